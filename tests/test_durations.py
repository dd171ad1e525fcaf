"""tests/durations.json: a test of `make test` takes at most 3 s, and the selection names tests that exist."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import selection

ROOT = Path(__file__).resolve().parent.parent
RECORDED = json.loads((ROOT / "tests" / "durations.json").read_text(encoding="utf-8"))


def test_long_tests_are_thorough() -> None:
    """Check recorded durations (pytest --record-durations). A long test leaves tests/selection.py or gets faster."""
    recorded = RECORDED["long tests"].items()
    long = {test: s for test, s in recorded if selection.is_product(test) and not test.startswith(selection.LONG)}
    assert not long, f"above {selection.MOST_SECONDS} s: {long}"


def test_tests_are_skipped_when_time_is_over() -> None:
    command = (sys.executable, "-m", "pytest", "--minutes", "0", "tests/test_changed_tests.py")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert " skipped" in done.stdout and " passed" not in done.stdout and "0 minutes are over" in done.stdout


@pytest.mark.parametrize("name", selection.OTHERS)
def test_the_selection_names_tests_that_exist(name: str) -> None:
    file, _, test = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not test or test in functions


@pytest.mark.parametrize("folder", selection.FOLDERS)
def test_the_selection_names_folders_that_exist(folder: str) -> None:
    assert list((ROOT / "tests" / folder).glob("test_*.py"))


def test_recorded_modules_exist() -> None:
    gone = [name for name in RECORDED["modules"] if not (ROOT / name).is_file()]
    assert not gone, "record durations again: pytest --record-durations"


@pytest.mark.parametrize("name", [*selection.EXCEPT, *selection.LONG])
def test_an_exception_is_of_a_test_that_exists(name: str) -> None:
    """Check the names: a renamed test would leave or join `make test` unseen."""
    file, separator, test = name.partition("::")
    if not separator:
        assert "[" in file or list(ROOT.glob(f"{file}*"))
        return
    function = test.partition("[")[0]
    files = (
        [ROOT / file] if file else [path for one in selection.FOLDERS for path in (ROOT / "tests" / one).glob("*.py")]
    )
    assert any(f"def {function}" in path.read_text(encoding="utf-8") for path in files)
