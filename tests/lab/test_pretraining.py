"""lab.benchmarks.pretraining: every site quantized, and an interrupted run continues bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from lab.benchmarks import pretraining

ROOT = Path(__file__).resolve().parents[2]
INT4 = pretraining.CONFIGS[1]
COMMAND = [sys.executable, "-m", "lab.benchmarks.pretraining", "--size=1m", "--steps=16", "--save=2", "--validation=1"]
COMMAND += ["--batch=2", "--sequence=16", "--configs", INT4, "--controls", "noise 0.1", pretraining.FP32]


def finished(folder: Path) -> dict[str, Any]:
    found = (json.loads(file.read_text()) for file in folder.glob("*.json"))
    return {run["variant"]: run for run in found}


@pytest.mark.slow
def test_a_terminated_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = subprocess.run([*COMMAND, f"--folder={whole}"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    first = subprocess.Popen(
        [*COMMAND, f"--folder={parts}"], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith(f"{INT4}, seed 1, step 4:"):
            break
    os.killpg(first.pid, signal.SIGTERM)  # torchrun takes its ranks along
    first.communicate(timeout=60)
    assert INT4 not in finished(parts)
    done = subprocess.run([*COMMAND, f"--folder={parts}"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "goes on after step" in done.stdout
    expected, resumed = finished(whole), finished(parts)
    assert expected.keys() == resumed.keys() == {pretraining.FULL_PRECISION, INT4, "noise 0.1", pretraining.FP32}
    for variant, run in expected.items():
        for key in ("losses", "norms", "validation loss"):
            assert resumed[variant][key] == run[key], (variant, key)
    sites = {"megatron.g.forward", "megatron.linear.dgrad"}
    sites |= {"megatron.data_parallel.gradients", "megatron.data_parallel.parameters"}
    sites |= {"megatron.embedding.forward", "megatron.shared_gradients.layer_norm"}
    assert expected[INT4]["quantized"].keys() == sites
    assert expected[pretraining.FULL_PRECISION]["quantized"] == {}
    assert len({tuple(run["losses"]) for run in expected.values()}) == len(expected)
    assert not [path for path in whole.iterdir() if path.is_dir()]  # no checkpoint of a finished run


def test_the_learning_rate_rises_and_falls() -> None:
    arguments = pretraining.argparse.Namespace(steps=100, lr=1.0)
    rates = [pretraining.learning_rate(step, arguments) for step in range(100)]
    assert rates[0] == pytest.approx(0.05) and max(rates) == 1.0 == rates[19]
    assert 0 < rates[-1] < 0.001 and rates[20:] == sorted(rates[20:], reverse=True)
