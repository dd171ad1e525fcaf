"""Scalars for TensorBoard and similar writers: for each site, over the counts since the last call.

    fap.log_to(writer, step)

Tags are flash_allreduce/<site>/ and
    quantized_share  of the calls, 0 to 1
    bytes_saved      1 - bytes sent / bytes in full precision
    sqnr_db          of the calls that were measured, if any were
    bits             of the last quantized call, if there was one
    guard_raised     how often min_sqnr_db gave the site more bits or full precision, if it did
    guard_lowered    how often it took them back, if it did
    guard_share      of the calls, those that it sent in full precision, if there were any
"""

from __future__ import annotations

import math
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from flash_allreduce_plugin.policy import LOW_SQNR
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.counters import Counters, sqnr_db


class Writer(Protocol):
    """A torch.utils.tensorboard.SummaryWriter, for example."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any: ...


class Scalars:
    """The scalars for one writer: each time, of the calls since the last time."""

    def __init__(self, before: dict[str, Counters] | None = None) -> None:
        """before: counters.totals() where it begins; None: now."""
        self._told = counters.totals() if before is None else before

    def take(self) -> list[tuple[str, float]]:
        """(tag, value) of every site that was called; empty if none was."""
        before, self._told = self._told, counters.totals()
        values = []
        for site, counted in counters.difference(self._told, before).items():
            values += [(f"flash_allreduce/{site}/{name}", value) for name, value in _values(counted).items()]
        return values


_told: WeakKeyDictionary[Any, Scalars] = WeakKeyDictionary()


def log_to(writer: Writer, step: int) -> None:
    """Give `writer` the scalars of the calls since it was last given some, the first time since the start.

    To be called now and then on the ranks that have a writer; each tells its own counts. No communication. Raises
    TypeError if writer has no add_scalar.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(f"writer is {type(writer).__name__}; expected one with add_scalar(tag, value, step).")
    for tag, value in _told.setdefault(writer, Scalars(before={})).take():
        writer.add_scalar(tag, value, step)


def _values(counters: Counters) -> dict[str, float]:
    values: dict[str, float] = {}
    if counters.calls:
        values["quantized_share"] = counters.quantized / counters.calls
    if counters.bytes_full_precision:
        values["bytes_saved"] = 1 - counters.bytes_sent / counters.bytes_full_precision
    if counters.measured:
        decibels = sqnr_db(counters.signal, counters.noise)
        if math.isfinite(decibels):
            values["sqnr_db"] = decibels
    if counters.bits is not None:
        values["bits"] = counters.bits
    for change, count in counters.guard.items():
        values[f"guard_{change}"] = count
    if counters.full_precision[LOW_SQNR]:
        values["guard_share"] = counters.full_precision[LOW_SQNR] / counters.calls
    return values
