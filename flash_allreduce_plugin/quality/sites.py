"""The measurements of a rank at one site on one process group, and the width that the ranks choose by them.

Measurements (control.py) are summed over the ranks at the start of the site's next measured call, and the new width
holds from that call on. All ranks start calls in the same order, even if they wait for handles late, and every rank
gets the same sums. So all ranks change the width at the same call. The decisions are pure functions: widths.decide and
guard.decide.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from flash_allreduce_plugin.collectives import sample
from flash_allreduce_plugin.telemetry import counters


def gain_db(narrow: int, wide: int, symmetric: bool) -> float:
    """Return the gain in SQNR from one width to a wider one, in dB: a group's range has more steps.

    About 6.0 a bit, more at the lowest widths (7.4 from 2 bits to 3, symmetric 9.5).
    """
    return 20 * math.log10(_steps(wide, symmetric) / _steps(narrow, symmetric))


class Sums:
    """The sum of this rank's measurements (collectives/sample.py) at one site on one process group."""

    def __init__(self) -> None:
        # Replaced, never written to: another thread than the one that starts calls may wait for a handle.
        self._sums = sample.nothing()

    def add(self, measured: Tensor) -> None:
        """Add a measurement. One that is not finite makes the sums not finite, which decide nothing."""
        self._sums = self._sums + measured

    def take(self) -> Tensor:
        """Return the sums since the last `take`; zeros without a measurement."""
        sums, self._sums = self._sums, sample.nothing()
        return sums

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. `measured` belongs to this rank, the rest is equal on all ranks."""
        return {"measured": self._sums.view(-1).tolist() if self._sums.any() else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, also of earlier versions: signal and noise of a whole tensor, as one run."""
        measured = torch.tensor(state["measured"], dtype=torch.float64).view(2, -1)
        self._sums = sample.nothing()
        self._sums[:, : measured.shape[1]] = measured


@dataclass(frozen=True, slots=True)
class Standing:
    """The stand of a site: its width. Subclasses add a summary of earlier measurements."""

    bits: int


class SiteBits(Sums, ABC):
    """The width of one site on one process group, equal on all its ranks, and this rank's measurements at it."""

    _standing: Standing

    def __init__(self, name: str, threshold_db: float, symmetric: bool) -> None:
        super().__init__()
        self._name, self._threshold_db, self._symmetric = name, threshold_db, symmetric

    @property
    def bits(self) -> int:
        """Return the width of the site's calls, as the subclass defines it."""
        return self._standing.bits

    def record(self, bits: int, measured: Tensor) -> None:
        """Add the measurement of a call of width `bits`. A width that is no longer in use is skipped."""
        if bits == self.bits:
            self.add(measured)

    def update(self, runs: float, errors: float, call: int, log: bool) -> None:
        """Choose the width from call number `call` on. runs, errors: `take` of all ranks, summed and folded.

        Numbers that are not finite (a step that overflowed) and zeros (no measured call has ended) change nothing.
        """
        if not (math.isfinite(runs) and math.isfinite(errors)) or runs == errors == 0:
            return
        sqnr_db = counters.sqnr_db(runs, errors)
        before, self._standing = self._standing, self._decide(sqnr_db)
        self._decided(before, sqnr_db, call, log)

    @abstractmethod
    def _decide(self, sqnr_db: float) -> Standing:
        """Return the stand of the site after a measurement."""

    @abstractmethod
    def _decided(self, before: Any, sqnr_db: float, call: int, log: bool) -> None:
        """Count the change, and log it on the rank that logs. before: the previous stand."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **asdict(self._standing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        kind = type(self._standing)
        self._standing = kind(**{field.name: state[field.name] for field in fields(kind)})


def _steps(bits: int, symmetric: bool) -> int:
    """Return the quantizer's steps between the least code and the greatest."""
    return 2 * ((1 << (bits - 1)) - 1) if symmetric else (1 << bits) - 1
