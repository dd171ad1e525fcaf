"""tests/durations.json: a test of `make test` takes at most 3 s, and the selection names tests that exist."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests import selection

ROOT = Path(__file__).resolve().parent.parent
RECORDED = json.loads((ROOT / "tests" / "durations.json").read_text(encoding="utf-8"))


def test_long_tests_are_thorough() -> None:
    """Durations are recorded by pytest --record-durations. A long test leaves tests/selection.py or gets faster."""
    recorded = RECORDED["long tests"].items()
    long = {test: s for test, s in recorded if selection.is_product(test) and not test.startswith(selection.LONG)}
    assert not long, f"above {selection.MOST_SECONDS} s: {long}"


@pytest.mark.parametrize("name", selection.OTHERS)
def test_the_selection_names_tests_that_exist(name: str) -> None:
    file, _, test = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not test or test in functions


@pytest.mark.parametrize("folder", selection.FOLDERS)
def test_the_selection_names_folders_that_exist(folder: str) -> None:
    assert list((ROOT / "tests" / folder).glob("test_*.py"))


def test_every_module_of_tests_is_recorded() -> None:
    """A new file is in neither, until durations are recorded again; a file that is gone leaves."""
    gone = [name for name in RECORDED["modules"] if not (ROOT / name).is_file()]
    assert not gone, "record durations again: pytest --record-durations"
