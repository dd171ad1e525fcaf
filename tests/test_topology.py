"""Which ranks share a node, and who holds which groups: pure functions."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest

from flash_allreduce_plugin import topology
from flash_allreduce_plugin.topology import Nodes


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
            for rank in nodes[slab.node]:
                first, last = slab.part(rank)
                owned += range(slab.number(rank), slab.number(rank) + last - first)
        assert sorted(owned) == list(range(len(owned)))  # every group of the call has one owner


def test_the_layout_of_thousands_of_ranks_is_made_in_no_time() -> None:
    """What every slab keeps of every rank is 33 million parts at 16 384 ranks: minutes, and gigabytes."""
    nodes = topology.neighbours(16_384, 8)
    tracemalloc.start()
    slabs = topology.slabs_of_tensor(1 << 20, 1 << 16, nodes, 4)
    shards = topology.slabs_of_shards((64,) * 16_384, 1 << 16, nodes, 4)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(slabs) == len(shards) == 2048 and most < 30e6
    slab = slabs[1000]
    assert slab.node == 1000 and slab.number(8000) == 1000 * slab.groups
    assert [slab.part(8000 + i) for i in range(8)] == [slab.part(i) for i in range(8)]  # nodes are alike


def test_nodes() -> None:
    assert topology.neighbours(8, 3) == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert topology.neighbours(3, 8) == ((0, 1, 2),)
    assert topology.by_host("abba") == ((0, 3), (1, 2))
