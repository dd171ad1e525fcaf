"""Asynchronous handles: sync = async, any order, other collectives in between, progress without a wait."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.runtime.groups import state_of
from tests.codecs import same_bits
from tests.distributed import Ranks
from tests.queued import Queue, queued
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
    """Start all calls, then wait for their handles in another order on each rank."""
    tensors, expected = inputs(), reduced()
    works = [fap.all_reduce(x, config=CONFIG, async_op=True) for x in tensors]
    order = list(range(len(works)))
    random.Random(100 * seed + dist.get_rank()).shuffle(order)
    for i in order:
        assert works[i].wait() is True
        assert works[i].is_completed()
    return [same_bits(x, y) for x, y in zip(tensors, expected, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_wait_in_different_orders(ranks: GetRanks, world_size: int) -> None:
    for seed in range(4):
        for rank in ranks(world_size).run(any_order, seed):
            assert all(rank)


def without_a_wait() -> list[bool]:
    """Make calls and drop their handles, with more chunks than are in flight together. Look after a barrier."""
    tensors, expected = inputs(), reduced()
    works = [fap.all_reduce(x, config=CONFIG, async_op=True) for x in tensors]
    if dist.get_rank() == 0:  # a wait before the barrier here, and after it there
        works[-1].wait()
    dist.barrier()
    deadline = time.monotonic() + 30
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.001)
    return [same_bits(x, y) for x, y in zip(tensors, expected, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_progress_without_a_wait(ranks: GetRanks, world_size: int) -> None:
    for rank in ranks(world_size).run(without_a_wait):
        assert all(rank)


def limited_wait() -> list[str]:
    """Wait for a late peer, with a limit for this wait alone; the call continues."""
    said = []
    if dist.get_rank() == 1:
        time.sleep(1.0)
    x = torch.full((50_000,), 1.0)
    work = fap.all_reduce(x, config=CONFIG, async_op=True, site=fap.Site("late"))
    try:
        work.wait(timedelta(milliseconds=200 if dist.get_rank() == 0 else 20_000))
    except fap.CollectiveError as error:
        said.append(str(error))
    work.wait(timeout=timedelta(seconds=20))
    assert bool((x - dist.get_world_size()).abs().max() < 0.1)
    return said


def test_a_wait_may_have_a_limit(ranks: GetRanks) -> None:
    first, second = ranks(2).run(limited_wait)
    assert second == []
    assert first == [
        "all_reduce at site 'late' is not done after 0:00:00.200000; it continues, and wait() may be called again"
    ]


def futures() -> list[bool]:
    """Ask for the futures of quantized and other calls, before and after the result is there."""
    answers = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for config in (CONFIG, fap.FlashConfig()):
        for waited in (False, True):
            x = torch.full((20_000,), float(rank))
            work = fap.all_reduce(x, config=config, async_op=True)
            if waited:
                work.wait()
            then = work.get_future().then(lambda future: future.value()[0].mean().item())
            answers.append(abs(then.wait() - sum(range(world)) / 1) < 0.1 and work.get_future().value()[0] is x)
            shard = torch.empty(10_000)
            work = fap.reduce_scatter(shard, torch.ones(10_000 * world), config=config, async_op=True)
            answers.append(work.get_future().wait()[0] is shard and bool((shard - world).abs().max() < 0.1))
    return answers


@pytest.mark.parametrize("world_size", [1, 2])
def test_handles_have_futures(ranks: GetRanks, world_size: int) -> None:
    for rank in ranks(world_size).run(futures):
        assert rank == [True] * 8


def measured_in_order() -> tuple[float, int]:
    """Check that a measurement counts from the call's wait on, whenever its result came: timing decides nothing."""
    config = fap.FlashConfig(bits=4, min_bytes=0, quality_interval=1, quality_measure="exact")
    site = fap.Site(f"measured in order {dist.get_rank()}" if dist.get_world_size() == 1 else "measured in order")
    x = torch.randn(20_000)
    work = fap.all_reduce(x, config=config, async_op=True, site=site)
    while not work.is_completed():
        time.sleep(0.001)
    before = fap.stats()["sites"][site.name]["sqnr_db"]
    work.wait()
    return before, fap.stats()["sites"][site.name]["sqnr_db"]


def test_a_measurement_counts_from_the_wait_on(ranks: GetRanks) -> None:
    for before, after in ranks(2).run(measured_in_order):
        assert before is None and after > 10


def in_inference_mode() -> bool:
    with torch.inference_mode():
        x = torch.full((20_000,), 2.0)
        work = fap.all_reduce(x, config=CONFIG, async_op=True)
    work.wait()
    return bool((x - 2 * dist.get_world_size()).abs().max() < 0.1)


def test_tensors_of_inference_mode(ranks: GetRanks) -> None:
    assert ranks(2).run(in_inference_mode) == [True, True]


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
    """Make the user's own collectives between issue and wait, synchronous and asynchronous."""
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


def dropped() -> list[bool]:
    """Drop handles: the calls are made anyway, and the group continues."""
    tensors, expected = inputs(), reduced()
    for x in tensors:
        fap.all_reduce(x, config=CONFIG, async_op=True)
    gc.collect()
    x = torch.full((60_000,), dist.get_rank() + 1.0)
    fap.all_reduce(x, config=CONFIG, async_op=True).wait()  # behind the others
    exact = sum(range(1, dist.get_world_size() + 1))
    return [same_bits(x, y) for x, y in zip(tensors, expected, strict=True)] + [bool((x - exact).abs().max() < 0.1)]


def test_a_dropped_handle_loses_nothing(ranks: GetRanks) -> None:
    for rank in ranks(2).run(dropped):
        assert all(rank)


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
    """Make calls on overlapping groups in flight together, each with its own buffers and agreement."""
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
    """Put the output of reduce_scatter inside its input, the input of all_gather inside its output, as frameworks."""
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


def helpers() -> int:
    return sum(thread.name == "flash_allreduce" for thread in threading.enumerate())


def threads_of_synchronous_calls() -> int:
    group = dist.new_group()
    before = helpers()
    fap.all_reduce(torch.ones(20_000), group=group, config=CONFIG)
    fap.all_reduce(torch.ones(20), group=group, config=fap.FlashConfig(), async_op=True).wait()
    return helpers() - before


def test_neither_synchronous_calls_nor_those_in_full_precision_take_a_thread(ranks: GetRanks) -> None:
    assert ranks(2).run(threads_of_synchronous_calls) == [0, 0]


ENDS = """
import sys, torch, torch.distributed as dist
import flash_allreduce_plugin as fap
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
config = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
fap.all_reduce(torch.ones(50_000), config=config, async_op=True).wait()
if sys.argv[3] == "raises":
    if rank == 0:
        work = fap.all_reduce(torch.ones(50_000), config=config, async_op=True)  # the peer makes no such call
        raise SystemExit("raised")
    sys.stdin.read()  # until rank 0 is gone
elif sys.argv[3] == "in flight":
    fap.all_reduce(torch.ones(500_000), config=config, async_op=True)
"""


@pytest.mark.parametrize("how", ["waited", "in flight", "raises"])
def test_the_program_ends(how: str, tmp_path: Path) -> None:
    """End with nothing in flight, with calls of dropped handles, and in an exception while a peer is silent."""
    command = [sys.executable, "-c", ENDS]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path / "store"), how], **pipes) for rank in (0, 1)]
    try:
        _, said = processes[0].communicate(timeout=60)
        processes[1].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
    expected = (1, "raised\n") if how == "raises" else (0, "")
    assert (processes[0].returncode, said) == expected


# ---- over a backend that queues (NCCL), as it is issued ----

QUEUED = fap.FlashConfig(bits=8, min_bytes=0, check_ranks=False)


def issued(queue: Queue) -> list[tuple[str, str]]:
    """Return (operation, stream) of all but the memory's marks."""
    return [(one.what, one.on) for one in queue.issued if one.what != "record_stream"]


def test_an_asynchronous_call_is_issued_immediately_on_the_stream_of_its_group() -> None:
    with queued(4) as queue:
        work = fap.all_reduce(torch.empty(100_000), config=QUEUED, async_op=True)
        own = queue.issued[0].on
        assert own != "current"
        assert issued(queue) == [
            *[("wait_stream", own), ("launch", own), ("collective", own)],  # encode, all-to-all
            *[("launch", own), ("collective", own), ("launch", own)],  # sum, all-gather, decode
            ("record_event", own),
        ]
        queue.clear()
        assert work.wait() and work.is_completed()
        assert issued(queue) == [("wait_event", "current")]
        assert queue.count("synchronize") == 0


def test_groups_have_streams_of_their_own_of_high_priority() -> None:
    """Check that a call of one group does not queue behind a call of another, in whatever order they are issued."""
    with queued(4) as queue:
        groups = [dist.new_group(list(range(4))) for _ in range(2)]
        streams = []
        for group in (*groups, *reversed(groups)):
            queue.clear()
            fap.all_reduce(torch.empty(100_000), group=group, config=QUEUED, async_op=True).wait()
            streams.append(next(one.on for one in queue.issued if one.what == "launch"))
        assert streams[0] != streams[1] and streams == streams[::-1] and queue.made == 2
        assert all(state_of(group).stream(torch.device("cpu")).priority < 0 for group in groups)


def test_with_one_hardware_queue_the_half_is_issued_by_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue the half in wait(), else all later launches would queue behind the call's waits for the wire."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with queued(4) as queue:
        work = fap.all_reduce(torch.empty(100_000), config=QUEUED, async_op=True)
        own = queue.issued[0].on
        assert issued(queue) == [("wait_stream", own), ("launch", own), ("collective", own)]
        queue.clear()
        work.wait()
        rest = [("launch", own), ("collective", own), ("launch", own), ("record_event", own)]
        assert issued(queue) == [*rest, ("wait_event", "current")]
        queue.clear()
        work.wait()
        assert issued(queue) == [("wait_event", "current")]
        work = fap.all_reduce(torch.empty(100_000), config=QUEUED, async_op=True)
        assert work.is_completed()  # polling advances the call
        assert queue.count("record_event") == 1


def test_on_blackwell_that_variable_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with queued(4) as queue:
        queue.capability = (10, 0)
        fap.all_reduce(torch.empty(100_000), config=QUEUED, async_op=True)
        assert queue.count("record_event") == 1


def test_a_captured_call_has_buffers_of_its_own() -> None:
    """Take buffers of the graph's pool: an eager call takes and frees others, before and after the capture."""
    with queued(4) as queue:
        pool = state_of(dist.group.WORLD).pool(torch.device("cpu"))

        def call(numel: int) -> set[int]:
            queue.clear()
            fap.all_reduce(torch.empty(numel), config=QUEUED)
            return {message.untyped_storage().data_ptr() for message in queue.messages()}

        eager, kept = call(100_000), list(pool._free)
        queue.capturing = True
        captured, again = call(100_000), call(100_000)
        storages = [message.untyped_storage() for message in queue.messages()]  # as the graph keeps them
        assert not captured & eager and not again & eager
        assert [id(b) for b in pool._free] == [id(b) for b in kept]  # nothing of the capture came into the pool
        queue.capturing = False
        assert call(100_000) == eager
        assert not call(1_000_000) & {storage.data_ptr() for storage in storages}
