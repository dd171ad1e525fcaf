"""Gradients of parameters that every tensor-parallel rank has a copy of: layer norms, biases after a sum.

Copies stay the same because their gradients are the same bits on all tensor-parallel ranks. In a bucket such a gradient
shares groups with its neighbours, which are other numbers on every tensor-parallel rank, and comes back with other
roundings: the copies would drift apart, step by step. Such ranges are therefore reduced once more, in full precision,
in a small collective beside the bucket's, and take the place of what was quantized.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import counters

REASON = "replicated over tensor-parallel ranks"

Range = tuple[int, int]
"""First element, and the element after the last one."""


ADAPTIVE = (
    "target_sqnr_db and min_sqnr_db do not go together with parameters that tensor-parallel ranks have copies of "
    "(DTensors): each data-parallel group chooses its widths by what it measures, and the copies would drift apart."
)

Sharding = frozenset[str | int]
"""Dimensions of a device mesh over which a parameter is split, by name where they have one."""


def sharding(mesh: Any, placements: Sequence[Any]) -> Sharding:
    """Of a DTensor."""
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return frozenset(name for name, placement in zip(names, placements, strict=True) if not placement.is_replicate())


def among(shardings: Sequence[Sharding], config: FlashConfig) -> list[bool]:
    """Which parameters of one call are copies on ranks where others of the call are split.

    Where nothing is split, the gradients and so the results are the same on those ranks anyway. Raises ConfigError
    where they would be the same at one width only, and the width is adapted (target_sqnr_db or min_sqnr_db).
    """
    split: Sharding = frozenset().union(*shardings)
    found = [one != split for one in shardings]
    if any(found) and (config.target_sqnr_db is not None or config.min_sqnr_db is not None):
        raise ConfigError(ADAPTIVE)
    return found


def within(gradients: Iterable[Tensor], bucket: Tensor) -> list[Range]:
    """Where `bucket`, 1-D and contiguous, has elements of `gradients`, ascending: in whole or, of a shard, in part."""
    found = []
    for gradient in gradients:
        if gradient.dtype != bucket.dtype:  # not in this memory
            continue
        start = (gradient.data_ptr() - bucket.data_ptr()) // bucket.element_size()
        first, last = max(start, 0), min(start + gradient.numel(), bucket.numel())
        if first < last:
            found.append((first, last))
    return sorted(found)


def check(ranges: Sequence[Range], numel: int) -> None:
    """ValueError where they are not ascending ranges of a tensor of `numel` elements."""
    end = 0
    for first, last in ranges:
        if not end <= first < last <= numel:
            raise ValueError(
                f"exact has the range ({first}, {last}) after {end}; expected ascending ranges (first, end) of {numel} "
                "elements, none of them empty."
            )
        end = last


def moved(ranges: Sequence[Range], segments: Iterable[Range]) -> list[Range]:
    """Where ranges of a tensor are once its segments stand one after another in this order."""
    found, at = [], 0
    for first, last in segments:
        for begin, end in ranges[bisect_right(ranges, first, key=_end) :]:
            if begin >= last:
                break
            found.append((at + max(begin, first) - first, at + min(end, last) - first))
        at += last - first
    return found


def overlap(ranges: Sequence[Range], start: int, end: int) -> int:
    """How many elements of the ranges are in start to end."""
    return sum(max(0, min(last, end) - max(first, start)) for first, last in ranges)


def _end(one: Range) -> int:
    return one[1]


class Exactly:
    """Some ranges of a call's input, on their way in full precision; every rank gets all of them."""

    def __init__(self, ranges: Sequence[Range], parts: Sequence[Tensor], factor: float, label: Label, site: Site):
        """ranges: ascending, of the parts one after another; parts: contiguous; factor: for the sum."""
        self._ranges = ranges
        self._sums = torch.cat([piece for first, last in ranges for piece in _cut(parts, first, last)])
        if factor != 1.0:  # before the sum, so that float16 does not overflow
            self._sums.mul_(factor)
        world = label.group.size()
        sent = 2 * (self._sums.numel() * self._sums.element_size() * (world - 1) // world)
        counters.record_full_precision(site, REASON, sent, instead_of=0)  # the bucket's call counts what it replaces
        self._pending = transport.all_reduce(self._sums, dist.ReduceOp.SUM, label)

    def write(self, output: Tensor, start: int = 0) -> None:
        """Wait, and put in place what output [numel] has of the ranges: elements from `start` on of the input."""
        self._pending.wait()
        at, end = 0, start + output.numel()
        for first, last in self._ranges:
            begin, stop = max(first, start), min(last, end)
            if begin < stop:
                output[begin - start : stop - start] = self._sums[at + begin - first : at + stop - first]
            at += last - first


def _cut(parts: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
    """Elements first to last of the parts one after another, 1-D."""
    found, start = [], 0
    for part in parts:
        begin, stop = max(first - start, 0), min(last - start, part.numel())
        if begin < stop:
            found.append(part.view(-1)[begin:stop])
        start += part.numel()
    return found
