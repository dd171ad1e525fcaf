"""The words and numbers of a report, in the terminal and on the page."""

from __future__ import annotations

import math

from flash_allreduce_plugin.cli.report.log import Log
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.counters import Counters, sqnr_db

# Copies of policy.ONE_RANK and policy.EMPTY: that module imports torch, which a report does not need.
NOTHING_TO_SEND = frozenset(("one-rank group", "empty message"))


def amount(count: float) -> str:
    """Return bytes in powers of 1000."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


def percent(part: float, whole: float) -> str:
    if not whole:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share in (0, 100) else f"{share:.1f} %"


def saved(counters: Counters) -> str:
    return percent(counters.bytes_full_precision - counters.bytes_sent, counters.bytes_full_precision)


def shares(log: Log) -> str:
    """Return the shares of the rank's bytes: quantized, in full precision, other traffic."""
    text = counters.shares(log.sites.values(), log.beside.values())
    return text[0].upper() + text[1:] + "."


def nothing_sent(log: Log) -> list[str]:
    """Return the sites whose calls had nothing to send."""
    return [
        name
        for name, one in log.sites.items()
        if one.calls and not one.quantized and NOTHING_TO_SEND.issuperset(one.full_precision)
    ]


def decibels(counters: Counters) -> float | None:
    """Return the SQNR in dB, or None without a measurement."""
    return sqnr_db(counters.signal, counters.noise) if counters.measured else None


def sqnr(counters: Counters) -> str:
    value = decibels(counters)
    if value is None:
        return "-"
    return f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "-inf"


def bits(counters: Counters) -> str:
    return "-" if counters.bits is None else str(counters.bits)


def guard(counters: Counters) -> str:
    """Return the changes by min_sqnr_db at a site."""
    changes = ", ".join(f"{change} {count} time{'s' * (count > 1)}" for change, count in counters.guard.items())
    return f"by min_sqnr_db {changes}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def notes(log: Log) -> list[str]:
    """Return the remarks about a log that its counts do not show."""
    lines = []
    if len(log.starts) > 1:
        lines.append(f"The file has {len(log.starts)} starts; their counts are added.")
    if log.cut_off:
        lines.append(f"{log.cut_off} line{'s were' * (log.cut_off > 1) or ' was'} cut off and left out.")
    if not log.starts[-1].ended:
        lines.append("The last line is missing: the run continues or was killed. Up to its last minute is not counted.")
    lines += [f"{line[0].upper()}{line[1:]}." for start in log.starts for line in start.decisions if line]
    if not log.sites:
        lines.append("No call was counted.")
    if silent := nothing_sent(log):
        lines.append(f"Nothing to send: {', '.join(silent)}.")
    return lines
