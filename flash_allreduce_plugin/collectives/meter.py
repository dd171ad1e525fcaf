"""The error of a call, measured from the values of each rank: quality_measure "local".

How-to: docs/decide/accuracy_controls.md#what-is-measured.

A rank decodes its own payloads and compares them with the values, at the runs of a Sample. If the errors of the ranks
are independent, a run has

    noise   = factor^2 x sum of |x - q|^2 before the sum + sum of |s - t|^2 after it
    signal  = sum of |s|^2 + factor^2 x sum of (|x|^2 - |q|^2)

A rank encodes x, which decodes to q. s is a part of the sum times factor, in its owner's float32, and decodes to t.
One rank has each term. The last term corrects the signal: it subtracts the energy that errors added to the sums, and
adds the energy of small values that became zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import sample
from flash_allreduce_plugin.collectives.sample import Chosen, Sample, energy


class Meter:
    """This rank's share of the signal and the noise of one call, run by run.

    first: the number in the call of the first group of the argument. `gathered` and `held` receive all groups of this
    rank in order.
    """

    def __init__(self, factor: float, device: torch.device, chosen: Sample, *, summed: bool) -> None:
        """factor: multiplies the sum over the ranks. summed: True if other ranks measure the same runs."""
        self._weight, self._sample, self._summed = factor * factor, chosen, summed
        self._next = 0  # next group of `gathered` and `held`
        self._signal, self._faded, self._before, self._after = torch.zeros(
            4, sample.RUNS, dtype=torch.float64, device=device
        )

    def encoded(self, part: Tensor, payload: Tensor, wire: Format, first: int, a_row: int = 0) -> None:
        """Measure part [rows, numel], of any dtype, sent as payload [rows, bytes] before the sum."""
        chosen = self._chosen(part, first, a_row)
        if chosen is not None:
            self._encoded(*_both(part, payload, wire, chosen), chosen)

    def summed_inside(self, payloads: Tensor, payload: Tensor, wide: Format, reduce: Format, first: int) -> None:
        """Measure the sum of a node's payloads [ranks, bytes], sent as payload [bytes] before the next sum."""
        chosen = self._sample.of(first, payload.numel() // reduce.record_bytes, 1, 0, payload.device)
        if chosen is not None:
            self._encoded(_sums(payloads, wide, 1.0, chosen), _decoded(payload.view(1, -1), reduce, chosen), chosen)

    def summed(
        self, payloads: Tensor, payload: Tensor, reduce: Format, gather: Format, factor: float, first: int
    ) -> None:
        """Measure the sum of payloads [ranks, bytes] times factor, sent as payload [bytes] to all ranks."""
        chosen = self._sample.of(first, payload.numel() // gather.record_bytes, 1, 0, payload.device)
        if chosen is not None:
            self._arrives(
                _sums(payloads, reduce, factor, chosen), _decoded(payload.view(1, -1), gather, chosen), chosen
            )

    def gathered(self, part: Tensor, payload: Tensor, wire: Format) -> None:
        """Measure part [1, numel], of any dtype, sent as payload [1, bytes] to all ranks."""
        chosen = self._following(part)
        if chosen is not None:
            self._arrives(*_both(part, payload, wire, chosen), chosen)

    def held(self, master: Tensor, weights: Tensor) -> None:
        """Measure weights [numel], the values on all ranks, against the exact master [numel]."""
        chosen = self._following(master.view(1, -1))
        if chosen is not None:
            size = self._sample.group_size
            exact, arrived = (taken(one.view(1, -1), size, chosen) for one in (master, weights))
            self._arrives(exact, arrived, chosen)

    def result(self, part: Tensor, first: int) -> None:
        """Add a part [numel] of the result to the signal, which no other rank measures."""
        chosen = self._chosen(part.view(1, -1), first)
        if chosen is not None:
            self._signal.index_add_(0, chosen.run, energy(taken(part.view(1, -1), self._sample.group_size, chosen)))

    def would_lose(self, part: Tensor, wire: Format, first: int, *, summed: bool) -> None:
        """Add the error that encoding part [numel] would make. summed: True before the sum, on all ranks."""
        chosen = self._chosen(part.view(1, -1), first)
        if chosen is not None:
            exact = taken(part.view(1, -1), wire.group_size, chosen)
            lost = energy(decoded_from(exact.view(1, -1), wire).view_as(exact).sub_(exact))
            self._after.index_add_(0, chosen.run, lost * (self._weight if summed else 1.0))

    def read(self) -> Tensor:
        """Return this rank's measurement, to be added to those of the other ranks. Waits for a GPU."""
        signal, faded, before, after = torch.stack([self._signal, self._faded, self._before, self._after]).cpu()
        signal, noise = signal + self._weight * faded, self._weight * before + after
        if not self._summed:
            return sample.alone(signal, noise)
        measured = sample.nothing()
        measured[0, :-1], measured[1, :-1] = signal, noise
        return measured

    def _chosen(self, part: Tensor, first: int, a_row: int = 0) -> Chosen | None:
        height, numel = part.shape
        return self._sample.of(first, -(-numel // self._sample.group_size), height, a_row, part.device)

    def _following(self, part: Tensor) -> Chosen | None:
        first = self._next
        self._next += -(-part.shape[1] // self._sample.group_size)
        return self._chosen(part, first)

    def _encoded(self, exact: Tensor, decoded: Tensor, chosen: Chosen) -> None:
        self._faded.index_add_(0, chosen.run, energy(exact) - energy(decoded))
        self._before.index_add_(0, chosen.run, energy(decoded.sub_(exact)))

    def _arrives(self, exact: Tensor, decoded: Tensor, chosen: Chosen) -> None:
        self._signal.index_add_(0, chosen.run, energy(exact))
        self._after.index_add_(0, chosen.run, energy(decoded.sub_(exact)))


def decoded_from(row: Tensor, wire: Format) -> Tensor:
    """Return the float32 values [1, numel] of a row [1, numel] after encoding and decoding."""
    payload = torch.empty(1, wire.payload_bytes(row.shape[1]), dtype=torch.uint8, device=row.device)
    rows.encode(row, payload, wire)
    decoded = torch.empty(row.shape, dtype=torch.float32, device=row.device)
    rows.decode(payload, decoded, wire)
    return decoded


def _both(part: Tensor, payload: Tensor, wire: Format, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Return the chosen groups [n, group_size] of part [rows, numel], exact and decoded from payload [rows, bytes]."""
    exact, decoded = taken(part, wire.group_size, chosen), _decoded(payload, wire, chosen)
    rest = part.shape[1] % wire.group_size
    if rest:  # the codec has padded the last group
        decoded[chosen.group == part.shape[1] // wire.group_size, rest:] = 0
    return exact, decoded


def taken(part: Tensor, size: int, chosen: Chosen) -> Tensor:
    """Return the chosen groups [n, size] of part [rows, numel] in float32. A last, short group ends with zeros."""
    whole, rest = divmod(part.shape[1], size)
    if not rest:
        return _of(part.unflatten(1, (whole, size)), chosen).float()
    full = chosen.group < whole
    found = torch.zeros(len(full), size, dtype=torch.float32, device=part.device)
    if whole:
        found[full] = part[:, : whole * size].unflatten(1, (whole, size))[chosen.row[full], chosen.group[full]].float()
    found[~full, :rest] = part[chosen.row[~full], whole * size :].float()
    return found


def _of(groups: Tensor, chosen: Chosen) -> Tensor:
    """Return the chosen groups of [rows, groups, size] as a matrix [n, size]."""
    return groups[0].index_select(0, chosen.group) if len(groups) == 1 else groups[chosen.row, chosen.group]


def _records(payload: Tensor, wire: Format) -> Tensor:
    return payload.unflatten(1, (-1, wire.record_bytes))


def _decoded(payload: Tensor, wire: Format, chosen: Chosen) -> Tensor:
    """Return the chosen groups [n, group_size] decoded from payload [rows, bytes]."""
    decoded = torch.empty(len(chosen.run), wire.group_size, dtype=torch.float32, device=payload.device)
    rows.decode(_of(_records(payload, wire), chosen).view(1, -1), decoded.view(1, -1), wire)
    return decoded


def _sums(payloads: Tensor, wire: Format, factor: float, chosen: Chosen) -> Tensor:
    """Return the chosen groups [n, group_size] of the sum of payloads [ranks, bytes], times factor."""
    sums = torch.empty(len(chosen.run), wire.group_size, dtype=torch.float32, device=payloads.device)
    of_ranks = _records(payloads, wire).index_select(1, chosen.group).flatten(1)
    rows.decode_sum(of_ranks, sums.view(-1), wire, factor)
    return sums
