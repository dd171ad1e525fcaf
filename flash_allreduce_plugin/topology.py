"""Which ranks of a group share a node, and which rank holds which groups of a tensor: pure functions.

A slab is a run of groups whose sums over the nodes are taken in one node, its owner. In every node the slab is cut
among the ranks: in the owner into the parts that they own, elsewhere evenly. Two ranks of different nodes exchange
bytes where their parts overlap.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of every node, ascending; nodes in the order of their first ranks."""

Part = tuple[int, int]
"""First group, and the group after the last one, counted from the slab's first."""


def neighbours(world_size: int, ranks_per_node: int) -> Nodes:
    """Neighbouring ranks share a node; the last node may have fewer."""
    firsts = range(0, world_size, ranks_per_node)
    return tuple(tuple(range(first, min(first + ranks_per_node, world_size))) for first in firsts)


def by_host(hosts: Sequence[Hashable]) -> Nodes:
    """hosts: of every rank."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return tuple(map(tuple, nodes.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Groups that one node sums up. Of the other nodes it keeps nothing: a group of 16 384 ranks has 2 048 slabs.

    Args:
        node: the owner.
        groups: of the slab.
        own: parts of the owner's ranks, in their order.
        firsts: of the same: which group of the call the first one of the part is.
        places: of every rank of the group.
        multiple: parts begin at multiples of so many groups.
    """

    node: int
    groups: int
    own: tuple[Part, ...]
    firsts: tuple[int, ...]
    places: tuple[Place, ...]
    multiple: int

    def part(self, rank: int) -> Part:
        """In its node."""
        place = self.places[rank]
        if place.node == self.node:
            return self.own[place.position]
        return _even(self.groups, place.ranks, self.multiple)[place.position]

    def number(self, rank: int) -> int:
        """Which group of the call the first one of the part of a rank of the owner is."""
        return self.firsts[self.places[rank].position]

    def meet(self, a: int, b: int) -> Part:
        """The overlap of the parts of two ranks; (0, 0) if they do not overlap."""
        one, other = self.part(a), self.part(b)
        first, last = max(one[0], other[0]), min(one[1], other[1])
        return (first, last) if first < last else (0, 0)


class Place(NamedTuple):
    """Of a rank: its node, its position there, and the ranks of the node."""

    node: int
    position: int
    ranks: int


@lru_cache(maxsize=64)
def _places(nodes: Nodes) -> tuple[Place, ...]:
    found = {rank: Place(node, i, len(ranks)) for node, ranks in enumerate(nodes) for i, rank in enumerate(ranks)}
    return tuple(found[rank] for rank in range(len(found)))


@lru_cache(maxsize=64)
def slabs_of_tensor(groups: int, size: int, nodes: Nodes, multiple: int = 1) -> tuple[Slab, ...]:
    """A tensor of `groups` groups in slabs of about `size`, alike, the nodes owning them in turn.

    multiple: slabs and parts begin at multiples of so many groups.
    """
    count = -(-groups // max(size, 1))
    count = -(-count // len(nodes)) * len(nodes)
    size = _up(-(-groups // count), multiple)
    slabs, places = [], _places(nodes)
    for i, first in enumerate(range(0, groups, size)):
        node, of_slab = i % len(nodes), min(size, groups - first)
        own = _even(of_slab, len(nodes[node]), multiple)
        slabs.append(Slab(node, of_slab, own, tuple(first + part[0] for part in own), places, multiple))
    return tuple(slabs)


@lru_cache(maxsize=64)
def slabs_of_shards(
    groups: tuple[int, ...], size: int, nodes: Nodes, multiple: int = 1
) -> tuple[tuple[int, Slab], ...]:
    """Shards of so many groups, one a rank, in chunks of about `size` groups of each, as far as it reaches.

    A slab is a chunk of the shards of one node, one behind the other, each at a multiple of `multiple` groups; each
    rank owns its own.

    Returns:
        Slabs that are not empty, each with the first group of its chunk, counted from the first of a shard.
    """
    starts = [0, *itertools.accumulate(groups)]
    count = -(-max(groups) // max(size, 1))
    size = _up(-(-max(groups) // count), multiple)
    slabs, places = [], _places(nodes)
    for first in range(0, max(groups), size):
        for node, ranks in enumerate(nodes):
            of_chunk = [min(max(groups[rank] - first, 0), size) for rank in ranks]
            bounds = tuple(itertools.accumulate((_up(numel, multiple) for numel in of_chunk), initial=0))
            if bounds[-1]:
                own = tuple((at, at + numel) for at, numel in zip(bounds, of_chunk, strict=False))
                firsts = tuple(starts[rank] + first for rank in ranks)
                slabs.append((first, Slab(node, bounds[-1], own, firsts, places, multiple)))
    return tuple(slabs)


def _up(groups: int, multiple: int) -> int:
    return -(-groups // multiple) * multiple


@lru_cache(maxsize=1024)
def _even(groups: int, parts: int, multiple: int) -> tuple[Part, ...]:
    """`parts` parts that begin at multiples of `multiple` and are alike but for one such."""
    bounds = [min(-(-groups // multiple) * i // parts * multiple, groups) for i in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))


def host() -> str:
    """A name for this machine that no other one has.

    Containers with host names of their own count as machines.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
