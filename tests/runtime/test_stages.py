"""A decided call: the framework's own collective in full precision, parts in pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import transport
from tests.api.test_reductions import QUANTIZED, counts
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]


REASONS = {
    "message below min_bytes": {"config": fap.FlashConfig(min_bytes=1 << 30)},
    "disabled by configuration": {"config": fap.FlashConfig(enabled=False)},
    "warm-up": {"config": fap.FlashConfig(min_bytes=0, warmup_steps=3), "step": 2},
    "asked for": {"config": QUANTIZED, "full_precision": "asked for"},
}


def their_own(async_op: bool) -> list[Any]:
    """Call each collective twice with another function, distinct from torch's: it leaves 7 in place of the result."""
    x, part, whole = gaussian(6000), torch.zeros(3000), torch.zeros(6000)

    def once(name: str, how: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, int], bool, int]:
        ran: list[Tensor] = []

        def theirs() -> Any:
            ran.append(tensors[0].fill_(7))
            return dist.barrier(async_op=True) if async_op else tensors[0]  # as Megatron's functions return the tensor

        def call() -> None:
            handle = getattr(fap, name)(*tensors, async_op=async_op, plain=theirs, **how)
            assert (handle is None) == (not async_op)
            if async_op:
                handle.wait()

        counted = counts(call)["full_precision"]
        return counted, bool((tensors[0] == 7).all()), len(ran)

    calls = {"all_reduce": [x], "reduce_scatter": [part, x], "all_gather": [whole, part]}
    return [
        (reason, *once(name, how, [tensors[0].zero_(), *tensors[1:]]))
        for reason, how in REASONS.items()
        for name, tensors in calls.items()
        for _ in range(2)
    ]


@pytest.mark.parametrize("async_op", [False, True])
def test_full_precision_is_the_frameworks_own_collective(ranks: GetRanks, async_op: bool) -> None:
    for found in ranks(2).run(their_own, async_op):
        assert len(found) == 2 * 3 * len(REASONS)
        for reason, counted, sevens, ran in found:
            assert counted == {reason: 1} and sevens and ran == 1, reason


def their_failure() -> str:
    def theirs() -> None:
        raise RuntimeError("connection reset")

    try:
        fap.all_reduce(gaussian(6000), config=fap.FlashConfig(enabled=False), plain=theirs, site=fap.Site("here"))
    except fap.CollectiveError as error:
        return str(error)
    return ""


def test_a_frameworks_own_collective_that_fails_is_named(ranks: GetRanks) -> None:
    for rank, message in enumerate(ranks(2).run(their_failure)):
        assert (
            message.startswith(f"all_reduce at site 'here', rank {rank} of 2, failed") and "connection reset" in message
        )


def parts_in_pieces() -> list[bool]:
    """Return True if a part, and the output, may be consecutive tensors: the bits of the joined ones."""
    rank, same = dist.get_rank(), []
    x = gaussian(9000, seed=rank)
    for config in (QUANTIZED, fap.FlashConfig(enabled=False), fap.FlashConfig(min_bytes=0, quality_interval=1)):
        joined = [x[:5000].clone(), x[5000:].clone()]
        expected = torch.empty(len(joined[rank]))
        fap.reduce_scatter(expected, joined, config=config)
        pieces: list[list[Tensor]] = [[x[:1], x[1:2001], x[2001:5000]], [x[5000:]]]
        output = [torch.empty(one.numel()) for one in pieces[rank]]
        fap.reduce_scatter(output, pieces, config=config)
        same.append(same_bits(torch.cat(output), expected))
    return same


def test_parts_in_pieces_are_parts(ranks: GetRanks) -> None:
    assert ranks(2).run(parts_in_pieces) == [[True] * 3] * 2


def kept_by_the_guard() -> list[tuple[str, int, bool]]:
    """Run each collective until the guard keeps it in full precision, where it measures the framework's own result."""
    config = fap.FlashConfig(bits=8, min_bytes=0, quality_interval=1, min_sqnr_db=200.0)
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        x = gaussian(3000 * world, seed=rank)
        exact, ran, counted = x.clone(), 0, {}
        for _ in range(8):
            if name == "all_reduce":
                ours, theirs, tensors = x.clone(), dist.all_reduce, ()
                exact = x.clone()
                dist.all_reduce(exact)
            elif name == "reduce_scatter":
                ours, theirs, tensors = torch.empty(3000), transport.reduce_scatter_single, (x,)
                exact = torch.empty(3000)
                transport.reduce_scatter_single(exact, x)
            else:
                ours, theirs, tensors = torch.empty(3000 * world), transport.all_gather_single, (x[:3000],)
                exact = torch.empty(3000 * world)
                transport.all_gather_single(exact, x[:3000])

            def plain(ours: Tensor = ours, theirs: Any = theirs, tensors: Any = tensors) -> Tensor:
                nonlocal ran
                ran += 1
                theirs(ours, *tensors)
                return ours

            call = partial(getattr(fap, name), ours, *tensors, config=config, site=fap.Site(name), plain=plain)
            counted = counts(call)["full_precision"]
        (reason,) = counted
        found.append((reason, ran, same_bits(ours, exact)))
    return found


def test_the_guards_full_precision_is_the_frameworks_own_and_is_watched(ranks: GetRanks) -> None:
    for found in ranks(2).run(kept_by_the_guard):
        assert len(found) == 3
        for reason, ran, exact in found:
            assert reason == "below min_sqnr_db" and 4 <= ran < 8 and exact
