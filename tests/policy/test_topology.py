"""The ranks that share a node, and the owner of each group: pure functions."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest

from flash_allreduce_plugin.policy import topology
from flash_allreduce_plugin.policy.topology import Nodes


@pytest.mark.parametrize("nodes", [((0,),), ((0, 1), (2, 3)), ((0, 1, 2), (3, 4)), ((0, 3), (1,), (2, 4, 5))])
@pytest.mark.parametrize("numel", [1, 5, 64, 1000])
def test_every_node_has_every_group_of_a_slab_once(nodes: Nodes, numel: int) -> None:
    world = sum(map(len, nodes))
    uneven = tuple(numel * rank % 71 + (rank == 0) for rank in range(world))
    tensor = topology.slabs_of_tensor(numel, 17, nodes)
    shards = [slab for _, slab in topology.slabs_of_shards(uneven, 17, nodes)]
    assert sum(slab.groups for slab in tensor) == numel and max(slab.groups for slab in tensor) <= 17
    assert sum(slab.groups for slab in shards) == sum(uneven)
    for slabs in (tensor, shards):
        owned = []
        for slab in slabs:
            for ranks in nodes:
                ends = [0, *itertools.chain(*(slab.part(rank) for rank in ranks)), slab.groups]
                assert all(a == b for a, b in zip(ends[::2], ends[1::2], strict=True))
            for rank in range(world):
                first, last = slab.own(rank)
                owned += range(slab.numbers[rank], slab.numbers[rank] + last - first)
                for node in range(len(nodes)):  # every node has the whole piece, by parts
                    parts = [p.part for p in slab.holders(rank) if p.node == node and p.peer in nodes[node]]
                    assert sum(b - a for a, b in parts) == last - first
                for owner in range(world):  # both ends of a message have the same part
                    ours = [p.part for p in slab.owners(rank) if p.peer == owner]
                    assert ours == [p.part for p in slab.holders(owner) if p.peer == rank]
        assert sorted(owned) == list(range(len(owned)))  # every group of the call has one owner


def test_ranks_of_one_position_form_groups_where_nodes_are_equal() -> None:
    nodes = topology.neighbours(12, 4)
    (slab,) = topology.slabs_of_tensor(12 * 64, 1 << 20, nodes, 4)
    (shards,) = (slab for _, slab in topology.slabs_of_shards((64,) * 12, 1 << 20, nodes, 4))
    for each in (slab, shards):
        for rank in range(12):
            assert {p.peer % 4 for p in each.owners(rank)} == {rank % 4} and len(each.owners(rank)) == 3
            assert [p.peer for p in each.holders(rank)] == [rank % 4, rank % 4 + 4, rank % 4 + 8]


def test_every_node_owns_as_much() -> None:
    nodes = ((0, 1, 2), (3,), (4, 5))
    (slab,) = topology.slabs_of_tensor(6 * 300, 1 << 20, nodes, 1)
    for ranks in nodes:
        assert sum(b - a for a, b in map(slab.own, ranks)) == 600


def test_the_layout_of_thousands_of_ranks_is_made_in_no_time() -> None:
    """Build the layout for 16 384 ranks. Keeping every rank's part of every slab would be 33 million parts: minutes."""
    nodes = topology.neighbours(16_384, 8)
    tracemalloc.start()
    slabs = topology.slabs_of_tensor(1 << 20, 1 << 17, nodes, 4)
    shards = topology.slabs_of_shards((64,) * 16_384, 8, nodes, 4)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(slabs) == len(shards) == 8 and most < 60e6


def test_nodes() -> None:
    assert topology.neighbours(8, 3) == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert topology.neighbours(3, 8) == ((0, 1, 2),)
    assert topology.by_host("abba") == ((0, 3), (1, 2))
