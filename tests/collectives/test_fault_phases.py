"""A rank that is killed or stops in every phase of every collective: the others get CollectiveError in bounded time,
and whoever gets none has the right result.

One phase of each kind is among the quick tests, the others are slow.
"""

from __future__ import annotations

import os
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
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import transport
from tests.codecs import same_bits
from tests.distributed import Ranks

TIMEOUT = timedelta(seconds=3)
FLAT = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
LEVELS = fap.FlashConfig(
    bits=4, min_bytes=0, chunk_bytes=4096, hierarchical={"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}
)
SITE = fap.Site("layer 7")
NUMEL = 30_000
VICTIM = 1

# phase -> the function in which the victim stops, at its call of that number. An exchange, named by its work, stops
# after it has posted its messages. There are many chunks and slabs, so that some are complete and some are not.
PHASES: dict[str, tuple[Any, str, str, int]] = {
    "encode": (rows, "encode", "", 2),
    "encode, later": (rows, "encode", "", 12),
    "all-to-all": (transport, "all_to_all", "", 3),
    "first all-to-all": (transport, "all_to_all", "", 1),
    "last all-to-all": (transport, "all_to_all", "", -1),
    "broadcast": (transport, "exchange", "broadcasting", 3),
    "passing on": (transport, "exchange", "passing on", 3),
    "sum": (rows, "decode_sum_encode", "", 3),
    "sum into the result": (rows, "decode_sum", "", 3),
    "all-gather": (transport, "all_gather", "gathering", 3),
    "last all-gather": (transport, "all_gather", "gathering", -1),
    "decode": (rows, "decode", "", 3),
    "inside": (transport, "exchange", "summing inside", 3),
    "between": (transport, "exchange", "summing between", 3),
    "back": (transport, "exchange", "gathering between", 3),
    "forward": (transport, "exchange", "gathering inside", 3),
    "last forward": (transport, "exchange", "gathering inside", -1),
}
OF = {
    ("all_reduce", "flat"): (
        "encode",
        "encode, later",
        "all-to-all",
        "sum",
        "all-gather",
        "last all-gather",
        "decode",
    ),
    ("reduce_scatter", "flat"): ("encode", "encode, later", "all-to-all", "sum into the result"),
    ("all_gather", "flat"): ("encode", "all-gather", "last all-gather", "decode"),
    ("all_to_all", "flat"): ("encode", "first all-to-all", "last all-to-all", "decode"),
    ("broadcast", "flat"): ("broadcast", "passing on", "decode"),
    ("all_reduce", "levels"): ("encode", "inside", "sum", "between", "back", "forward", "last forward", "decode"),
    ("reduce_scatter", "levels"): ("encode", "inside", "sum", "between", "sum into the result"),
    ("all_gather", "levels"): ("encode", "back", "forward", "last forward", "decode"),
}
QUICK = {
    ("all_reduce", "flat", "encode"),
    ("all_reduce", "flat", "all-to-all"),
    ("all_reduce", "flat", "sum"),
    ("all_reduce", "flat", "last all-gather"),
    ("reduce_scatter", "flat", "sum into the result"),
    ("all_gather", "flat", "all-gather"),
    ("all_to_all", "flat", "first all-to-all"),
    ("broadcast", "flat", "passing on"),
    ("all_reduce", "levels", "back"),
}
CASES = [
    pytest.param(*key, phase, marks=() if (*key, phase) in QUICK else pytest.mark.slow)
    for key, phases in OF.items()
    for phase in phases
]


def stop_in(phase: str, how: int, calls: dict[str, int]) -> None:
    """Make the phase stop this rank by the signal `how`; calls: how many a whole collective makes of each."""
    module, name, doing, at = PHASES[phase]
    original: Callable[..., Any] = getattr(module, name)
    before = 0

    def stopping(*arguments: Any) -> Any:
        nonlocal before
        result = original(*arguments)
        # A label, and after it the name of the work: arguments of the exchanges only.
        if not doing or any(isinstance(a, str) and a.startswith(doing) for a in arguments):
            before += 1
            if before == (calls[phase] if at < 0 else min(at, calls[phase])):
                # This thread stops here. A signal to the process may stop another one first.
                signal.pthread_kill(threading.get_ident(), how)
        return result

    setattr(module, name, stopping)


class Counting:
    """A count of how often each phase comes in a collective."""

    def __enter__(self) -> dict[str, int]:
        self.counts = dict.fromkeys(PHASES, 0)
        self.originals = {(m, n): getattr(m, n) for m, n, _, _ in PHASES.values()}
        for (module, name), original in self.originals.items():
            setattr(module, name, self._counted(module, name, original))
        return self.counts

    def _counted(self, module: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            for phase, (its_module, its_name, doing, _) in PHASES.items():
                if (its_module, its_name) == (module, name) and (
                    not doing or any(isinstance(a, str) and a.startswith(doing) for a in arguments)
                ):
                    self.counts[phase] += 1
            return original(*arguments)

        return counted

    def __exit__(self, *_: object) -> None:
        for (module, name), original in self.originals.items():
            setattr(module, name, original)


def tensors(collective: str) -> tuple[Tensor, ...]:
    """Return the call's tensors, the result's first. A shard lies inside the whole tensor, as frameworks have it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(NUMEL * world, generator=torch.Generator().manual_seed(rank))
    shard = whole[rank * NUMEL : (rank + 1) * NUMEL]
    return {
        "all_reduce": (whole,),
        "reduce_scatter": (shard, whole),
        "all_gather": (whole, shard),
        "all_to_all": (torch.zeros_like(whole), whole),
        "broadcast": (whole,),
    }[collective]


def call(collective: str, given: tuple[Tensor, ...], config: fap.FlashConfig) -> None:
    root = {"src": 0} if collective == "broadcast" else {}
    work = getattr(fap, collective)(*given, **root, config=config, site=SITE, async_op=True)
    work.wait()


def interrupted(collective: str, levels: str, phase: str, how: int) -> tuple[str, float, bool]:
    """Return the error, its seconds, and if the result is right."""
    config = LEVELS if levels == "levels" else FLAT
    torch.set_num_threads(1)
    fap.all_reduce(torch.ones(1000), config=config)  # agreed on
    reduced = tensors(collective)
    with Counting() as calls:
        call(collective, reduced, config)
    assert calls[phase], f"the collective has no phase {phase}"
    given = tensors(collective)
    if dist.get_rank() == VICTIM:
        stop_in(phase, how, calls)
    start = time.monotonic()
    try:
        call(collective, given, config)
        message = "no error"
    except fap.CollectiveError as error:
        message = str(error)
    return message, time.monotonic() - start, all(map(same_bits, given, reduced))


def check(collective: str, outcome: tuple[str, Any], rank: int, world: int) -> bool:
    """Check a survivor's outcome. Return True if it got an error."""
    kind, value = outcome
    assert kind == "value", value
    message, seconds, right = value
    assert seconds < TIMEOUT.total_seconds() + 3
    if message == "no error":
        assert right
        return False
    assert message.startswith(f"{collective} at site 'layer 7', rank {rank} of {world}, failed while "), message
    return True


@pytest.mark.parametrize(("collective", "levels", "phase"), CASES)
def test_guarantee_7_a_rank_is_killed(collective: str, levels: str, phase: str) -> None:
    world = 4 if levels == "levels" else 3
    with Ranks(world, TIMEOUT) as ranks:
        outcomes = ranks.outcomes(interrupted, collective, levels, phase, signal.SIGKILL, timeout=90)
    assert outcomes[VICTIM] == ("died", -signal.SIGKILL)
    failed = [check(collective, outcomes[rank], rank, world) for rank in range(world) if rank != VICTIM]
    if not phase.startswith(("last", "decode", "sum into")):  # the victim's complete messages may have arrived
        assert any(failed)


def continues(pid: int) -> None:
    """Continue a stopped process when the others must long have given up."""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "T" and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(TIMEOUT.total_seconds() + 1)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("collective", "levels", "phase"),
    [
        ("all_reduce", "flat", "sum"),
        pytest.param("all_reduce", "flat", "all-gather", marks=pytest.mark.slow),
        pytest.param("reduce_scatter", "flat", "all-to-all", marks=pytest.mark.slow),
        pytest.param("all_gather", "flat", "encode", marks=pytest.mark.slow),
        pytest.param("all_reduce", "levels", "between", marks=pytest.mark.slow),
    ],
)
def test_guarantee_7_a_rank_stops_answering(collective: str, levels: str, phase: str) -> None:
    """Send SIGSTOP for longer than the timeout. The rank that continues gets an error too: its peers have given up."""
    world = 4 if levels == "levels" else 3
    with Ranks(world, TIMEOUT) as ranks:
        pid = ranks.processes[VICTIM].pid
        assert pid is not None
        helper = threading.Thread(target=continues, args=(pid,))
        helper.start()
        outcomes = ranks.outcomes(interrupted, collective, levels, phase, signal.SIGSTOP, timeout=90)
        helper.join()
    for rank in range(world):
        if rank == VICTIM:
            kind, (message, _, _) = outcomes[rank]
            assert kind == "value" and "failed while" in message, message
        else:
            assert check(collective, outcomes[rank], rank, world)
