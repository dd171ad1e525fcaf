"""The bytes of a broadcast on each link; its bits: tests/api/test_one_to_many.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import broadcast, transport
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]


@pytest.mark.parametrize("nbytes", [1, 16, 17, 100, 4096, 4100])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_parts_are_the_payload(nbytes: int, world: int) -> None:
    payload = torch.arange(nbytes).to(torch.uint8)
    for root in range(world):
        parts = broadcast._parts(payload, root, world)
        assert len(parts) == world and not len(parts[root])
        assert torch.equal(torch.cat(parts), payload)
        assert all(one.storage_offset() % 16 == 0 for one in parts if len(one))


def bytes_to(numel: int, root: int) -> Counter[int]:
    """Return the bytes that this rank sends to each rank in one call."""
    sent: Counter[int] = Counter()
    isend = dist.isend

    def counting(tensor: Any, **how: Any) -> Any:
        sent[how["group_dst"]] += tensor.numel() * tensor.element_size()
        return isend(tensor, **how)

    config, x = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096), gaussian(numel, seed=dist.get_rank())
    fap.broadcast(x.clone(), root, config=config)  # agreed on
    dist.isend = counting
    try:
        fap.broadcast(x, root, config=config)
    finally:
        dist.isend = isend
    return sent


@pytest.mark.parametrize("root", [0, 2])
def test_no_link_carries_more_than_the_payload(ranks: GetRanks, root: int) -> None:
    payload = Format(4, 128).payload_bytes(100_000)
    seen = ranks(4).run(bytes_to, 100_000, root)
    assert sum(seen[root].values()) == payload
    for rank, sent in enumerate(seen):
        if rank != root:
            assert root not in sent and sum(sent.values()) == pytest.approx(payload * 2 / 3, rel=0.02)


def through_a_collective(root: int) -> bool:
    config, x = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096), gaussian(30_000, seed=dist.get_rank())
    y, by_messages = x.clone(), transport.by_messages
    fap.broadcast(x, root, config=config)
    transport.by_messages = lambda group, device: False
    try:
        fap.broadcast(y, root, config=config)
    finally:
        transport.by_messages = by_messages
    return same_bits(x, y)


def test_other_backends_have_a_broadcast_of_their_own(ranks: GetRanks) -> None:
    assert ranks(3).run(through_a_collective, 1) == [True] * 3
