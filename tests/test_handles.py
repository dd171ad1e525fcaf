"""Asynchronous handles: sync = async, any order that all ranks share, other collectives in between."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import groups
from tests.codecs import same_bits
from tests.distributed import Ranks
from tests.simulation import Call

GetRanks = Callable[[int], Ranks]

CONFIG = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
SIZES = (1, 129, 5003, 60_007, 30_011, 128)


def inputs() -> list[Tensor]:
    return [Call("all_reduce", n).input(dist.get_rank(), dist.get_world_size()) for n in SIZES]


def reduced() -> list[Tensor]:
    tensors = inputs()
    for x in tensors:
        assert fap.all_reduce(x, config=CONFIG) is None
    return tensors


def any_order(seed: int) -> list[bool]:
    """All handles in flight at once, waited on in an order drawn from a seed that the ranks share."""
    tensors, expected = inputs(), reduced()
    works = [fap.all_reduce(x, config=CONFIG, async_op=True) for x in tensors]
    order = list(range(len(works)))
    random.Random(seed).shuffle(order)
    for i in order:
        assert not works[i].is_completed()
        assert works[i].wait() is True
        assert works[i].is_completed()
    return [same_bits(x, y) for x, y in zip(tensors, expected, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_handles_are_waited_on_in_any_order(ranks: GetRanks, world_size: int) -> None:
    for seed in range(4):
        for rank in ranks(world_size).run(any_order, seed):
            assert all(rank)


def different_collectives() -> list[bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    calls = [Call(c, 20_011, dtype, {"bits": 5}) for c in ("all_reduce", "reduce_scatter", "all_gather")
             for dtype in ("float32", "float16")]  # fmt: skip
    expected = [call.run(call.input(rank, world)) for call in calls]
    works, results = [], []
    for call in calls:
        x = call.input(rank, world)
        arguments = {"config": call.flash_config, "async_op": True}
        if call.collective == "all_reduce":
            results.append(x)
            works.append(fap.all_reduce(x, **arguments))
        elif call.collective == "reduce_scatter":
            results.append(x.new_empty(20_011))
            works.append(fap.reduce_scatter(results[-1], x, **arguments))
        else:
            results.append(x.new_empty(20_011 * world))
            works.append(fap.all_gather(results[-1], x, **arguments))
    for work in reversed(works):
        work.wait()
    return [same_bits(x, y) for x, y in zip(results, expected, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_different_collectives_are_in_flight_together(ranks: GetRanks, world_size: int) -> None:
    for rank in ranks(world_size).run(different_collectives):
        assert all(rank)


def interleaved() -> list[bool]:
    """The user's own collectives between issue and wait, synchronous and asynchronous."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors, expected = inputs(), reduced()
    works, plain, pending = [], [], []
    for x in tensors:
        works.append(fap.all_reduce(x, config=CONFIG, async_op=True))
        y = torch.full((3000,), float(rank))
        dist.all_reduce(y)
        plain.append(bool((y == sum(range(world))).all()))
        z = torch.full((1000,), rank)
        pending.append((z, dist.all_reduce(z, async_op=True)))
    for work in works[::-1]:
        work.wait()
        y = torch.full((2,), float(rank))
        dist.broadcast(y, src=world - 1)
        plain.append(bool((y == world - 1).all()))
    for z, work in pending:
        work.wait()
        plain.append(bool((z == sum(range(world))).all()))
    return plain + [same_bits(x, y) for x, y in zip(tensors, expected, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_collectives_may_run_between_issue_and_wait(ranks: GetRanks, world_size: int) -> None:
    for rank in ranks(world_size).run(interleaved):
        assert all(rank)


def other_thread() -> list[bool]:
    tensors, expected = inputs(), reduced()
    answers: list[bool] = []
    for x in tensors:
        work = fap.all_reduce(x, config=CONFIG, async_op=True)
        waiting = [threading.Thread(target=lambda work=work: answers.append(work.wait())) for _ in range(3)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        work.wait()
        work.wait()
    return answers + [same_bits(x, y) for x, y in zip(tensors, expected, strict=True)]


def test_wait_serves_any_thread_and_may_be_called_again(ranks: GetRanks) -> None:
    for rank in ranks(2).run(other_thread):
        assert len(rank) == 4 * len(SIZES) and all(rank)


def dropped() -> tuple[list[str], bool]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            fap.all_reduce(torch.ones(50_000), config=CONFIG, async_op=True, site=fap.Site("dropped here"))
        done = fap.all_reduce(torch.ones(50_000), config=CONFIG, async_op=True)
        done.wait()
        del done
        gc.collect()
    x = torch.full((60_000,), dist.get_rank() + 1.0)
    fap.all_reduce(x, config=CONFIG)
    exact = sum(range(1, dist.get_world_size() + 1))
    return [f"{w.category.__name__}: {w.message}" for w in caught], bool((x - exact).abs().max() < 0.1)


def test_a_dropped_handle_is_warned_about_and_the_group_still_works(ranks: GetRanks) -> None:
    for messages, correct in ranks(2).run(dropped):
        assert len(messages) == 3 and correct
        assert all(
            m.startswith("ResourceWarning: all_reduce at site 'dropped here' was started and never waited on")
            for m in messages
        )


def full_precision_handles() -> list[bool]:
    answers = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for x in (torch.full((10,), rank), torch.full((10,), float(rank)), torch.empty(0)):
        work = fap.all_reduce(x, config=fap.FlashConfig(), async_op=True)
        answers.append(work.wait() and work.is_completed() and bool((x == sum(range(world))).all()))
    return answers


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_calls_in_full_precision_have_handles_too(ranks: GetRanks, world_size: int) -> None:
    for rank in ranks(world_size).run(full_precision_handles):
        assert all(rank)


def two_groups() -> list[bool]:
    """Calls on overlapping groups in flight at once, each with its own buffers and agreement."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    mine = [g for g, members in zip(pairs, ((0, 1), (1, 2), (0, 2)), strict=True) if rank in members]
    tensors = [torch.full((20_000,), float(rank + 1)) for _ in mine]
    works = [fap.all_reduce(x, group=g, config=CONFIG, async_op=True) for x, g in zip(tensors, mine, strict=True)]
    for work in works:
        work.wait()
    answers = []
    for x, g in zip(tensors, mine, strict=True):
        exact = sum(r + 1 for r in dist.get_process_group_ranks(g))
        answers.append(bool((x - exact).abs().max() < 0.1))
    outsider = next(g for g in pairs if g not in mine)
    try:
        fap.all_reduce(torch.ones(10), group=outsider, config=CONFIG)
    except ValueError as error:
        answers.append("not a member of the group" in str(error))
    for g in mine:
        dist.destroy_process_group(g)
    return answers


def test_groups_that_overlap(ranks: GetRanks) -> None:
    for rank in ranks(3).run(two_groups):
        assert rank == [True, True, True]


def aliased() -> list[bool]:
    """output of reduce_scatter inside its input, input of all_gather inside its output, as frameworks have it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    same = []
    for numel in (129, 30_011):
        scatter = Call("reduce_scatter", numel, "bfloat16")
        x = scatter.input(rank, world)
        expected = scatter.run(x.clone())
        shard = x[rank * numel : (rank + 1) * numel]
        fap.reduce_scatter(shard, x, config=scatter.flash_config)
        same.append(same_bits(shard, expected))
        gather = Call("all_gather", numel, "bfloat16")
        y = gather.input(rank, world)
        expected = gather.run(y.clone())
        whole = torch.zeros_like(expected)
        whole[rank * numel : (rank + 1) * numel] = y
        fap.all_gather(whole, whole[rank * numel : (rank + 1) * numel], config=gather.flash_config)
        same.append(same_bits(whole, expected))
    return same


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_shard_may_lie_inside_the_whole(ranks: GetRanks, world_size: int) -> None:
    for rank in ranks(world_size).run(aliased):
        assert rank == [True] * 4


def states_left_behind() -> int:
    gc.collect()
    before = len(groups._states)
    for _ in range(3):
        group = dist.new_group()
        fap.all_reduce(torch.ones(20_000), group=group, config=CONFIG)
        dist.destroy_process_group(group)
        del group
    gc.collect()
    return len(groups._states) - before


def test_what_is_remembered_of_a_group_dies_with_it(ranks: GetRanks) -> None:
    assert ranks(2).run(states_left_behind) == [0, 0]
