"""The quantized all-to-all: every rank sends a run of elements to each rank, of any length, and decodes those it gets.

    encode -> all_to_all -> decode     one rounding

A rank's own run is encoded and decoded as well: what becomes of an element does not depend on where it goes. Groups
are anchored at the first element of every run.

No rank knows all the runs of a call, but the two ends of a run both know its length. What both must do alike is
therefore a function of that length and the configuration, on every backend:

    is it quantized   run bytes x world size >= min_bytes: as in a call whose runs are all as long as this one. A
                      shorter run travels as it is, in the same exchange, and arrives bit for bit.
    its pieces        payload bytes x world size / chunk_bytes of them, whole groups each, EXCHANGES at most

Exchange i carries piece i of every run. Over messages (gloo) a rank keeps its own run to itself, which it encodes and
decodes while the others' are on the wire, and a call reserves EXCHANGES numbers, the same on all
ranks, and posts those exchanges in which this rank has something to send or to receive. NCCL matches exchanges by
their order, so one too many would cost a launch on every rank of every call: there a call is one exchange, whose byte
sizes differ from rank to rank, and no run is cut.

Neighbouring runs of whole groups are encoded, and decoded, by one launch: the payload of a concatenation of whole
groups is the concatenation of their payloads. So a call over NCCL whose runs are rows of a multiple of the group size
is one launch before the exchange and one after it, for any number of peers.

A generator as those of flat.py.
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

# Over messages: the most pieces of a run, all of them in flight at once. Half of the codec hides behind the wire. More
# pieces would hide more of it and cost more messages, one for each peer: on two and four ranks that share two cores
# three and four pieces were no faster at 1 Gbit/s, and eight or more slower on loopback.
EXCHANGES = 2
KEPT_GROUPS = 1024  # of what a rank keeps, at a time


@dataclass(frozen=True, slots=True)
class Rule:
    """Which runs are quantized, by their length: the same at both ends of a run.

    Args:
        itemsize: bytes of an element.
        world_size: ranks of the group.
        min_bytes: of a run times world_size; a shorter one travels as it is.
    """

    itemsize: int
    world_size: int
    min_bytes: int

    def quantizes(self, numel: int) -> bool:
        return numel * self.itemsize * self.world_size >= self.min_bytes

    def sent_bytes(self, sizes: Sequence[int], rank: int, wire: Format) -> tuple[int, int]:
        """Bytes that `rank` puts on the wire for runs of these sizes, and those of them that travel as they are."""
        others = [numel for to, numel in enumerate(sizes) if to != rank]
        exact = sum(aligned(numel * self.itemsize) for numel in others if not self.quantizes(numel))
        return exact + sum(aligned(wire.payload_bytes(numel)) for numel in others if self.quantizes(numel)), exact


class _Stretch(NamedTuple):
    """Elements and their bytes in an exchange, which one launch can encode or decode.

    group: the number of the first group in the call.
    """

    elements: Tensor
    payload: Tensor
    group: int
    quantized: bool


class _Runs:
    """The runs of a 1-D tensor, one to or from each rank, and their pieces. kept: whose run is not exchanged."""

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
        """Bytes of exchange i to or from each rank, filled up to where the next one may begin."""
        return [
            0 if rank == self._kept else aligned(self._bytes(max(0, min(step, end - start - i * step)), quantized))
            for rank, (start, end, _, step, quantized) in enumerate(self._runs)
        ]

    def stretches(self, i: int, payload: Tensor) -> list[_Stretch]:
        """Exchange i, whose bytes are `payload`, in as few launches as its pieces allow."""
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
        """The run that is not exchanged, cut for the cache. Their payloads have the same memory."""
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
        """Whether another run may follow these elements in one payload: groups and bytes end with them."""
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
    """Run j of input, sent[j] elements, goes to rank j; run j of output, received[j] elements, comes from it.

    One rounding, by plan.gather, of the runs that the rule quantizes; the others arrive as they are.
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
