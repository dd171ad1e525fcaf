"""The sample of a call's elements that is measured, and the SQNR computed from it.

1. A call is cut into runs of RUN elements (of one group, if a group is larger). Up to RUNS runs are measured. A longer
   call is cut into RUNS equal stretches, and one run of each is measured, at the same place on all ranks.
2. The error of a run is noise / signal: sums of squares of the difference and of the exact result. It is at most MOST.
   A run of zeros is skipped.
3. All runs weigh the same: SQNR = 10 log10(number of runs / sum of their errors), in dB.

A token or channel with most of a tensor's energy is a few runs of many, and hides no other run. For values of equal
size the result is 10 log10(signal / noise) of the whole tensor.

A measurement is a tensor [2, RUNS + 1], float64, on the CPU: signal and noise of each run. Every rank has a part of the
signal and noise of a sum, so the measurements of the ranks are added. The last column is for runs that one rank
measured alone: their number and the sum of their errors.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

RUNS = 256
RUN = 256
#: A sum of terms that cancel may have more error than energy, and must not outweigh all other runs.
MOST = 10.0
_LEAST, _GREATEST = 1e-14, 1e18
_TURNS, _REMEMBERED = 8, 256  # sets of places for the runs of a call; cached samples
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, are spread evenly and have no period


class Chosen(NamedTuple):
    """The measured groups of a matrix [rows, groups]: the row, the group and the run of each."""

    row: Tensor
    group: Tensor
    run: Tensor


class Sample:
    """The measured groups of one call, by their numbers in the call."""

    def __init__(self, groups: int, group_size: int, turn: int, most: int = RUNS) -> None:
        """Choose `most` runs of a call of `groups` groups. turn: selects their places."""
        self.group_size = group_size
        a_run = max(1, RUN // group_size)
        runs = -(-groups // a_run)
        chosen = torch.arange(min(runs, most))
        if runs > most:
            bounds = torch.arange(most + 1) * runs // most
            dice = (torch.arange(most, dtype=torch.float64) * _GOLDEN + turn / _TURNS) % 1
            chosen = bounds[:-1] + (dice * bounds.diff()).long()
        self._numbers = (chosen.unsqueeze(1) * a_run + torch.arange(a_run)).view(-1)
        self._runs = torch.arange(len(chosen)).repeat_interleave(a_run)
        self._sorted = array("q", self._numbers.tolist())

    def of(self, first: int, count: int, height: int, a_row: int, device: torch.device) -> Chosen | None:
        """Return the measured groups of a matrix [height, count], or None.

        first: the number of its first group, which grows by a_row from one row to the next.
        """
        rows, groups, runs = [], [], []
        for row in range(height):
            start = first + row * a_row
            low = bisect_left(self._sorted, start)
            high = bisect_left(self._sorted, start + count, low)
            if low < high:
                rows.append(torch.full((high - low,), row))
                groups.append(self._numbers[low:high] - start)
                runs.append(self._runs[low:high])
        if not rows:
            return None
        return Chosen(*(torch.cat(one).to(device) for one in (rows, groups, runs)))


@lru_cache(_REMEMBERED)
def _sample(groups: int, group_size: int, turn: int) -> Sample:
    return Sample(groups, group_size, turn)


def sample_of(groups: int, group_size: int, measured: int) -> Sample:
    """Return the sample of a call of `groups` groups. measured: number of measured calls of its site so far."""
    return _sample(groups, group_size, measured % _TURNS)


def nothing() -> Tensor:
    """Return an empty measurement."""
    return torch.zeros(2, RUNS + 1, dtype=torch.float64)


def alone(signal: Tensor, noise: Tensor) -> Tensor:
    """Return the measurement of one rank that has the whole signal and noise of its runs, any number of them."""
    measured = nothing()
    measured[:, -1] = _fold(signal, noise)
    return measured


def fold(measured: Tensor) -> tuple[float, float]:
    """Return the number of runs and the sum of their errors; NaN if a run is not finite."""
    return fold_all(measured.unsqueeze(0))[0]


def fold_all(measured: Tensor) -> list[tuple[float, float]]:
    """Return `fold` of each measurement [n, 2, RUNS + 1]."""
    folded = _fold(measured[:, 0, :-1], measured[:, 1, :-1]) + measured[..., -1]
    return [(runs, errors) for runs, errors in folded.tolist()]


def compare(exact: Tensor, result: Tensor) -> Tensor:
    """Return the measurement of all runs of a result against the exact one, both 1-D."""
    signal = _by_run(exact.float())
    return alone(signal, _by_run(result.float() - exact))


def energy(x: Tensor) -> Tensor:
    """Return the sums of squares of the rows of a float32 matrix, in float64."""
    if x.is_cpu and len(x):  # norms in float32 take a third of the time, and suffice where squares are normal numbers
        norms = torch.linalg.vector_norm(x, dim=1)
        least, greatest = norms.aminmax()
        if float(least) > _LEAST and float(greatest) < _GREATEST:
            return norms.double().square_()
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square_()


def _by_run(x: Tensor) -> Tensor:
    whole = x.numel() // RUN * RUN
    parts = [energy(x[:whole].view(-1, RUN)), energy(x[whole:].view(1, -1))]
    return torch.cat(parts).cpu()


def _fold(signal: Tensor, noise: Tensor) -> Tensor:
    """Return the number of runs and the sum of their errors, in the last dimension; NaN if one is not finite."""
    errors = (noise / signal.clamp(min=0)).clamp_(max=MOST)  # NaN without any energy
    found = torch.stack([errors.isfinite().sum(-1), errors.nansum(-1)], -1)
    return found + ((signal + noise).sum(-1, keepdim=True) * 0)
