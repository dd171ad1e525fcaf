"""The error of a call from what each rank has at hand: quality_measure "local" (docs/guard.md).

A rank decodes what it encodes and compares. Where the errors of different ranks have nothing to do with each other,

    noise   = factor^2 x sum of |x - q|^2 before the sum + sum of |s - t|^2 after it
    signal  = sum of |s|^2 + factor^2 x sum of (|x|^2 - |q|^2)

x is what a rank encodes, q what that decodes to; s is a part of the sum, times factor, as its owner has it in float32,
and t what that decodes to. Every term is known to one rank. The last one takes off the signal what the errors have
added to the sums, or puts back what they have taken, where small values become zeros. All in float64: squares of 1e-30
are none in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_allreduce_plugin import codec
from flash_allreduce_plugin.wire import Codec

_PIECE = 1 << 18  # elements that are decoded at a time: they stay in the cache


class Meter:
    """This rank's share of the signal and the noise of one call."""

    def __init__(self, factor: float, device: torch.device) -> None:
        """factor: what the sum over the ranks is multiplied with."""
        self._weight = factor * factor
        self._signal, self._faded, self._before, self._after = torch.zeros(4, dtype=torch.float64, device=device)

    def encoded(self, part: Tensor, payload: Tensor, wire: Codec) -> None:
        """part [rows, numel], of any dtype, goes as payload [rows, bytes] to be summed."""
        lost, faded = _lost(part, payload, wire)
        self._before += lost
        self._faded += faded

    def summed_inside(self, payloads: Tensor, payload: Tensor, wide: Codec, reduce: Codec) -> None:
        """The sum of payloads [ranks, bytes], over a node, goes as payload [bytes] to be summed again."""
        self.encoded(_sum(payloads, payload, wide, reduce, 1.0), payload.view(1, -1), reduce)

    def summed(self, payloads: Tensor, payload: Tensor, reduce: Codec, gather: Codec, factor: float) -> None:
        """The sum of payloads [ranks, bytes], times factor, goes as payload [bytes] to all ranks."""
        sums = _sum(payloads, payload, reduce, gather, factor)
        self._signal += _energy(sums)
        self._after += _lost(sums, payload.view(1, -1), gather)[0]

    def gathered(self, part: Tensor, payload: Tensor, wire: Codec) -> None:
        """part [1, numel], of any dtype, goes as payload [1, bytes] to all ranks."""
        self._signal += _energy(part)
        self._after += _lost(part, payload, wire)[0]

    def result(self, part: Tensor) -> None:
        """A part of the result that this rank alone tells of."""
        self._signal += _energy(part)

    def would_lose(self, part: Tensor, wire: Codec, *, summed: bool) -> None:
        """part [numel] is not encoded, but would be; summed: by all ranks, and then summed."""
        for piece in part.split(_PIECE):
            if piece.numel():
                payload = torch.empty(1, wire.payload_bytes(len(piece)), dtype=torch.uint8, device=piece.device)
                codec.encode_rows(piece.view(1, -1), payload, wire)
                lost, _ = _lost(piece.view(1, -1), payload, wire)
                self._after += lost * (self._weight if summed else 1.0)

    def read(self) -> tuple[float, float]:
        """Signal and noise; of all ranks together they are those of the call. Waits for a GPU."""
        signal, faded, before, after = torch.stack([self._signal, self._faded, self._before, self._after]).tolist()
        return signal + self._weight * faded, self._weight * before + after


def _energy(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _lost(part: Tensor, payload: Tensor, wire: Codec) -> tuple[Tensor, Tensor]:
    """|x - q|^2 and |x|^2 - |q|^2 of part [rows, numel] and what payload [rows, bytes] stands for."""
    rows, numel = part.shape
    step = max(1, _PIECE // (rows * wire.group_size))  # groups
    lost, faded = torch.zeros(2, dtype=torch.float64, device=part.device)
    for first in range(0, wire.groups(numel), step):
        piece = part[:, first * wire.group_size : (first + step) * wire.group_size]
        decoded = torch.empty(piece.shape, dtype=torch.float32, device=part.device)
        codec.decode_rows(payload[:, first * wire.record_bytes : (first + step) * wire.record_bytes], decoded, wire)
        faded += _energy(piece) - _energy(decoded)
        lost += _energy(decoded.sub_(piece))
    return lost, faded


def _sum(payloads: Tensor, payload: Tensor, reduce: Codec, gather: Codec, factor: float) -> Tensor:
    """[1, numel] in whole groups, float32: what went as payload [bytes]."""
    groups = payload.numel() // gather.record_bytes
    sums = torch.empty(groups * gather.group_size, dtype=torch.float32, device=payload.device)
    codec.decode_sum(payloads, sums, reduce, factor)
    return sums.view(1, -1)
