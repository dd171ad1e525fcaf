"""The measurements of a rank at one site on one process group, and the width that the ranks choose from it.

Measurements (control.py) are added up over the ranks at the start of the site's next measured call, and the width
that follows holds from that call on. The start of a call is the one place that all ranks pass in the same order,
however late they wait for their handles, and the sums are the same numbers on every rank: all ranks change the width
at the same call, or none does. The decisions are pure functions: widths.decide and guard.decide.
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
    """The gain in SQNR from one width to a wider one, in dB: a group's range is divided into more steps.

    About 6.0 a bit, more at the lowest widths (7.4 from 2 bits to 3, symmetric 9.5).
    """
    return 20 * math.log10(_steps(wide, symmetric) / _steps(narrow, symmetric))


class Sums:
    """Measurements (collectives/sample.py) that this rank has made at one site on one process group, added up."""

    def __init__(self) -> None:
        # Replaced, never written to: a handle may be waited on in another thread than the one that starts calls.
        self._sums = sample.nothing()

    def add(self, measured: Tensor) -> None:
        """One non-finite measurement cancels the whole decision: the sums that it is part of decide nothing."""
        self._sums = self._sums + measured

    def take(self) -> Tensor:
        """The sums since they were last taken; zeros: nothing was measured."""
        sums, self._sums = self._sums, sample.nothing()
        return sums

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; `measured` is this rank's alone, the rest is the same on all ranks."""
        return {"measured": self._sums.view(-1).tolist() if self._sums.any() else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what state_dict gave, or earlier versions did: signal and noise of a whole tensor, as one run."""
        measured = torch.tensor(state["measured"], dtype=torch.float64).view(2, -1)
        self._sums = sample.nothing()
        self._sums[:, : measured.shape[1]] = measured


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a site stands: its width, and what a subclass remembers of earlier measurements."""

    bits: int


class SiteBits(Sums, ABC):
    """The width of one site on one process group, the same on all its ranks, and what this rank measured at it."""

    _standing: Standing

    def __init__(self, name: str, threshold_db: float, symmetric: bool) -> None:
        super().__init__()
        self._name, self._threshold_db, self._symmetric = name, threshold_db, symmetric

    @property
    def bits(self) -> int:
        """The width of the site's calls, as the subclass defines it."""
        return self._standing.bits

    def record(self, bits: int, measured: Tensor) -> None:
        """Add the measurement of a call of width `bits`; those of a width no longer in use are left out."""
        if bits == self.bits:
            self.add(measured)

    def update(self, runs: float, errors: float, call: int, log: bool) -> None:
        """Choose the width of the calls from number `call` on. runs, errors: `take` of all ranks, added up and folded.

        Numbers that are not finite (a step that overflowed) and zeros (no measured call has ended) decide nothing.
        """
        if not (math.isfinite(runs) and math.isfinite(errors)) or runs == errors == 0:
            return
        sqnr_db = counters.sqnr_db(runs, errors)
        before, self._standing = self._standing, self._decide(sqnr_db)
        self._decided(before, sqnr_db, call, log)

    @abstractmethod
    def _decide(self, sqnr_db: float) -> Standing:
        """Where the site stands after a measurement."""

    @abstractmethod
    def _decided(self, before: Any, sqnr_db: float, call: int, log: bool) -> None:
        """Count the change and, on the rank that logs, say it. before: where the site stood."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **asdict(self._standing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        kind = type(self._standing)
        self._standing = kind(**{field.name: state[field.name] for field in fields(kind)})


def _steps(bits: int, symmetric: bool) -> int:
    """Steps of the quantizer between the least code and the greatest."""
    return 2 * ((1 << (bits - 1)) - 1) if symmetric else (1 << bits) - 1
