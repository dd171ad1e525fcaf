"""What `bench` checks: inputs that every rank can make again, the exact result, and the error allowed.

The allowed error is guarantee 6 of docs/trust/numerics.md, from the groups' own extremes: at most half a step of the
group at every rounding, the widening of the range by the roundings before counted in.
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

PIECE = 1 << 20  # elements that are made and compared at a time: whole groups of any size
_FLOAT32 = 2.0**-21  # of a group's greatest magnitude: what the float32 arithmetic of a rounding may add


@dataclass(frozen=True)
class Inputs:
    """Every rank's input of one call: Gaussian, or small whole numbers, whose sums are exact in any dtype.

    numel: of a part. all_reduce has one part, all_gather one a rank, reduce_scatter and all_to_all one a rank in every
    rank's input.
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

    at: the first one in the result. piece, first, last: in the part. sources: the ranks, in the order of the sum.
    """

    at: int
    part: int
    piece: int
    first: int
    last: int
    sources: tuple[int, ...]


def segments(inputs: Inputs, rank: int) -> Iterator[Segment]:
    """The segments that a rank checks of its own result: all of them, or its share where all ranks have the same."""
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
    """The same for a ring, whose shards are each summed from another rank on."""
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
    """exact [groups, group_size], float64; error [groups]: how far what travels may be from it, at any element.

    Of groups that are rotated, the error of the rotated elements; of the elements themselves it is no larger.
    """

    exact: Tensor
    error: Tensor

    @classmethod
    def of(cls, x: Tensor, group_size: int) -> Groups:
        """x [numel], as a codec cuts it; the ragged group is filled up with its first element."""
        padding = -len(x) % group_size
        if padding:
            x = torch.cat([x, x[len(x) - len(x) % group_size].expand(padding)])
        exact = x.double().view(-1, group_size)
        return cls(exact, exact.new_zeros(len(exact)))

    def __add__(self, other: Groups) -> Groups:
        return Groups(self.exact + other.exact, self.error + other.error)

    def rounded(self, wire: Format) -> Groups:
        """After an encode and a decode."""
        x = self.exact
        if wire.hadamard:
            x = reference._rotated(x * reference._signs(wire.group_size, x.device))
        low, high = x.amin(-1) - self.error, x.amax(-1) + self.error
        if wire.codebook and wire.spikes and wire.hadamard:  # two elements less are rotated, or a part of them
            taken = 2.5 * (self.exact.abs().amax(-1) + self.error)
            low, high = low - taken, high + taken
        return Groups(self.exact, self.error + largest_error(low, high, wire))


def largest_error(low: Tensor, high: Tensor, wire: Format) -> Tensor:
    """Of one rounding, in groups between low and high."""
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
    if wire.spikes:  # the extremes themselves are bf16
        error = torch.maximum(error, largest * (2.0**-7 if wire.stochastic else 2.0**-8))
    return error + largest * _FLOAT32


def _codebook_share(wire: Format) -> float:
    """Return the error over a group's largest element (docs/trust/numerics.md, "The error with the codebook")."""
    shares = {2: (0.48, 0.61), 3: (0.23, 0.39), 4: (0.125, 0.34), 5: (0.08, 0.31), 6: (0.07, 0.31)}
    plain, searched = shares.get(wire.bits, (2 / 2**wire.bits, 16 / 2**wire.bits))
    return (searched if wire.mse else plain) * (1 + 1e-4)


def two_step(inputs: Sequence[Groups], collective: Collective, plan: Plan) -> Groups:
    """The result of a quantized call of the ranks' groups, in rank order."""
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
    """The result of a quantized ring that begins with the first of the ranks' groups."""
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
    """This rank's segments against the exact result: wrong elements, signal and noise (sums of squares).

    travel: what the groups go through. None: nothing may change, each element must be the exact one.
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
        wrong += int((~(difference <= allowed)).sum())  # a NaN is not allowed either
        signal += float(exact.square().sum())
        noise += float(difference.square().sum())
    return wrong, signal, noise


def differing(result: Tensor) -> int:
    """Elements of this rank's result whose bits are not those of rank 0's."""
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
    """64 bits, in which any single element shows."""
    weights = torch.arange(1, 2 * len(bits), 2, dtype=torch.int64, device=bits.device) * 0x5851F42D4C957F2D
    return (bits.long() * weights).sum()
