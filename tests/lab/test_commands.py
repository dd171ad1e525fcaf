"""Every command of lab that README, docs, Makefile and docstrings name runs, and has the options that are named."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: A command ends at a comment, at the end of its code span, or at the spaces before a remark.
COMMAND = re.compile(r"(?:python|torchrun\b[^\n`]*?) -m (lab(?:\.\w+)+)((?: [^\s`#][^\s`]*)*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def texts() -> Iterator[tuple[str, str]]:
    """Yield each place that documents commands, and its text."""
    for file in (ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))):
        yield str(file.relative_to(ROOT)), file.read_text()
    for folder in ("lab", "scripts"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.get_docstring(ast.parse(file.read_text())) or ""


def documented() -> dict[str, list[tuple[str, str]]]:
    """Return each module's commands: the place and the options as they stand there."""
    found: dict[str, list[tuple[str, str]]] = {}
    for place, text in texts():
        for module, options in COMMAND.findall(re.sub(r"\\\\?\n\s*", "", text)):
            found.setdefault(module, []).append((place, options.partition(" -- ")[0]))
    return found


COMMANDS = documented()


@pytest.mark.parametrize("module", sorted(COMMANDS))
def test_a_documented_command_has_its_options(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        warnings.simplefilter("ignore", RuntimeWarning)  # the module may be imported already
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    known = set(OPTION.findall(said.getvalue().partition("options:")[2]))
    assert "--help" in known
    for place, options in COMMANDS[module]:
        unknown = set(OPTION.findall(options)) - known
        assert not unknown, f"{place}: python -m {module}{options}: {', '.join(sorted(unknown))}"


def test_the_commands_are_found() -> None:
    every = [(place, options) for module in COMMANDS.values() for place, options in module]
    assert len(COMMANDS) >= 30 and {"README.md", "docs/decide/benchmarks.md"} <= {place for place, _ in every}
    assert (
        "docs/decide/benchmarks.md",
        ' --stages 3 --noise --sections \'{"bits": 8}\' \'{"bits": 8, "param_bits": 8}\'',
    ) in every
