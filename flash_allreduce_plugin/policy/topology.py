"""The nodes of a group, and the ranks that hold and own the groups of a tensor: pure functions.

A slab is a run of groups that is summed twice. In every node each rank holds a part of it, and sums this part over its
node. Every rank of the group owns a piece, and sums this piece over the nodes:

    node 0   | part of rank 0    | part of rank 1    |
    node 1   | part of rank 2    | part of rank 3    |
    pieces   | 0       | 2       | 1       | 3       |

Two ranks of different nodes exchange the bytes in which the part of one and the piece of the other overlap. With equal
nodes only ranks at the same place in their nodes do.
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
    """Return nodes of neighbouring ranks. The last node may have fewer."""
    firsts = range(0, world_size, ranks_per_node)
    return tuple(tuple(range(first, min(first + ranks_per_node, world_size))) for first in firsts)


def by_host(hosts: Sequence[Hashable]) -> Nodes:
    """Return the nodes by the host of every rank."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return tuple(map(tuple, nodes.values()))


class Overlap(NamedTuple):
    """The overlap of a rank's part with the piece of `peer`, or of its piece with the part of `peer`, in `node`."""

    node: int
    peer: int
    part: Part


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """The ranks of a group in the order of their pieces, which is the order of their parts in their nodes.

    Args:
        nodes: of the group.
        ranks: in that order.
        index: position of every rank in that order.
        places: node of every rank, and its place there.
        shares: start of each piece of a tensor and the end of the last one, in units of shares[-1] a tensor. Nodes own
            equal shares, and so do the ranks of a node.
        regular: ranks of a node, if all nodes have as many, and neighbouring ones; else 0.
    """

    nodes: Nodes
    ranks: tuple[int, ...]
    index: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    shares: tuple[int, ...]
    regular: int


@lru_cache(maxsize=64)
def order_of(nodes: Nodes) -> Order:
    """Return the order of the nodes' ranks; the same object for the same nodes."""
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
    """A run of groups, with its parts and pieces.

    Args:
        groups: number of groups of the slab.
        bounds: start of each piece, in the order of `order`, and the end of the last one.
        filling: padding of each piece, in that order: groups at its end that are not in the call.
        numbers: for every rank, the number in the call of its piece's first group.
        multiple: divides the starts of parts and pieces, in groups.
    """

    groups: int
    bounds: tuple[int, ...]
    filling: tuple[int, ...]
    numbers: tuple[int, ...]
    order: Order
    multiple: int

    def part(self, rank: int) -> Part:
        """Return the part of a rank in its node."""
        node, place = self.order.places[rank]
        return _even(self.groups, len(self.order.nodes[node]), self.multiple)[place]

    def own(self, rank: int) -> Part:
        """Return the piece of a rank, without padding."""
        i = self.order.index[rank]
        return self.bounds[i], self.bounds[i + 1] - self.filling[i]

    def owners(self, rank: int) -> list[Overlap]:
        """Return the overlaps of a rank's part with the pieces of their owners, in order."""
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
        """Return the overlaps of a rank's piece with the parts of their holders, node by node."""
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
    """Cut a tensor of `groups` groups into equal slabs of about `size`. Every node owns an equal share of each.

    multiple: divides the starts of slabs, parts and pieces, in groups.
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
    """Cut shards, one a rank, into chunks of about `size` groups. groups: of each shard.

    A slab has one chunk of every shard, one after another, each at a multiple of `multiple` groups. Each rank owns the
    chunk of its shard.

    Returns:
        Slabs that are not empty, each with the first group of its chunk, counted from the start of a shard.
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
    """Return `parts` parts that start at multiples of `multiple` and differ by at most one `multiple`."""
    bounds = [min(-(-groups // multiple) * i // parts * multiple, groups) for i in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))


def host() -> str:
    """Return a unique name of this machine. Containers with different host names count as machines."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
