"""Ranks for tests: real processes on gloo, started once and used for many cases, killed when time is up.

A case is a module-level function; it runs on every rank with `rank` and `world_size` from torch.distributed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

GROUP_TIMEOUT = timedelta(seconds=60)
TIMEOUT = 240  # seconds of a case: on a machine that is busy with other things a compiler takes minutes
MANY_THREADS = 60
# torch._dynamo: the first optimizer of a process imports it, which takes more than a second.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "flash_allreduce_plugin.api.reductions")
# For ranks that build Megatron's models: 2.5 s of imports for each. Not where a stub stands in for an import.
MEGATRON = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_layer",
)


class RankFailure(AssertionError):
    """A case raised on a rank, and the message has its traceback, or a rank died."""


class Ranks:
    """world_size processes in one default group. Use as a context manager, or close().

    method: "forkserver" starts ranks in milliseconds, "spawn" in seconds.
    preload: modules that the ranks have imported when they start, in no time.
    """

    def __init__(
        self,
        world_size: int,
        group_timeout: timedelta = GROUP_TIMEOUT,
        backend: str = "gloo",
        method: str = "forkserver",
        preload: tuple[str, ...] = (),
    ) -> None:
        self.world_size = world_size
        self.closed = False
        context: Any = multiprocessing.get_context(method)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, str(Path(self._folder.name) / "store"), group_timeout, theirs, backend),
                daemon=True,
            )
            # A process of this method connects to a server: the module has one, with one list of imports.
            with mock.patch.object(forkserver, "connect_to_new_process", _server(preload).connect_to_new_process):
                process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    @property
    def crowded(self) -> bool:
        """Return True if a rank has more threads than a few process groups need."""
        tasks = [Path(f"/proc/{process.pid}/task") for process in self.processes]
        return any(len(list(threads.iterdir())) > MANY_THREADS for threads in tasks if threads.exists())

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Run case(*args) on every rank. Return the results in rank order.

        Raises RankFailure with the traceback of each rank that failed, or the exit code of one that died, TimeoutError
        when time is up; then the ranks are killed.
        """
        outcomes = self.outcomes(case, *args, timeout=timeout)
        failures = [f"rank {r}: {o[0]}\n{o[1]}" for r, o in enumerate(outcomes) if o[0] != "value"]
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return [value for _, value in outcomes]

    def outcomes(self, case: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[tuple[str, Any]]:
        """Run as run does, but return ("value", result), ("error", traceback) or ("died", exit code) per rank."""
        for connection in self._connections:
            connection.send((case, args))
        deadline = time.monotonic() + timeout
        outcomes: dict[int, tuple[str, Any]] = {}
        while len(outcomes) < self.world_size:
            waiting = {c: r for r, c in enumerate(self._connections) if r not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"{case.__name__}: ranks {sorted(waiting.values())} did not finish")
            for connection in ready:
                rank = waiting[connection]
                try:
                    outcomes[rank] = connection.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    outcomes[rank] = ("died", self.processes[rank].exitcode)
        return [outcomes[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        self.closed = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pool:
    """Keep pool(n): n running ranks for many tests, replaced when a case has failed.

    Raises RankFailure when they have ended by themselves between two cases: an earlier test left something behind.
    """

    def __init__(self) -> None:
        self._started: dict[int, Ranks] = {}
        POOLS.append(self)

    def __call__(self, world_size: int) -> Ranks:
        ranks = self._started.get(world_size)
        if ranks is None or ranks.closed:
            self._started[world_size] = ranks = Ranks(world_size)
        if not ranks.alive:
            codes = [process.exitcode for process in ranks.processes]
            ranks.close()
            raise RankFailure(f"since an earlier test the {world_size} ranks have ended, with exit codes {codes}")
        return ranks

    def close(self, *, crowded: bool = False) -> None:
        """End all ranks; crowded: those that have made so many groups that their threads take the machine."""
        for world_size, ranks in list(self._started.items()):
            if not crowded or ranks.crowded:
                self._started.pop(world_size).close()


POOLS: list[Pool] = []


@cache
def _server(preload: tuple[str, ...]) -> forkserver.ForkServer:
    """Return the server of ranks: a process that has imported torch and these once, and from which ranks fork."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*PRELOADED, *preload])
    return server


def run_ranks(
    world_size: int, case: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, preload: tuple[str, ...] = ()
) -> list[Any]:
    """Run one case in separate ranks, for cases that leave something behind."""
    with Ranks(world_size, preload=preload) as ranks:
        return ranks.run(case, *args, timeout=timeout)


def _serve(rank: int, world_size: int, store: str, timeout: timedelta, connection: Connection, backend: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
    )
    while True:
        try:
            case, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("value", case(*args)))
        except Exception:
            connection.send(("error", traceback.format_exc()))
