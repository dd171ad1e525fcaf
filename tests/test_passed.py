"""scripts/passed.py leaves out a check only where its files are those with which it passed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import passed

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A root with one file for each pattern."""
    for patterns in passed.FILES.values():
        for pattern in patterns:
            path = tmp_path / pattern.replace("**", "folder").replace("*", "a")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("as it passed")
    (tmp_path / ".ci").mkdir()
    return tmp_path


def test_a_check_runs_until_it_has_passed_and_again_after_a_change(files: Path) -> None:
    assert passed.to_run(files) == list(passed.FILES)
    for check in passed.FILES:
        passed.record(check, files)
    assert passed.to_run(files) == []
    (files / "tests/ptx/a").write_text("changed")
    assert passed.to_run(files) == ["check-ptx"]
    passed.record("check-ptx", files)
    (files / "csrc/cuda/b.h").write_text("new")
    assert passed.to_run(files) == list(passed.FILES)
    (files / "csrc/cuda/b.h").rename(files / "csrc/cuda/c.h")
    passed.record("check-cuda", files)
    (files / "csrc/cuda/c.h").rename(files / "csrc/cuda/b.h")
    assert "check-cuda" in passed.to_run(files)


def test_kernels_of_the_cpu_are_not_part_of_the_checks_of_cuda(files: Path) -> None:
    for check in passed.FILES:
        passed.record(check, files)
    (files / "csrc/folder/b.h").write_text("new")
    assert passed.to_run(files) == ["fuzz-check", "package", "check-arm"]


def test_of_a_page_the_tables_count(files: Path) -> None:
    page = files / "docs/trust/cuda.md"
    page.write_text("Prose.\n\n<!-- python -m scripts.check_cuda --write -->\n| 1 |\n<!-- end -->\n")
    passed.record("check-cuda", files)
    page.write_text(page.read_text().replace("Prose", "Other prose"))
    assert "check-cuda" not in passed.to_run(files)
    page.write_text(page.read_text().replace("| 1 |", "| 2 |"))
    assert "check-cuda" in passed.to_run(files)


def test_a_pattern_without_a_file_is_an_error(files: Path) -> None:
    (files / "scripts/fuzz.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"fuzz-check: no file is named scripts/fuzz\.py"):
        passed.digest("fuzz-check", files)


def test_every_check_is_a_session_of_nox_and_is_run_or_reported() -> None:
    sessions = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert all(f"def {check.replace('-', '_')}(" in sessions for check in passed.FILES)
    done = subprocess.run(
        [sys.executable, "-m", "scripts.passed"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    said = done.stdout.split() + [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert sorted(said) == sorted(passed.FILES)
