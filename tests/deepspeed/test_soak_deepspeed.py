"""benchmarks/soak.py deepspeed, briefly."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # 5,000 steps are `make soak`
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_twenty_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "deepspeed", "--steps", "20", "--most-growth", "100"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "soak.json")], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["replicas compared"] == 10 and len(found["growth"]) == 2
    assert found["quantized"] == {"deepspeed.stage2.gradients": 20} and not found["full precision"]
    ((first, last),) = found["loss"].values()
    assert last < first
