"""All-gather of weights by their differences (SDP4Bit: arXiv 2410.15526, section 3.1).

The owner of a shard has its exact values, the master. All ranks hold the same rounded weights.

    owner       payload = encode(master - held)
    every rank  held = held + decode(payload), in float32, rounded to the dtype of the weights

The error of a gather is part of the next difference, so errors do not add up. Every rank, the owner too, adds the same
bytes to the same weights, so all hold the same bits. A difference of zero adds zero.

Other code may write to the weights: a checkpoint, averaged weights, a merged adapter, a step that one rank lost. So all
ranks keep a sum over the weights' bits after a gather (`HeldWeights`) and compare it before the next one. If it has
changed, the next gather sends whole values, once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives import messages, replicated_params, transport
from flash_allreduce_plugin.collectives.replicated_params import Range
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import counters

# Reasons to send whole values: keys of counters.
FIRST = "first gather of parameters"
CHANGED = "parameters changed"

_ROW = 64  # words that are summed before they are multiplied
_LAYOUT = "<QB"
# The state of a rank's weights: not known; unchanged since the last gather; changed.
_NONE, _SAME, _OTHER = range(3)


class HeldWeights:
    """The state of the weights of one buffer that is gathered by differences.

    The buffer's owner keeps one from gather to gather. It holds 8 bytes and no weights.
    """

    __slots__ = ("_asked", "_finite", "digest")

    def __init__(self) -> None:
        #: digest of the weights after the last gather, 63 bits; None: not known
        self.digest: int | None = None
        self._asked = False
        self._finite: list[Tensor] = []

    def agree(self, weights: Tensor, label: Label) -> str | None:
        """Return None if the weights are equal and unchanged on all ranks, else the reason to send whole values.

        Collective: all ranks get the same answer. Raises CollectiveError if a peer failed or the group's timeout
        passed.
        """
        self._asked = True
        digest = digest_of(weights)
        known = _NONE if self.digest is None else _SAME
        if known == _SAME and (digest != self.digest or not all(map(bool, self._finite))):
            known = _OTHER
        self._finite.clear()
        mine = struct.pack(_LAYOUT, digest, known)
        ranks = messages.gather(mine, label, weights.device, "comparing the weights that they hold")
        if known == _SAME and len(set(ranks)) == 1:
            return None
        self.digest = None
        return FIRST if any(struct.unpack(_LAYOUT, told)[1] == _NONE for told in ranks) else CHANGED

    def gathered(self, weights: Tensor) -> None:
        """Note weights [numel], equal on all ranks after a gather of differences or whole values. Waits for a GPU."""
        if self._asked:
            self.digest, self._asked = digest_of(weights), False
        else:  # a gather in full precision, as in a warm-up: the next quantized one asks all ranks
            self.digest = None

    def encode(self, master: Tensor, held: Tensor, payload: Tensor, wire: Format, draw: Draw) -> None:
        """Encode master - held, both [1, numel], into payload [1, bytes].

        A difference that is not finite would stay in the weights: the next gather then sends whole values.
        """
        finite = rows.encode_difference(master, held, payload, wire, draw)
        if finite.is_cuda or not finite:
            self._finite.append(finite)


def digest_of(weights: Tensor) -> int:
    """Return a sum over the bits of the weights, in row-major order: 63 bits, equal for equal bits.

    A changed value changes the sum. So do values that changed places, unless they stay within 512 bytes.
    """
    bits = rows.flat(weights).view(torch.uint8)
    if bits.storage_offset() % 8:
        bits = bits.clone()
    whole = len(bits) // (8 * _ROW) * 8 * _ROW
    sums = bits[:whole].view(torch.int64).view(-1, _ROW).sum(1)
    rest = bits[whole:].to(torch.int64) << 8
    # Times odd numbers: no bit of a sum is lost.
    for each in (sums, rest):
        each *= torch.arange(len(each), device=each.device).mul_(2).add_(1)
    digest = int(sums.sum() + rest.sum()) % (1 << 64)
    return (digest ^ digest >> 63) % (
        1 << 63
    )  # the highest bit, maybe the only one that a sign changes, moves to the lowest


class Exact:
    """Ranges of weights that are sent as values: those of parameters with copies on other ranks.

    Copies stay equal because they get the same bits. The rounding of a difference depends on its neighbours, which
    differ between tensor-parallel ranks (replicated_params.py).
    """

    def __init__(
        self, ranges: Sequence[Range], weights: Tensor, master: Tensor, sizes: Sequence[int], label: Label, site: Site
    ) -> None:
        """ranges: ascending, of weights [numel]. master: this rank's part. sizes: elements of each rank's part."""
        rank = label.group.rank()
        starts = list(accumulate(sizes, initial=0))
        counts = [
            replicated_params.overlap(ranges, start, start + size) for start, size in zip(starts, sizes, strict=False)
        ]
        mine = [
            master[max(first, starts[rank]) - starts[rank] : min(last, starts[rank + 1]) - starts[rank]]
            for first, last in ranges
            if first < starts[rank + 1] and last > starts[rank]
        ]
        sent = torch.cat([*mine, master[:0]]).to(weights.dtype)
        self._ranges, self._values = ranges, weights.new_empty(sum(counts))
        # The call of the gather counts the bytes that it replaces.
        bytes_ = counts[rank] * (len(sizes) - 1) * weights.element_size()
        counters.record_full_precision(site, replicated_params.REASON, bytes_, instead_of=0)
        self._pending = transport.all_gather(self._values, sent, label, "gathering copies exactly", counts)

    def write(self, weights: Tensor) -> None:
        """Wait, and write the values into the weights."""
        self._pending.wait()
        at = 0
        for first, last in self._ranges:
            weights[first:last] = self._values[at : at + last - first]
            at += last - first
