"""The quantized all-to-all: every rank sends a run of elements to each rank. The runs may have any lengths.

    encode -> all_to_all -> decode     one rounding

A rank also encodes and decodes the run for itself: an element is rounded the same for every destination. Groups start
at the first element of every run.

No rank has the lengths of all runs of a call, but both ends of a run have its length. So a function of that length and
the configuration decides, on every backend:

    quantized or not    run bytes x world size >= min_bytes, as in a call with runs of equal length. A shorter run is
                        sent in full precision, in the same exchange.
    number of pieces    payload bytes x world size / chunk_bytes, of whole groups, EXCHANGES at most

Exchange i sends piece i of every run. Over messages (gloo) a rank does not send its run for itself, and encodes and
decodes it while the others are on the wire. There a call reserves EXCHANGES tags on all ranks, and posts the exchanges
in which this rank sends or receives anything. NCCL matches exchanges by their order, and an empty one would cost every
rank a launch: there a call is one exchange with different byte sizes, and runs are not cut.

One launch encodes or decodes neighbouring runs of whole groups: the payload of a concatenation of whole groups is the
concatenation of their payloads. So a call over NCCL whose runs are rows of a multiple of the group size is one launch
before the exchange and one after it, for any number of peers.

all_to_all is a generator as in flat.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.chunks import ALIGNMENT, aligned
from flash_allreduce_plugin.collectives.meter import Meter
from flash_allreduce_plugin.collectives.transport import BufferPool, Label, Pending
from flash_allreduce_plugin.collectives.work import Stage
from flash_allreduce_plugin.policy import Plan

# Over messages: the most pieces of a run, all in flight together. With two, half of the codec's time hides behind the
# wire. More pieces hide more of it and cost one more message a peer: on two and four ranks that share two cores three
# and four pieces were no faster at 1 Gbit/s, and eight or more were slower on loopback.
EXCHANGES = 2
KEPT_GROUPS = 1024  # groups of the run for this rank that are encoded at a time


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule that decides by its length if a run is quantized: the same at both ends of a run.

    Args:
        itemsize: bytes of an element.
        world_size: ranks of the group.
        min_bytes: a run whose bytes times world_size are fewer is sent in full precision.
    """

    itemsize: int
    world_size: int
    min_bytes: int

    def quantizes(self, numel: int) -> bool:
        return numel * self.itemsize * self.world_size >= self.min_bytes

    def sent_bytes(self, sizes: Sequence[int], rank: int, wire: Format) -> tuple[int, int]:
        """Return the bytes that `rank` sends for runs of these sizes, and the part of them in full precision."""
        others = [numel for to, numel in enumerate(sizes) if to != rank]
        exact = sum(aligned(numel * self.itemsize) for numel in others if not self.quantizes(numel))
        return exact + sum(aligned(wire.payload_bytes(numel)) for numel in others if self.quantizes(numel)), exact


class _Stretch(NamedTuple):
    """Elements and their bytes in an exchange that one launch can encode or decode.

    group: the number of the first group in the call.
    """

    elements: Tensor
    payload: Tensor
    group: int
    quantized: bool


class _Runs:
    """The runs of a 1-D tensor, one to or from each rank, and their pieces. kept: the rank without an exchange."""

    def __init__(
        self,
        tensor: Tensor,
        sizes: Sequence[int],
        rule: Rule,
        wire: Format,
        chunk_bytes: int,
        exchanges: int,
        kept: int | None,
    ) -> None:
        self._tensor, self._wire, self._kept = tensor, wire, kept
        chunk = max(1, chunk_bytes // (wire.record_bytes * rule.world_size))
        self._runs: list[tuple[int, int, int, int, bool]] = []  # start, end, first group, elements a piece, quantized
        start = group = self.count = 0
        for rank, numel in enumerate(sizes):
            quantized, groups = rule.quantizes(numel), wire.groups(numel)
            pieces = min(exchanges, -(-groups // chunk)) if quantized else 1
            step = -(-groups // max(pieces, 1)) * wire.group_size
            self._runs.append((start, start + numel, group, step, quantized))
            start, group = start + numel, group + groups
            if rank != kept:
                #: exchanges in which a run has a piece
                self.count = max(self.count, -(-numel // max(step, 1)))
        #: bytes of the largest exchange
        self.slot = sum(self.sizes(0))

    def sizes(self, i: int) -> list[int]:
        """Return the bytes of exchange i to or from each rank, with padding."""
        return [
            0 if rank == self._kept else aligned(self._bytes(max(0, min(step, end - start - i * step)), quantized))
            for rank, (start, end, _, step, quantized) in enumerate(self._runs)
        ]

    def stretches(self, i: int, payload: Tensor) -> list[_Stretch]:
        """Return exchange i, with the bytes `payload`, as the fewest stretches."""
        found: list[tuple[int, int, int, bool]] = []  # first element, the one after the last, first group, quantized
        for rank, (start, end, group, step, quantized) in enumerate(self._runs):
            first = start + i * step
            last = min(first + step, end)
            if first >= last or rank == self._kept:
                continue
            if found:
                begin, before, number, kind = found[-1]
                if before == first and kind == quantized and self._is_whole(before - begin, kind):
                    found[-1] = begin, last, number, kind
                    continue
            found.append((first, last, group + i * (step // self._wire.group_size), quantized))
        sizes = [self._bytes(last - first, quantized) for first, last, _, quantized in found]
        starts = accumulate(map(aligned, sizes), initial=0)
        return [
            _Stretch(self._tensor[first:last], payload[at : at + size], group, quantized)
            for (first, last, group, quantized), size, at in zip(found, sizes, starts, strict=False)
        ]

    def pieces_kept(self) -> Iterator[_Stretch]:
        """Yield the run that is not exchanged, in pieces that fit the cache. Their payloads share one buffer."""
        if self._kept is None:
            return
        start, end, group, _, quantized = self._runs[self._kept]
        if start == end:
            return
        if not quantized:
            yield _Stretch(self._tensor[start:end], self._tensor.new_empty(0, dtype=torch.uint8), group, False)
            return
        size = self._wire.group_size
        payload = self._tensor.new_empty(self._bytes(KEPT_GROUPS * size, True), dtype=torch.uint8)
        for i, elements in enumerate(self._tensor[start:end].split(KEPT_GROUPS * size)):
            yield _Stretch(elements, payload[: self._bytes(len(elements), True)], group + i * KEPT_GROUPS, True)

    def _is_whole(self, numel: int, quantized: bool) -> bool:
        """True if another run may follow these elements in one payload: their groups and bytes end together."""
        return (not quantized or numel % self._wire.group_size == 0) and self._bytes(numel, quantized) % ALIGNMENT == 0

    def _bytes(self, numel: int, quantized: bool) -> int:
        return self._wire.payload_bytes(numel) if quantized else numel * self._tensor.element_size()


def all_to_all(
    output: Tensor,
    input: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    plan: Plan,
    rule: Rule,
    label: Label,
    pool: BufferPool,
    key: int = 0,
    *,
    meter: Meter | None = None,
) -> Iterator[Stage]:
    """Send run j of input, sent[j] elements, to rank j, and receive run j of output, received[j] elements, from it.

    One rounding, by plan.gather, of the runs that the rule quantizes. The others are sent in full precision.
    """
    wire = plan.gather
    by_messages = transport.by_messages(label.group, input.device)
    most, kept = (EXCHANGES, label.group.rank()) if by_messages else (1, None)
    key = rows.draw_key(key, label.group.rank())
    going = _Runs(input, sent, rule, wire, plan.chunk_bytes, most, kept)
    coming = _Runs(output, received, rule, wire, plan.chunk_bytes, most, kept)
    count = max(going.count, coming.count) if by_messages else 1
    label.reserve(most)
    outbox, inbox = pool.take(count * going.slot), pool.take(count * coming.slot)
    exchanges: list[tuple[Tensor, Pending]] = []

    def encode(stretch: _Stretch) -> None:
        elements, encoded = stretch.elements.view(1, -1), stretch.payload.view(1, -1)
        rows.encode(elements, encoded, wire, Draw(key, stretch.group))
        if meter is not None:
            meter.gathered(elements, encoded, wire)

    def send(i: int) -> None:
        out_sizes, in_sizes = going.sizes(i), coming.sizes(i)
        start, to = i * going.slot, i * coming.slot
        payload, arriving = outbox[start : start + sum(out_sizes)], inbox[to : to + sum(in_sizes)]
        for stretch in going.stretches(i, payload):
            if stretch.quantized:
                encode(stretch)
            else:
                stretch.payload.copy_(stretch.elements.view(torch.uint8))
        doing = f"exchanging part {i + 1} of {count}"
        exchanges.append((arriving, transport.all_to_all(arriving, payload, label, doing, in_sizes, out_sizes)))

    def keep() -> None:
        for mine, result in zip(going.pieces_kept(), coming.pieces_kept(), strict=True):
            if mine.quantized:
                encode(mine)
                rows.decode(mine.payload.view(1, -1), result.elements.view(1, -1), wire)
            else:
                result.elements.copy_(mine.elements)

    def write(i: int) -> None:
        arrived, pending = exchanges[i]
        pending.wait()
        for stretch in coming.stretches(i, arrived):
            if stretch.quantized:
                rows.decode(stretch.payload.view(1, -1), stretch.elements.view(1, -1), wire)
            else:
                stretch.elements.view(torch.uint8).copy_(stretch.payload)

    for i in range(count):
        send(i)
    keep()
    yield Stage.PROGRESS
    for i in range(count):
        write(i)
    pool.give(outbox, inbox)
