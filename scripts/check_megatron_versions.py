"""Check every seam against the published sources of megatron-core.

    python -m scripts.check_megatron_versions                    # every release of the supported window
    python -m scripts.check_megatron_versions 0.16.1 0.19.2      # these releases
    python -m scripts.check_megatron_versions path/to/folder     # a checkout or site-packages that holds megatron/core

Wheels are downloaded with pip and read, never imported or installed, so a release for another Python is checked
all the same. Of each seam it is checked that the symbol is there, that it has the parameters the seam knows, and,
by making the replacement from the function's own compiled code, that it makes the call that is to be replaced: what
`enable` checks in a running process.

Exit status: 0 if every release fits, 1 if one does not, 2 if a release could not be had.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.errors import PatchError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import fsdp_seams
from flash_allreduce_plugin.integrations.patching import Seam
from scripts.releases import Read, Unavailable, check, final, pip

WINDOW = ((0, 13), (0, 19))
PYTHONS = ("3.12", "3.11", "3.10")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
# Decorators that keep the function they were given in reach (functools.wraps), or that Python itself undoes.
TRANSPARENT = ("staticmethod", "custom_fwd", "custom_bwd", "no_grad()")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", nargs="*", help="releases, or folders that hold megatron/core; default: the window")
    parser.add_argument("--wheels", type=Path, help="folder where downloaded wheels are kept and looked for")
    options = parser.parse_args(arguments)
    seams = megatron.seams()
    with tempfile.TemporaryDirectory() as scratch:
        wheels = options.wheels or Path(scratch)
        return check(
            lambda: options.what or releases(),
            lambda what: problems(reader(what, wheels), (*seams, *of_fsdp(reader(what, wheels)))),
            len(seams),
            "seams",
            lambda what: texts(reader(what, wheels), seams),
        )


def of_fsdp(read: Read) -> list[Seam]:
    """Return the seams of Megatron-FSDP for sources that have it as from 0.16 on; others are not served."""
    try:
        has = "outer_fsdp_group_param_gather" in read(f"{fsdp_seams.CORE.replace('.', '/')}/param_and_grad_buffer.py")
    except (KeyError, OSError):
        has = False
    return fsdp_seams.every(megatron.core_fsdp()) if has else []


def problems(read: Read, seams: Iterable[Seam]) -> list[str]:
    """One line for each seam that does not fit the sources."""
    lines = []
    for seam in seams:
        problem = _problem(read, seam)
        if problem is not None:
            lines.append(f"{seam.id}: {seam.target}: {problem}")
    return lines


def texts(read: Read, seams: Iterable[Seam]) -> dict[str, str]:
    """Return the function that each seam replaces, without comments, by the seam's name; "" where there is none."""
    found = {}
    for seam in seams:
        try:
            node = find(_parsed(read(seam.module.replace(".", "/") + ".py")), seam.attribute.split("."))
        except (KeyError, OSError, SyntaxError):
            node = None
        found[seam.id] = "" if node is None else ast.unparse(node)
    return found


@functools.lru_cache(maxsize=16)  # many seams are of one module
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _problem(read: Read, seam: Seam) -> str | None:
    try:
        tree = _parsed(read(seam.module.replace(".", "/") + ".py"))
    except (KeyError, OSError):
        return None if seam.optional else "the module does not exist"
    except SyntaxError as error:
        return f"Python {sys.version_info.major}.{sys.version_info.minor} cannot parse the module ({error})"
    node = find(tree, seam.attribute.split("."))
    if node is None:
        return None if seam.optional else "it does not exist"
    if not isinstance(node, ast.FunctionDef):
        return None  # a name for a function of torch's, whose parameters are not to be read here
    hiding = [name for name in map(ast.unparse, node.decorator_list) if name.split(".")[-1] not in TRANSPARENT]
    if hiding:
        return f"the decorator {hiding[0]} hides the function"
    function = _function(node)
    wrong = seam.wrong_parameters(tuple(inspect.signature(function).parameters))
    if wrong is not None:
        return wrong
    try:
        seam.replacement(function)
    except PatchError as error:
        return str(error)
    return None


def find(tree: ast.AST, path: list[str]) -> ast.AST | None:
    """The last definition of a dotted name in a module or class, inside `if` and `try` too."""
    name, *rest = path
    found = None
    for statement in _statements(tree):
        defined = isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == name
        if defined or (isinstance(statement, ast.Assign) and name in map(ast.unparse, statement.targets)):
            found = statement
    return find(found, rest) if found is not None and rest else found


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(block):
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _statements(child)
        else:
            yield child


class _Anything:
    """Stands for every global that a function names."""

    def __getattr__(self, name: str) -> _Anything:
        return self


def _function(node: ast.FunctionDef) -> types.FunctionType:
    """The function of a definition, with its own code and nothing behind its globals; it is not run."""
    bare = ast.FunctionDef(node.name, _without_values(node.args), node.body, [], None, lineno=1, col_offset=0)
    if sys.version_info >= (3, 12):
        bare.type_params = []
    module = ast.fix_missing_locations(ast.Module([bare], []))
    code = next(c for c in compile(module, node.name, "exec").co_consts if isinstance(c, types.CodeType))
    named: dict[str, Any] = {name: _Anything() for name in code.co_names}
    return types.FunctionType(code, {**named, "__builtins__": __builtins__, "__name__": "megatron"})


def _without_values(arguments: ast.arguments) -> ast.arguments:
    """The parameters by name, without defaults and annotations, which would have to be evaluated."""

    def bare(argument: ast.arg | None) -> Any:
        return None if argument is None else ast.arg(argument.arg)

    return ast.arguments(
        posonlyargs=[bare(argument) for argument in arguments.posonlyargs],
        args=[bare(argument) for argument in arguments.args],
        vararg=bare(arguments.vararg),
        kwonlyargs=[bare(argument) for argument in arguments.kwonlyargs],
        kw_defaults=[None for _ in arguments.kwonlyargs],
        kwarg=bare(arguments.kwarg),
        defaults=[],
    )


def reader(what: str, wheels: Path) -> Read:
    """How to read a file of a release (downloaded if it is not in `wheels`) or of a folder."""
    if not re.fullmatch(r"\d+(\.\d+)+\w*", what):
        if not (Path(what) / "megatron" / "core").is_dir():
            raise Unavailable(f"{what} is neither a release nor a folder that holds megatron/core")
        return lambda path: (Path(what) / path).read_text(encoding="utf-8")
    archive = zipfile.ZipFile(wheel(what, wheels))
    return lambda path: archive.read(path).decode()


def wheel(release: str, wheels: Path) -> Path:
    """A wheel of the release, for whatever Python there is one."""
    pattern = f"megatron_core-{release}-*.whl"
    output = ""
    for python in PYTHONS:
        kept = sorted(wheels.glob(pattern))
        if kept:
            return kept[0]
        platforms = [f"--platform={platform}" for platform in (*PLATFORMS, "any")]
        output = pip(
            *("download", "--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={python}", *platforms),
            *("--dest", str(wheels), f"megatron-core=={release}"),
        ).stderr
    kept = sorted(wheels.glob(pattern))
    if not kept:
        raise Unavailable(f"megatron-core {release}: pip finds no wheel ({output.strip().splitlines()[-1:]})")
    return kept[0]


def releases() -> list[str]:
    """Every final release of the window, oldest first."""
    first, last = WINDOW
    return final("megatron-core", lambda number: first <= number[:2] <= last, (last[0], last[1] + 1))


if __name__ == "__main__":
    sys.exit(main())
