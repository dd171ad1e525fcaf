"""Tensor parallelism at every stage: parameters with a copy on every tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import NEWEST, configuration, deepspeed, skip_if_nothing_is_reduced, stats
from test_section import mpu
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.integrations.deepspeed import parameters, replicated
from tests.distributed import RankFailure, Ranks
from tests.integrations.ddp.test_hook import WIDTH, Split

STEPS = 5
FOUR = {"bits": 4, "min_bytes": 4 * WIDTH + 1}  # more than a norm's weight has
SMALL = {"reduce_bucket_size": 12000}  # several, and a weight and its neighbours in one


def train(
    options: dict[str, Any],
    flash: dict[str, Any],
    marked: bool = True,
    copied: bool = True,
    large: bool = False,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train data parallel 2 x tensor parallel 2. Return the difference of copies between tensor-parallel ranks.

    large: one of the copies is a matrix.
    marked: the reductions recognize copies; copied: the gathers by differences recognize them too.
    """
    package = deepspeed()
    from deepspeed.utils import groups

    fap.reset_stats()
    units = mpu(2, 1)
    blocks = [Split(units.get_tensor_model_parallel_group()) for _ in range(3)]
    torch.manual_seed(1)
    net = nn.Sequential(*([nn.Linear(WIDTH, WIDTH)] if large else []), *blocks)
    split = [p for block in blocks for layer in (block.up, block.down) for p in layer.parameters()]
    for p in split:
        p.tensor_model_parallel = True
    same = [p for p in net.parameters() if not hasattr(p, "tensor_model_parallel")]
    with pytest.MonkeyPatch.context() as patch:
        if not marked:
            patch.setattr(replicated, "ranges", lambda *_args, **_kwargs: [])
        if not copied:
            patch.setattr(parameters.Parameters, "_copies", lambda *_args: [])
        try:
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
            config = configuration(options, flash)
            built, *_ = package.initialize(model=net, optimizer=optimizer, config=config, mpu=units)
            dtype = next(net.parameters()).dtype
            for number in range(steps * built.gradient_accumulation_steps()):
                generator = torch.Generator().manual_seed(1000 * number + units.get_data_parallel_rank())
                x = torch.randn(8, WIDTH, generator=generator).to(dtype)
                built.backward((built(x) - x.flip(1)).float().square().mean())
                built.step()
            mine = []
            for p in same:
                with package.zero.GatheredParameters([p], enabled=built.zero_optimization_stage() == 3):
                    mine.append(p.detach().float().flatten().clone())
            counted = fap.stats() if "param_bits" in flash else stats()
            built.destroy()
        finally:
            groups.mpu = None
    both = [torch.empty_like(torch.cat(mine)) for _ in range(2)]
    dist.all_gather(both, torch.cat(mine), group=units.get_tensor_model_parallel_group())
    return {"apart": float((both[0] - both[1]).abs().max()), **counted}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


BF16 = {"bf16": {"enabled": True}}
CASES: dict[str, dict[str, Any]] = {
    "stage0": zero(0),
    "stage1": zero(1),
    "stage1-small-buckets": zero(1, **SMALL),
    "stage1-bf16-optimizer": {**zero(1), **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "stage2": zero(2),
    "stage2-small-buckets": {**zero(2, **SMALL), "gradient_accumulation_steps": 2},
    "stage2-bf16-sent-in-fp32": {**zero(2), **BF16, "communication_data_type": "fp32"},
    "stage2-overlap": zero(2, overlap_comm=True, **SMALL),
    "stage2-whole": zero(2, reduce_scatter=False),
    "stage2-not-contiguous": zero(2, contiguous_gradients=False),
    "stage2-one-owner": zero(2, use_multi_rank_bucket_allreduce=False),
    "stage3": zero(3),
    "stage3-small-buckets": zero(3, **SMALL),
    "stage3-whole": zero(3, reduce_scatter=False),
}


@pytest.mark.parametrize("name", CASES)
def test_copies_stay_the_same(engines: Callable[[int], Ranks], name: str) -> None:
    skip_if_nothing_is_reduced(CASES[name]["zero_optimization"])
    for outcome in engines(4).run(train, CASES[name], FOUR):
        assert outcome["apart"] == 0
        assert outcome["quantized"] > 0 and list(outcome["full_precision"]) == [replicated_params.REASON]
        assert outcome["bytes_sent"] < 0.4 * outcome["bytes_full_precision"]


LONG = {"error_feedback": True, "rounding": "stochastic"}


@NEWEST
@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["stage0", "stage1-small-buckets", "stage2", "stage2-one-owner", "stage3"])
def test_copies_are_the_same_after_many_steps_and_the_large_one_is_quantized(
    engines: Callable[[int], Ranks], name: str, steps: int
) -> None:
    skip_if_nothing_is_reduced(CASES[name]["zero_optimization"])
    for outcome in engines(4).run(train, CASES[name], {**FOUR, **LONG}, True, True, True, steps):
        assert outcome["apart"] == 0
        assert outcome["full_precision"][replicated_params.REASON] > 0
        assert outcome["bytes_sent"] < 0.3 * outcome["bytes_full_precision"], "the matrix alone would be a seventh"


@pytest.mark.parametrize("name", ["stage1-bf16-optimizer", "stage2", "stage2-bf16-sent-in-fp32", "stage3"])
def test_copies_stay_the_same_where_parameters_are_quantized(engines: Callable[[int], Ranks], name: str) -> None:
    try:
        outcomes = engines(4).run(train, CASES[name], {**FOUR, "param_bits": 4})
    except RankFailure as failure:
        if "param_bits=4 has no effect with FP16_UnfusedOptimizer" not in str(failure):
            raise
        pytest.skip("this DeepSpeed builds an optimizer here that gathers no parameters, and it is refused")
    for outcome in outcomes:
        assert outcome["apart"] == 0
        site = next(site for name, site in outcome["sites"].items() if name.endswith("parameters"))
        assert site["quantized"] > 0 and site["full_precision"][replicated_params.REASON] > 0


def test_parameters_would_drift_apart(engines: Callable[[int], Ranks]) -> None:
    for outcome in engines(4).run(train, CASES["stage2"], {**FOUR, "param_bits": 4}, True, False):
        assert outcome["apart"] > 0


@pytest.mark.parametrize("more", [{"error_feedback": True}, {"min_sqnr_db": 20.0, "quality_interval": 2}], ids=str)
@pytest.mark.parametrize("stage", range(4))
def test_copies_stay_the_same_with_feedback_and_guard(
    engines: Callable[[int], Ranks], stage: int, more: dict[str, Any]
) -> None:
    for outcome in engines(4).run(train, zero(stage, **SMALL), {**FOUR, **more}):
        assert outcome["apart"] == 0 and outcome["quantized"] > 0


@pytest.mark.parametrize("stage", range(4))
def test_they_would_drift_apart(engines: Callable[[int], Ranks], stage: int) -> None:
    for outcome in engines(4).run(train, zero(stage), FOUR, False):
        assert outcome["apart"] > 1e-4
