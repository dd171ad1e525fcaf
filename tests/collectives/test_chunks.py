"""How calls are cut: chunks for a backend that queues, and every message at a multiple of 16 bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives.chunks import (
    ALIGNMENT,
    Chunks,
    aligned,
    queued_chunk_bytes,
    shard_multiple,
    whole_groups,
)
from flash_allreduce_plugin.runtime.groups import state_of
from tests.queued import Queue, queued

MIB = 1 << 20
FORMATS = (
    {"bits": 8},
    {"bits": 5, "symmetric": True},
    {"bits": 3, "group_size": 32, "compact": True},
    {"bits": 4, "reduce_bits": 6, "group_size": 64, "spike_reserving": True},
)


def test_a_whole_number_of_groups_has_a_whole_number_of_16_bytes() -> None:
    for bits in range(2, 9):
        for options in ({}, {"symmetric": True}, {"compact": True}, {"spikes": True}):
            one = Format(bits, 32, **options)
            count = whole_groups(one, Format(8, 32, **options))
            assert one.record_bytes * count % ALIGNMENT == 0 and ALIGNMENT % count == 0
            assert all(one.record_bytes * n % ALIGNMENT or Format(8, 32, **options).record_bytes * n % ALIGNMENT
                       for n in range(1, count))  # fmt: skip
    assert [aligned(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_padding_is_at_most_a_thirtieth() -> None:
    one = Format(8, 128)
    for world in (2, 3, 8):
        for groups in range(1, 4000):
            multiple = shard_multiple(groups, world, one)
            filled = -(-groups // (world * multiple)) * world * multiple
            even = -(-groups // world) * world
            assert filled - even <= groups / 30


@pytest.mark.parametrize(
    ("configured", "payload", "count"),
    [(MIB, 7 * MIB, 1), (MIB, 33 * MIB, 5), (MIB, 64 * MIB, 8), (MIB, 1000 * MIB, 8), (300 * MIB, 1000 * MIB, 4)],
)
def test_where_the_backend_queues_chunks_are_few_and_large(configured: int, payload: int, count: int) -> None:
    size = queued_chunk_bytes(configured, payload)
    assert size >= max(8 * MIB, configured) and -(-payload // size) == count
    groups = payload // 132
    assert Chunks.cut(groups, size // 132, 32).count == count


def aligned_messages(queue: Queue) -> None:
    assert queue.count("collective") > 0
    for message in queue.messages():
        assert message.numel() == 0 or message.data_ptr() % ALIGNMENT == 0
    queue.clear()


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("given", FORMATS, ids=str)
def test_every_message_begins_at_16_bytes(world_size: int, given: dict[str, object]) -> None:
    """Check flat and two-level, even and uneven calls, in one chunk and many; random sizes, any number of elements."""
    chance = random.Random(world_size)
    common = {"min_bytes": 0, "check_ranks": False, **given}
    with queued(world_size) as queue, pytest.MonkeyPatch.context() as patch:
        # 4096 bytes a chunk: tens of chunks of a call of the sizes here.
        patch.setattr(
            "flash_allreduce_plugin.runtime.decision.queued_chunk_bytes", lambda configured, payload: configured
        )
        for levels in ({}, {"hierarchical": {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}}):
            config = fap.FlashConfig(chunk_bytes=4096, **common, **levels)
            for _ in range(8):
                numel = 32 * 128 * 8 * world_size + chance.randrange(100_000)
                fap.all_reduce(torch.empty(numel), config=config)
                aligned_messages(queue)
                sizes = [chance.randrange(60_000) for _ in range(world_size)]
                parts = [torch.empty(size) for size in sizes]
                fap.reduce_scatter(torch.empty(sizes[0]), parts, config=config)
                aligned_messages(queue)
                fap.all_gather(torch.empty(sum(sizes)), parts[0], config=config, output_split_sizes=sizes)
                aligned_messages(queue)
                even = torch.empty(sizes[0] * world_size)
                fap.reduce_scatter(torch.empty(sizes[0]), even, config=config)
                aligned_messages(queue)
                fap.all_gather(even, torch.empty(sizes[0]), config=config)
                aligned_messages(queue)
                fap.all_to_all(
                    *(torch.empty(sum(sizes)), torch.empty(sum(sizes)), sizes, sizes),
                    config=config,
                )
                aligned_messages(queue)


def test_a_large_call_is_a_few_launches_and_collectives() -> None:
    """Reduce 256 MiB of bf16 over 8 ranks: 8 chunks of three launches and two collectives, no wait on the host."""
    with queued(8) as queue:
        tensor = torch.empty(128 * MIB, dtype=torch.bfloat16)
        fap.all_reduce(tensor, config=fap.FlashConfig(bits=8, check_ranks=False))
        assert queue.count("launch") == 3 * 8 and queue.count("collective") == 2 * 8
        assert queue.count("synchronize") == 0
        queue.clear()
        small = torch.empty(MIB, dtype=torch.bfloat16)
        fap.all_reduce(small, config=fap.FlashConfig(bits=8, check_ranks=False))
        assert queue.count("launch") == 3 and queue.count("collective") == 2


@pytest.mark.parametrize("numel", [1 << 20, 100_003 * 8])
def test_the_buffers_of_a_call_are_cut_once(numel: int) -> None:
    """Check that the next call of the same sizes has the same views, whatever was called in between."""
    config = fap.FlashConfig(bits=8, min_bytes=0, check_ranks=False)
    with queued(8):
        pool = state_of(dist.group.WORLD).pool(torch.device("cpu"), dist.group.WORLD)
        whole, shard = torch.empty(numel), torch.empty(numel // 8)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: fap.all_reduce(whole, config=config),
            lambda: fap.reduce_scatter(shard, whole, config=config),
            lambda: fap.all_gather(whole, shard, config=config),
        )

        def parts() -> set[int]:
            return {id(cut) for ways in pool._ways.values() for cut in ways.values()}

        for call in calls * 2:  # until every buffer was in every hand
            call()
        before = parts()
        for call in calls * 3:
            call()
        assert parts() == before and len(before) >= 4
