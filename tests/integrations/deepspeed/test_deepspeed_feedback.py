"""Error feedback on DeepSpeed engines: at every stage, while gradients accumulate, and over overflows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import deepspeed, engine, release, step, weights
from test_overflow import FP16, skip_defects_of_older_releases

import flash_allreduce_plugin as fap
from tests.distributed import Ranks

OFF = {"bits": 3, "min_bytes": 0}
ON = {**OFF, "error_feedback": True}
STEPS = 4


def train(zero: dict[str, Any], flash: dict[str, Any], accumulate: int = 1) -> dict[str, Any]:
    fap.reset_stats()
    built = engine({"zero_optimization": zero, "gradient_accumulation_steps": accumulate}, flash)
    for number in range(STEPS):
        step(built, number)
    stats, owner = fap.stats(), fap.deepspeed.feedback(built)
    result = {
        "weights": weights(built),
        "calls": stats["quantized"],
        "dropped": stats["residuals_dropped"],
        "keys": [] if owner is None else owner.keys(),
        "steps": None if owner is None else owner.step + 1,
        "left": owner is not None and all(bool(kept.before.any()) for kept in owner._residuals.values()),
    }
    built.destroy()
    return result


WAYS: list[dict[str, Any]] = [{"stage": stage} for stage in range(4)]
WAYS += [{"stage": 2, "reduce_scatter": False}, {"stage": 3, "reduce_scatter": False}]
WAYS += [{"stage": stage, "reduce_bucket_size": 4000} for stage in (2, 3)]  # several buckets


@pytest.mark.parametrize("zero", WAYS, ids=lambda zero: "-".join(str(value) for value in zero.values()))
def test_every_stage_carries_its_residuals(engines: Callable[[int], Ranks], zero: dict[str, Any]) -> None:
    for accumulate in (1, 2):
        if accumulate == 2 and zero["stage"] == 2 and release() < (0, 18, 3):
            continue
        off, on = (engines(2).run(train, zero, flash, accumulate) for flash in (OFF, ON))
        for rank in range(2):
            found = on[rank]
            assert torch.equal(found["weights"], on[0]["weights"]), "the replicas have drifted apart"
            assert not torch.equal(found["weights"], off[rank]["weights"])
            passes = STEPS * (accumulate if zero["stage"] >= 2 else 1)
            assert len(found["keys"]) * passes == found["calls"] == off[rank]["calls"], "one a call of a pass"
            assert found["left"] and found["steps"] == STEPS
            assert found["dropped"] == off[rank]["dropped"] == {}
            assert off[rank]["keys"] == []


def overflowing(stage: int) -> list[tuple[int, float, dict[str, int]]]:
    """Return after each step: steps skipped, the loss scale, and the dropped residuals.

    The second step overflows at one rank. The scale doubles after two good steps.
    """
    deepspeed()
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True
    options = {"zero_optimization": {"stage": stage}, "fp16": {**FP16, "loss_scale_window": 2}}
    built = engine(options, {**ON, "bits": 8}, lr=0.01)
    now = {"step": 0}

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if now["step"] == 1 and dist.get_rank() == 1:
            gradient = gradient.clone()
            gradient.view(-1)[5] = math.inf
        return gradient

    next(iter(built.module.parameters())).register_hook(spoil)
    seen = []
    for number in range(6):
        now["step"] = number
        fap.reset_stats()
        step(built, number)
        owner = fap.deepspeed.feedback(built)
        assert owner is not None and owner.keys()
        seen.append((built.skipped_steps, float(built.optimizer.loss_scale), fap.stats()["residuals_dropped"]))
        assert bool(torch.isfinite(weights(built)).all())
    built.destroy()
    return seen


@pytest.mark.parametrize("stage", range(4))
def test_a_skipped_step_and_another_scale_drop_the_residuals(engines: Callable[[int], Ranks], stage: int) -> None:
    skip_defects_of_older_releases({"stage": stage}, 1)
    for seen in engines(2).run(overflowing, stage):
        skipped, scales, dropped = zip(*seen, strict=True)
        assert skipped == (0, 1, 1, 1, 1, 1)
        calls = sum(dropped[2].values())
        expected: list[dict[str, int]] = [{}, {}, {"step skipped": calls}]
        for later, earlier in zip(scales[2:], scales[1:], strict=False):
            expected.append({} if later == earlier else {"loss scale changed": calls})
        assert list(dropped) == expected[:6]
        assert calls > 0 and {"loss scale changed": calls} in dropped


def not_served() -> str:
    built = engine({"zero_optimization": {"stage": 0}}, None)
    try:
        fap.deepspeed.feedback(built)
    except ValueError as error:
        return str(error)
    finally:
        built.destroy()
    return "no error"


def test_an_engine_without_a_section_gets_a_line(engines: Callable[[int], Ranks]) -> None:
    assert "has no flash_allreduce section" in engines(2).run(not_served)[0]
