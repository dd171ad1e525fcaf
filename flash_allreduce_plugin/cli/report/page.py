"""The report as one HTML file. It loads no other file, and every text from a log is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from flash_allreduce_plugin.cli.report.log import Interval, Log, Sites, added_up, total
from flash_allreduce_plugin.cli.report.plot import Across, curve
from flash_allreduce_plugin.cli.report.text import (
    amount,
    bits,
    decibels,
    duration,
    notes,
    nothing_sent,
    percent,
    saved,
    shares,
    sqnr,
)
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.telemetry.counters import OUTSIDE, Counters

_POINTS = 240  # most points of a curve; more intervals are merged

_STYLE = """
:root { --ground: #f6f7f9; --card: #fff; --text: #1c2430; --dim: #5d6878; --rule: #dde2e9; --saved: #2563c9;
  --sqnr: #0f8a6d; --bits: #9a4fb5; --full: #c4701a; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --card: #1b212a; --text: #e6eaf0; --dim: #98a4b5;
  --rule: #323b48; --saved: #6ea3f7; --sqnr: #45c4a2; --bits: #c98be0; --full: #e7a253; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1140px; padding: 28px 20px 60px; background: var(--ground); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 19px; margin: 34px 0 4px; overflow-wrap: anywhere }
h3 { font-size: 15px; margin: 0 0 10px; overflow-wrap: anywhere } h4 { font-size: 13px; margin: 0; color: var(--dim) }
p { margin: 2px 0; color: var(--dim) } .note { color: var(--full) } a { color: var(--saved) }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 16px 18px;
  margin-top: 14px; overflow-x: auto }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 14px }
.tiles .card { margin: 0; padding: 12px 16px } .tiles b { display: block; font-size: 21px; font-weight: 650 }
.tiles span { color: var(--dim); font-size: 13px }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 10px 26px }
.quiet { color: var(--dim); font-size: 13px; margin: 8px 0 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { color: var(--dim); font-weight: 500; font-size: 13px } tr:last-child td { border-bottom: 0 }
th:first-child, td:first-child, .left { text-align: left }
td.wrap { white-space: normal; overflow-wrap: anywhere; min-width: 10em }
tr.all td { font-weight: 600 } .pairs td:first-child { width: 17em }
.bar { background: var(--full); height: 12px; border-radius: 2px; min-width: 2px } td.wide { width: 34% }
details { margin-top: 10px } summary { cursor: pointer; color: var(--dim) }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--dim); font: 8px system-ui, sans-serif }
.points { fill: var(--ink) } .hidden use { opacity: 0 } .points use:hover { opacity: .35 }
.saved { --ink: var(--saved) } .sqnr { --ink: var(--sqnr) } .bits { --ink: var(--bits) }
@media print { body { max-width: none } .card { break-inside: avoid } }
"""


def page(logs: Sequence[Log]) -> str:
    """Return the whole file, which is well-formed XML too."""
    body = "".join(_log(log, f"log{number}") for number, log in enumerate(logs, 1))
    if len(logs) > 1:
        links = (f'<li><a href="#log{n}">{escape(str(log.path))}</a></li>' for n, log in enumerate(logs, 1))
        body = f"<ul>{''.join(links)}</ul>{body}"
    made = datetime.now(timezone.utc)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>Flash all-reduce: {escape(', '.join(log.path.name for log in logs))}</title>"
        f"<style>{_STYLE}</style></head><body><h1>The collectives of a run</h1>"
        f"<p>Made by flash-allreduce report on {made:%Y-%m-%d %H:%M} UTC</p>"
        f"{body}</body></html>\n"
    )


def _log(log: Log, anchor: str) -> str:
    header, sites = log.starts[0].header, _sites(log)
    began = datetime.fromtimestamp(header["time"], timezone.utc)
    parts = [
        f'<section id="{anchor}"><h2>{escape(str(log.path))}</h2>',
        f"<p>Rank {header['rank']} of {header['world']} on {escape(str(header['host']))}, from "
        f"{began:%Y-%m-%d %H:%M:%S} UTC</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes(log)),
        _tiles(log),
    ]
    if sites or log.beside:
        parts.append(_table(log))
    if sites:
        parts += [_full_precision(log)]
        intervals, label = _along(log.intervals)
        across = label, intervals[0].seconds, intervals[-1].seconds
        parts += [_site(name, intervals, across) for name, counters in sites.items() if counters.quantized]
    return "".join([*parts, _configuration(log), _versions(header), "</section>"])


def _sites(log: Log) -> Sites:
    """Return the sites that sent anything; `notes` names the others."""
    silent = nothing_sent(log)
    return {name: counters for name, counters in log.sites.items() if name not in silent}


def _tiles(log: Log) -> str:
    sites = _sites(log)
    counters = total(sites)
    errors = [error for site in sites.values() if (error := decibels(site)) is not None and math.isfinite(error)]
    tiles = {
        "of the bytes saved": saved(log.all),
        "sent by this rank": amount(log.all.bytes_sent),
        f"of {counters.calls:,} calls quantized": percent(counters.quantized, counters.calls),
        "dB, the lowest SQNR of a site": f"{min(errors):.1f}" if errors else "-",
        "steps": "-" if log.steps is None else f"{log.steps:,}",
        "from start to last line": duration(log.seconds),
    }
    cells = (f'<div class="card"><b>{escape(value)}</b><span>{name}</span></div>' for name, value in tiles.items())
    return f'<div class="tiles">{"".join(cells)}</div>'


def _table(log: Log) -> str:
    sites = _sites(log)
    between_nodes = any(counters.bytes_between_nodes for counters in sites.values())
    names = ["site", "calls", "quantized", "sent", "of", *["between nodes"] * between_nodes, "saved", "SQNR dB", "bits"]

    def row(name: str, counters: Counters, kind: str = "") -> str:
        values = [f"{counters.calls:,}", percent(counters.quantized, counters.calls), amount(counters.bytes_sent)]
        values += [amount(counters.bytes_full_precision)]
        values += [amount(counters.bytes_between_nodes)] * between_nodes
        values += [saved(counters), *(["", ""] if kind else [sqnr(counters), bits(counters)])]
        return f"<tr{kind}>{_cells([name, *values])}</tr>"

    rows = [row(name, counters) for name, counters in sites.items()]
    if len(sites) > 1:
        rows.append(row("all", total(sites), ' class="all"'))
    rows += [row(f"{OUTSIDE}: {name}", counters) for name, counters in log.beside.items()]
    if log.beside:
        rows.append(row("everything", log.all, ' class="all"'))
    head = "".join(f"<th>{name}</th>" for name in names)
    said = f'<p class="quiet">{escape(shares(log))}</p>' if log.beside else ""
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>{said}</div>'


def _full_precision(log: Log) -> str:
    """Return bars of calls in full precision by reason and site, and of dropped residuals."""
    found = [
        (count, reason, name)
        for name, counters in _sites(log).items()
        for reason, count in counters.full_precision.items()
    ]
    text = _bars(found, "calls") if found else '<p class="quiet">None: every call was quantized.</p>'
    text = f'<div class="card"><h3>Calls in full precision, by reason</h3>{text}</div>'
    dropped = [
        (count, reason, name)
        for name, counters in log.sites.items()
        for reason, count in counters.residuals_dropped.items()
    ]
    if dropped:
        text += f'<div class="card"><h3>Residuals of error feedback dropped</h3>{_bars(dropped, "residuals")}</div>'
    changed = [(count, change, name) for name, one in log.sites.items() for change, count in one.guard.items()]
    if changed:
        text += f'<div class="card"><h3>Changes by min_sqnr_db</h3>{_bars(changed, "times")}</div>'
    return text


def _bars(found: list[tuple[int, str, str]], what: str) -> str:
    most = max(count for count, _, _ in found)
    rows = "".join(
        f'<tr><td class="wrap">{escape(reason)}</td><td class="left wrap">{escape(name)}</td><td>{count:,}</td>'
        f'<td class="wide"><div class="bar" style="width: {100 * count / most:.1f}%"></div></td></tr>'
        for count, reason, name in sorted(found, reverse=True)
    )
    head = f'<th>reason</th><th class="left">site</th><th>{what}</th><th></th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _along(intervals: list[Interval]) -> tuple[list[Interval], str]:
    """Return at most _POINTS intervals, merged if there are more, and the unit of their axis.

    The intervals' `seconds` are positions on that axis: steps if all are known and never fall, else time.
    """
    many = math.ceil(len(intervals) / _POINTS)
    runs = [intervals[i : i + many] for i in range(0, len(intervals), many)]
    merged = [Interval(run[-1].seconds, run[-1].step, added_up(one.sites for one in run)) for run in runs]
    steps = [one.step for one in merged if one.step is not None]
    if len(steps) == len(merged) and steps == sorted(steps) and steps[0] < steps[-1]:
        return [Interval(float(one.step or 0), one.step, one.sites) for one in merged], "step"
    unit, length = "seconds", 1.0
    for unit, length in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)):  # noqa: B007
        if merged[-1].seconds >= 2 * length:
            break
    return [Interval(round(one.seconds / length, 4), one.step, one.sites) for one in merged], unit


def _site(name: str, intervals: list[Interval], across: Across) -> str:
    """Return the curves of one site."""

    def values(of: Callable[[Counters], float | None]) -> list[tuple[float, float]]:
        found = ((one.seconds, of(one.sites[name])) for one in intervals if name in one.sites)
        return [(x, y) for x, y in found if y is not None and math.isfinite(y)]

    savings = values(_saved_percent)
    error, widths = values(decibels), values(lambda counters: counters.bits)
    curves = []
    if savings:
        svg = curve(savings, across, "%", 0, 100, "saved", f"bytes saved at {name}, percent")
        curves.append(f"<div><h4>Bytes saved, %</h4>{svg}</div>")
    if error:
        low, high = min(y for _, y in error), max(y for _, y in error)
        svg = curve(error, across, "dB", low - 1, high + 1, "sqnr", f"SQNR at {name}, dB")
        curves.append(f"<div><h4>SQNR of the measured calls, dB</h4>{svg}</div>")
    if len({width for _, width in widths}) > 1:
        svg = curve(widths, across, "bits", 2, 8, "bits", f"width at {name}, bits")
        curves.append(f"<div><h4>Bits of the last quantized call</h4>{svg}</div>")
    quiet = "" if error else '<p class="quiet">SQNR was not measured. Set quality_interval to measure it.</p>'
    return f'<div class="card site"><h3>{escape(name)}</h3><div class="curves">{"".join(curves)}</div>{quiet}</div>'


def _saved_percent(counters: Counters) -> float | None:
    whole = counters.bytes_full_precision
    return 100 * (1 - counters.bytes_sent / whole) if whole else None


def _configuration(log: Log) -> str:
    """Return every configuration of the log: the changes from the defaults, and all fields."""
    defaults = FlashConfig().to_dict()
    found: list[dict[str, Any]] = []
    for start in log.starts:
        found += [config for config in start.configurations if config not in found]
    text = ""
    for config in found:
        changed = {key: value for key, value in config.items() if key not in defaults or defaults[key] != value}
        rest = {key: value for key, value in config.items() if key not in changed}
        shown = _pairs((key, json.dumps(value)) for key, value in changed.items()) if changed else ""
        quiet = "" if changed else '<p class="quiet">Every setting at its default.</p>'
        others = _pairs((key, json.dumps(value)) for key, value in rest.items())
        text += f"{shown}{quiet}<details><summary>{len(rest)} settings at their defaults</summary>{others}</details>"
    title = "Configuration" if len(found) == 1 else f"{len(found)} configurations"
    return f'<div class="card"><h3>{title}</h3>{text}</div>'


def _versions(header: dict[str, Any]) -> str:
    versions = _pairs([*header["versions"].items(), ("wire version", header.get("wire", "-"))])
    environment = header["environment"]
    text = f'<div class="card"><h3>Versions</h3>{versions}</div>'
    if environment:
        text += f'<div class="card"><h3>Environment</h3>{_pairs(environment.items())}</div>'
    return text


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    rows = (f'<tr><td>{escape(key)}</td><td class="left wrap">{escape(str(value))}</td></tr>' for key, value in pairs)
    return f'<table class="pairs"><tbody>{"".join(rows)}</tbody></table>'


def _cells(values: Iterable[str]) -> str:
    return "".join(f"<td>{escape(value)}</td>" for value in values)
