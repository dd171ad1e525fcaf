"""Ranges of what is copied, and reducing them exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import copies
from tests.distributed import Ranks


def test_a_gradient_that_is_partly_in_a_bucket_counts_in_part() -> None:
    memory = torch.zeros(100)
    gradients = [memory[90:100], memory[5:15], memory[30:40], memory[60:60]]
    assert copies.within(gradients, memory[10:50]) == [(0, 5), (20, 30)]
    assert copies.within(gradients, memory[50:80]) == []
    assert copies.within([torch.zeros(10**6, dtype=torch.bfloat16)], memory) == []


def test_ranges_move_with_their_segments() -> None:
    chosen = random.Random(5)
    for _ in range(200):
        borders = [0, *sorted(chosen.sample(range(1, 60), 6)), 60]
        segments = list(itertools.pairwise(borders))
        chosen.shuffle(segments)
        ends = sorted(chosen.sample(range(61), 8))
        ranges = list(zip(ends[::2], ends[1::2], strict=True))
        marked = torch.zeros(60, dtype=torch.bool)
        for first, last in ranges:
            marked[first:last] = True
        expected = torch.cat([marked[first:last] for first, last in segments])
        found = torch.zeros_like(marked)
        for first, last in copies.moved(ranges, segments):
            assert not found[first:last].any() and first < last
            found[first:last] = True
        assert torch.equal(found, expected)


RANGES = [(0, 3), (100, 164), (290, 310), (590, 600)]
FOUR = fap.FlashConfig(bits=4, min_bytes=0)


def reduced(form: str, op: Any, dtype: torch.dtype, asynchronous: bool) -> dict[str, Any]:
    """Elements of one call that are to be exact, and the others, against a sum in full precision."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [torch.randn(600, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    total = sum(one.double() for one in inputs)
    assert isinstance(total, torch.Tensor)
    total = total / world if op == dist.ReduceOp.AVG else total
    exact = torch.zeros(600, dtype=torch.bool)
    for first, last in RANGES:
        exact[first:last] = True
    fap.reset_stats()
    mine = inputs[rank]
    if form == "all_reduce":
        work = fap.all_reduce(mine, op, config=FOUR, async_op=asynchronous, exact=RANGES)
        result = mine
    elif form == "strided":
        wide = torch.zeros(600, 2, dtype=dtype)
        wide[:, 0] = mine
        result = wide[:, 0]
        work = fap.all_reduce(result, op, config=FOUR, async_op=asynchronous, exact=RANGES)
    else:
        sizes = [600 // world] * world if form == "reduce_scatter" else [0, *[600 // (world - 1)] * (world - 1)]
        result = mine.new_empty(sizes[rank])
        input = mine if form == "reduce_scatter" else list(mine.split(sizes))
        work = fap.reduce_scatter(result, input, op, config=FOUR, async_op=asynchronous, exact=RANGES)
        start = sum(sizes[:rank])
        total, exact = total[start : start + sizes[rank]], exact[start : start + sizes[rank]]
    if work is not None:
        work.wait()
    error = (result.double() - total).abs()
    return {"exact": error[exact].max().item() if exact.any() else 0.0, "others": error[~exact], **fap.stats()}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "avg"])
@pytest.mark.parametrize("form", ["all_reduce", "strided", "reduce_scatter", "parts"])
def test_ranges_are_reduced_exactly_beside_the_quantized_call(
    ranks: Callable[[int], Ranks], form: str, op: Any, dtype: torch.dtype, asynchronous: bool
) -> None:
    for outcome in ranks(3).run(reduced, form, op, dtype, asynchronous):
        assert outcome["exact"] < (1e-6 if dtype == torch.float32 else 1e-2)
        assert len(outcome["others"]) == 0 or outcome["others"].max() > 0.02
        assert (outcome["quantized"], outcome["full_precision"]) == (1, {copies.REASON: 1})


def refused() -> list[str]:
    messages = []
    for ranges in ([(0, 11)], [(4, 6), (5, 7)], [(3, 3)], [(-1, 2)]):
        with pytest.raises(ValueError) as error:
            fap.all_reduce(torch.zeros(10), config=FOUR, exact=ranges)
        messages.append(str(error.value))
    return messages


def test_ranges_that_are_none_are_refused_before_anything_is_sent(ranks: Callable[[int], Ranks]) -> None:
    for messages in ranks(2).run(refused):
        assert all("expected ascending ranges (first, end) of 10 elements" in message for message in messages)
