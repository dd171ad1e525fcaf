"""The guard: a site with a measured SQNR below config.min_sqnr_db gets more bits, then full precision.

All ranks decide by the same numbers at the same call (sites.py). The decision is a pure function of a Stand and a
number:

    up    one bit (after 8 bits: full precision) at LOW measurements in a row below the floor
    down  one bit (from full precision: to 8) at `patience` measurements in a row after which the site is expected
          MARGIN_DB above the floor with a bit less; never below the configured width

A site that moves down and up again has twice the patience from then on. So the number of changes of direction in any
series of measurements grows with the logarithm of its length.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from flash_allreduce_plugin.codec.format import MAX_BITS
from flash_allreduce_plugin.quality.sites import SiteBits, Standing, gain_db
from flash_allreduce_plugin.telemetry import counters

#: The width of full precision.
FULL = MAX_BITS + 1
#: Measurements in a row below the floor before a site gets more bits. A single outlier is one measurement.
LOW = 2
#: Good measurements in a row before a site gets fewer bits, at first.
PATIENCE = 4
#: Expected distance of a narrower width from the floor, in dB, before it is taken.
MARGIN_DB = 2.0

RAISED, LOWERED = "raised", "lowered"  # keys of a counter

_log = logging.getLogger("flash_allreduce_plugin")


@dataclass(frozen=True, slots=True)
class Stand(Standing):
    """bits: the least width, or FULL. low, good: measurements in a row. came_down: since the last step up."""

    low: int = 0
    good: int = 0
    patience: int = PATIENCE
    came_down: bool = False


def decide(stand: Stand, sqnr_db: float, floor_db: float, start: int, symmetric: bool = False) -> Stand:
    """Return the stand after a measurement at stand.bits; in full precision, after one of 8 bits.

    start: the configured width, the guard's minimum.
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


class SiteGuard(SiteBits):
    """The least width of one site on one process group, or FULL, with config.min_sqnr_db."""

    _standing: Stand

    def __init__(self, name: str, start: int, floor_db: float, symmetric: bool) -> None:
        """start: the narrowest configured width of the site's calls."""
        super().__init__(name, floor_db, symmetric)
        self.start = start
        self._standing = Stand(start)

    def _decide(self, sqnr_db: float) -> Stand:
        return decide(self._standing, sqnr_db, self._threshold_db, self.start, self._symmetric)

    def _decided(self, before: Stand, sqnr_db: float, call: int, log: bool) -> None:
        if self.bits == before.bits:
            return
        raised = self.bits > before.bits
        counters.record_guard(self._name, RAISED if raised else LOWERED)
        if log:
            _log.log(
                logging.WARNING if raised else logging.INFO,
                "%s changes from %s to %s at call %d: %.1f dB %s, the floor is %.1f dB",
                *(self._name, _shown(before.bits), _shown(self.bits), call, sqnr_db),
                "expected of 8 bits" if before.bits == FULL else "measured",
                self._threshold_db,
            )


def _shown(bits: int) -> str:
    return "full precision" if bits == FULL else f"{bits} bits"
