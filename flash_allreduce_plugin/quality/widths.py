"""Adaptive bits: the least width with a measured SQNR of config.target_sqnr_db or more, for each site."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flash_allreduce_plugin.codec.format import MAX_BITS, MIN_BITS
from flash_allreduce_plugin.quality.sites import SiteBits, Standing, gain_db

#: Expected distance of a narrower width from the target, in dB, before it is taken.
MARGIN_DB = 1.0

_log = logging.getLogger("flash_allreduce_plugin")


def decide(bits: int, sqnr_db: float, target_db: float, spare: bool, symmetric: bool = False) -> tuple[int, bool]:
    """Return the width after a measurement at `bits`, and True if a bit was spare.

    Below the target the width grows immediately, by as many bits as are expected to reach it. It falls by one bit after
    two measurements in a row at which the narrower width is expected MARGIN_DB above the target. spare: True if the
    measurement before was such a one.
    """
    if sqnr_db < target_db:
        wider = range(bits + 1, MAX_BITS)
        enough = (w for w in wider if sqnr_db + gain_db(bits, w, symmetric) >= target_db)
        return next(enough, MAX_BITS), False
    if bits == MIN_BITS or sqnr_db - gain_db(bits - 1, bits, symmetric) < target_db + MARGIN_DB:
        return bits, False
    return (bits - 1, False) if spare else (bits, True)


@dataclass(frozen=True, slots=True)
class Width(Standing):
    """spare: True if a bit was spare at the last measurement. missed: True after 8 bits have missed the target."""

    spare: bool = False
    missed: bool = False


class SiteWidth(SiteBits):
    """The width of one site on one process group, with config.target_sqnr_db."""

    _standing: Width

    def __init__(self, name: str, bits: int, target_db: float, symmetric: bool) -> None:
        """bits: the configured width, the first one."""
        super().__init__(name, target_db, symmetric)
        self._standing = Width(bits)

    def _decide(self, sqnr_db: float) -> Width:
        now = self._standing
        missed = now.missed or (now.bits == MAX_BITS and sqnr_db < self._threshold_db)
        return Width(*decide(now.bits, sqnr_db, self._threshold_db, now.spare, self._symmetric), missed)

    def _decided(self, before: Width, sqnr_db: float, call: int, log: bool) -> None:
        if not log:
            return
        if self._standing.missed and not before.missed:
            _log.info(
                "%s misses the target of %.1f dB at %d bits: %.1f dB before call %d",
                *(self._name, self._threshold_db, MAX_BITS, sqnr_db, call),
            )
        elif self.bits != before.bits:
            _log.info(
                "%s changes from %d to %d bits at call %d: %.1f dB measured, the target is %.1f dB",
                *(self._name, before.bits, self.bits, call, sqnr_db, self._threshold_db),
            )
