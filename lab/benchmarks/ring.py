"""A quantized ring all-reduce, to compare the two-step one with (arXiv 2412.04964, table of the two).

N-1 hops reduce: a rank decodes the partial sum that comes from its left, adds its own shard, encodes the new sum and
sends it to its right. N-1 hops gather: the encoded sums pass around unchanged. Every element of an N-rank ring is
rounded N times, in the two-step form twice.

Codec and chunks are the same: each shard has as many pieces as the two-step form has chunks, so that the codec of one
hides behind the wire of another. All receives are posted before the first send.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format

_TAGS = 1 << 29


class RingAllReduce:
    """The sum over a gloo group of tensors of one size, in place; the buffers are kept from call to call."""

    def __init__(self, numel: int, wire: Format, chunk_bytes: int, group: dist.ProcessGroup) -> None:
        self.group, self.world, self.rank = group, group.size(), group.rank()
        self.wire = wire
        groups = wire.groups(numel)
        self.shard = -(-groups // self.world)  # groups of a shard; the last ones may have fewer
        pieces = -(-groups * wire.record_bytes // chunk_bytes)
        self.piece = -(-self.shard // pieces)
        self.pieces = -(-self.shard // self.piece)
        slot = self.pieces, self.piece * wire.record_bytes
        self.received = torch.empty(self.world - 1, *slot, dtype=torch.uint8)
        self.sent = torch.empty_like(self.received)
        self.sums = torch.empty(self.world, *slot, dtype=torch.uint8)
        self.sum = torch.empty(self.piece * wire.group_size)
        self.steps = 0  # hops of the last call
        self.bytes_sent = 0  # of the last call

    def __call__(self, tensor: Tensor) -> None:
        """tensor: 1-D, contiguous, of `numel` elements; every rank ends with the same bits."""
        world, rank, last = self.world, self.rank, self.world - 1
        self.steps, self.bytes_sent = 0, 0
        self.sends: list[Any] = []
        reduced = [self._receive(self.received[hop], tensor, rank - hop - 1, hop) for hop in range(last)]
        slots = [self.sums[(rank - hop) % world] for hop in range(world)]
        gathered = [self._receive(slots[hop], tensor, rank - hop, last + hop) for hop in range(last)]
        for hop in range(world):
            self.steps += hop < last
            for i, part in self._parts(tensor, rank - hop):
                total = part.view(1, -1)
                if hop:
                    reduced[hop - 1][i].wait()
                    total = self.sum[: len(part)].view(1, -1)
                    rows.decode(self._payload(self.received[hop - 1], i, part), total, self.wire)
                    total.add_(part)
                out = self._payload(self.sent[hop] if hop < last else slots[last], i, part)
                first = (rank - hop) % world * self.shard + i * self.piece
                rows.encode(total, out, self.wire, Draw(rows.draw_key(rank, hop), first))
                self._send(out, hop, i)
                if hop == last:  # the sum's owner decodes its own payload
                    rows.decode(out, part.view(1, -1), self.wire)
        for hop in range(last):
            self.steps += 1
            for i, part in self._parts(tensor, rank - hop):
                gathered[hop][i].wait()
                payload = self._payload(slots[hop], i, part)
                if hop < last - 1:
                    self._send(payload, last + hop + 1, i)
                rows.decode(payload, part.view(1, -1), self.wire)
        for send in self.sends:
            send.wait()

    def _parts(self, tensor: Tensor, shard: int) -> list[tuple[int, Tensor]]:
        """The pieces of a shard that are not empty, with their numbers."""
        size = self.wire.group_size
        first = shard % self.world * self.shard
        starts = [first + i * self.piece for i in range(self.pieces)]
        parts = [tensor[start * size : min(start + self.piece, first + self.shard) * size] for start in starts]
        return [(i, part) for i, part in enumerate(parts) if len(part)]

    def _payload(self, slot: Tensor, i: int, part: Tensor) -> Tensor:
        """[1, bytes]"""
        return slot[i : i + 1, : self.wire.payload_bytes(len(part))]

    def _receive(self, slot: Tensor, tensor: Tensor, shard: int, hop: int) -> dict[int, Any]:
        left = (self.rank - 1) % self.world
        return {
            i: dist.irecv(self._payload(slot, i, part)[0], group=self.group, group_src=left, tag=self._tag(hop, i))
            for i, part in self._parts(tensor, shard)
        }

    def _send(self, payload: Tensor, hop: int, i: int) -> None:
        right = (self.rank + 1) % self.world
        self.bytes_sent += payload.numel()
        self.sends.append(dist.isend(payload[0], group=self.group, group_dst=right, tag=self._tag(hop, i)))

    def _tag(self, hop: int, i: int) -> int:
        return _TAGS + hop * self.pieces + i


def sent_bytes(numel: int, wire: Format, world_size: int) -> float:
    """By the formula, 2 M (N-1)/N at the codec's bits: the same for a ring and for two steps."""
    return 2 * wire.payload_bytes(numel) * (world_size - 1) / world_size
