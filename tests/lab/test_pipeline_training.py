"""lab.benchmarks.pipeline_training: a few steps of it, quantized in both directions."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from flash_allreduce_plugin.config import FlashConfig
from lab.benchmarks import pipeline_training
from lab.benchmarks.results import LOSSES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("text", pipeline_training.CONFIGS)
def test_its_settings_are_valid(text: str) -> None:
    config = FlashConfig.from_dict(json.loads(text))
    assert config.pipeline_bits != "full" and config.pipeline_backward_bits != "full"


def test_three_steps_of_two_stages(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ["--steps=3", "--hidden=64", "--layers=2", "--sequence=32", "--validation=2", "--seeds=1", "--noise=1"]
    command = [sys.executable, "-m", "lab.benchmarks.pipeline_training", *sizes, f"--json={output}"]
    done = subprocess.run(
        [*command, "--configs", pipeline_training.CONFIGS[0]], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    full, eight, noise = json.loads(output.read_text())["seeds"]["1"].values()
    assert len(full[LOSSES]) == 1 and math.isfinite(full[LOSSES][0])  # the mean of three steps
    assert full["quantized"] == 0 and eight["quantized"] == 2 * 3 * 4  # a send or a receive in both directions
    assert 0.25 < eight["bytes sent"] / eight["bytes in full precision"] < 0.28
    assert eight[LOSSES] == pytest.approx(full[LOSSES], rel=1e-3) != noise[LOSSES]
    assert "of fp32's bytes" in done.stdout
