"""`flash-allreduce report`: a run from its log, in the terminal, as JSON, or as a page."""

from __future__ import annotations

import math
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flash_allreduce_plugin.cli.output import STDOUT, Output
from flash_allreduce_plugin.cli.report import page
from flash_allreduce_plugin.cli.report.log import Log, read, total
from flash_allreduce_plugin.cli.report.text import (
    amount,
    bits,
    decibels,
    duration,
    guard,
    notes,
    nothing_sent,
    percent,
    saved,
    shares,
    sqnr,
)
from flash_allreduce_plugin.telemetry.counters import Counters

WIDTH = 170  # columns without a terminal
_SILENCE = 3.0  # seconds between two lines of progress without a terminal


def run_report(paths: list[Path], html_file: Path | None, json_file: Path | None) -> None:
    """Read the logs, write the requested files, and print a table for each log.

    Raises LogError for a bad log, OSError for a file that cannot be written.
    """
    output = Output(json_file, width=0 if sys.stdout.isatty() else WIDTH, soft_wrap=False)
    total_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    done = 0
    with output.progress(_SILENCE) as progress:

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress("reading", done, total_bytes, more=percent(done, total_bytes))

        logs = [read(path, on_bytes) for path in paths]
    output.write_json({"logs": [as_dict(log) for log in logs]})
    if html_file is not None:
        html_file.write_text(page.page(logs), encoding="utf-8")
    for log in logs:
        show(output.results, log)
    written = [str(file) for file in (html_file, json_file) if file not in (None, STDOUT)]
    if written:
        output.note(f"written: {', '.join(written)}")


def show(console: Console, log: Log) -> None:
    """Print one log: a line about the run, and a row for each site."""
    console.print(escape(headline(log)), highlight=False)
    for note in notes(log):
        console.print(escape(note), highlight=False)
    silent = nothing_sent(log)
    sites = {name: counters for name, counters in log.sites.items() if name not in silent}
    if not sites and not log.beside:
        return
    table = Table()
    for column in ("site", "calls", "quantized", "sent", "of", "saved", "SQNR dB", "bits", "in full precision"):
        table.add_column(column, justify="left" if column in ("site", "in full precision") else "right")
    for name, counters in sites.items():
        table.add_row(*map(escape, (name, *cells(counters))))
    if len(sites) > 1:
        table.add_section()
        *counts, _, _, reasons = cells(total(sites))  # no error: one for sites of all sizes means little
        table.add_row("all", *map(escape, (*counts, "", "", reasons)))
    if log.beside:
        table.add_section()
        for name, counters in log.beside.items():
            table.add_row(*map(escape, (name, *cells(counters))))
        table.add_section()
        *counts, _, _, _ = cells(log.all)
        table.add_row("everything", *map(escape, (*counts, "", "", "")))
    console.print(table)
    if log.beside:
        console.print(escape(shares(log)), highlight=False)
    for name, counters in sites.items():
        for reason, count in counters.residuals_dropped.items():
            console.print(escape(f"{name}: {count} residuals of error feedback dropped: {reason}"), highlight=False)
        if counters.guard:
            console.print(escape(f"{name}: {guard(counters)}"), highlight=False)


def cells(counters: Counters) -> tuple[str, ...]:
    """Return the cells of a row, after the name."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in counters.full_precision.most_common())
    return (
        f"{counters.calls:,}",
        percent(counters.quantized, counters.calls),
        amount(counters.bytes_sent),
        amount(counters.bytes_full_precision),
        saved(counters),
        sqnr(counters),
        bits(counters),
        reasons or "-",
    )


def headline(log: Log) -> str:
    header = log.starts[0].header
    began = datetime.fromtimestamp(header["time"], timezone.utc)
    steps = "" if log.steps is None else f", {log.steps:,} steps"
    return (
        f"{log.path}: rank {header['rank']} of {header['world']} on {header['host']}, from {began:%Y-%m-%d %H:%M:%S} "
        f"UTC, {duration(log.seconds)}{steps}"
    )


def as_dict(log: Log) -> dict[str, Any]:
    """Return the report in JSON types."""
    return {
        "log": str(log.path),
        "starts": [start.header for start in log.starts],
        "ended": log.starts[-1].ended,
        "cut_off": log.cut_off,
        "seconds": log.seconds,
        "steps": log.steps,
        "beside": {
            name: {"calls": counters.calls, "bytes_sent": counters.bytes_sent} for name, counters in log.beside.items()
        },
        "total": _dict(total(log.sites)),
        "sites": {name: {**_dict(counters), **_quality(counters)} for name, counters in log.sites.items()},
    }


def _dict(counters: Counters) -> dict[str, Any]:
    return {
        "calls": counters.calls,
        "quantized": counters.quantized,
        "full_precision": dict(counters.full_precision),
        "bytes_sent": counters.bytes_sent,
        "bytes_full_precision": counters.bytes_full_precision,
        "bytes_plain": counters.bytes_plain,
        "bytes_between_nodes": counters.bytes_between_nodes,
        "residuals_dropped": dict(counters.residuals_dropped),
        "guard": dict(counters.guard),
    }


def _quality(counters: Counters) -> dict[str, Any]:
    value = decibels(counters)
    finite = value is not None and math.isfinite(value)
    return {"bits": counters.bits, "measured": counters.measured, "sqnr_db": value if finite else None}
