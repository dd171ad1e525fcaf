"""Read a log of telemetry/run_log.py."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.codec.format import MAX_BITS, MIN_BITS
from flash_allreduce_plugin.config import FlashConfig, strict_json
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.telemetry.counters import OUTSIDE, Counters, sqnr_db
from flash_allreduce_plugin.telemetry.run_log import LOG_VERSION

Sites = dict[str, Counters]

_MOST = (1 << 53) - 1  # the largest count: exact as a float too
_LONGEST = 1e10  # seconds of a run, 300 years
_END_OF_TIME = 253402300799.0  # the last second of the year 9999


class LogError(ValueError):
    """A file that is no log. The message is one sentence."""


@dataclass(slots=True)
class Interval:
    """The counts of an interval that ends `seconds` after the start. step: finished training steps; None: not known."""

    seconds: float
    step: int | None
    sites: Sites
    beside: Sites = field(default_factory=dict)


@dataclass(slots=True)
class Start:
    """One process in the log: its first line and its intervals. ended: True if its last line is there."""

    header: dict[str, Any]
    configurations: list[dict[str, Any]]
    intervals: list[Interval] = field(default_factory=list)
    ended: bool = False
    decisions: list[str] = field(default_factory=list)  # of enabled "auto"
    sites: Sites = field(default_factory=dict)  # sum of all intervals

    @property
    def seconds(self) -> float:
        return self.intervals[-1].seconds if self.intervals else 0.0

    def take(self, line: dict[str, Any]) -> None:
        """Add an interval. Raises ValueError for impossible values."""
        found = {}
        for name, fields in _mapping(line, "sites").items():
            try:
                found[name] = _counters(fields)
                total = self.sites[name] = self.sites.get(name, Counters()).plus(found[name])
                if total.measured > total.quantized:
                    raise _WrongField(f'"measured" adds up to {total.measured}, and "quantized" to {total.quantized}')
            except _WrongField as error:
                raise _WrongField(f"site {_shown(name)}: {error}") from None
        step = None if line.get("step") is None else _count(line, "step")
        beside = {name: _beside(fields) for name, fields in line.get("beside", {}).items()}
        self.intervals.append(Interval(_number(line, "seconds", self.seconds, _LONGEST), step, found, beside))
        self.ended = line["kind"] == "end"


@dataclass
class Log:
    """A file. cut_off: number of incomplete lines, which are skipped."""

    path: Path
    starts: list[Start]
    cut_off: int

    @cached_property
    def intervals(self) -> list[Interval]:
        """Return the intervals of all starts in order, with their seconds added up."""
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
        """Return the sites of the whole run."""
        return added_up(interval.sites for interval in self.intervals)

    @cached_property
    def beside(self) -> Sites:
        """Return torch.distributed's other traffic, by collective and group."""
        return added_up(interval.beside for interval in self.intervals)

    @property
    def all(self) -> Counters:
        """Return the sum of all sites and other traffic."""
        return total(self.sites).plus(total(self.beside))

    @property
    def steps(self) -> int | None:
        """Return the last known step."""
        return next((one.step for one in reversed(self.intervals) if one.step is not None), None)


def added_up(several: Iterable[Sites]) -> Sites:
    """Return the sums by site, sorted by name."""
    total: Sites = {}
    for sites in several:
        for name, counters in sites.items():
            total[name] = total.get(name, Counters()).plus(counters)
    return dict(sorted(total.items()))


def total(sites: Sites) -> Counters:
    return reduce(Counters.plus, sites.values(), Counters())


def read(path: Path, advance: Callable[[int], None] = lambda _: None) -> Log:
    """Read a log. advance: receives the bytes of every line.

    Raises LogError for a missing or empty file, a file that is no log, another version, and a line that no log has or
    with impossible figures.
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
                    line = strict_json.loads(text)
                except strict_json.DuplicateKeyError as error:
                    raise LogError(f"{path}: line {number}: {error}; was it edited?") from None
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
            starts[-1].configurations.append(_configuration(line))
        elif line["kind"] == "auto":
            starts[-1].decisions.append(_text(line, "line"))
        elif line["kind"] in ("interval", "end"):
            starts[-1].take(line)
        else:
            raise ValueError
    except _WrongField as error:
        raise LogError(f"{path}: line {number}: {error}; was it edited?") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise LogError(f"{path}: line {number} is no line of such a log; was it edited?") from None


def _start(line: dict[str, Any]) -> Start:
    header = {**line, "time": _number(line, "time", 0.0, _END_OF_TIME), "host": str(line["host"])}
    header["world"] = _count(line, "world", 1)
    header["rank"] = _count(line, "rank", 0, header["world"] - 1)
    for key in ("versions", "environment"):
        header[key] = _mapping(line, key)
    return Start(header, [_configuration(line)])


def _configuration(line: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration unchanged. The fields that this version has must be valid."""
    fields = _mapping(line, "configuration")
    try:
        FlashConfig.from_dict({key: value for key, value in fields.items() if key in FlashConfig.model_fields})
    except ConfigError as error:
        raise _WrongField(f'"configuration": {str(error).splitlines()[0].removesuffix(".")}') from None
    return fields


def _counters(fields: dict[str, Any]) -> Counters:
    counters = Counters(
        _count(fields, "quantized"),
        None if fields.get("bits") is None else _count(fields, "bits", MIN_BITS, MAX_BITS),
        _reasons(fields, "full_precision"),
        _count(fields, "bytes_sent"),
        _count(fields, "bytes_full_precision"),
        _count({"bytes_between_nodes": 0, **fields}, "bytes_between_nodes"),
        _number({"signal": 0.0, **fields}, "signal"),
        _number({"noise": 0.0, **fields}, "noise"),
        _count({"measured": 0, **fields}, "measured"),
        _reasons({"residuals_dropped": {}, **fields}, "residuals_dropped"),
        _reasons({"guard": {}, **fields}, "guard"),
        # Older logs do not have it.
        _count({"bytes_plain": 0 if fields["quantized"] else fields["bytes_sent"], **fields}, "bytes_plain"),
    )
    _adds_up(fields, counters)
    return counters


def _adds_up(fields: dict[str, Any], counters: Counters) -> None:
    """Raise ValueError for figures that contradict each other."""
    if _count(fields, "calls") != counters.calls:
        raise _WrongField(f'"calls" is {fields["calls"]}, and quantized and full_precision add up to {counters.calls}')
    if counters.bits is not None and not counters.quantized:
        raise _WrongField(f'"bits" is {counters.bits}, and no call was quantized')
    sent, in_full = counters.bytes_sent, counters.bytes_full_precision
    if sent < in_full and not counters.quantized:  # more: replicated_params.py
        raise _WrongField(f'"bytes_sent" is {sent} of {in_full} bytes, and no call was quantized')
    if counters.bytes_between_nodes > sent:
        raise _WrongField(f'"bytes_between_nodes" is {counters.bytes_between_nodes} of {sent} bytes that were sent')
    if counters.bytes_plain > sent:
        raise _WrongField(f'"bytes_plain" is {counters.bytes_plain} of {sent} bytes that were sent')
    if "sqnr_db" in fields and not counters.measured:
        raise _WrongField(f'"sqnr_db" is {_shown(fields["sqnr_db"])}, and no call was measured')
    if counters.measured and "sqnr_db" in fields:
        value = sqnr_db(counters.signal, counters.noise)
        expected = round(value, 3) if math.isfinite(value) else None
        given = None if fields["sqnr_db"] is None else _number(fields, "sqnr_db", -sys.float_info.max)
        if (given is None) != (expected is None) or abs((given or 0.0) - (expected or 0.0)) > 0.0015:
            raise _WrongField(f'"sqnr_db" is {given}, and signal and noise are of {expected}')


def _beside(fields: dict[str, Any]) -> Counters:
    sent = _count(fields, "bytes_sent")
    reasons = Counter({OUTSIDE: _count(fields, "calls")})
    return Counters(full_precision=reasons, bytes_sent=sent, bytes_full_precision=sent, bytes_plain=sent)


def _reasons(fields: dict[str, Any], key: str) -> Counter[str]:
    counts = _mapping(fields, key)
    try:
        return Counter({reason: _count(counts, reason) for reason in counts})
    except _WrongField as error:
        raise _WrongField(f'"{key}": {error}') from None


# ---- the fields of a line: a log may have been edited, cut off or forged


class _WrongField(ValueError):
    """A bad field. The message has the field, its value, and the allowed values."""


def _count(fields: dict[str, Any], key: str, least: int = 0, most: int = _MOST) -> int:
    value = _field(fields, key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        within = f", {least} or more" if most == _MOST else f" from {least} to {most}"
        raise _WrongField(f'"{key}" is {_shown(value)}; expected a whole number{within}')
    return value


def _number(fields: dict[str, Any], key: str, least: float = 0.0, most: float = sys.float_info.max) -> float:
    value = _field(fields, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        within = f", {least:g} or more" if most == sys.float_info.max else f" from {least:g} to {most:g}"
        raise _WrongField(f'"{key}" is {_shown(value)}; expected a number{within}')
    return float(value)


def _mapping(fields: dict[str, Any], key: str) -> dict[str, Any]:
    value = _field(fields, key)
    if not isinstance(value, dict):
        raise _WrongField(f'"{key}" is {_shown(value)}; expected keys and values')
    return value


def _text(fields: dict[str, Any], key: str) -> str:
    value = _field(fields, key)
    if not isinstance(value, str):
        raise _WrongField(f'"{key}" is {_shown(value)}; expected a sentence')
    return value


def _field(fields: Any, key: str) -> Any:
    if not isinstance(fields, dict):
        raise ValueError
    if key not in fields:
        raise _WrongField(f'"{key}" is missing')
    return fields[key]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _printable(value: Any) -> Any:
    """Return a value with escapes for control characters, which a terminal would obey and a page cannot hold."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list) else value


def _no_log(path: Path) -> LogError:
    return LogError(f"{path}: no log of a run; expected a file that FLASH_ALLREDUCE_LOG={path} made a run write.")
