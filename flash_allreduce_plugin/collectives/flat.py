"""all_reduce, reduce_scatter and all_gather in one level (Flash All-Reduce: arXiv 2412.04964, Algorithm 1).

A call is cut into chunks: the codec works on one chunk while another is on the wire, and the link is busy in both
directions. Groups start at the tensor's first element (reduce_scatter, all_gather: at the first element of each shard).
Chunks and shards start at groups, and sums are taken in rank order in float32. So the result of an element depends on
its group alone. The owner of a shard decodes the bytes that it sent, as every other rank does.

all_reduce of K chunks, for each chunk i, with W chunks on the wire together:

    encode chunk -> A[i] -> all_to_all -> R[i mod W] -> decode, sum, encode -> own shard of A[i] -> all_gather -> A[i]
    -> decode into the tensor

A has K slots and R has W: K + W slots, 1.5 x the payload from 4 chunks on. Chunks are decoded as they arrive: a call
that fails leaves the tensor undefined, as with torch.distributed.

Each function is a generator that yields once, when the first chunks are on the wire. The rest may run in another thread
(work.py). Tensors are 1-D and contiguous. Arguments that all functions share:

    label      names the call in errors
    pool       lends the buffers
    key        seeds stochastic rounding: one stream of random numbers a rank before the sum, one a group after it
    residual   the error that the last call of this slot lost; replaced by the error of this call (error_feedback.py)
    meter      receives every rounding of a call that is measured (meter.py)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import NO_DRAW, Draw, Format
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.chunks import Chunks, aligned, shard_multiple, whole_groups
from flash_allreduce_plugin.collectives.error_feedback import Residual
from flash_allreduce_plugin.collectives.meter import Meter
from flash_allreduce_plugin.collectives.transport import BufferPool, Label, Pending
from flash_allreduce_plugin.collectives.weight_differences import HeldWeights
from flash_allreduce_plugin.collectives.work import Stage
from flash_allreduce_plugin.policy import Plan

_REDUCE, _GATHER = 0, 1  # the two halves of a call
_REMEMBERED = 1024  # layouts, one a size of call


def _chunks_of_tensor(numel: int, plan: Plan, world_size: int) -> Chunks:
    groups = plan.reduce.groups(numel)
    multiple = world_size * shard_multiple(groups, world_size, plan.reduce, plan.gather)
    return Chunks.cut(groups, plan.chunk_bytes // plan.widest.record_bytes, multiple)


def all_reduce(
    tensor: Tensor,
    factor: float,
    plan: Plan,
    label: Label,
    pool: BufferPool,
    key: int = 0,
    residual: Residual | None = None,
    *,
    meter: Meter | None = None,
) -> Iterator[Stage]:
    """Replace tensor [numel] by the sum over the ranks times factor, quantized before and after the sum."""
    call = _AllReduce(tensor, factor, plan, label, pool, key, residual, meter)
    count, window = call.chunks.count, call.chunks.window
    for i in range(window):
        call.send(i)
    yield Stage.PROGRESS
    for i in range(count):
        call.reduce(i)
        if i + window < count:
            call.send(i + window)
        if i + 1 >= window:  # the peers send in this order
            call.write(i + 1 - window)
    for i in range(count + 1 - window, count):
        call.write(i)
    pool.give(call.sent, call.received)


@dataclass(slots=True)
class _Slot:
    """The views of one chunk in A: its groups first to last, encoded, and later their sums.

    Records are padded to equal shards. payload and result are the records of the tensor, rest is the padding.
    """

    first: int
    last: int
    payload: Tensor  # [1, bytes]
    rest: Tensor | None  # [1, bytes]
    shards: Tensor  # [world, bytes]: payload and rest
    sums: Tensor  # [world, bytes]
    mine: Tensor  # [bytes]: this rank's row of sums
    result: Tensor  # [1, bytes]
    exchanging: str
    gathering: str


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The cuts of A and R of an all_reduce. records: bytes of a record before the sum and after it."""

    chunks: Chunks
    records: tuple[int, int]
    world: int
    rank: int

    @property
    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of A and of R."""
        chunks = self.chunks
        return chunks.count * chunks.size * max(self.records), chunks.window * chunks.size * self.records[0]

    def slots(self, buffer: Tensor) -> list[_Slot]:
        """Cut A into one slot a chunk."""
        return [self._slot(i, row) for i, row in enumerate(buffer.view(self.chunks.count, 1, -1).unbind(0))]

    def inboxes(self, buffer: Tensor) -> list[Tensor]:
        """Return the view of R [world, bytes] that receives each chunk."""
        chunks = self.chunks
        rows = buffer.view(chunks.window, -1).unbind(0)
        return [
            rows[i % chunks.window][: self._filled(i) * self.records[0]].view(self.world, -1)
            for i in range(chunks.count)
        ]

    def _filled(self, i: int) -> int:
        """Return the groups of chunk i with its padding."""
        first, last = self.chunks[i]
        return -(-(last - first) // self.chunks.multiple) * self.chunks.multiple

    def _slot(self, i: int, row: Tensor) -> _Slot:
        (first, last), filled, (reduce, gather) = self.chunks[i], self._filled(i), self.records
        whole, sums = row[:, : filled * reduce], row[:, : filled * gather].view(self.world, -1)
        real = (last - first) * reduce
        return _Slot(
            first=first,
            last=last,
            payload=whole[:, :real],
            rest=whole[:, real:] if real < whole.shape[1] else None,
            shards=whole.view(self.world, -1),
            sums=sums,
            mine=sums[self.rank],
            result=row[:, : (last - first) * gather],
            exchanging=f"exchanging the shards of chunk {i + 1} of {self.chunks.count}",
            gathering=f"gathering the sums of chunk {i + 1} of {self.chunks.count}",
        )


@lru_cache(_REMEMBERED)
def _layout(numel: int, plan: Plan, world: int, rank: int) -> _Layout:
    """Return the same object for the same arguments: BufferPool.take_cut finds the views of a buffer by it."""
    records = plan.reduce.record_bytes, plan.gather.record_bytes
    return _Layout(_chunks_of_tensor(numel, plan, world), records, world, rank)


class _AllReduce:
    """The steps of one all_reduce, its two buffers and its pending messages."""

    __slots__ = (
        *("chunks", "elements", "exchanges", "factor", "gather_key", "gathers", "inboxes", "label", "meter", "plan"),
        *("rank", "received", "reduce_key", "residual", "sent", "slots", "stochastic", "world"),
    )

    def __init__(
        self,
        tensor: Tensor,
        factor: float,
        plan: Plan,
        label: Label,
        pool: BufferPool,
        key: int,
        residual: Residual | None,
        meter: Meter | None,
    ) -> None:
        self.factor, self.plan, self.label = factor, plan, label
        self.residual, self.meter = residual, meter
        self.world, self.rank = label.group.size(), label.group.rank()
        layout = _layout(tensor.numel(), plan, self.world, self.rank)
        chunks = self.chunks = layout.chunks
        self.stochastic = plan.reduce.stochastic
        if self.stochastic:
            self.reduce_key, self.gather_key = rows.draw_key(key, _REDUCE, self.rank), rows.draw_key(key, _GATHER)
        label.reserve(2 * chunks.count)
        sent, received = layout.nbytes
        self.sent, self.received = pool.take_cut(sent, layout.slots), pool.take_cut(received, layout.inboxes)
        self.slots, self.inboxes = self.sent.parts, self.received.parts
        self.elements = _cut(tensor.view(1, -1), chunks.size * plan.reduce.group_size, 1)
        self.exchanges: deque[Pending] = deque()
        self.gathers: deque[Pending] = deque()

    def send(self, i: int) -> None:
        """Encode chunk i and send it."""
        slot = self.slots[i]
        draw = Draw(self.reduce_key, slot.first) if self.stochastic else NO_DRAW
        wire = self.plan.reduce
        _encode(self.elements[i], slot.payload, wire, draw, self.residual, slot.first, slot.last, self.meter)
        if slot.rest is not None:
            slot.rest.zero_()
        self.exchanges.append(transport.all_to_all(self.inboxes[i], slot.shards, self.label, slot.exchanging))

    def reduce(self, i: int) -> None:
        """Wait for chunk i, the oldest on the wire, sum this rank's shard of it, and send the sum."""
        self.exchanges.popleft().wait()
        plan, residual, inbox = self.plan, self.residual, self.inboxes[i]
        mine, wires = self.slots[i].mine, (plan.reduce, plan.gather, self.factor)
        shard = mine.numel() // plan.gather.record_bytes
        first = i * self.chunks.size + self.rank * shard  # the group's number in the call
        draw = Draw(self.gather_key, first) if self.stochastic else NO_DRAW
        if residual is None:
            rows.decode_sum_encode(inbox, mine, *wires, draw)
        else:
            begin = i * (self.chunks.size // self.world)
            kept = residual.after[begin : begin + shard]
            rows.decode_sum_encode_feedback(inbox, mine, kept, *wires, residual.momentum, draw)
        if self.meter is not None:
            self.meter.summed(inbox, mine, *wires, first)
        self.gathers.append(transport.all_gather(self.slots[i].sums, mine, self.label, self.slots[i].gathering))

    def write(self, i: int) -> None:
        """Wait for the sums of chunk i, the oldest, and decode them into the tensor."""
        self.gathers.popleft().wait()
        rows.decode(self.slots[i].result, self.elements[i], self.plan.gather)


def reduce_scatter(
    output: Tensor,
    shards: Tensor | Sequence[Tensor],
    factor: float,
    plan: Plan,
    label: Label,
    pool: BufferPool,
    key: int = 0,
    residual: Residual | None = None,
    *,
    meter: Meter | None = None,
) -> Iterator[Stage]:
    """Write this rank's shard of the sum times factor into output. One rounding.

    shards: [world, numel], or one 1-D tensor a rank. Chunk i covers the same range of elements of every shard.
    A shorter shard has fewer elements there, or none.
    """
    world, rank, wire = label.group.size(), label.group.rank(), plan.reduce
    numels = tuple(sizes_of(shards))
    layout = _layout_of_parts(numels, wire, plan.chunk_bytes, rank)
    chunks, starts = layout.chunks, layout.starts
    label.reserve(chunks.count)
    leaving, arriving = pool.take_cut(layout.nbytes, layout.pieces), pool.take_cut(layout.nbytes, layout.inboxes)
    step, even = chunks.size * wire.group_size, isinstance(shards, Tensor)
    outputs = _cut(output, step) if output.numel() else ()
    columns = _cut(shards, step, 1) if isinstance(shards, Tensor) and residual is None else None
    key = rows.draw_key(key, _REDUCE, rank) if wire.stochastic else 0
    exchanges: deque[Pending] = deque()

    def encode(i: int, first: int, part: Tensor, payload: Tensor) -> None:
        draw = Draw(key, first, starts[1]) if wire.stochastic else NO_DRAW
        _encode(part, payload, wire, draw, residual, first, first + wire.groups(part.shape[1]), meter, starts[1])

    def send(i: int) -> None:
        pieces, (inbox, _), first = leaving.parts[i], arriving.parts[i], chunks[i][0]
        if columns is not None and pieces.rows is not None:
            encode(i, first, columns[i], pieces.rows)
        else:
            for start, shard, payload in zip(starts, shards, pieces.payloads, strict=False):
                if payload is not None:
                    encode(i, start + first, shard[i * step : (i + 1) * step].view(1, -1), payload)
        sizes = (None, None) if even else ([pieces.room[rank]] * world, pieces.room)
        exchanges.append(transport.all_to_all(inbox, pieces.whole, label, pieces.exchanging, *sizes))

    def reduce(i: int) -> None:
        exchanges.popleft().wait()
        if i < len(outputs):
            rows.decode_sum(arriving.parts[i][1], outputs[i], wire, factor)
            if meter is not None:
                meter.result(outputs[i], starts[rank] + chunks[i][0])

    yield from _in_turn(chunks, send, reduce)
    pool.give(leaving, arriving)


def all_gather(
    output: Tensor,
    input: Tensor,
    plan: Plan,
    label: Label,
    pool: BufferPool,
    key: int = 0,
    *,
    parts: Sequence[int] | None = None,
    meter: Meter | None = None,
    held: HeldWeights | None = None,
) -> Iterator[Stage]:
    """Gather input [numel] of every rank into output [world * numel]. One rounding.

    parts: the numel of each rank, if they differ. Chunk i covers the same range of elements of every part.
    held: output has the previous result, and the ranks send differences (weight_differences.py).
    """
    world, rank, wire, even = label.group.size(), label.group.rank(), plan.gather, parts is None
    numels = (input.numel(),) * world if parts is None else tuple(parts)
    layout = _layout_of_parts(numels, wire, plan.chunk_bytes, rank)
    chunks = layout.chunks
    label.reserve(chunks.count)
    buffer = pool.take_cut(layout.nbytes, layout.pieces)
    step = chunks.size * wire.group_size
    inputs = _cut(input.view(1, -1), step, 1)
    columns = _cut(output.view(world, -1), step, 1) if even else ()
    before = sum(numels[:rank])
    owns = () if held is None else _cut(output[before : before + numels[rank]].view(1, -1), step, 1)
    key = rows.draw_key(key, _GATHER) if wire.stochastic else 0
    gathers: deque[Pending] = deque()
    put = rows.decode if held is None else rows.decode_add

    def send(i: int) -> None:
        pieces = buffer.parts[i]
        payload = pieces.payloads[rank]
        if payload is not None:
            draw = Draw(key, layout.starts[rank] + chunks[i][0]) if wire.stochastic else NO_DRAW
            if held is not None:
                held.encode(inputs[i], owns[i], payload, wire, draw)
            else:
                rows.encode(inputs[i], payload, wire, draw)
                if meter is not None:
                    meter.gathered(inputs[i], payload, wire)
        room = None if even else pieces.room
        gathers.append(transport.all_gather(pieces.whole, pieces.mine, label, pieces.gathering, room))

    def write(i: int) -> None:
        gathers.popleft().wait()
        pieces = buffer.parts[i]
        if even and pieces.rows is not None:
            put(pieces.rows, columns[i], wire)
        else:
            for shard, payload in zip(output.split(list(numels)), pieces.payloads, strict=True):
                if payload is not None:
                    put(payload, shard[i * step : (i + 1) * step].view(1, -1), wire)
        if held is not None and meter is not None and i < len(owns):
            meter.held(inputs[i].view(-1), owns[i].view(-1))

    yield from _in_turn(chunks, send, write)
    pool.give(buffer)


@dataclass(slots=True)
class _Pieces:
    """One chunk in the buffer: one piece of each rank's part, in rank order, each padded to a multiple of 16 bytes."""

    whole: Tensor  # [bytes]
    room: list[int]  # bytes of each piece
    mine: Tensor  # [bytes], this rank's
    payloads: list[Tensor | None]  # [1, bytes] of each piece without padding; None: the piece is empty
    rows: Tensor | None  # [world, bytes], all payloads in one view, if the parts have one size
    exchanging: str
    gathering: str


@dataclass(frozen=True, slots=True, eq=False)
class _LayoutOfParts:
    """The cuts of the buffers of a reduce_scatter or all_gather. numels: elements of each rank's part.

    starts: the number of the first group of each part in the call.
    """

    chunks: Chunks
    wire: Format
    numels: tuple[int, ...]
    rank: int
    starts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.chunks.window * len(self.numels) * self.chunks.size * self.wire.record_bytes

    def pieces(self, buffer: Tensor) -> list[_Pieces]:
        """Return the pieces of each chunk."""
        slots = buffer.view(self.chunks.window, -1).unbind(0)
        return [self._pieces(i, slots[i % len(slots)]) for i in range(self.chunks.count)]

    def inboxes(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the views that receive this rank's piece of each chunk from all ranks.

        A pair a chunk: [bytes] with the padding, and [world, bytes] without it.
        """
        slots, world = buffer.view(self.chunks.window, -1).unbind(0), len(self.numels)
        found = []
        for i in range(self.chunks.count):
            real = self._real(i)[self.rank]
            inbox = slots[i % len(slots)][: world * aligned(real)]
            found.append((inbox, inbox.view(world, -1)[:, :real]))
        return found

    def _real(self, i: int) -> list[int]:
        """Return the bytes of each part's piece of chunk i, without padding."""
        first, last = self.chunks[i]
        groups = map(self.wire.groups, self.numels)
        return [max(0, min(last, count) - first) * self.wire.record_bytes for count in groups]

    def _pieces(self, i: int, slot: Tensor) -> _Pieces:
        real, count = self._real(i), self.chunks.count
        room = list(map(aligned, real))
        whole = slot[: sum(room)]
        each, alike = whole.split(room), len(set(self.numels)) == 1
        return _Pieces(
            whole=whole,
            room=room,
            mine=each[self.rank],
            payloads=[one[:size].view(1, -1) if size else None for one, size in zip(each, real, strict=True)],
            rows=whole.view(len(room), -1)[:, : real[0]] if alike else None,
            exchanging=f"exchanging the shards of chunk {i + 1} of {count}",
            gathering=f"gathering chunk {i + 1} of {count}",
        )


@lru_cache(_REMEMBERED)
def _layout_of_parts(numels: tuple[int, ...], wire: Format, chunk_bytes: int, rank: int) -> _LayoutOfParts:
    """Return the same object for the same arguments, as _layout does."""
    chunks = Chunks.cut(wire.groups(max(numels)), chunk_bytes // (wire.record_bytes * len(numels)), whole_groups(wire))
    starts = itertools.accumulate(map(wire.groups, numels), initial=0)
    return _LayoutOfParts(chunks, wire, numels, rank, tuple(starts))


def sizes_of(shards: Tensor | Sequence[Tensor]) -> list[int]:
    """Return the elements of each shard. A matrix is not iterated: each row would cost a view."""
    return [shards.shape[1]] * shards.shape[0] if isinstance(shards, Tensor) else list(map(len, shards))


def _cut(tensor: Tensor, size: int, dim: int = 0) -> Sequence[Tensor]:
    """Return tensor.split(size, dim)."""
    return (tensor,) if tensor.shape[dim] <= size else tensor.split(size, dim)


def _in_turn(chunks: Chunks, send: Callable[[int], None], receive: Callable[[int], None]) -> Iterator[Stage]:
    """Send the first chunks and yield. Then receive the chunks in order; after each, send the next one."""
    for i in range(chunks.window):
        send(i)
    yield Stage.PROGRESS
    for i in range(chunks.count):
        receive(i)
        if i + chunks.window < chunks.count:
            send(i + chunks.window)


def _encode(
    part: Tensor,
    payload: Tensor,
    wire: Format,
    draw: Draw,
    residual: Residual | None,
    first: int,
    last: int,
    meter: Meter | None,
    a_row: int = 0,
) -> None:
    """Encode part [rows, numel] into payload [rows, bytes].

    With a residual part has one row, the groups first to last of the call.
    a_row: the number of a row's first group minus that of the row before.
    """
    if residual is None:
        rows.encode(part, payload, wire, draw)
    else:
        rows.encode_feedback(part, payload, residual.before[first:last], residual.momentum, wire, draw)
    if meter is not None:
        meter.encoded(part, payload, wire, first, a_row)


def groups_of_residual(collective: str, sizes: Sequence[int], plan: Plan, world_size: int) -> tuple[int, int]:
    """Return the groups of a Residual before and after the sum. sizes: elements of the tensor, or of each part."""
    before = sum(map(plan.reduce.groups, sizes))
    if collective != "all_reduce":
        return before, 0
    chunks = _chunks_of_tensor(sizes[0], plan, world_size)
    return before, chunks.count * (chunks.size // world_size)


@lru_cache(_REMEMBERED)
def sent_bytes(collective: str, numel: int, plan: Plan, world_size: int) -> int:
    """Return the bytes that a rank sends for a call of `numel` elements (the whole tensor, not a shard)."""
    if collective == "all_reduce":
        groups = plan.reduce.groups(numel)
        multiple = shard_multiple(groups, world_size, plan.reduce, plan.gather)
        groups = -(-groups // (world_size * multiple)) * multiple  # of a shard, with the padding of the last chunk
        return (world_size - 1) * groups * (plan.reduce.record_bytes + plan.gather.record_bytes)
    half = plan.reduce if collective == "reduce_scatter" else plan.gather
    return (world_size - 1) * aligned(half.payload_bytes(numel // world_size))
