"""ZeRO stages 0 to 3, with every option that has a path of its own, against the engine left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed_training import EIGHT, STEPS, compare, model, skip_if_nothing_is_reduced, train

from tests.distributed import Ranks

PARAMETERS = sum(p.numel() for p in model().parameters())


def options(stage: int, dtype: str = "fp32", accumulate: int = 1, **other: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration; keys of zero_optimization start with zero_."""
    zero = {key.removeprefix("zero_"): value for key, value in other.items() if key.startswith("zero_")}
    top = {key: value for key, value in other.items() if not key.startswith("zero_")}
    return {
        "zero_optimization": {"stage": stage, **zero},
        "gradient_accumulation_steps": accumulate,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **top,
    }


SMALL = {"zero_reduce_bucket_size": 5000}  # several buckets, and one parameter larger than a bucket
CASES: dict[str, tuple[int, dict[str, Any], str]] = {}  # name: (world, options, collective)
for stage in range(4):
    collective = "all_reduce" if stage == 0 else "reduce_scatter"
    for dtype in ("fp32", "bf16"):
        for accumulate in (1, 4):
            CASES[f"stage{stage}-{dtype}-x{accumulate}"] = (2, options(stage, dtype, accumulate), collective)
    CASES[f"stage{stage}-three-ranks"] = (3, options(stage, "fp32", 2), collective)
    if stage < 2:  # above, DeepSpeed takes these two with reduce_scatter: false only
        CASES[f"stage{stage}-predivide"] = (2, options(stage, gradient_predivide_factor=4.0), collective)
        CASES[f"stage{stage}-prescale"] = (2, options(stage, prescale_gradients=True), collective)
    CASES[f"stage{stage}-sent-in-fp32"] = (2, options(stage, "bf16", communication_data_type="fp32"), collective)
for stage in (1, 2):
    for name, settings, collective in [
        ("overlap", {"zero_overlap_comm": True}, "reduce_scatter"),
        ("no-overlap", {"zero_overlap_comm": False, **SMALL}, "reduce_scatter"),
        ("small-buckets", SMALL, "reduce_scatter"),
        ("not-contiguous", {"zero_contiguous_gradients": False}, "all_reduce"),
        ("whole", {"zero_reduce_scatter": False}, "all_reduce"),
        ("whole-predivide", {"zero_reduce_scatter": False, "gradient_predivide_factor": 4.0}, "all_reduce"),
        ("whole-prescale", {"zero_reduce_scatter": False, "prescale_gradients": True}, "all_reduce"),
        ("one-owner", {"zero_use_multi_rank_bucket_allreduce": False}, "reduce_scatter"),
        ("one-owner-small", {"zero_use_multi_rank_bucket_allreduce": False, **SMALL}, "reduce_scatter"),
        ("sum", {"gradient_allreduce_op": "sum", "zero_reduce_scatter": False}, "all_reduce"),
    ]:
        CASES[f"stage{stage}-{name}"] = (2, options(stage, **settings), collective)
    CASES[f"stage{stage}-one-owner-three-ranks"] = (
        3,
        options(stage, "bf16", zero_use_multi_rank_bucket_allreduce=False),
        "reduce_scatter",
    )
for name, settings, collective in [
    ("overlap", {"zero_overlap_comm": True, **SMALL}, "reduce_scatter"),
    ("no-overlap", {"zero_overlap_comm": False}, "reduce_scatter"),
    ("whole", {"zero_reduce_scatter": False}, "all_reduce"),
    ("whole-predivide", {"zero_reduce_scatter": False, "gradient_predivide_factor": 4.0}, "all_reduce"),
    ("whole-prescale", {"zero_reduce_scatter": False, "prescale_gradients": True}, "all_reduce"),
]:
    CASES[f"stage3-{name}"] = (2, options(3, **settings), collective)
for stage in (2, 3):
    offload = {"zero_offload_optimizer": {"device": "cpu"}}
    CASES[f"stage{stage}-offload"] = (2, options(stage, "bf16", 2, **offload), "reduce_scatter")
CASES["stage0-sum"] = (2, options(0, gradient_allreduce_op="sum"), "all_reduce")
CASES["stage1-bf16-optimizer"] = (
    2,
    options(1, "bf16", 2, data_types={"grad_accum_dtype": "fp32"}),
    "all_reduce",
)


@pytest.mark.parametrize("name", CASES)
def test_trains_as_without_and_counts_every_byte(engines: Callable[[int], Ranks], name: str) -> None:
    world, given, collective = CASES[name]
    skip_if_nothing_is_reduced(given["zero_optimization"])
    stage, accumulate = given["zero_optimization"]["stage"], given["gradient_accumulation_steps"]
    outcomes = engines(world).run(compare, given)
    site = f"deepspeed.stage{stage}.gradients"
    for plain, off, eight in outcomes:
        assert torch.equal(off["weights"], plain["weights"]) and off["losses"] == plain["losses"]
        assert plain["calls"] == 0
        assert list(off["sites"]) == list(eight["sites"]) == [site]
        assert off["full_precision"] == {"disabled by configuration": eight["calls"]}
        assert eight["quantized"] == eight["calls"] > 0
        # A wrong divisor would be a third off at least. bfloat16's own rounding is most of its difference.
        error = (eight["moved"] - plain["moved"]).norm() / plain["moved"].norm()
        assert 0 < error < (0.1 if "bf16" in given else 0.01), error
        assert eight["losses"] == pytest.approx(plain["losses"], rel=0.01)
        assert torch.equal(eight["weights"], outcomes[0][2]["weights"]), "the replicas have drifted apart"
    reductions = STEPS * (accumulate if stage >= 2 else 1)
    padded = stage == 3 and collective == "reduce_scatter"
    elements = sum(-(-p.numel() // world) * world for p in model().parameters()) if padded else PARAMETERS
    expected = (2 if collective == "all_reduce" else 1) * (world - 1) * elements * reductions
    expected *= outcomes[0][0]["comm_bytes"]
    if stage in (1, 2) and collective == "reduce_scatter" and "use_multi_rank_bucket_allreduce" not in str(given):
        expected *= 2  # DeepSpeed's own is an all-reduce
    # DeepSpeed itself would have sent the same for either route of a bucket: every gradient, every time, nothing else.
    slack = 8 * world * outcomes[0][2]["calls"]
    assert sum(off["bytes_sent"] for _, off, _ in outcomes) == pytest.approx(expected, abs=slack)
    for _, off, eight in outcomes:
        assert eight["bytes_full_precision"] == off["bytes_full_precision"] == off["bytes_sent"]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [2, 3])
def test_four_bits_send_no_more_than_they_must(engines: Callable[[int], Ranks], world: int, stage: int) -> None:
    """Check 4.25 bits an element with groups of 128: to the owners, and at stage 0 back to all ranks."""
    outcomes = engines(world).run(train, options(stage), {"bits": 4, "group_size": 128, "min_bytes": 0}, 1)
    bits = 8 * sum(outcome["bytes_sent"] for outcome in outcomes) / world / PARAMETERS
    assert 0 < bits <= 1.03 * (2 if stage == 0 else 1) * 4.25 * (world - 1) / world  # 3 %: groups that are not full


def test_warm_up_counts_steps_that_were_made(engines: Callable[[int], Ranks]) -> None:
    for outcome in engines(2).run(train, options(2, accumulate=2), {**EIGHT, "warmup_steps": 2}):
        assert outcome["full_precision"] == {"warm-up": 4}
        assert outcome["quantized"] == 2


def test_small_buckets_stay_in_full_precision(engines: Callable[[int], Ranks]) -> None:
    """Check that min_bytes is compared with a bucket, not with one owner's part."""
    size = 4 * PARAMETERS
    for stage in range(4):
        for limit, quantized in ((size, True), (size + 1, False)):
            for outcome in engines(2).run(train, options(stage), {"bits": 8, "min_bytes": limit}, 1):
                assert (outcome["quantized"] > 0) is quantized
                assert (outcome["full_precision"] == {"message below min_bytes": 1}) is not quantized
