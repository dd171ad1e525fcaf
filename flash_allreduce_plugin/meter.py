"""The error of a call from what each rank has at hand: quality_measure "local" (docs/guard.md).

A rank decodes what it encodes and compares. Errors of different ranks add up like independent noise, so over the ranks

    noise   = factor^2 x sum of what every rank lost before the sum + sum of what the owners lost after it
    signal  = sum of squares of the sums that arrive, less the noise in them

and both are sums of numbers that single ranks know. In float64: squares of 1e-30 are none in float32.
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
        self._signal, self._before, self._after = torch.zeros(3, dtype=torch.float64, device=device)

    def encoded(self, part: Tensor, payload: Tensor, wire: Codec) -> None:
        """part [rows, numel], of any dtype, goes as payload [rows, bytes] to be summed."""
        self._before += _lost(part, payload, wire)

    def summed_inside(self, payloads: Tensor, payload: Tensor, wide: Codec, reduce: Codec) -> None:
        """The sum of payloads [ranks, bytes], over a node, goes as payload [bytes] to be summed again."""
        self._before += _lost(_sum(payloads, payload, wide, reduce, 1.0), payload.view(1, -1), reduce)

    def summed(self, payloads: Tensor, payload: Tensor, reduce: Codec, gather: Codec, factor: float) -> None:
        """The sum of payloads [ranks, bytes], times factor, goes as payload [bytes] to all ranks."""
        sums = _sum(payloads, payload, reduce, gather, factor)
        self._signal += _energy(sums)
        self._after += _lost(sums, payload.view(1, -1), gather)

    def gathered(self, part: Tensor, payload: Tensor, wire: Codec) -> None:
        """part [1, numel], of any dtype, goes as payload [1, bytes] to all ranks."""
        self._signal += _energy(part)
        self._after += _lost(part, payload, wire)

    def result(self, part: Tensor) -> None:
        """A part of the result that this rank alone tells of."""
        self._signal += _energy(part)

    def would_lose(self, part: Tensor, wire: Codec, *, summed: bool, times: int = 1) -> None:
        """part [numel] is not encoded, but would be, so many times; summed: by all ranks, and then summed."""
        for piece in part.split(_PIECE):
            if piece.numel():
                payload = torch.empty(1, wire.payload_bytes(len(piece)), dtype=torch.uint8, device=piece.device)
                codec.encode_rows(piece.view(1, -1), payload, wire)
                self._after += _lost(piece.view(1, -1), payload, wire) * (times * (self._weight if summed else 1.0))

    def read(self) -> tuple[float, float]:
        """Signal and noise; of all ranks together they are those of the call. Waits for a GPU."""
        signal, before, after = torch.stack([self._signal, self._before, self._after]).tolist()
        return signal - self._weight * before, self._weight * before + after


def _energy(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _lost(part: Tensor, payload: Tensor, wire: Codec) -> Tensor:
    """Sum of squares of part [rows, numel] less what payload [rows, bytes] stands for."""
    rows, numel = part.shape
    step = max(1, _PIECE // (rows * wire.group_size))  # groups
    lost = torch.zeros((), dtype=torch.float64, device=part.device)
    for first in range(0, wire.groups(numel), step):
        piece = part[:, first * wire.group_size : (first + step) * wire.group_size]
        decoded = torch.empty(piece.shape, dtype=torch.float32, device=part.device)
        codec.decode_rows(payload[:, first * wire.record_bytes : (first + step) * wire.record_bytes], decoded, wire)
        lost += _energy(decoded.sub_(piece))
    return lost


def _sum(payloads: Tensor, payload: Tensor, reduce: Codec, gather: Codec, factor: float) -> Tensor:
    """[1, numel] in whole groups, float32: what went as payload [bytes]."""
    groups = payload.numel() // gather.record_bytes
    sums = torch.empty(groups * gather.group_size, dtype=torch.float32, device=payload.device)
    codec.decode_sum(payloads, sums, reduce, factor)
    return sums.view(1, -1)
