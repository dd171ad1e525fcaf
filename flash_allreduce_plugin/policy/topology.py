"""Which ranks of a group share a node, and which rank holds which groups of a tensor: pure functions.

A slab is a run of groups that is summed up twice. In every node its ranks have a part of it each, of which they take
the sum of their node; and every rank of the group owns a piece, of which it takes the sum of the nodes:

    node 0   | part of rank 0    | part of rank 1    |
    node 1   | part of rank 2    | part of rank 3    |
    pieces   | 0       | 2       | 1       | 3       |

Two ranks of different nodes exchange bytes where the part of one and the piece of the other overlap: with nodes that
are alike, only ranks of the same place in their nodes do.
"""

from __future__ import annotations

import itertools
import math
import socket
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
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


class Overlap(NamedTuple):
    """What a rank's part has of the piece of `peer`, or its piece of the part of `peer`, a rank of `node`."""

    node: int
    peer: int
    part: Part


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The ranks of a group in the order of their pieces: by where their parts lie in their nodes.

    Args:
        nodes: of the group.
        ranks: in that order.
        index: of every rank in it.
        places: of every rank: its node and its place there.
        shares: where each piece of a tensor begins, and the last one ends, in units of shares[-1] a tensor: nodes own
            alike, and so do the ranks of a node.
        regular: ranks of every node, if all have as many and neighbouring ones; 0: they have not.
    """

    nodes: Nodes
    ranks: tuple[int, ...]
    index: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    shares: tuple[int, ...]
    regular: int


@lru_cache(maxsize=64)
def order_of(nodes: Nodes) -> Order:
    """The same object for the same nodes."""
    places = {rank: (node, place) for node, ranks in enumerate(nodes) for place, rank in enumerate(ranks)}
    size = {rank: len(nodes[node]) for rank, (node, _) in places.items()}
    ranks = sorted(places, key=lambda rank: ((2 * places[rank][1] + 1) / size[rank], places[rank][0]))
    whole = math.lcm(*size.values())
    shares = itertools.accumulate((whole // size[rank] for rank in ranks), initial=0)
    index = {rank: i for i, rank in enumerate(ranks)}
    alike = nodes == neighbours(len(places), len(nodes[0])) and len(set(map(len, nodes))) == 1
    every = range(len(places))
    return Order(
        nodes,
        tuple(ranks),
        tuple(index[rank] for rank in every),
        tuple(places[rank] for rank in every),
        tuple(shares),
        len(nodes[0]) if alike else 0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A run of groups, and who has what of it.

    Args:
        groups: of the slab.
        bounds: where each piece begins, in the order of `order`, and the last one ends.
        filling: of every piece, in that order, how many groups at its end are none of the call's.
        numbers: of every rank: which group of the call the first one of its piece is.
        multiple: parts and pieces begin at multiples of so many groups.
    """

    groups: int
    bounds: tuple[int, ...]
    filling: tuple[int, ...]
    numbers: tuple[int, ...]
    order: Order
    multiple: int

    def part(self, rank: int) -> Part:
        """In its node."""
        node, place = self.order.places[rank]
        return _even(self.groups, len(self.order.nodes[node]), self.multiple)[place]

    def own(self, rank: int) -> Part:
        """The piece of a rank, without what it is filled up with."""
        i = self.order.index[rank]
        return self.bounds[i], self.bounds[i + 1] - self.filling[i]

    def owners(self, rank: int) -> list[Overlap]:
        """Of whose pieces the part of a rank has something, in their order."""
        begin, end = self.part(rank)
        found = []
        for i in range(max(0, bisect_right(self.bounds, begin) - 1), len(self.filling)):
            if self.bounds[i] >= end:
                break
            first, last = max(begin, self.bounds[i]), min(end, self.bounds[i + 1] - self.filling[i])
            if first < last:
                peer = self.order.ranks[i]
                found.append(Overlap(self.order.places[peer][0], peer, (first, last)))
        return found

    def holders(self, rank: int) -> list[Overlap]:
        """Whose parts have something of the piece of a rank, node by node."""
        begin, end = self.own(rank)
        found = []
        for node, ranks in enumerate(self.order.nodes if begin < end else ()):
            parts = _even(self.groups, len(ranks), self.multiple)
            for place in range(max(0, bisect_right(parts, begin, key=itemgetter(0)) - 1), len(ranks)):
                if parts[place][0] >= end:
                    break
                first, last = max(begin, parts[place][0]), min(end, parts[place][1])
                if first < last:
                    found.append(Overlap(node, ranks[place], (first, last)))
        return found


@lru_cache(maxsize=64)
def slabs_of_tensor(groups: int, size: int, nodes: Nodes, multiple: int = 1) -> tuple[Slab, ...]:
    """A tensor of `groups` groups in slabs of about `size`, alike; every node owns as much of each.

    multiple: slabs, parts and pieces begin at multiples of so many groups.
    """
    count = -(-groups // max(size, 1))
    size = _up(-(-groups // count), multiple)
    slabs, order = [], order_of(nodes)
    nothing = (0,) * len(order.ranks)
    for first in range(0, groups, size):
        of_slab = min(size, groups - first)
        units = -(-of_slab // multiple)
        bounds = tuple(min(units * share // order.shares[-1] * multiple, of_slab) for share in order.shares)
        numbers = tuple(first + bounds[i] for i in order.index)
        slabs.append(Slab(of_slab, bounds, nothing, numbers, order, multiple))
    return tuple(slabs)


@lru_cache(maxsize=64)
def slabs_of_shards(
    groups: tuple[int, ...], size: int, nodes: Nodes, multiple: int = 1
) -> tuple[tuple[int, Slab], ...]:
    """Shards of so many groups, one a rank, in chunks of about `size` groups of each, as far as it reaches.

    A slab is a chunk of all shards, one behind the other, each at a multiple of `multiple` groups; each rank owns its
    own.

    Returns:
        Slabs that are not empty, each with the first group of its chunk, counted from the first of a shard.
    """
    starts = [0, *itertools.accumulate(groups)]
    count = -(-max(groups) // max(size, 1))
    size = _up(-(-max(groups) // count), multiple)
    slabs, order = [], order_of(nodes)
    for first in range(0, max(groups), size):
        of_chunk = [min(max(groups[rank] - first, 0), size) for rank in order.ranks]
        room = [_up(count, multiple) for count in of_chunk]
        bounds = tuple(itertools.accumulate(room, initial=0))
        filling = tuple(whole - count for whole, count in zip(room, of_chunk, strict=True))
        numbers = tuple(start + first for start in starts[:-1])
        slabs.append((first, Slab(bounds[-1], bounds, filling, numbers, order, multiple)))
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
