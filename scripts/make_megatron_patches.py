"""Write patches/: the seams as source diffs, one file a release of megatron-core.

    python -m scripts.make_megatron_patches              # the releases of RELEASES, downloaded
    python -m scripts.make_megatron_patches 0.18.2       # another one

Every seam becomes one line above its function, so a patch is as small as it can be; this script finds the places.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.patching import Seam
from scripts.check_megatron_versions import find, reader
from scripts.releases import Read

RELEASES = ("0.16.1", "0.19.2")
PATCHES = Path(__file__).resolve().parent.parent / "patches"
IMPORT = "from flash_allreduce_plugin.megatron import source as flash_allreduce"


def main(releases: list[str]) -> None:
    with tempfile.TemporaryDirectory() as wheels:
        for release in releases or RELEASES:
            target = PATCHES / f"megatron-core-{release}.patch"
            target.write_text(patch(reader(release, Path(wheels)), megatron.seams()), encoding="utf-8")
            print(target)


def patch(read: Read, seams: Iterable[Seam], line: str = IMPORT) -> str:
    """A unified diff (for `git apply`, or `patch -p1`) that marks the place of every seam.

    line: the import that the marks need.
    """
    lines: list[str] = []
    for module, group in itertools.groupby(sorted(seams, key=lambda seam: seam.module), lambda seam: seam.module):
        path = module.replace(".", "/") + ".py"
        before = read(path)
        after = marked(before, group, line)
        lines += difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
        )
    return "".join(lines)


def marked(source: str, seams: Iterable[Seam], line: str) -> str:
    """The source of a module with a mark at each of its seams, and the import that the marks need."""
    tree = ast.parse(source)
    inserted = {_after_imports(tree): line + "\n"}
    for seam in seams:
        node = find(tree, seam.attribute.split("."))
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            first = node.decorator_list[0].lineno if decorators else node.lineno
            above = first if decorators[:1] == ["staticmethod"] else first - 1
            inserted[above] = f'{" " * node.col_offset}@flash_allreduce.seam("{seam.id}")\n'
        elif isinstance(node, ast.Assign):
            block = next(s for s in tree.body if s.lineno <= node.lineno <= (s.end_lineno or s.lineno))
            text = f'{seam.attribute} = flash_allreduce.seam("{seam.id}")({seam.attribute})\n'
            last = block.end_lineno or block.lineno
            inserted[last] = inserted.get(last, "") + text
        elif node is not None or not seam.optional:
            raise SystemExit(f"{seam.target} does not exist")
    lines = source.splitlines(keepends=True)
    return "".join(text + inserted.get(number, "") for number, text in enumerate(lines, start=1))


def _after_imports(tree: ast.Module) -> int:
    """The last line of the imports at the head of a module."""
    head = itertools.takewhile(lambda s: not isinstance(s, ast.ClassDef | ast.FunctionDef), tree.body)
    return max(s.end_lineno or s.lineno for s in head if isinstance(s, ast.Import | ast.ImportFrom))


if __name__ == "__main__":
    main(sys.argv[1:])
