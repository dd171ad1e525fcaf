"""A decided call: the framework's own collective in full precision, parts in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks
from tests.test_dispatch import QUANTIZED, counts

GetRanks = Callable[[int], Ranks]


REASONS = {
    "message below min_bytes": {"config": fap.FlashConfig(min_bytes=1 << 30)},
    "disabled by configuration": {"config": fap.FlashConfig(enabled=False)},
    "warm-up": {"config": fap.FlashConfig(min_bytes=0, warmup_steps=3), "step": 2},
    "asked for": {"config": QUANTIZED, "full_precision": "asked for"},
}


def their_own(async_op: bool) -> list[Any]:
    """Each collective twice, by one that is told apart from torch's: it leaves 7 where the result belongs."""
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
    """A part, and the output, may be tensors one after another: the bits of the joined ones."""
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
