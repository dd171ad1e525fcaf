"""Check every seam against the published sources of Transformer Engine.

    python -m scripts.check_transformer_engine_versions                    # every release of the supported window
    python -m scripts.check_transformer_engine_versions 1.13.0 2.18.0      # these releases
    python -m scripts.check_transformer_engine_versions path/to/folder     # a checkout that holds transformer_engine

The wheels of the package `transformer_engine` hold its Python sources and need no CUDA; they are downloaded with pip
and read, never imported or installed. Of each seam it is checked that the symbol is there, following the import that
brings it, that it has the parameters the seam knows, and that the module calls it as the replacement expects.

Exit status: 0 if every release fits, 1 if one does not, 2 if a release could not be had.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import attention, transformer_engine
from flash_allreduce_plugin.integrations.patching import Seam
from scripts import check_megatron_versions as sources
from scripts.releases import Read, Unavailable, check, final, pip

KEYWORDS = {"async_op", "quantizer"}  # tensor and group come by position


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "what", nargs="*", help="releases, or folders that hold transformer_engine; default: the window"
    )
    parser.add_argument("--wheels", type=Path, help="folder where downloaded wheels are kept and looked for")
    options = parser.parse_args(arguments)
    seams = transformer_engine.seams(FlashConfig)
    total = len(seams) + len(attention.of_transformer_engine(attention.TE_MODULES[0], FlashConfig))
    with tempfile.TemporaryDirectory() as scratch:
        wheels = options.wheels or Path(scratch)
        return check(
            lambda: options.what or releases(),
            lambda what: problems(reader(what, wheels), seams),
            total,
            "seams",
        )


def problems(read: Read, seams: Iterable[Seam]) -> list[str]:
    """One line for each seam that does not fit the sources."""
    found = [f"{seam.target}: {problem}" for seam in seams if (problem := _problem(read, seam)) is not None]
    return found + sources.problems(read, attention.of_transformer_engine(_attention_module(read), FlashConfig))


def _attention_module(read: Read) -> str:
    """Return the module of a release that has the exchanges of its attention."""
    for name in attention.TE_MODULES:
        with suppress(KeyError, OSError):
            read(name.replace(".", "/") + ".py")
            return name
    return attention.TE_MODULES[0]


def _problem(read: Read, seam: Seam) -> str | None:
    """Return why a seam does not fit the sources, or None."""
    try:
        tree = ast.parse(read(seam.module.replace(".", "/") + ".py"))
    except (KeyError, OSError):
        return "the module does not exist"
    *path, name = seam.attribute.split(".")
    if path:
        function = next((f for f in _body(tree, path[0]) if isinstance(f, ast.FunctionDef) and f.name == name), None)
    else:
        wrong = _wrong_call(tree, name)
        if wrong is not None:
            return wrong
        origin = _origin(tree, seam.module, name)
        function = origin and next((f for f in ast.parse(read(origin)).body if _defines(f, name)), None)
    if not isinstance(function, ast.FunctionDef):
        return "it does not exist"
    if not {ast.unparse(decorator) for decorator in function.decorator_list} <= {"staticmethod"}:
        return "a decorator hides the function"
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *filter(None, [arguments.vararg]), *arguments.kwonlyargs]
    return seam.wrong_parameters(tuple(argument.arg for argument in named))


def _body(tree: ast.Module, name: str) -> list[ast.stmt]:
    return next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])


def _defines(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _origin(tree: ast.Module, module: str, name: str) -> str | None:
    """The file that a relative import at the head of `module` takes `name` from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names if alias.asname is None):
            package = module.split(".")[: -node.level]
            return "/".join([*package, *(node.module or "").split(".")]) + ".py"
    return None


def _wrong_call(tree: ast.Module, name: str) -> str | None:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]
    for call in calls:
        keywords = {keyword.arg for keyword in call.keywords}
        if len(call.args) < 2 or not keywords <= KEYWORDS:
            return f"line {call.lineno} calls it otherwise than with a tensor, a group and {sorted(KEYWORDS)}"
    return None if calls else "nothing in the module calls it"


def reader(what: str, wheels: Path) -> Read:
    """How to read a file of a release (downloaded if it is not in `wheels`) or of a folder."""
    if not re.fullmatch(r"\d+(\.\d+)+\w*", what):
        if not (Path(what) / "transformer_engine").is_dir():
            raise Unavailable(f"{what} is neither a release nor a folder that holds transformer_engine")
        return lambda path: (Path(what) / path).read_text(encoding="utf-8")
    kept = wheels / f"transformer_engine-{what}-py3-none-any.whl"
    if not kept.exists():
        options = ("--quiet", "--no-deps", "--only-binary=:all:", "--platform=any", "--python-version=3.12")
        output = pip("download", *options, "--dest", str(wheels), f"transformer_engine=={what}").stderr
        if not kept.exists():
            raise Unavailable(f"transformer_engine {what}: pip finds no wheel ({output.strip().splitlines()[-1:]})")
    archive = zipfile.ZipFile(kept)
    return lambda path: archive.read(path).decode()


def releases() -> list[str]:
    """Every final release of the window, oldest first."""
    first, last = transformer_engine.WINDOW
    return final("transformer_engine", lambda number: first <= number[:2] <= last, (last[0], last[1] + 1))


if __name__ == "__main__":
    sys.exit(main())
