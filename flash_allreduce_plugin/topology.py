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


@dataclass(frozen=True, slots=True)
class Slab:
    """Groups that one node sums up.

    Args:
        node: the owner.
        groups: of the slab.
        parts: of every rank.
        numbers: of every rank: which group of the call the first one of its part is; looked at in the owner only.
    """

    node: int
    groups: int
    parts: tuple[Part, ...]
    numbers: tuple[int, ...]

    def meet(self, a: int, b: int) -> Part:
        """The overlap of the parts of two ranks; (0, 0) if they do not overlap."""
        first, last = max(self.parts[a][0], self.parts[b][0]), min(self.parts[a][1], self.parts[b][1])
        return (first, last) if first < last else (0, 0)


@lru_cache(maxsize=64)
def slabs_of_tensor(groups: int, size: int, nodes: Nodes, multiple: int = 1) -> tuple[Slab, ...]:
    """A tensor of `groups` groups in slabs of about `size`, alike, the nodes owning them in turn.

    multiple: slabs and parts begin at multiples of so many groups.
    """
    count = -(-groups // max(size, 1))
    count = -(-count // len(nodes)) * len(nodes)
    size = _up(-(-groups // count), multiple)
    slabs = []
    for i, first in enumerate(range(0, groups, size)):
        node, of_slab = i % len(nodes), min(size, groups - first)
        parts = _parts(of_slab, node, _even(of_slab, len(nodes[node]), multiple), nodes, multiple)
        slabs.append(Slab(node, of_slab, parts, tuple(first + part[0] for part in parts)))
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
    slabs = []
    for first in range(0, max(groups), size):
        of_chunk = [min(max(g - first, 0), size) for g in groups]
        for node, ranks in enumerate(nodes):
            bounds = tuple(itertools.accumulate((_up(of_chunk[rank], multiple) for rank in ranks), initial=0))
            if bounds[-1]:
                own = tuple((at, at + of_chunk[rank]) for at, rank in zip(bounds, ranks, strict=False))
                parts = _parts(bounds[-1], node, own, nodes, multiple)
                slabs.append(
                    (first, Slab(node, bounds[-1], parts, tuple(starts[r] + first for r in range(len(groups)))))
                )
    return tuple(slabs)


def _up(groups: int, multiple: int) -> int:
    return -(-groups // multiple) * multiple


def _even(groups: int, parts: int, multiple: int) -> tuple[Part, ...]:
    """`parts` parts that begin at multiples of `multiple` and are alike but for one such."""
    bounds = [min(-(-groups // multiple) * i // parts * multiple, groups) for i in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))


@lru_cache(maxsize=1024)
def _parts(groups: int, owner: int, own: tuple[Part, ...], nodes: Nodes, multiple: int) -> tuple[Part, ...]:
    """own: the owner's parts."""
    parts: list[Part] = [(0, 0)] * sum(map(len, nodes))
    for node, ranks in enumerate(nodes):
        cut = own if node == owner else _even(groups, len(ranks), multiple)
        for rank, part in zip(ranks, cut, strict=True):
            parts[rank] = part
    return tuple(parts)


def host() -> str:
    """A name for this machine that no other one has.

    Containers with host names of their own count as machines.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
