"""The quantized collectives in two levels: wide codes inside a node, narrow ones between nodes.

(ZeRO++: arXiv 2306.10209, section 3.3, extended to nodes with different numbers of ranks.) The tensor is cut into
slabs. A rank holds a part of a slab in its node and owns a piece of it in the group (policy/topology.py). Per slab:

    1 inside    every rank encodes the slab with plan.inside and sends each part to its holder in the node
    2 between   the holder sums its node's parts in rank order, encodes with plan.reduce, sends each piece to its owner
    3 back      the owner sums the nodes' pieces in node order, times factor, encodes with plan.gather, and sends the
                sum to the holders of the piece, one in each node
    4 forward   the holder sends those bytes, unchanged, to the other ranks of its node; all decode them

all_reduce runs all four, three roundings an element. reduce_scatter runs 1 and 2, where a piece is the chunk of a
shard, two roundings. all_gather runs 3 and 4 with shards in place of sums, one rounding. The sums do not depend on
holders and owners: a group has the same result in any tensor and chunk size. Between nodes one payload is sent where
the flat collectives send one for each of the node's ranks. A slab needs four exchanges for any number of nodes.

Slabs overlap: some are in each stage while others are in the next. Signatures and generators are those of flat.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.chunks import aligned, whole_groups
from flash_allreduce_plugin.collectives.meter import Meter
from flash_allreduce_plugin.collectives.transport import BufferPool, Label, Pending
from flash_allreduce_plugin.collectives.weight_differences import HeldWeights
from flash_allreduce_plugin.collectives.work import Stage
from flash_allreduce_plugin.policy import Plan, topology
from flash_allreduce_plugin.policy.topology import Nodes, Overlap, Part, Slab

_INSIDE, _GATHER, _BETWEEN = 0, 1, 2  # the roundings: indices of the streams of random numbers


def all_reduce(
    tensor: Tensor,
    factor: float,
    plan: Plan,
    label: Label,
    pool: BufferPool,
    key: int = 0,
    *,
    meter: Meter | None = None,
) -> Iterator[Stage]:
    """Replace tensor [numel] by the sum over the ranks times factor. Three roundings."""
    slabs = _slabs_of_tensor(tensor.numel(), plan)
    group_size, rank = plan.gather.group_size, label.group.rank()
    inside_key, gather_key = rows.draw_key(key, _INSIDE, rank), rows.draw_key(key, _GATHER)
    label.reserve(4 * len(slabs))
    stages = _Stages(slabs, plan, label, pool, key, _lag(len(slabs), 4), ring=len(slabs), meter=meter)

    def elements(i: int) -> Tensor:
        first = slabs[0].groups * i
        return tensor[first * group_size : (first + slabs[i].groups) * group_size].view(1, -1)

    def inside(i: int) -> None:
        draw = Draw(inside_key, slabs[0].groups * i)
        payload = stages.whole(i, stages.wide).view(1, -1)
        rows.encode(elements(i), payload, stages.wide, draw)
        if meter is not None:
            meter.encoded(elements(i), payload, stages.wide, slabs[0].groups * i)
        stages.send_inside(i)

    def back(i: int) -> None:
        arrived = stages.arrived(i)
        if arrived.numel():
            mine, number = stages.own(i, rank), slabs[i].numbers[rank]
            rows.decode_sum_encode(arrived, mine, plan.reduce, plan.gather, factor, Draw(gather_key, number))
            if meter is not None:
                meter.summed(arrived, mine, plan.reduce, plan.gather, factor, number)
        stages.send_back(i)

    def write(i: int) -> None:
        rows.decode(stages.whole(i, plan.gather).view(1, -1), elements(i), plan.gather)

    yield from stages.run(inside, stages.send_between, back, stages.send_forward, write=write)


def reduce_scatter(
    output: Tensor,
    shards: Tensor | Sequence[Tensor],
    factor: float,
    plan: Plan,
    label: Label,
    pool: BufferPool,
    key: int = 0,
    *,
    meter: Meter | None = None,
) -> Iterator[Stage]:
    """Write this rank's shard of the sum times factor into output. Two roundings.

    shards: [world, numel], or one 1-D tensor a rank.
    """
    firsts, slabs = _slabs_of_shards([len(shard) for shard in shards], plan)
    group_size, rank = plan.reduce.group_size, label.group.rank()
    inside_key = rows.draw_key(key, _INSIDE, rank)
    lag = _lag(len(slabs), 2)
    label.reserve(2 * len(slabs))
    stages = _Stages(slabs, plan, label, pool, key, lag, ring=lag, meter=meter)

    def elements(shard: Tensor, i: int, owner: int) -> Tensor:
        first, last = slabs[i].own(owner)
        return shard[firsts[i] * group_size : (firsts[i] + last - first) * group_size]

    def encode(part: Tensor, payload: Tensor, draw: Draw) -> None:
        rows.encode(part, payload, stages.wide, draw)
        if meter is not None:
            meter.encoded(part, payload, stages.wide, draw.first_group, draw.groups_a_row)

    def inside(i: int) -> None:
        if isinstance(shards, Tensor) and (places := stages.by_place(i, stages.wide)):
            last = firsts[i] * group_size + elements(shards[0], i, 0).numel()
            for place, payloads in enumerate(places):
                part = shards[place :: len(places), firsts[i] * group_size : last]
                step = slabs[i].numbers[len(places)] - slabs[i].numbers[0]
                encode(part, payloads, Draw(inside_key, slabs[i].numbers[place], step))
        else:
            for owner, shard in enumerate(shards):
                mine = elements(shard, i, owner)
                if len(mine):
                    draw = Draw(inside_key, slabs[i].numbers[owner])
                    encode(mine.view(1, -1), stages.own(i, owner, stages.wide).view(1, -1), draw)
        stages.send_inside(i)

    def finish(i: int) -> None:
        arrived = stages.arrived(i)
        if arrived.numel():
            rows.decode_sum(arrived, elements(output, i, rank), plan.reduce, factor)
            if meter is not None:
                meter.result(elements(output, i, rank), slabs[i].numbers[rank])

    yield from stages.run(inside, stages.send_between, finish)


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

    parts: the numel of each rank, if they differ.
    held: output has the previous result, and the ranks send differences (weight_differences.py).
    """
    world, rank = label.group.size(), label.group.rank()
    sizes = [len(input)] * world if parts is None else list(parts)
    firsts, slabs = _slabs_of_shards(sizes, plan)
    group_size, gather_key = plan.gather.group_size, rows.draw_key(key, _GATHER)
    lag = _lag(len(slabs), 2)
    label.reserve(2 * len(slabs))
    stages = _Stages(slabs, plan, label, pool, key, lag, ring=2 * lag)
    shards = output.split(sizes)
    put = rows.decode if held is None else rows.decode_add

    def elements(shard: Tensor, i: int, owner: int) -> Tensor:
        first, last = slabs[i].own(owner)
        return shard[firsts[i] * group_size : (firsts[i] + last - first) * group_size].view(1, -1)

    def back(i: int) -> None:
        draw = Draw(gather_key, slabs[i].numbers[rank])
        mine, payload = elements(input, i, rank), stages.own(i, rank).view(1, -1)
        if mine.numel() and held is not None:
            held.encode(mine, elements(shards[rank], i, rank), payload, plan.gather, draw)
        elif mine.numel():
            rows.encode(mine, payload, plan.gather, draw)
            if meter is not None:
                meter.gathered(mine, payload, plan.gather)
        stages.send_back(i)

    def write(i: int) -> None:
        if parts is None and (places := stages.by_place(i, plan.gather)):
            last = firsts[i] * group_size + elements(input, i, rank).numel()
            for place, payloads in enumerate(places):
                put(payloads, output.view(world, -1)[place :: len(places), firsts[i] * group_size : last], plan.gather)
        else:
            for owner, shard in enumerate(shards):
                part = elements(shard, i, owner)
                if part.numel():
                    put(stages.own(i, owner).view(1, -1), part, plan.gather)
        if held is not None and meter is not None and (mine := elements(input, i, rank)).numel():
            meter.held(mine[0], elements(shards[rank], i, rank)[0])

    yield from stages.run(back, stages.send_forward, write=write)


def sent_bytes(collective: str, sizes: int | Sequence[int], plan: Plan, rank: int) -> tuple[int, int]:
    """Return the bytes that a rank sends for a call, and the part of them that it sends to other nodes.

    sizes: elements of the tensor for all_reduce; of each rank's shard for the other two.
    """
    assert plan.inside is not None and plan.nodes is not None
    slabs = _slabs_of_tensor(sizes, plan) if isinstance(sizes, int) else _slabs_of_shards(sizes, plan)[1]
    node = next(n for n, ranks in enumerate(plan.nodes) if rank in ranks)
    mates = [mate for mate in plan.nodes[node] if mate != rank]
    inside = between = 0

    def to(overlaps: Sequence[Overlap], record: int) -> None:
        nonlocal inside, between
        between += sum(_length(one.part) for one in overlaps if one.node != node) * record
        inside += sum(_length(one.part) for one in overlaps if one.node == node and one.peer != rank) * record

    for slab in slabs:
        if collective != "all_gather":
            inside += sum(_length(slab.part(mate)) for mate in mates) * plan.inside.record_bytes
            to(slab.owners(rank), plan.reduce.record_bytes)
        if collective != "reduce_scatter":
            to(slab.holders(rank), plan.gather.record_bytes)
            inside += _length(slab.part(rank)) * len(mates) * plan.gather.record_bytes
    return inside + between, between


def _length(part: Part) -> int:
    return part[1] - part[0]


def _multiple(plan: Plan) -> int:
    """Return the number of groups that divides the start of every slab and part."""
    assert plan.inside is not None
    return whole_groups(plan.inside, plan.reduce, plan.gather)


def _slabs_of_tensor(numel: int, plan: Plan) -> tuple[Slab, ...]:
    assert plan.nodes is not None
    size = plan.chunk_bytes // plan.widest.record_bytes
    return topology.slabs_of_tensor(plan.reduce.groups(numel), size, plan.nodes, _multiple(plan))


def _slabs_of_shards(sizes: Sequence[int], plan: Plan) -> tuple[tuple[int, ...], tuple[Slab, ...]]:
    """Return the first group of each slab's chunk, counted from the start of a shard, and the slabs."""
    assert plan.nodes is not None
    groups = tuple(map(plan.reduce.groups, sizes))
    of_all = plan.chunk_bytes // plan.widest.record_bytes
    size = of_all * max(groups) // max(1, sum(groups))  # of each shard
    both = topology.slabs_of_shards(groups, size, plan.nodes, _multiple(plan))
    return tuple(first for first, _ in both), tuple(slab for _, slab in both)


def _lag(count: int, exchanges: int) -> int:
    """Return the number of slabs in flight in each stage: a stage is so many slabs behind the one before."""
    return -(-count // exchanges)


class _Ring:
    """`count` buffers of `rows` rows of at most `size` bytes, used cyclically."""

    def __init__(self, pool: BufferPool, count: int, rows: int, size: int) -> None:
        self._count, self._rows, self._row = count, rows, aligned(size)
        self.buffer = pool.take(count * rows * self._row)

    def __call__(self, i: int, size: int) -> Tensor:
        """Return buffer i, [rows, size]."""
        start = i % self._count * self._rows * self._row
        return self.buffer[start : start + self._rows * self._row].view(self._rows, self._row)[:, :size]


class _Stages:
    """One rank's exchanges of a call's slabs, and their buffers.

    Each exchange but the first waits for the exchange of the same slab before it.
    """

    def __init__(
        self,
        slabs: Sequence[Slab],
        plan: Plan,
        label: Label,
        pool: BufferPool,
        key: int,
        lag: int,
        ring: int,
        meter: Meter | None = None,
    ) -> None:
        """lag: slabs in flight in each stage. ring: slabs in flight in all stages."""
        assert plan.inside is not None and plan.nodes is not None
        self.nodes: Nodes = plan.nodes
        self.wide: Format = plan.inside
        self.rank = label.group.rank()
        self.node = next(n for n, ranks in enumerate(plan.nodes) if self.rank in ranks)
        self._mates = plan.nodes[self.node]
        self._slabs, self._plan, self._label, self._pool, self._lag = slabs, plan, label, pool, lag
        self._key, self._meter = rows.draw_key(key, _BETWEEN, self.node), meter
        part = max(_length(slab.part(self.rank)) for slab in slabs)
        summed = max(_length(slab.own(self.rank)) for slab in slabs)
        self._whole = _Ring(pool, ring, 1, max(slab.groups for slab in slabs) * plan.widest.record_bytes)
        self._inbox = _Ring(pool, lag, len(self._mates), part * self.wide.record_bytes)
        self._sums = _Ring(pool, lag, 1, part * plan.reduce.record_bytes)
        self._arrived = _Ring(pool, lag, len(plan.nodes), summed * plan.reduce.record_bytes)
        self._pending: dict[int, Pending] = {}

    def run(self, *stages: Callable[[int], None], write: Callable[[int], None] | None = None) -> Iterator[Stage]:
        """Run every stage of every slab. Yields once, when the first slabs are on the wire.

        Within a turn the last stage runs first: it frees the buffers that the other stages take.
        write: stores the output of the last exchange.
        """
        count = len(self._slabs)

        def arrive(i: int) -> None:
            self.wait(i)
            assert write is not None
            write(i)

        if write is not None:
            stages = (*stages, arrive)
        for turn in range(count + self._lag * (len(stages) - 1)):
            if turn == self._lag:
                yield Stage.PROGRESS
            for number, stage in reversed(list(enumerate(stages))):
                i = turn - number * self._lag
                if 0 <= i < count:
                    stage(i)
        self._pool.give(*(ring.buffer for ring in (self._whole, self._inbox, self._sums, self._arrived)))

    def whole(self, i: int, codec: Format) -> Tensor:
        """Return the slab's payload [bytes]: sent inside the node, later the sums."""
        return self._whole(i, self._slabs[i].groups * codec.record_bytes)[0]

    def part(self, i: int, rank: int, codec: Format | None = None) -> Tensor:
        """Return the part of the slab that a rank of the node holds; in plan.gather by default."""
        return self._cut(i, self._slabs[i].part(rank), codec or self._plan.gather)

    def own(self, i: int, rank: int, codec: Format | None = None) -> Tensor:
        """Return the piece that a rank owns; in plan.gather by default."""
        return self._cut(i, self._slabs[i].own(rank), codec or self._plan.gather)

    def by_place(self, i: int, codec: Format) -> list[Tensor]:
        """Return the pieces [nodes, bytes] of the ranks at each place in a node, for a call with equal shards.

        Empty if nodes have different sizes, or ranks that are not neighbours.
        """
        places = self._slabs[i].order.regular
        if not places:
            return []
        real = _length(self._slabs[i].own(self.rank)) * codec.record_bytes
        return list(self.whole(i, codec).view(places, len(self.nodes), -1)[:, :, :real].unbind(0))

    def arrived(self, i: int) -> Tensor:
        """Return every node's sums of the piece that this rank owns, [nodes, bytes]."""
        self.wait(i)
        return self._outbox(i)

    def wait(self, i: int) -> None:
        self._pending.pop(i).wait()

    def send_inside(self, i: int) -> None:
        inbox = self._inbox(i, _length(self._slabs[i].part(self.rank)) * self.wide.record_bytes)
        sent = {mate: self.part(i, mate, self.wide) for mate in self._mates}
        self._exchange(i, dict(zip(self._mates, inbox, strict=True)), sent, "summing inside the node")

    def send_between(self, i: int) -> None:
        self.wait(i)
        slab, wide, narrow = self._slabs[i], self.wide.record_bytes, self._plan.reduce.record_bytes
        begin, end = slab.part(self.rank)
        inbox = self._inbox(i, (end - begin) * wide)
        sums = self._sums(i, (end - begin) * narrow)[0]
        owners = slab.owners(self.rank)

        def of_sums(part: Part) -> Tensor:
            return sums[(part[0] - begin) * narrow : (part[1] - begin) * narrow]

        for number, part in self._runs(slab, owners):
            payloads = inbox[:, (part[0] - begin) * wide : (part[1] - begin) * wide]
            rows.decode_sum_encode(payloads, of_sums(part), self.wide, self._plan.reduce, 1.0, Draw(self._key, number))
            if self._meter is not None:
                self._meter.summed_inside(payloads, of_sums(part), self.wide, self._plan.reduce, number)
        outbox, received, at = self._outbox(i), {}, slab.own(self.rank)[0]
        for node, peer, (first, last) in slab.holders(self.rank):
            received[peer] = outbox[node, (first - at) * narrow : (last - at) * narrow]
        self._exchange(i, received, {one.peer: of_sums(one.part) for one in owners}, "summing between the nodes")

    def send_back(self, i: int) -> None:
        slab, gather = self._slabs[i], self._plan.gather
        received, sent = (
            {one.peer: self._cut(i, one.part, gather) for one in overlaps if one.peer != self.rank}
            for overlaps in (slab.owners(self.rank), slab.holders(self.rank))
        )
        self._exchange(i, received, sent, "gathering between the nodes")

    def send_forward(self, i: int) -> None:
        self.wait(i)
        mates = [mate for mate in self._mates if mate != self.rank]
        received = {mate: self.part(i, mate) for mate in mates}
        sent = dict.fromkeys(mates, self.part(i, self.rank))
        self._exchange(i, received, sent, "gathering inside the node")

    def _runs(self, slab: Slab, owners: Sequence[Overlap]) -> list[tuple[int, Part]]:
        """Return (number of the first group in the call, part) for the owners, joined where one kernel can do two."""
        runs: list[tuple[int, Part]] = []
        numbered = self._plan.reduce.stochastic or self._meter is not None
        for _, owner, (first, last) in owners:
            number = slab.numbers[owner] + first - slab.own(owner)[0]
            if runs:
                before, (begin, end) = runs[-1]
                if end == first and (number == before + end - begin or not numbered):
                    runs[-1] = before, (begin, last)
                    continue
            runs.append((number, (first, last)))
        return runs

    def _outbox(self, i: int) -> Tensor:
        return self._arrived(i, _length(self._slabs[i].own(self.rank)) * self._plan.reduce.record_bytes)

    def _cut(self, i: int, part: Part, codec: Format) -> Tensor:
        first, last = part
        return self._whole(i, last * codec.record_bytes)[0, first * codec.record_bytes :]

    def _exchange(self, i: int, received: dict[int, Tensor], sent: dict[int, Tensor], doing: str) -> None:
        nothing = self._whole.buffer[:0]
        world = range(sum(map(len, self.nodes)))
        self._pending[i] = transport.exchange(
            [received.get(rank, nothing) for rank in world],
            [sent.get(rank, nothing) for rank in world],
            self._label,
            f"{doing}, slab {i + 1} of {len(self._slabs)}",
        )
