"""Reading a log that run_log.py wrote."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.run_log import LOG_VERSION
from flash_allreduce_plugin.telemetry import NOT_OURS, Counters

Sites = dict[str, Counters]

_MOST = (1 << 53) - 1  # of anything counted: exact as a float too
_LONGEST = 1e10  # seconds of a run, 300 years
_END_OF_TIME = 253402300799.0  # the last second of the year 9999


class LogError(ValueError):
    """A file that is no log; the message is one sentence."""


@dataclass(slots=True)
class Interval:
    """What was counted up to `seconds` after the start. step: finished training steps, None where nobody knows."""

    seconds: float
    step: int | None
    sites: Sites
    beside: Sites = field(default_factory=dict)


@dataclass(slots=True)
class Start:
    """One process that wrote to the file: its first line, and what followed. ended: its last line is there."""

    header: dict[str, Any]
    configurations: list[dict[str, Any]]
    intervals: list[Interval] = field(default_factory=list)
    ended: bool = False

    @property
    def seconds(self) -> float:
        return self.intervals[-1].seconds if self.intervals else 0.0


@dataclass
class Log:
    """A file. cut_off: lines that are not whole, and are left out."""

    path: Path
    starts: list[Start]
    cut_off: int

    @cached_property
    def intervals(self) -> list[Interval]:
        """Of all starts, one after the other, their seconds counted on."""
        found, before = [], 0.0
        for start in self.starts:
            found += [Interval(before + one.seconds, one.step, one.sites, one.beside) for one in start.intervals]
            before += start.seconds
        return found

    @property
    def seconds(self) -> float:
        return sum(start.seconds for start in self.starts)

    @cached_property
    def sites(self) -> Sites:
        """The whole run."""
        return added_up(interval.sites for interval in self.intervals)

    @cached_property
    def beside(self) -> Sites:
        """What torch.distributed sent beside us, by collective and group."""
        return added_up(interval.beside for interval in self.intervals)

    @property
    def all(self) -> Counters:
        """The sites and what was sent beside us."""
        return total(self.sites).plus(total(self.beside))

    @property
    def steps(self) -> int | None:
        """The last one that is known."""
        return next((one.step for one in reversed(self.intervals) if one.step is not None), None)


def added_up(several: Iterable[Sites]) -> Sites:
    """By site, in the order of their names."""
    total: Sites = {}
    for sites in several:
        for name, counters in sites.items():
            total[name] = total.get(name, Counters()).plus(counters)
    return dict(sorted(total.items()))


def total(sites: Sites) -> Counters:
    return reduce(Counters.plus, sites.values(), Counters())


def read(path: Path, advance: Callable[[int], None] = lambda _: None) -> Log:
    """Read a log. advance: is told the bytes of every line.

    Raises LogError: not there, empty, not a log, of another version, or with a line that is none of a log's.
    """
    starts: list[Start] = []
    cut_off = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                advance(len(text))
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    if not starts:
                        raise _no_log(path) from None
                    cut_off += 1
                    continue
                _take(line, starts, path, number)
    except OSError as error:
        raise LogError(f"{path}: cannot be read ({error.strerror}).") from error
    if not starts:
        raise LogError(f"{path}: empty; expected a log that a run with FLASH_ALLREDUCE_LOG={path} wrote.")
    return Log(path, starts, cut_off)


def _take(line: Any, starts: list[Start], path: Path, number: int) -> None:
    if isinstance(line, dict) and line.get("kind") == "start":
        version = line.get("flash_allreduce_log")
        if version != LOG_VERSION:
            raise LogError(f"{path}: version {version!r} of the log; this package reads version {LOG_VERSION}.")
    elif not starts:
        raise _no_log(path)
    try:
        line = _printable(line)
        if line["kind"] == "start":
            starts.append(_start(line))
        elif line["kind"] == "configuration":
            starts[-1].configurations.append(_mapping(line["configuration"]))
        elif line["kind"] in ("interval", "end"):
            sites = {name: _counters(fields) for name, fields in line["sites"].items()}
            beside = {name: _beside(fields) for name, fields in line.get("beside", {}).items()}
            step = None if line.get("step") is None else _count(line["step"])
            seconds = _number(line["seconds"], starts[-1].seconds, _LONGEST)
            starts[-1].intervals.append(Interval(seconds, step, sites, beside))
            starts[-1].ended = line["kind"] == "end"
        else:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise LogError(f"{path}: line {number} is none of such a log's; was it edited?") from None


def _start(line: dict[str, Any]) -> Start:
    header = {**line, "time": _number(line["time"], 0.0, _END_OF_TIME), "host": str(line["host"])}
    for key in ("rank", "world"):
        header[key] = _count(line[key])
    for key in ("versions", "environment", "configuration"):
        header[key] = _mapping(line[key])
    return Start(header, [header["configuration"]])


def _counters(fields: dict[str, Any]) -> Counters:
    return Counters(
        _count(fields["quantized"]),
        None if fields.get("bits") is None else _count(fields["bits"]),
        _reasons(fields["full_precision"]),
        _count(fields["bytes_sent"]),
        _count(fields["bytes_full_precision"]),
        _count(fields.get("bytes_between_nodes", 0)),
        _number(fields.get("signal", 0.0)),
        _number(fields.get("noise", 0.0)),
        _count(fields.get("measured", 0)),
        _reasons(fields.get("residuals_dropped", {})),
        _reasons(fields.get("guard", {})),
        # Logs did not say it once.
        _count(fields.get("bytes_plain", 0 if fields["quantized"] else fields["bytes_sent"])),
    )


def _beside(fields: dict[str, Any]) -> Counters:
    sent = _count(fields["bytes_sent"])
    reasons = Counter({NOT_OURS: _count(fields["calls"])})
    return Counters(full_precision=reasons, bytes_sent=sent, bytes_full_precision=sent, bytes_plain=sent)


def _reasons(fields: dict[str, Any]) -> Counter[str]:
    return Counter({reason: _count(count) for reason, count in fields.items()})


# ---- what a line may hold: the log is a file like any other, and may be edited, cut off or made to mislead


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError
    return value


def _number(value: Any, least: float = 0.0, most: float = sys.float_info.max) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError
    return float(value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _printable(value: Any) -> Any:
    """The same with escapes for what a terminal would obey and a page cannot hold."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list) else value


def _no_log(path: Path) -> LogError:
    return LogError(f"{path}: no log of a run; expected a file that FLASH_ALLREDUCE_LOG={path} made a run write.")
