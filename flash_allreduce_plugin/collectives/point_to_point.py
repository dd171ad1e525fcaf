"""A send of one tensor from one rank to another, quantized or in full precision.

    sender      header | encode piece 1 | encode piece 2 | ...
    receiver    header | piece 1 -> decode | piece 2 -> decode | ...        one rounding

The receiver sends no reply. Each end computes the pieces from its own tensor and configuration, and posts all of them
when the call starts. Quantized, a piece is a chunk of whole groups; in full precision, the tensor is one piece.

The header detects ends that differ. Its 256 bytes hold a digest of all facts that must be equal at both ends, and the
same facts with the shape in words. The receiver compares the digests. If they differ, its error names both ends, and it
leaves the sentence in the group's store, where the sender finds it after its own wait has failed. Over messages that
wait fails for all sizes, because the digest is in the tag of every piece (transport.between_two). The receiver uses its
own sizes, never those of a header.

Over messages (gloo) every message has a header. With other backends a header blocks the host, so only the first message
of a kind between two ranks has one; later mismatches depend on the backend.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import WIRE_VERSION, Draw, Format
from flash_allreduce_plugin.collectives import missing_ranks, transport
from flash_allreduce_plugin.collectives.chunks import Chunks, whole_groups
from flash_allreduce_plugin.collectives.meter import Meter
from flash_allreduce_plugin.collectives.transport import BufferPool, Label, Pending, Post
from flash_allreduce_plugin.collectives.work import Stage
from flash_allreduce_plugin.errors import CollectiveError, MismatchError
from flash_allreduce_plugin.policy import FullPrecision, Plan

HEADER_BYTES, _DIGEST_BYTES = 256, 16
# Nothing hides the encoding of the first piece and the decoding of the last. So a message has this many pieces, unless
# they would be smaller than this. At 1 Gbit/s 8 M values in 4 bits take 38.1 ms in 8 pieces and 39.9 ms in 4; 139.1 in
# bf16.
_PIECES, _LEAST_BYTES = 8, 1 << 17


@dataclass(frozen=True, slots=True)
class Ends:
    """The facts of one end of a message that must be equal at the other end.

    Args:
        numel, dtype: of the tensor.
        plan: a Plan, of which the gather half and chunk_bytes must be equal, or the reason for full precision.
        shape: may differ; an error about another fact names it.
    """

    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    plan: Plan | FullPrecision

    def text(self) -> str:
        """Return the facts in words (ASCII) that fit a header."""
        if isinstance(self.plan, Plan):
            how = f"in {_described(self.plan.gather)}, chunks of {self.plan.chunk_bytes} bytes, wire {WIRE_VERSION}"
        else:
            how = f"in full precision ({self.plan.reason})"
        shape = str(list(self.shape)) if len(self.shape) <= 8 else f"{self.numel} elements"
        return f"{str(self.dtype).removeprefix('torch.')} {shape} {how}"[: HEADER_BYTES - _DIGEST_BYTES]


@lru_cache(1024)
def header(ends: Ends) -> bytes:
    """Return HEADER_BYTES bytes: the digest of the facts, and their text."""
    how = (WIRE_VERSION, ends.plan.gather, ends.plan.chunk_bytes) if isinstance(ends.plan, Plan) else None
    digest = hashlib.sha256(repr((ends.numel, ends.dtype, how)).encode()).digest()
    return (digest[:_DIGEST_BYTES] + ends.text().encode()).ljust(HEADER_BYTES, b"\0")


class Message:
    """One end of a message: post it, then wait for it. Nothing else may touch the tensor between.

    Args:
        tensor: 1-D and contiguous; a receiver writes into it.
        ends: the facts of this end.
        outgoing: True if this rank sends.
        peer: the other end's rank in the group. None, for a receiver: any sender; holds its rank afterwards.
        tag: the caller's, equal at both ends.
        headed: True if the message has a header.
        key: of the random numbers, if the sender rounds stochastically.
        meter: measures the sender's error.
    """

    def __init__(
        self,
        tensor: Tensor,
        ends: Ends,
        label: Label,
        *,
        outgoing: bool,
        peer: int | None,
        tag: int,
        headed: bool,
        key: int = 0,
        meter: Meter | None = None,
    ) -> None:
        self.label, self.peer, self.outgoing, self.headed, self.meter = label, peer, outgoing, headed, meter
        self._tensor, self._ends, self._tag, self._key = tensor, ends, tag, key
        self._digest = header(ends)[:_DIGEST_BYTES]
        self._header: Tensor | None = None
        self._header_pending: Pending | None = None
        self._pieces_pending: list[Pending] = []
        self._chunks: list[tuple[Tensor, Tensor]] = []  # elements, payload
        self._buffer: Tensor | None = None

    def post(self, pool: BufferPool, issue: Callable[[Post, Label], Pending] | None = None) -> None:
        """Post the sends or receives. issue: posts a piece; None: transport.post."""
        issue = issue or transport.post
        if self.headed:
            device = self._tensor.device
            if self.outgoing:
                self._header = torch.frombuffer(bytearray(header(self._ends)), dtype=torch.uint8).to(device)
            else:
                self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)
            self._header_pending = issue(self._piece(self._header, "the header", None), self.label)
        if self.peer is not None:
            self._pieces_pending = [issue(piece, self.label) for piece in self._pieces(pool)]

    def finish(self, pool: BufferPool) -> None:
        """Wait for all pieces. A receiver has the tensor afterwards.

        Raises:
            MismatchError: the other end has another number of elements, dtype or configuration. The receiver raises it
                after the header, the sender after its wait has failed.
            CollectiveError: the other end failed or the group's timeout passed.
        """
        if self.outgoing:
            self._finish_sending()
        else:
            self._finish_receiving(pool)
        if self._buffer is not None:
            pool.give(self._buffer)

    def _finish_sending(self) -> None:
        assert self.peer is not None
        try:
            for pending in filter(None, (self._header_pending, *self._pieces_pending)):
                pending.wait()
        except CollectiveError as error:
            told = missing_ranks.left(self.label.group, _refusal(self.label.group.rank(), self.peer))
            if told is not None:
                raise MismatchError(_printable(told)) from error
            raise

    def _finish_receiving(self, pool: BufferPool) -> None:
        if self._header_pending is not None and self._header is not None:
            self._header_pending.wait()
            anybody = self.peer is None
            if anybody:
                self.peer = self._header_pending.source()
            self._compare(bytes(self._header.tolist()))
            if anybody:
                self._pieces_pending = [transport.post(piece, self.label) for piece in self._pieces(pool)]
        for i, pending in enumerate(self._pieces_pending):
            pending.wait()
            if isinstance(self._ends.plan, Plan):
                elements, payload = self._chunks[i]
                rows.decode(payload.view(1, -1), elements.view(1, -1), self._ends.plan.gather)

    def _pieces(self, pool: BufferPool) -> Iterator[Post]:
        """Yield the pieces in order. The sender encodes a chunk while the chunks before it are on the wire."""
        numel, plan = self._tensor.numel(), self._ends.plan
        if not numel:
            return
        if not isinstance(plan, Plan):
            payload = self._tensor.view(torch.uint8)
            yield self._piece(payload, "the tensor", self._digest)
            return
        wire = plan.gather
        groups = wire.groups(numel)
        size = groups
        if self.label.by_messages(self._tensor.device):
            nbytes = min(plan.chunk_bytes, max(_LEAST_BYTES, wire.payload_bytes(numel) // _PIECES))
            size = nbytes // wire.record_bytes
        chunks = Chunks.cut(groups, size, whole_groups(wire))
        self._buffer = pool.take(wire.payload_bytes(numel))
        parts = self._tensor.split(chunks.size * wire.group_size)
        self._chunks = list(zip(parts, self._buffer.split(chunks.size * wire.record_bytes), strict=True))
        for i, (elements, payload) in enumerate(self._chunks):
            if self.outgoing:
                row, encoded = elements.view(1, -1), payload.view(1, -1)
                rows.encode(row, encoded, wire, Draw(self._key, i * chunks.size))
                if self.meter is not None:
                    self.meter.gathered(row, encoded, wire)
            yield self._piece(payload, f"chunk {i + 1} of {chunks.count}", self._digest)

    def _piece(self, part: Tensor, what: str, digest: bytes | None) -> Post:
        """Return one piece. digest: as for transport.between_two."""
        where = "anybody" if self.peer is None else f"rank {self.peer}"
        doing = f"sending {what} to {where}" if self.outgoing else f"receiving {what} from {where}"
        tag = transport.between_two(self._tag, digest) if self.label.by_messages(part.device) else self._tag
        return Post(part, self.outgoing, self.peer, tag, doing)

    def _compare(self, said: bytes) -> None:
        if said[:_DIGEST_BYTES] == self._digest:
            return
        theirs = _printable(said[_DIGEST_BYTES:].rstrip(b"\0").decode("latin-1"))
        assert self.peer is not None
        group, rank = self.label.group, self.label.group.rank()
        message = (
            f"recv at site {self.label.site!r}, tag {self._tag}: rank {self.peer} sends {theirs}, and rank {rank} "
            f"expects {self._ends.text()}. Both ends need the same number of elements, dtype and configuration."
        )
        missing_ranks.leave(group, _refusal(self.peer, rank), message)
        raise MismatchError(message)


def exchange(messages: Sequence[Message], pool: Callable[[], BufferPool]) -> Iterator[Stage]:
    """Post the messages, yield, and wait for them. A backend that batches sends and receives launches them as one.

    pool: returns the buffers of the current stream.
    """
    buffers = pool()
    if len(messages) == 1:
        messages[0].post(buffers)
    else:
        batch = transport.Batch()
        for message in messages:
            message.post(buffers, batch.add)
        batch.post(messages[0].label)
    yield Stage.PROGRESS
    for message in messages:
        message.finish(buffers)


def _refusal(sender: int, receiver: int) -> str:
    """Return the key in the group's store of a receiver's sentence about a message."""
    return f"refused/{sender}/{receiver}"


def _printable(text: str) -> str:
    """Return a peer's text for display: ASCII without control characters."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def _described(wire: Format) -> str:
    options = [one.name for one in fields(wire) if getattr(wire, one.name) is True]
    return ", ".join([f"{wire.bits} bits, groups of {wire.group_size}", *options])
