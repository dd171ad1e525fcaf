"""Trouble inside a process: memory, Ctrl-C, fork, spawn, a hook that raises, a group made a second time."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters, run_log
from tests.distributed import Ranks

TIMEOUT = timedelta(seconds=2)
CONFIG = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
LARGE = fap.FlashConfig(bits=8, min_bytes=0, chunk_bytes=1 << 20)
NUMEL = 80_000_000


def error_of(call: Callable[[], Any]) -> tuple[str, float]:
    """Return the error of a call, with its type, and its seconds."""
    start = time.monotonic()
    try:
        call()
        return "no error", time.monotonic() - start
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start


# ---- memory ----


def out_of_memory(victim: int) -> tuple[str, float, bool, str]:
    """Allow the victim not a byte more: the workspace of its call cannot be allocated."""
    torch.set_num_threads(1)
    fap.all_reduce(torch.ones(1000), config=CONFIG)
    x = torch.full((NUMEL,), 1.0 + dist.get_rank())
    before = x[::1000].clone()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    if dist.get_rank() == victim:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), unlimited[1]))
    message, seconds = error_of(lambda: fap.all_reduce(x, config=LARGE))
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    # A rank that continues after its error cannot be mistaken for a rank that has made the call.
    later, _ = error_of(lambda: fap.all_reduce(torch.ones(1000), config=CONFIG))
    return message, seconds, torch.equal(x[::1000], before), later


def test_one_rank_has_no_memory_for_its_workspace() -> None:
    # No arena of malloc's has as much: each reserves 64 MiB of addresses in one piece, which the limit does not see.
    assert LARGE.format().payload_bytes(NUMEL) > 64 << 20
    with Ranks(2, TIMEOUT) as ranks:
        (_, first), (kind, second) = ranks.outcomes(out_of_memory, 0, timeout=60)
    assert kind == "value", second
    assert "can't allocate memory" in first[0] and first[2], first
    assert second[0].startswith("CollectiveError: all_reduce at site 'all_reduce', rank 1 of 2"), second
    assert second[1] < TIMEOUT.total_seconds() + 5 and second[2]
    assert first[3].startswith("CollectiveError") and second[3].startswith("CollectiveError"), (first, second)


# ---- Ctrl-C ----


def interrupted(answers: bool) -> list[tuple[str, float]] | None:
    """Send SIGINT to rank 1 while it waits for rank 0, which comes late, or not before the timeout."""
    torch.set_num_threads(1)
    fap.all_reduce(torch.ones(1000), config=CONFIG)
    if dist.get_rank() == 0:
        time.sleep(1 if answers else TIMEOUT.total_seconds() + 1)
        error_of(lambda: fap.all_reduce(torch.ones(100_000), config=CONFIG, async_op=True).wait())
        return None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x = torch.full((100_000,), 5.0)
    work = fap.all_reduce(x, config=CONFIG, async_op=True)
    assert work is not None
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    found = [error_of(work.wait), error_of(work.wait)]
    assert not answers or bool((x - 6).abs().max() < 0.1)
    return found


@pytest.mark.parametrize("answers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ctrl_c_in_a_wait(answers: bool) -> None:
    """Check that Ctrl-C is raised immediately and the call continues: a later wait has its result, or its error."""
    with Ranks(2, TIMEOUT) as ranks:
        _, (kind, value) = ranks.outcomes(interrupted, answers, timeout=90)
    assert kind == "value", value
    (first, seconds), (second, _) = value
    assert first.startswith("KeyboardInterrupt"), first
    assert seconds < 0.9
    assert second.startswith("no error" if answers else "CollectiveError: all_reduce at site 'all_reduce', rank 1"), (
        second
    )


# ---- fork, spawn ----


def in_a_child(case: Callable[[], str]) -> str:
    """Return the message of a forked child; "killed" if none comes for ten seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, case().encode())
        finally:
            os._exit(0)
    os.close(writing)
    timer = threading.Timer(10, os.kill, (child, signal.SIGKILL))
    timer.start()
    try:
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(child, 0)
    finally:
        timer.cancel()
    return said or "killed"


def uses_the_groups_of_its_parent() -> str:
    torch.set_num_threads(1)
    x = torch.ones(1000)
    plainly = CONFIG.model_copy(update={"enabled": False})
    calls = [lambda c=c: fap.all_reduce(x, config=c) for c in (CONFIG, plainly)]
    calls.append(lambda: fap.all_reduce(x, config=CONFIG, async_op=True))
    return "\n".join(error_of(call)[0] for call in calls)


def forks(used: bool) -> tuple[str, bool]:
    """Fork after creating a group; used: the parent has used its group with the package before it forks."""
    plainly = CONFIG.model_copy(update={"enabled": False})
    if used:
        for config in (CONFIG, plainly):
            fap.all_reduce(torch.ones(1000), config=config)
    refused = in_a_child(uses_the_groups_of_its_parent)
    x = torch.full((50_000,), 1.0 + dist.get_rank())
    fap.all_reduce(x, config=CONFIG)  # the parents' group still works
    return refused, bool((x - sum(range(1, dist.get_world_size() + 1))).abs().max() < 0.1)


@pytest.mark.parametrize("used", [False, True])
def test_a_forked_child_gets_an_error_for_groups_of_its_parent(used: bool) -> None:
    with Ranks(2, TIMEOUT) as ranks:
        for refused, correct in ranks.run(forks, used, timeout=60):
            assert [line.split(" from ")[0] for line in refused.splitlines()] == [
                "ValueError: this process was forked"
            ] * 3, refused
            assert correct


def locked_when_forked() -> str:
    """Fork in the main thread while another thread holds the counters, as that of the log does."""
    held, stop = threading.Event(), threading.Event()

    def hold() -> None:
        while not stop.is_set():
            for lock in (counters._lock, run_log._lock):
                with lock:
                    held.set()
                    time.sleep(0.05)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    said = in_a_child(lambda: str(fap.stats()["calls"]))
    stop.set()
    thread.join()
    return said


def test_a_fork_while_a_thread_counts() -> None:
    with Ranks(1) as ranks:
        ranks.run(fap.reset_stats)
        assert ranks.run(locked_when_forked, timeout=90) == ["0"]


def correct() -> bool:
    x = torch.full((50_000,), 1.0 + dist.get_rank())
    fap.all_reduce(x, config=CONFIG)
    return bool((x - sum(range(1, dist.get_world_size() + 1))).abs().max() < 0.1)


@pytest.mark.slow  # they import torch one after another
def test_spawned_ranks() -> None:
    with Ranks(2, TIMEOUT, method="spawn") as ranks:
        assert ranks.run(correct) == [True, True]


# ---- a group that is destroyed and made a second time ----


def anew(store: str, victim: int) -> list[str]:
    """Let one rank die in a call; the others make a new group and continue, twice over."""
    rank = dist.get_rank()
    x = torch.full((50_000,), 1.0 + rank)
    fap.all_reduce(torch.ones(1000), config=CONFIG)
    if rank == victim:
        os._exit(17)
    found = [error_of(lambda: fap.all_reduce(x, config=CONFIG))[0]]
    dist.destroy_process_group()
    found.append(error_of(lambda: fap.all_reduce(x, config=CONFIG))[0])
    survivors = [r for r in (0, 1, 2) if r != victim]
    for attempt in range(2):
        file = dist.FileStore(f"{store}/{attempt}", len(survivors))
        dist.init_process_group("gloo", store=file, rank=survivors.index(rank), world_size=len(survivors))
        assert groups.known(dist.group.WORLD) is None
        y = torch.full((50_000,), 1.0 + rank)  # the contents after a failed call are undefined
        fap.all_reduce(y, config=CONFIG)
        found.append(str(round(float(y.mean()), 1)))
        dist.destroy_process_group()
    return found


def test_the_survivors_make_a_new_group(tmp_path: Path) -> None:
    with Ranks(3, TIMEOUT) as ranks:
        outcomes = ranks.outcomes(anew, str(tmp_path), 1, timeout=90)
    assert outcomes[1] == ("died", 17)
    for rank in (0, 2):
        kind, found = outcomes[rank]
        assert kind == "value", found
        assert found[0].startswith("CollectiveError: ")
        assert found[1] == ("ValueError: torch.distributed is not initialized; call init_process_group first."), found
        assert found[2:] == ["4.0", "4.0"]  # ranks 0 and 2 have 1 and 3


# ---- a hook that raises ----


def raises_in_backward(store: str) -> tuple[str, float, str]:
    """Raise in a hook on a parameter on rank 1 while some buckets are in flight; then all continue in a new group."""
    torch.set_num_threads(1)

    def training() -> tuple[nn.Module, DistributedDataParallel]:
        torch.manual_seed(7)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.06)
        ddp.register_comm_hook(None, fap.ddp_hook(CONFIG))
        ddp(torch.ones(4, 128)).sum().backward()  # all is well
        return model, ddp

    model, ddp = training()

    def raising(gradient: torch.Tensor) -> None:
        raise ArithmeticError("this rank alone")

    if dist.get_rank() == 1:
        model[2].weight.register_hook(raising)
    message, seconds = error_of(lambda: ddp(torch.ones(4, 128)).sum().backward())
    time.sleep(max(0.0, TIMEOUT.total_seconds() + 1 - seconds))  # a rank that ends is noticed immediately
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(os.environ["RANK"]), world_size=2)
    again, _ = error_of(training)
    return message, seconds, again


def test_a_rank_raises_in_the_backward_pass_of_ddp(tmp_path: Path) -> None:
    with Ranks(2, TIMEOUT) as ranks:
        outcomes = ranks.outcomes(raises_in_backward, str(tmp_path / "store"), timeout=60)
    (_, first), (kind, second) = outcomes
    assert kind == "value", second
    assert second[0].startswith("ArithmeticError: this rank alone"), second
    assert "all_reduce at site 'ddp.gradients', rank 0 of 2, failed while" in first[0], first
    assert first[1] < TIMEOUT.total_seconds() + 3
    assert first[2] == second[2] == "no error", (first, second)
