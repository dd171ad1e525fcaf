"""The entry point of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_cli_extra_one_sentence(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from flash_allreduce_plugin.cli import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        f"flash-allreduce: {package} is not installed: "
        '`pip install --no-build-isolation ".[cli]"` in a checkout of the plugin'
    )
    assert "Traceback" not in done.stderr


def test_every_command_has_its_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flash_allreduce_plugin", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    for command in ("demo", "run", "doctor", "plan", "bench", "tune", "report"):
        assert command in done.stdout
