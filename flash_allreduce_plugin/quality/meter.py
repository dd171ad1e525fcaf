"""The error of a call from what each rank has at hand: quality_measure "local".

How-to: docs/accuracy_controls.md#what-is-measured.

A rank decodes what it encodes and compares. Where the errors of different ranks have nothing to do with each other,

    noise   = factor^2 x sum of |x - q|^2 before the sum + sum of |s - t|^2 after it
    signal  = sum of |s|^2 + factor^2 x sum of (|x|^2 - |q|^2)

A rank encodes x, which decodes to q. s is a part of the sum, times factor, as its owner has it in float32, and decodes
to t. Every term is known to one rank. The last one corrects the signal: it takes off what the errors have added to the
sums, and puts back what they have taken away where small values become zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Format

# Elements that are compared at a time: on a CPU they stay in the cache, and a GPU wants few launches.
_PIECE, _PIECE_OF_A_GPU = 1 << 16, 1 << 24
# Between these a norm in float32 is the sum of squares that are normal numbers, of up to _PIECE elements.
_LEAST, _GREATEST = 1e-14, 1e18


class Meter:
    """This rank's share of the signal and the noise of one call."""

    def __init__(self, factor: float, device: torch.device) -> None:
        """factor: the sum over the ranks is multiplied with it."""
        self._weight = factor * factor
        self._signal, self._faded, self._before, self._after = torch.zeros(4, dtype=torch.float64, device=device)

    def encoded(self, part: Tensor, payload: Tensor, wire: Format) -> None:
        """part [rows, numel], of any dtype, goes as payload [rows, bytes] to be summed."""
        for piece, bytes_ in _pieces(part, payload, wire):
            self._encoded(piece, bytes_, wire)

    def summed_inside(self, payloads: Tensor, payload: Tensor, wide: Format, reduce: Format) -> None:
        """The sum of payloads [ranks, bytes], over a node, goes as payload [bytes] to be summed again."""
        for piece, bytes_ in _sums(payloads, payload, wide, reduce, 1.0):
            self._encoded(piece, bytes_, reduce)

    def summed(self, payloads: Tensor, payload: Tensor, reduce: Format, gather: Format, factor: float) -> None:
        """The sum of payloads [ranks, bytes], times factor, goes as payload [bytes] to all ranks."""
        for piece, bytes_ in _sums(payloads, payload, reduce, gather, factor):
            self._arrives(piece, bytes_, gather)

    def gathered(self, part: Tensor, payload: Tensor, wire: Format) -> None:
        """part [1, numel], of any dtype, goes as payload [1, bytes] to all ranks."""
        for piece, bytes_ in _pieces(part, payload, wire):
            self._arrives(piece, bytes_, wire)

    def held(self, master: Tensor, weights: Tensor) -> None:
        """master [numel] is exact, and what all ranks hold of it is weights [numel]."""
        for exact, piece in zip(master.split(_piece(master)), weights.split(_piece(master)), strict=True):
            exact = exact.float()
            self._signal += _energy(exact)
            self._after += _energy(exact - piece)

    def result(self, part: Tensor) -> None:
        """A part [numel] of the result that no other rank measures."""
        for piece in part.split(_piece(part)):
            self._signal += _energy(piece.float())

    def would_lose(self, part: Tensor, wire: Format, *, summed: bool) -> None:
        """part [numel] adds the error that encoding it would make. summed: on all ranks, before the sum."""
        for piece in part.split(_piece(part)):
            if piece.numel():
                row = piece.view(1, -1)
                payload = torch.empty(1, wire.payload_bytes(len(piece)), dtype=torch.uint8, device=piece.device)
                rows.encode(row, payload, wire)
                self._after += _energy(_decoded(row, payload, wire).sub_(row)) * (self._weight if summed else 1.0)

    def read(self) -> tuple[float, float]:
        """Signal and noise; of all ranks together they are those of the call. Waits for a GPU."""
        signal, faded, before, after = torch.stack([self._signal, self._faded, self._before, self._after]).tolist()
        return signal + self._weight * faded, self._weight * before + after

    def _encoded(self, part: Tensor, payload: Tensor, wire: Format) -> None:
        decoded = _decoded(part, payload, wire)
        self._faded += _energy(part) - _energy(decoded)
        self._before += _energy(decoded.sub_(part))

    def _arrives(self, part: Tensor, payload: Tensor, wire: Format) -> None:
        self._signal += _energy(part)
        self._after += _energy(_decoded(part, payload, wire).sub_(part))


def _piece(x: Tensor) -> int:
    return _PIECE_OF_A_GPU if x.is_cuda else _PIECE


def _energy(x: Tensor) -> Tensor | float:
    """Sum of squares of up to a piece of float32 elements, of any size."""
    if x.is_cuda:  # where looking at a number is waiting for it
        return torch.linalg.vector_norm(x, dtype=torch.float64).square()
    norm = float(torch.linalg.vector_norm(x))
    if not _LEAST < norm < _GREATEST:
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return norm * norm


def _decoded(like: Tensor, payload: Tensor, wire: Format) -> Tensor:
    decoded = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    rows.decode(payload, decoded, wire)
    return decoded


def _pieces(part: Tensor, payload: Tensor, wire: Format) -> Iterator[tuple[Tensor, Tensor]]:
    """part [rows, numel] in float32 and payload [rows, bytes], piece by piece."""
    rows, numel = part.shape
    step = max(1, _piece(part) // (rows * wire.group_size))
    for first in range(0, wire.groups(numel), step):
        piece = part[:, first * wire.group_size : (first + step) * wire.group_size]
        yield piece.float(), payload[:, first * wire.record_bytes : (first + step) * wire.record_bytes]


def _sums(
    payloads: Tensor, payload: Tensor, reduce: Format, gather: Format, factor: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole groups [1, numel] in float32 that went as payload [bytes], and their bytes [1, bytes], piece by piece."""
    groups, step = payload.numel() // gather.record_bytes, _piece(payload) // gather.group_size
    for first in range(0, groups, step):
        last = min(first + step, groups)
        sums = torch.empty((last - first) * gather.group_size, dtype=torch.float32, device=payload.device)
        rows.decode_sum(payloads[:, first * reduce.record_bytes : last * reduce.record_bytes], sums, reduce, factor)
        yield sums.view(1, -1), payload[first * gather.record_bytes : last * gather.record_bytes].view(1, -1)
