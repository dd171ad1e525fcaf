"""FLASH_ALLREDUCE_AUTOSAVE with FLASH_ALLREDUCE_ATTACH=megatron: a program that saves its model and its optimizer."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from test_data_parallel import start_megatron
from test_megatron_parameters import CudaIsCpu, Stopped, Training

from flash_allreduce_plugin.integrations.megatron import attach, scopes

SAVED, STEPS = 3, 5
VARIABLES = {
    **{"PRESET": "int8", "GRAD_BITS": "4", "ERROR_FEEDBACK": "true", "ROUNDING": "stochastic"},
    **{"WARMUP_STEPS": "1", "MIN_BYTES": "0", "GROUP_SIZE": "64"},
}


def train(folder: Path, first: int, saves: bool, overlap: bool = False) -> dict[str, Any]:
    """Train from step `first`, of the program's own checkpoint, to the end; all in one process of this rank."""
    os.environ.update({f"FLASH_ALLREDUCE_{key}": value for key, value in VARIABLES.items()})
    if saves:
        os.environ["FLASH_ALLREDUCE_AUTOSAVE"] = f"{folder / 'flash'}:{SAVED}"
    checkpoint = folder / f"checkpoint-{dist.get_rank()}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), CudaIsCpu():
        attach.by_environment()
        start_megatron()
        options = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
        training = Training(seed=8 if first else 3, **options)
        if first:
            pickle.loads(checkpoint.read_bytes()).load(training)
        for number in range(first, STEPS):
            training.step(number)
            if number + 1 == SAVED:
                training.gathered()  # with overlap the gather is due: Megatron-LM too makes it before it saves
                checkpoint.write_bytes(pickle.dumps(Stopped(training)))
    return {
        "weights": training.gathered(),
        "losses": training.losses,
        "replicas": training.replicas(),
        "steps": scopes.step(),
        "said": [line for line in printed.getvalue().splitlines() if "AUTOSAVE" in line],
    }


@pytest.mark.thorough
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = run_ranks(2, train, tmp_path, 0, True, preload=MEGATRON)
    again = run_ranks(2, train, tmp_path, SAVED, True, preload=MEGATRON)
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one["weights"], other["weights"]) and one["losses"][SAVED:] == other["losses"]
        assert one["steps"] == other["steps"] == STEPS
    assert [one["said"] for one in whole] == [[], []]
    [line] = again[0]["said"]
    assert f"resumes from the state of step {SAVED}" in line and again[1]["said"] == []


@pytest.mark.thorough
def test_overlap_param_gather_resumes_with_whole_values(tmp_path: Path) -> None:
    """The gather of the saved step comes after the state. So the first gather of a resumed run sends values."""
    whole = run_ranks(2, train, tmp_path, 0, True, True, preload=MEGATRON)
    again = run_ranks(2, train, tmp_path, SAVED, True, True, preload=MEGATRON)
    for one, other in zip(whole, again, strict=True):
        assert other["losses"] == pytest.approx(one["losses"][SAVED:], rel=1e-3)
        assert one["replicas"] and other["replicas"]
    [line] = again[0]["said"]
    assert f"resumes from the state of step {SAVED}" in line


@pytest.mark.thorough
def test_without_it_rank_0_names_the_losses_of_a_resume(tmp_path: Path) -> None:
    whole = run_ranks(2, train, tmp_path, 0, False, preload=MEGATRON)
    again = run_ranks(2, train, tmp_path, SAVED, False, preload=MEGATRON)
    assert [one["said"] for one in whole] == [[], []]
    assert not torch.equal(whole[0]["weights"], again[0]["weights"])
    [line] = again[0]["said"]
    lost = "warmup_steps=1 counts from 0; residuals of error_feedback begin with zeros"
    assert f"the optimizer resumes from step {SAVED}, and no state of the plugin was loaded: {lost}." in line
    assert again[1]["said"] == []
