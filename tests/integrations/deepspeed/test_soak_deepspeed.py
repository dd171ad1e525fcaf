"""lab/soak deepspeed, briefly."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow  # 5,000 steps are `nox -s soak`
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_twenty_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab.soak", "deepspeed", "--steps", "20", "--most-growth", "100"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "soak.json")], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["replicas compared"] == 10 and len(found["growth"]) == 2
    gradients, gathers = "deepspeed.stage2.gradients", "deepspeed.stage2.parameters"
    assert found["quantized"] == {gradients: 40, gathers: 19} and found["full precision"].keys() == {gathers}
    assert len(found["loss"]) == 2 and all(last < first for first, last in found["loss"].values())
