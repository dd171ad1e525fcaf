"""fp16's dynamic loss scaling sees an overflow of any rank in any gradient, at every stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import (
    EIGHT,
    NEWEST,
    deepspeed,
    engine,
    release,
    skip_if_nothing_is_reduced,
    stats,
    step,
    weights,
)

import flash_allreduce_plugin as fap
from tests.distributed import Ranks

FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 1000}


def overflowing(
    zero: dict[str, Any], accumulate: int, bad: float, parameter: int, flash: dict[str, Any] = EIGHT
) -> list[dict[str, Any]]:
    """Run three steps, with the last rank's gradient spoiled in one element of the second step's first micro-batch."""
    deepspeed()
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True  # asks for mkldnn's; torch computes without it
    fap.reset_stats()
    options = {"zero_optimization": zero, "fp16": FP16, "gradient_accumulation_steps": accumulate}
    built = engine(options, flash, lr=0.01)
    now = {"step": 0, "micro": 0}

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        now["micro"] += 1
        if now["step"] == 1 and now["micro"] == 1 and dist.get_rank() == dist.get_world_size() - 1:
            gradient = gradient.clone()
            gradient.view(-1)[5] = bad
        return gradient

    list(built.module.parameters())[parameter].register_hook(spoil)
    seen = []
    for number in range(3):
        before = weights(built)
        now.update(step=number, micro=0)
        step(built, number)
        after = weights(built)
        seen.append(
            {
                "skipped": built.skipped_steps,
                "scale": built.optimizer.loss_scale,
                "finite": bool(torch.isfinite(after).all()),
                "moved": not torch.equal(before, after),
                "weights": after,
                **{key: stats()[key] for key in ("calls", "quantized")},
            }
        )
    built.destroy()
    return seen


def skip_defects_of_older_releases(zero: dict[str, Any], accumulate: int) -> None:
    """Skip on defects that DeepSpeed has with the plugin and without."""
    skip_if_nothing_is_reduced(zero)
    if zero["stage"] == 1 and release() < (0, 18):
        pytest.skip("DeepSpeed before 0.18.0 tells no other rank of an overflow at stage 1, and hangs")
    if zero["stage"] == 2 and accumulate > 1 and release() < (0, 18, 3):
        pytest.skip("DeepSpeed before 0.18.3 keeps the last micro-batch only at stage 2")


WHOLE = {"reduce_scatter": False}
PATHS: list[dict[str, Any]] = [{"stage": stage} for stage in range(4)]
PATHS += [{"stage": stage, **WHOLE} for stage in (1, 2, 3)]
PATHS += [{"stage": 2, "contiguous_gradients": False}, {"stage": 2, "use_multi_rank_bucket_allreduce": False}]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("zero", PATHS, ids=lambda zero: "-".join(str(value) for value in zero.values()))
def test_the_step_is_skipped_and_the_scale_lowered(
    engines: Callable[[int], Ranks], zero: dict[str, Any], bad: float
) -> None:
    skip_defects_of_older_releases(zero, 1)
    outcomes = engines(2).run(overflowing, zero, 1, bad, 0)
    for first, second, third in outcomes:
        assert [seen["skipped"] for seen in (first, second, third)] == [0, 1, 1]
        assert [seen["scale"] for seen in (first, second, third)] == [256, 128, 128]
        assert [seen["moved"] for seen in (first, second, third)] == [True, False, True]
        assert first["finite"] and second["finite"] and third["finite"]
        assert torch.equal(third["weights"], outcomes[0][2]["weights"])
        assert third["quantized"] == third["calls"] > 0


@pytest.mark.parametrize("stage", range(4))
def test_while_gradients_accumulate_and_in_any_parameter(engines: Callable[[int], Ranks], stage: int) -> None:
    skip_defects_of_older_releases({"stage": stage}, 2)
    for parameter in (1, 4):  # a bias, and one that the other rank owns
        for _, second, third in engines(2).run(overflowing, {"stage": stage}, 2, math.nan, parameter):
            assert (second["skipped"], second["scale"], second["moved"]) == (1, 128, False)
            assert third["finite"] and third["moved"]
            assert third["quantized"] == third["calls"] > 0


def test_a_step_that_is_skipped_does_not_count_as_warm_up(engines: Callable[[int], Ranks]) -> None:
    for seen in engines(2).run(overflowing, {"stage": 2}, 1, math.nan, 0, {**EIGHT, "warmup_steps": 2}):
        assert [step["quantized"] for step in seen] == [0, 0, 0] and seen[2]["skipped"] == 1
    for seen in engines(2).run(overflowing, {"stage": 2}, 1, math.nan, 0, {**EIGHT, "warmup_steps": 1}):
        assert [step["quantized"] for step in seen] == [0, 1, 2]


def spoiled_in_bf16(stage: int, flash: dict[str, Any]) -> dict[str, Any]:
    """Run four steps, with one Inf in rank 1's gradient in the third step, and the same steps without that one."""
    options = {"bf16": {"enabled": True, "check_grad_overflow": True}, "zero_optimization": {"stage": stage}}
    spoiled, missing = engine(options, flash), engine(options, flash)
    now = {"step": 0}

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if now["step"] == 2 and dist.get_rank() == 1:
            gradient = gradient.clone()
            gradient.view(-1)[5] = math.inf
        return gradient

    list(spoiled.module.parameters())[2].register_hook(spoil)
    found: dict[str, Any] = {"moved": []}
    for number in range(5):
        now["step"], before = number, weights(spoiled)
        step(spoiled, number)
        found["moved"].append(not torch.equal(weights(spoiled), before))
        if number != 2:
            step(missing, number)
    residuals = fap.deepspeed.feedback(spoiled)
    held = [] if residuals is None else list(residuals.state_dict()["residuals"].values())
    found |= {"skipped": spoiled.skipped_steps, "spoiled": weights(spoiled), "missing": weights(missing)}
    found["residuals"] = [bool(torch.isfinite(one["before"]).all()) for one in held]
    spoiled.destroy()
    missing.destroy()
    return found


@NEWEST
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_infinity_in_bf16_skips_the_step_on_every_rank(engines: Callable[[int], Ranks], stage: int) -> None:
    if release() < (0, 19, 8):
        pytest.skip("DeepSpeed before 0.19.8 does not look for it in bf16 at every stage")
    for flash in ({"bits": 4, "min_bytes": 0}, {"preset": "int4", "error_feedback_bits": 16, "min_bytes": 0}):
        outcomes = engines(2).run(spoiled_in_bf16, stage, flash)
        for seen in outcomes:
            assert seen["skipped"] == 1 and seen["moved"] == [True, True, False, True, True]
            assert torch.equal(seen["spoiled"], outcomes[0]["spoiled"])
            if "bits" in flash:
                assert torch.equal(seen["spoiled"], seen["missing"]), "later steps are as if it were missing"
            else:  # which has lost its residuals
                torch.testing.assert_close(seen["spoiled"], seen["missing"], atol=0.02, rtol=0.02)
                assert seen["residuals"] and all(seen["residuals"])
