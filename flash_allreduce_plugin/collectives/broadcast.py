"""The quantized broadcast: the root encodes once, and every rank decodes the same bytes.

    root: encode -> a part to each of the others -> each passes its part on to the others -> decode     one rounding

For any number of ranks the root sends every byte once, and each other rank sends (ranks - 2) / (ranks - 1) of them. So
over messages no link carries more than the payload. Backends without messages use their own broadcast. The root decodes
its payload too: all ranks end with the same bits.

broadcast is a generator as in flat.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.chunks import Chunks, aligned, whole_groups
from flash_allreduce_plugin.collectives.meter import Meter
from flash_allreduce_plugin.collectives.transport import BufferPool, Label, Pending
from flash_allreduce_plugin.collectives.work import Stage
from flash_allreduce_plugin.policy import Plan


def broadcast(
    tensor: Tensor,
    root: int,
    plan: Plan,
    label: Label,
    pool: BufferPool,
    key: int = 0,
    *,
    meter: Meter | None = None,
) -> Iterator[Stage]:
    """Replace tensor [numel], 1-D and contiguous, on every rank by the decoded payload of the root's, by plan.gather.

    root: rank in the group. key, meter: as in flat.py; only the root measures.
    """
    wire, world, rank = plan.gather, label.group.size(), label.group.rank()
    by_messages = label.by_messages(tensor.device)
    chunks = Chunks.cut(wire.groups(tensor.numel()), plan.chunk_bytes // wire.record_bytes, whole_groups(wire))
    passed_on = by_messages and world > 2
    label.reserve(chunks.count * (2 if passed_on else 1))
    slot, step = chunks.size * wire.record_bytes, chunks.size * wire.group_size
    buffer = pool.take(chunks.window * slot)
    key = rows.draw_key(key, 0)
    arriving: deque[tuple[int, Tensor, Pending]] = deque()
    passing: deque[tuple[int, Tensor, Pending]] = deque()

    def elements(i: int) -> Tensor:
        return tensor[i * step : (i + 1) * step].view(1, -1)

    def send(i: int) -> None:
        start = i % chunks.window * slot
        payload = buffer[start : start + wire.payload_bytes(elements(i).shape[1])]
        if rank == root:
            rows.encode(elements(i), payload.view(1, -1), wire, Draw(key, chunks[i][0]))
            if meter is not None:
                meter.gathered(elements(i), payload.view(1, -1), wire)
        doing = f"broadcasting chunk {i + 1} of {chunks.count}"
        if by_messages:
            parts, none = _parts(payload, root, world), [payload[:0]] * world
            own = [payload[:0]] * root + [parts[rank]] + [payload[:0]] * (world - root - 1)
            pending = transport.exchange(own, parts if rank == root else none, label, doing)
        else:
            pending = transport.broadcast(payload, root, label, doing)
        arriving.append((i, payload, pending))

    def pass_on(_: int) -> None:
        i, payload, pending = arriving.popleft()
        pending.wait()
        if passed_on:
            parts, none = _parts(payload, root, world), [payload[:0]] * world
            own = [payload[:0] if other == root else parts[rank] for other in range(world)]
            doing = f"passing on chunk {i + 1} of {chunks.count}"
            pending = transport.exchange(none if rank == root else parts, own, label, doing)
        passing.append((i, payload, pending))

    def write() -> None:
        i, payload, pending = passing.popleft()
        if passed_on:
            pending.wait()
        rows.decode(payload.view(1, -1), elements(i), wire)

    for i in range(chunks.window):
        send(i)
    yield Stage.PROGRESS
    for i in range(chunks.count):
        pass_on(i)
        if i > 0:  # decode the previous chunk while this one is passed on
            write()
            if i - 1 + chunks.window < chunks.count:
                send(i - 1 + chunks.window)
    write()
    pool.give(buffer)


def _parts(payload: Tensor, root: int, world: int) -> list[Tensor]:
    """Cut the payload into one part a rank. The root's part is empty."""
    size = aligned(-(-len(payload) // (world - 1)))
    others = iter(range(0, (world - 1) * size, size))
    return [payload[:0] if rank == root else payload[(start := next(others)) : start + size] for rank in range(world)]
