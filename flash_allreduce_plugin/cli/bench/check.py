"""The checks of `bench`: inputs that every rank can generate, the exact result, and the allowed error.

The allowed error is guarantee 6 of docs/trust/numerics.md, from the extremes of the groups: at most half a step of the
group at every rounding. Earlier roundings widen the range, which is included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.codec import reference, rows
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.policy import Collective, Plan

if TYPE_CHECKING:
    from lab.benchmarks.ring import RingAllReduce

PIECE = 1 << 20  # elements that are generated and compared at a time: whole groups of any size
_FLOAT32 = 2.0**-21  # error of a rounding's float32 arithmetic, relative to a group's greatest magnitude


@dataclass(frozen=True)
class Inputs:
    """Every rank's input of one call: Gaussian, or small whole numbers, with exact sums in any dtype.

    numel: of a part. all_reduce has one part, all_gather one a rank; reduce_scatter and all_to_all have one a rank in
    every rank's input.
    """

    collective: Collective
    numel: int
    dtype: torch.dtype
    world_size: int
    whole: bool = False

    def tensor(self, rank: int) -> Tensor:
        parts = range(self.world_size if self.collective in ("reduce_scatter", "all_to_all") else 1)
        pieces = range(-(-self.numel // PIECE))
        return torch.cat([self.piece(rank, part, i) for part in parts for i in pieces])

    def piece(self, rank: int, part: int, i: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows.draw_key(rank, part, i) & (1 << 63) - 1)
        x = torch.randn(min(PIECE, self.numel - i * PIECE), generator=generator)
        if self.whole:
            most = max(1, 128 // self.world_size)
            x = (3 * x).round().clamp(-most, most)
        return x.to(self.dtype)


@dataclass(frozen=True)
class Segment:
    """Elements of one rank's result that come from the same piece of some ranks' inputs.

    at: first element in the result. piece, first, last: in the part. sources: the ranks, in the order of the sum.
    """

    at: int
    part: int
    piece: int
    first: int
    last: int
    sources: tuple[int, ...]


def segments(inputs: Inputs, rank: int) -> Iterator[Segment]:
    """Yield the segments of its result that a rank checks: all, or a share if all ranks have the same result."""
    every = tuple(range(inputs.world_size))
    pieces = -(-inputs.numel // PIECE)
    if inputs.collective == "reduce_scatter":
        for i in range(pieces):
            yield Segment(i * PIECE, rank, i, 0, min(PIECE, inputs.numel - i * PIECE), every)
        return
    if inputs.collective == "all_to_all":
        for source, i in itertools.product(every, range(pieces)):
            last = min(PIECE, inputs.numel - i * PIECE)
            yield Segment(source * inputs.numel + i * PIECE, rank, i, 0, last, (source,))
        return
    parts = inputs.world_size if inputs.collective == "all_gather" else 1
    for part in range(parts):
        for i in range(rank, pieces, inputs.world_size):
            sources = (part,) if inputs.collective == "all_gather" else every
            last = min(PIECE, inputs.numel - i * PIECE)
            yield Segment(part * inputs.numel + i * PIECE, 0, i, 0, last, sources)


def ring_segments(inputs: Inputs, ring: RingAllReduce) -> Iterator[Segment]:
    """Yield the segments of a ring, which starts the sum of each shard at another rank."""
    shard = ring.shard * ring.wire.group_size
    for whole in segments(inputs, ring.rank):
        end = whole.at + whole.last
        cuts = [whole.at, *range(-(-whole.at // shard) * shard, end, shard), end]
        for first, last in itertools.pairwise(dict.fromkeys(cuts)):
            begins = first // shard
            sources = tuple((begins + hop) % ring.world for hop in range(ring.world))
            yield Segment(first, 0, whole.piece, first - whole.at, last - whole.at, sources)


@dataclass(frozen=True)
class Groups:
    """Groups and their allowed error. exact: [groups, group_size], float64. error: [groups], for any element.

    For rotated groups: the error of the rotated elements. The elements themselves have no larger error.
    """

    exact: Tensor
    error: Tensor

    @classmethod
    def of(cls, x: Tensor, group_size: int) -> Groups:
        """Cut x [numel] as the codec does. The ragged group is padded with its first element."""
        padding = -len(x) % group_size
        if padding:
            x = torch.cat([x, x[len(x) - len(x) % group_size].expand(padding)])
        exact = x.double().view(-1, group_size)
        return cls(exact, exact.new_zeros(len(exact)))

    def __add__(self, other: Groups) -> Groups:
        return Groups(self.exact + other.exact, self.error + other.error)

    def rounded(self, wire: Format) -> Groups:
        """Return the groups after an encode and a decode."""
        x = self.exact
        if wire.hadamard:
            x = reference._rotated(x * reference._signs(wire.group_size, x.device))
        low, high = x.amin(-1) - self.error, x.amax(-1) + self.error
        if wire.codebook and wire.spikes and wire.hadamard:  # two elements are not rotated, or only a part of them
            taken = 2.5 * (self.exact.abs().amax(-1) + self.error)
            low, high = low - taken, high + taken
        return Groups(self.exact, self.error + largest_error(low, high, wire))


def largest_error(low: Tensor, high: Tensor, wire: Format) -> Tensor:
    """Return the largest error of one rounding, in groups between low and high."""
    if wire.codebook:
        return torch.maximum(low.abs(), high.abs()).clamp(min=2.0**-104) * (_codebook_share(wire) + _FLOAT32)
    levels, half = (1 << wire.bits) - 1, (1 << (wire.bits - 1)) - 1
    largest = torch.maximum(low.abs(), high.abs())
    least = 2.0**-126
    if wire.symmetric:
        step = largest / half * (1 + 2.0**-7)
    elif wire.compact:
        widest = torch.maximum(torch.maximum(high - low, high), low * (-32 / 31))
        step, least = widest / levels * (1.43 if wire.mse else 1.27), 2.0**-119
    else:
        step = (high - low + low.abs() * 2.0**-7) / levels * (1 + 2.0**-7)
        if wire.mse:  # a zero point inside of the range is rounded down by more than one at its end
            step = step * (1 + 2.0**-7)
    # A group that may hold a 0 (docs/trust/numerics.md).
    if not wire.symmetric and not (wire.compact and wire.bits >= 5):
        with_zero = (
            (high - low) / (levels - (1 if wire.stochastic else 1 / 8)) * (9 / 8 if wire.compact else 1 + 2.0**-7)
        )
        step = torch.where((low <= 0) & (high >= 0), torch.maximum(step, with_zero), step)
    error = step.clamp(min=least) * (1.0 if wire.stochastic else 0.5) * (1 + 1e-4)
    if wire.spikes:  # the extremes are bf16
        error = torch.maximum(error, largest * (2.0**-7 if wire.stochastic else 2.0**-8))
    return error + largest * _FLOAT32


def _codebook_share(wire: Format) -> float:
    """Return the error over a group's largest element (docs/trust/numerics.md, "The error with the codebook")."""
    shares = {2: (0.48, 0.61), 3: (0.23, 0.39), 4: (0.125, 0.34), 5: (0.08, 0.31), 6: (0.07, 0.31)}
    plain, searched = shares.get(wire.bits, (2 / 2**wire.bits, 16 / 2**wire.bits))
    return (searched if wire.mse else plain) * (1 + 1e-4)


def two_step(inputs: Sequence[Groups], collective: Collective, plan: Plan) -> Groups:
    """Return the result of a quantized call of the ranks' groups, in rank order."""
    if collective in ("all_gather", "all_to_all"):
        return inputs[0].rounded(plan.gather)
    if plan.nodes is None:
        total = _sum([x.rounded(plan.reduce) for x in inputs])
    else:
        inside = plan.inside or plan.reduce
        nodes = [_sum([inputs[rank].rounded(inside) for rank in node]) for node in plan.nodes]
        total = _sum([node.rounded(plan.reduce) for node in nodes])
    return total if collective == "reduce_scatter" else total.rounded(plan.gather)


def ring(inputs: Sequence[Groups], wire: Format) -> Groups:
    """Return the result of a quantized ring that starts with the first of the ranks' groups."""
    total, *others = inputs
    for x in others:
        total = total.rounded(wire) + x
    return total.rounded(wire)


def _sum(groups: list[Groups]) -> Groups:
    total, *others = groups
    for x in others:
        total = total + x
    return total


def compare(
    result: Tensor,
    inputs: Inputs,
    parts: Iterator[Segment],
    group_size: int,
    travel: Callable[[Sequence[Groups]], Groups] | None,
) -> tuple[int, float, float]:
    """Compare this rank's segments with the exact result. Return wrong elements, signal and noise (sums of squares).

    travel: the roundings of the groups. None: each element must be the exact one.
    """
    wrong, signal, noise = 0, 0.0, 0.0
    for s in parts:
        sources = [inputs.piece(rank, s.part, s.piece)[s.first : s.last] for rank in s.sources]
        groups = [Groups.of(x, group_size) for x in sources]
        total = _sum(groups) if travel is None else travel(groups)
        exact, ours = total.exact.flatten()[: s.last - s.first], result[s.at : s.at + s.last - s.first].cpu().double()
        difference = (ours - exact).abs()
        if travel is None:
            allowed = torch.zeros(())
        else:
            error = total.error.repeat_interleave(group_size)[: len(exact)]
            about = torch.finfo(inputs.dtype)
            allowed = error + about.eps / 2 * (exact.abs() + error) + about.smallest_normal * about.eps
        wrong += int((~(difference <= allowed)).sum())  # a NaN is wrong too
        signal += float(exact.square().sum())
        noise += float(difference.square().sum())
    return wrong, signal, noise


def differing(result: Tensor) -> int:
    """Return the number of elements whose bits differ from rank 0's result."""
    size = result.element_size()
    pieces = result.view({4: torch.int32, 2: torch.int16}[size]).split(PIECE)
    mine = torch.stack([_checksum(piece) for piece in pieces]).cpu()
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    differ = (torch.stack(table) != table[0]).any(0).nonzero().flatten().tolist()
    count = 0
    for i in differ:
        ours = pieces[i].cpu().view(torch.uint8)
        theirs = ours.clone()
        dist.broadcast(theirs, 0)
        count += int((ours != theirs).view(-1, size).any(1).sum())
    return count


def _checksum(bits: Tensor) -> Tensor:
    """Return a checksum of 64 bits that changes with any single element."""
    weights = torch.arange(1, 2 * len(bits), 2, dtype=torch.int64, device=bits.device) * 0x5851F42D4C957F2D
    return (bits.long() * weights).sum()
