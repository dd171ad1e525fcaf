"""Gradients of parameters with a copy on every tensor-parallel rank: layer norms, biases after a sum, embeddings.

Copies stay equal because their gradients have the same bits on all tensor-parallel ranks. In a bucket such a gradient
shares groups with neighbours that differ between tensor-parallel ranks, and gets different roundings: the copies would
drift apart, step by step. A call therefore sends copies separately:

    bucket   | other | A: whole, large | other | b: small | C: large, cut off here |
    A        a separate quantized call. Its groups start at A's first element and hold A alone, with a residual and
             random numbers of A: the result does not depend on A's position in the buckets of other ranks.
    b, C     summed again, in full precision, in one small all-reduce. That sum replaces the quantized elements.

A is large if the configuration quantizes a call of its size (min_bytes): that size is equal on all ranks that have a
copy, the bucket's size is not. C is a part of a gradient. Other ranks may cut the gradient elsewhere, so C is not
quantized. With `hierarchical` no copy is quantized: the sums follow the nodes of each data-parallel group.

Limit: inputs of equal value and different bits (kernels that add in a random order) stay as close as their quantized
values. In full precision they would stay as close as their last bits.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import counters

REASON = "replicated over tensor-parallel ranks"

Range = tuple[int, int]
"""First element, and the element after the last one."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The whole gradient of a parameter with a copy on other ranks.

    number: of the parameter, equal at every step (`number_of`).
    pieces: the ranges of the call's input that hold the gradient, in the order of its elements.
    cut_alike: True if a reduce-scatter cuts the gradient at the same elements on all ranks that have a copy.
    """

    number: int
    pieces: tuple[Range, ...]
    cut_alike: bool = False

    @property
    def numel(self) -> int:
        return numel_of(self.pieces)


Copied = Sequence[Range | Copy]
"""Elements of a call that are copies: whole gradients, and other ranges, ascending."""

_numbers: Any = WeakIdKeyDictionary()
_unused = itertools.count()


def number_of(parameter: Any) -> int:
    """Return the number of a parameter, or of an object that stands for one, in the order of the first requests."""
    number: int | None = _numbers.get(parameter)
    if number is None:
        number = _numbers[parameter] = next(_unused)
    return number


ADAPTIVE = (
    "target_sqnr_db and min_sqnr_db exclude parameters with copies on tensor-parallel ranks "
    "(DTensors): each data-parallel group chooses its widths by what it measures, and the copies would drift apart."
)

Sharding = frozenset[str | int]
"""Dimensions of a device mesh over which a parameter is split, by name where they have one."""


def sharding(mesh: Any, placements: Sequence[Any]) -> Sharding:
    """Return the sharding of a DTensor."""
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return frozenset(name for name, placement in zip(names, placements, strict=True) if not placement.is_replicate())


def among(shardings: Sequence[Sharding], adapted: bool, others: Sharding = frozenset()) -> list[bool]:
    """Return for each parameter of a call if it is a copy on ranks where other parameters of the call are split.

    others: dimensions over which parameters of other calls are split; ranks may cut calls elsewhere. Where nothing is
    split, gradients and results are equal on those ranks without help. Raises ConfigError where they would be equal at
    one width only and the width is adapted (policy.widths_follow_errors).
    """
    split = others.union(*shardings)
    found = [one != split for one in shardings]
    if any(found) and adapted:
        raise ConfigError(ADAPTIVE)
    return found


def within(gradients: Iterable[Tensor], bucket: Tensor) -> list[Range]:
    """Return the ascending ranges of `bucket`, 1-D and contiguous, with elements of `gradients`, whole or in part."""
    found = []
    for gradient in gradients:
        if gradient.dtype != bucket.dtype:  # not in this memory
            continue
        start = (gradient.data_ptr() - bucket.data_ptr()) // bucket.element_size()
        first, last = max(start, 0), min(start + gradient.numel(), bucket.numel())
        if first < last:
            found.append((first, last))
    return sorted(found)


def of(gradients: Iterable[tuple[Any, Tensor]], bucket: Tensor) -> list[Range | Copy]:
    """Return the copies in `bucket`, 1-D and contiguous, in the order of its elements, which is the order of the calls.

    gradients: (parameter, gradient) pairs in any order: Megatron's buckets hold sets.
    """
    places = [
        (place, place[1] - place[0] == gradient.numel(), parameter)
        for parameter, gradient in gradients
        for place in within([gradient], bucket)
    ]
    places.sort(key=lambda one: one[0])
    return [Copy(number_of(parameter), (place,)) if whole else place for place, whole, parameter in places]


def ranges_of(copied: Copied) -> Sequence[Range]:
    """Return all elements of the copies as ascending ranges."""
    if not any(isinstance(one, Copy) for one in copied):
        return copied  # type: ignore[return-value]
    return sorted(piece for one in copied for piece in (one.pieces if isinstance(one, Copy) else (one,)))


def check(ranges: Sequence[Range], numel: int) -> None:
    """Raise ValueError unless they are ascending ranges of a tensor of `numel` elements."""
    end = 0
    for first, last in ranges:
        if not end <= first < last <= numel:
            raise ValueError(
                f"exact has the range ({first}, {last}) after {end}; expected ascending ranges (first, end) of {numel} "
                "elements, none of them empty."
            )
        end = last


def moved(copied: Copied, segments: Iterable[Range], cut_alike: bool = False) -> list[Range | Copy]:
    """Return the copies of a tensor after its segments, which do not overlap, are joined in the given order."""
    placed, at = [], 0
    for first, last in segments:
        if first < last:
            placed.append((first, last, at))
            at += last - first
    placed.sort()

    def pieces(one: Range) -> Iterator[Range]:
        """Yield the moved pieces of `one`, in the order of its elements."""
        for first, last, at in placed[max(0, bisect_right(placed, (one[0] + 1,)) - 1) :]:
            if first >= one[1]:
                break
            if last > one[0]:
                yield at + max(one[0], first) - first, at + min(one[1], last) - first

    ranges = sorted(piece for one in copied if not isinstance(one, Copy) for piece in pieces(one))
    whole = [one for one in copied if isinstance(one, Copy)]
    return [
        *ranges,
        *(replace(one, pieces=tuple(itertools.chain(*map(pieces, one.pieces))), cut_alike=cut_alike) for one in whole),
    ]


def between(ranges: Sequence[Range], numel: int) -> list[Range]:
    """Return the ranges of `numel` elements between ascending ranges."""
    free, start = [], 0
    for first, last in [*ranges, (numel, numel)]:
        if start < first:
            free.append((start, first))
        start = max(start, last)
    return free


def numel_of(ranges: Iterable[Range]) -> int:
    return sum(last - first for first, last in ranges)


def split(ranges: Iterable[Range], sizes: Iterable[int]) -> list[list[Range]]:
    """Return the pieces of the ranges in each part. sizes: of the parts, one after another."""
    ends = list(itertools.accumulate(sizes))
    found: list[list[Range]] = [[] for _ in ends]
    for part, piece in _by_part(ranges, ends):
        found[part].append(piece)
    return found


def _by_part(ranges: Iterable[Range], ends: Sequence[int]) -> Iterator[tuple[int, Range]]:
    """Yield (part, piece) of the ranges, in the order of the elements. ends: of the parts."""
    for first, last in ranges:
        part = bisect_right(ends, first)
        while first < last:
            stop = min(last, ends[part])
            if first < stop:
                yield part, (first, stop)
            first, part = stop, part + 1


def overlap(ranges: Sequence[Range], start: int, end: int) -> int:
    """Return the number of elements of the ranges in start to end."""
    return sum(max(0, min(last, end) - max(first, start)) for first, last in ranges)


class Exactly:
    """The sum in full precision of some ranges of a call's input, in flight. Every rank gets all of them."""

    def __init__(self, ranges: Sequence[Range], parts: Sequence[Tensor], factor: float, label: Label, site: Site):
        """ranges: ascending, of the parts one after another; parts: contiguous; factor: for the sum."""
        self._ranges = ranges
        self._sums = torch.cat(list(cut(parts, ranges)))
        if factor != 1.0:  # before the sum, so that float16 does not overflow
            self._sums.mul_(factor)
        world = label.group.size()
        sent = 2 * (self._sums.numel() * self._sums.element_size() * (world - 1) // world)
        counters.record_full_precision(site, REASON, sent, instead_of=0)  # the bucket's call counts what it replaces
        self._pending = transport.all_reduce(self._sums, dist.ReduceOp.SUM, label)

    def write(self, output: Tensor, start: int = 0) -> None:
        """Wait, and write the ranges into output [numel], which has the input's elements from `start` on."""
        self._pending.wait()
        write(self._sums, self._ranges, output, start)


def write(values: Tensor, ranges: Iterable[Range], output: Tensor, start: int = 0) -> None:
    """Copy `values`, the elements of the ranges, into output [numel], which has the elements from `start` on."""
    at, end = 0, start + output.numel()
    for first, last in ranges:
        begin, stop = max(first, start), min(last, end)
        if begin < stop:
            output[begin - start : stop - start] = values[at + begin - first : at + stop - first]
        at += last - first


def cut(parts: Sequence[Tensor], ranges: Iterable[Range]) -> Iterator[Tensor]:
    """Yield the elements of the ranges of contiguous parts, in order, as 1-D tensors."""
    ends = list(itertools.accumulate(map(Tensor.numel, parts)))
    for part, (first, last) in _by_part(ranges, ends):
        start = ends[part] - parts[part].numel()
        yield parts[part].view(-1)[first - start : last - start]


def joined(pieces: Iterable[Tensor], like: Tensor) -> Tensor:
    """Join the pieces into a 1-D tensor; one piece keeps its memory. like: dtype and device without any piece."""
    found = list(pieces)
    return found[0] if len(found) == 1 else torch.cat(found or [like.new_empty(0)])
