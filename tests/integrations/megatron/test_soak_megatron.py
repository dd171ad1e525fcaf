"""lab/soak megatron, briefly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow  # 5,000 steps are `nox -s soak`
def test_twenty_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab.soak", "megatron", "--steps", "20", "--most-growth", "100"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "soak.json")], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["replicas compared"] == 10 and len(found["growth"]) == 4
    assert all(last < first for first, last in found["loss"].values()) and len(found["loss"]) == 2
    quantized = {site for site, count in found["quantized"].items() if count}
    assert quantized >= {
        "megatron.g.forward",
        "megatron.linear.dgrad",
        "megatron.embedding.forward",
        "megatron.data_parallel.gradients",
        "megatron.sequence_parallel.g.forward",
        "megatron.sequence_parallel.g.backward",
        "megatron.sequence_parallel.linear.gather",
        "megatron.sequence_parallel.linear.regather",
        "megatron.sequence_parallel.linear.dgrad",
    }
