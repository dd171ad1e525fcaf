"""Ranges of copied parameters, and reducing them exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import replicated_params
from tests.distributed import Ranks


def test_a_gradient_that_is_partly_in_a_bucket_counts_in_part() -> None:
    memory = torch.zeros(100)
    gradients = [memory[90:100], memory[5:15], memory[30:40], memory[60:60]]
    assert replicated_params.within(gradients, memory[10:50]) == [(0, 5), (20, 30)]
    assert replicated_params.within(gradients, memory[50:80]) == []
    assert replicated_params.within([torch.zeros(10**6, dtype=torch.bfloat16)], memory) == []


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
        for first, last in replicated_params.moved(ranges, segments):
            assert not found[first:last].any() and first < last
            found[first:last] = True
        assert torch.equal(found, expected)


RANGES = [(0, 3), (100, 164), (290, 310), (590, 600)]
FOUR = fap.FlashConfig(bits=4, min_bytes=0)


def reduced(form: str, op: Any, dtype: torch.dtype, asynchronous: bool) -> dict[str, Any]:
    """Compare elements of one call that are to be exact, and the others, with a sum in full precision."""
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
def test_ranges_are_reduced_exactly_next_to_the_quantized_call(
    ranks: Callable[[int], Ranks], form: str, op: Any, dtype: torch.dtype, asynchronous: bool
) -> None:
    for outcome in ranks(3).run(reduced, form, op, dtype, asynchronous):
        assert outcome["exact"] < (1e-6 if dtype == torch.float32 else 1e-2)
        assert len(outcome["others"]) == 0 or outcome["others"].max() > 0.02
        assert (outcome["quantized"], outcome["full_precision"]) == (1, {replicated_params.REASON: 1})


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


# A copy among other neighbours: the buckets of two tensor-parallel ranks, one after the other on the same ranks.

COPY = 700
FIRST, SECOND = (0, 0), (1310, 40)  # elements before and behind it
PARAMETERS = [torch.nn.Parameter(torch.zeros(COPY)) for _ in range(2)]


def reduced_among(
    place: tuple[int, int], form: str, options: dict[str, Any], marked: bool, steps: int, wrong: int = -1
) -> list[torch.Tensor]:
    """Return averages of two copies in one bucket, after each of some steps.

    place: other elements before and behind the copies. marked: the call has the copies' ranges. wrong: the step
    at which rank 0's other elements are not finite.
    """
    group = dist.new_group(list(range(dist.get_world_size())))  # counts its calls alone
    world, rank = group.size(), group.rank()
    config = fap.FlashConfig(bits=4, min_bytes=COPY * 4, **options)
    feedback = fap.Feedback.from_config(config) if config.error_feedback else None
    before, behind = place
    first, last = before, before + COPY
    copied = [(first, last), (last + 10, last + 10 + COPY)]
    generator = torch.Generator().manual_seed(rank)
    others = torch.Generator().manual_seed(100 + rank + before)
    results = []
    for step in range(steps):
        bucket = torch.randn(copied[1][1] + behind, generator=others)
        for begin, end in copied:
            bucket[begin:end] = torch.randn(COPY, generator=generator)
        if step == wrong and before and rank == 0:
            bucket[0] = torch.inf
        if feedback is not None:
            feedback.begin()
        slot = None if feedback is None else feedback.slot(0)
        ranges = [(begin, end) for begin, end in copied] if marked else []
        segments = [(0, len(bucket))]
        if form == "cut_alike":  # every rank's part has an equal share of each copy and of the gaps between
            steps_of = [0, *(border for one in copied for border in one), len(bucket)]
            spans = [(a, b) for a, b in itertools.pairwise(steps_of)]
            of_rank = [
                [(a + (b - a) * r // world, a + (b - a) * (r + 1) // world) for a, b in spans] for r in range(world)
            ]
            segments = list(itertools.chain(*of_rank))
        whole = [
            replicated_params.Copy(replicated_params.number_of(one), (place,))
            for one, place in zip(PARAMETERS, ranges, strict=False)
        ]
        exact = replicated_params.moved(whole, segments, cut_alike=form == "cut_alike")
        how: dict[str, Any] = {"group": group, "config": config, "feedback": slot, "exact": exact, "async_op": step % 2}
        if form == "all_reduce":
            work = fap.all_reduce(bucket, dist.ReduceOp.AVG, **how)
            result, mine = bucket, [(0, len(bucket))]
        else:
            cut = [len(bucket) * r // world for r in range(world + 1)]
            parts = [[bucket[a:b]] for a, b in itertools.pairwise(cut)]
            mine = [(cut[rank], cut[rank + 1])]
            if form == "cut_alike":
                parts, mine = [[bucket[a:b] for a, b in spans] for spans in of_rank], of_rank[rank]
            result = bucket.new_empty(sum(b - a for a, b in mine))
            work = fap.reduce_scatter(result, parts, dist.ReduceOp.AVG, **how)
        if work is not None:
            work.wait()
        whole_result = torch.zeros(world, len(bucket))
        at = 0
        for a, b in mine:
            whole_result[rank, a:b] = result[at : at + b - a]
            at += b - a
        if form != "all_reduce":
            dist.all_reduce(whole_result)
            result = whole_result.sum(0)
        results.append(torch.cat([result[begin:end] for begin, end in copied]))
    return results


def both_places(*how: Any) -> list[bool]:
    """Return, for every step, True if the copies have the same bits in both places, and are finite."""
    pairs = zip(reduced_among(FIRST, *how), reduced_among(SECOND, *how), strict=True)
    return [bool(torch.equal(a, b) and a.isfinite().all()) for a, b in pairs]


def errors(form: str) -> list[float]:
    """Return the relative error of the copies at every step."""
    found = reduced_among(SECOND, form, {}, True, 4)
    averages = reduced_among(SECOND, form, {"enabled": False}, True, 4)
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, averages, strict=True)]


OPTIONS = [
    {},
    {"error_feedback": True},
    {"rounding": "stochastic"},
    {"error_feedback": True, "rounding": "stochastic", "symmetric": True},
    {"hadamard": True, "reduce_bits": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", ["all_reduce", "parts", "cut_alike"])
def test_a_large_copy_gets_the_same_bits_whatever_its_neighbours_are(
    ranks: Callable[[int], Ranks], form: str, options: dict[str, Any]
) -> None:
    for same in ranks(3).run(both_places, form, options, True, 60 if form == "all_reduce" else 20, 5):
        assert all(same)


@pytest.mark.parametrize("form", ["all_reduce", "parts", "cut_alike"])
def test_a_large_copy_is_quantized_and_put_in_its_place(ranks: Callable[[int], Ranks], form: str) -> None:
    for found in ranks(3).run(errors, form):
        assert all(0.05 < error < 0.2 for error in found)


def test_in_the_groups_of_its_neighbours_it_does_not(ranks: Callable[[int], Ranks]) -> None:
    for same in ranks(3).run(both_places, "all_reduce", {}, False, 3):
        assert not any(same)
