"""Adaptive bits: the least width at which a site's measured SQNR reaches config.target_sqnr_db.

What quality.py measures at one call of a site is added up over the ranks at the start of the next measured call
(dispatch.py), and the width that follows from it holds from that call on. The start of a call is the one place that
ranks pass in the same order however late they wait for their handles, and the sums are the same numbers on all of
them: they change width together, or none does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from flash_allreduce_plugin.codec.format import MAX_BITS, MIN_BITS
from flash_allreduce_plugin.telemetry import counters

#: How far above the target a narrower width must be expected before it is taken, in dB.
MARGIN_DB = 1.0

_log = logging.getLogger("flash_allreduce_plugin")


def gain_db(narrow: int, wide: int, symmetric: bool) -> float:
    """What SQNR grows by from one width to another, in dB: a group's range is divided into more steps.

    About 6.0 a bit, more at the lowest widths (7.4 from 2 bits to 3, symmetric 9.5).
    """
    return 20 * math.log10(_steps(wide, symmetric) / _steps(narrow, symmetric))


def decide(bits: int, sqnr_db: float, target_db: float, spare: bool, symmetric: bool = False) -> tuple[int, bool]:
    """The width that follows from what was measured at `bits`, and whether a bit was spare.

    Below the target: up at once, by as many bits as are expected to reach it. Down by one bit, where that is expected
    to stay MARGIN_DB above the target, at two measurements in a row; `spare`: it was so at the one before.
    """
    if sqnr_db < target_db:
        wider = range(bits + 1, MAX_BITS)
        enough = (w for w in wider if sqnr_db + gain_db(bits, w, symmetric) >= target_db)
        return next(enough, MAX_BITS), False
    if bits == MIN_BITS or sqnr_db - gain_db(bits - 1, bits, symmetric) < target_db + MARGIN_DB:
        return bits, False
    return (bits - 1, False) if spare else (bits, True)


class Sums:
    """Signal and noise, sums of squares, that this rank has measured at one site on one process group."""

    def __init__(self) -> None:
        # One tuple: a handle may be waited on in another thread than the one that starts calls.
        self._sums = (0.0, 0.0)

    def add(self, signal: float, noise: float) -> None:
        """What is not finite spoils all that is taken with it."""
        self._sums = (self._sums[0] + signal, self._sums[1] + noise)

    def take(self) -> tuple[float, float]:
        """What was added since the last time; zeros: nothing."""
        sums, self._sums = self._sums, (0.0, 0.0)
        return sums

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; `measured` is this rank's alone."""
        return {"measured": list(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what state_dict gave."""
        signal, noise = state["measured"]
        self._sums = signal, noise


class SiteWidth(Sums):
    """The width of one site on one process group, the same on all its ranks, and what this rank measured there."""

    def __init__(self, name: str, bits: int, target_db: float, symmetric: bool) -> None:
        """bits: the configured width, where it starts."""
        super().__init__()
        self.bits = bits
        self._name, self._target_db, self._symmetric = name, target_db, symmetric
        self._spare = self._missed = False

    def record(self, bits: int, signal: float, noise: float) -> None:
        """Sums of squares of a call of width `bits`; those of a width no longer in use are left out."""
        if bits == self.bits:
            self.add(signal, noise)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "bits": self.bits, "spare": self._spare, "missed": self._missed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.bits, self._spare, self._missed = state["bits"], state["spare"], state["missed"]

    def update(self, signal: float, noise: float, call: int, log: bool) -> None:
        """Decide for the calls of number `call` and on. signal, noise: sums over the ranks of what they took.

        Sums that are not finite (a step that overflowed) and zeros (no call has finished) decide nothing.
        """
        if not (math.isfinite(signal) and math.isfinite(noise)) or signal == noise == 0:
            return
        sqnr_db = counters.sqnr_db(signal, noise)
        before = self.bits
        self.bits, self._spare = decide(before, sqnr_db, self._target_db, self._spare, self._symmetric)
        if before == MAX_BITS and sqnr_db < self._target_db:
            if log and not self._missed:
                _log.info(
                    "%s misses the target of %.1f dB at %d bits: %.1f dB before call %d",
                    *(self._name, self._target_db, MAX_BITS, sqnr_db, call),
                )
            self._missed = True
        elif log and self.bits != before:
            _log.info(
                "%s goes from %d to %d bits at call %d: %.1f dB measured, the target is %.1f dB",
                *(self._name, before, self.bits, call, sqnr_db, self._target_db),
            )


def _steps(bits: int, symmetric: bool) -> int:
    """Steps of the quantizer between the least code and the greatest."""
    return 2 * ((1 << (bits - 1)) - 1) if symmetric else (1 << bits) - 1
