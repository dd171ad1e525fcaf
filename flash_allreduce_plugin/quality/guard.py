"""The guard: a site whose measured SQNR falls below config.min_sqnr_db gets more bits, then full precision.

What is measured at one call of a site is added up over the ranks at the start of the next measured call (dispatch.py),
as for target_sqnr_db (adaptive.py): all ranks decide by the same numbers, at the same call. The decision is a pure
function of a Stand and a number.

    up    one bit (after 8 bits: full precision) at LOW measurements in a row below the floor
    down  one bit (from full precision: to 8) at `patience` measurements in a row after which the site is expected
          MARGIN_DB above the floor with a bit less; never below the configured width

Whoever went down and has to go up again needs twice the patience from then on: a series of measurements of whatever
kind turns the guard round a number of times that grows with the logarithm of its length.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from flash_allreduce_plugin.codec.format import MAX_BITS
from flash_allreduce_plugin.quality.widths import Sums, gain_db
from flash_allreduce_plugin.telemetry import counters

#: A width that stands for full precision.
FULL = MAX_BITS + 1
#: Measurements in a row below the floor before there are more bits: a spike is one.
LOW = 2
#: Good measurements in a row before there are fewer, at first.
PATIENCE = 4
#: How far above the floor a narrower width must be expected before it is taken, in dB.
MARGIN_DB = 2.0

RAISED, LOWERED = "raised", "lowered"  # keys of a counter

_log = logging.getLogger("flash_allreduce_plugin")


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a site is. low, good: measurements in a row; came_down: since it last went up."""

    bits: int
    low: int = 0
    good: int = 0
    patience: int = PATIENCE
    came_down: bool = False


def decide(stand: Stand, sqnr_db: float, floor_db: float, start: int, symmetric: bool = False) -> Stand:
    """What follows from a measurement at stand.bits; in full precision, from what 8 bits would have given.

    start: the configured width, below which the guard does not go.
    """
    if sqnr_db < floor_db and stand.bits < FULL:
        if stand.low + 1 < LOW:
            return replace(stand, low=stand.low + 1, good=0)
        return Stand(stand.bits + 1, patience=stand.patience * (2 if stand.came_down else 1))
    if stand.bits == start:
        return replace(stand, low=0, good=0)
    gain = 0.0 if stand.bits == FULL else gain_db(stand.bits - 1, stand.bits, symmetric)
    if sqnr_db - gain < floor_db + MARGIN_DB:
        return replace(stand, low=0, good=0)
    if stand.good + 1 < stand.patience:
        return replace(stand, low=0, good=stand.good + 1)
    return Stand(stand.bits - 1, patience=stand.patience, came_down=True)


class SiteGuard(Sums):
    """The guard of one site on one process group, the same on all its ranks, and what this rank measured there."""

    def __init__(self, name: str, start: int, floor_db: float, symmetric: bool) -> None:
        """start: the narrowest width of the site's calls as they are configured."""
        super().__init__()
        self.start = start
        self._stand = Stand(start)
        self._name, self._floor_db, self._symmetric = name, floor_db, symmetric

    @property
    def bits(self) -> int:
        """The least width of the site's calls, or FULL."""
        return self._stand.bits

    def record(self, bits: int, signal: float, noise: float) -> None:
        """Sums of squares that were measured at calls for which `bits` was asked; of others they are left out."""
        if bits == self.bits:
            self.add(signal, noise)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **asdict(self._stand)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._stand = Stand(**{field.name: state[field.name] for field in fields(Stand)})

    def update(self, signal: float, noise: float, call: int, log: bool) -> None:
        """Decide for the calls of number `call` and on. signal, noise: sums over the ranks of what they took.

        Sums that are not finite (a step that overflowed) and zeros (nothing was measured) decide nothing.
        """
        if not (math.isfinite(signal) and math.isfinite(noise)) or signal == noise == 0:
            return
        sqnr_db = counters.sqnr_db(signal, noise)
        before, self._stand = self.bits, decide(self._stand, sqnr_db, self._floor_db, self.start, self._symmetric)
        if self.bits == before:
            return
        raised = self.bits > before
        counters.record_guard(self._name, RAISED if raised else LOWERED)
        if log:
            _log.log(
                logging.WARNING if raised else logging.INFO,
                "%s goes from %s to %s at call %d: %.1f dB %s, the floor is %.1f dB",
                *(self._name, _shown(before), _shown(self.bits), call, sqnr_db),
                "expected of 8 bits" if before == FULL else "measured",
                self._floor_db,
            )


def _shown(bits: int) -> str:
    return "full precision" if bits == FULL else f"{bits} bits"
