"""Counters per site: calls, reasons for full precision, bytes on the wire, measured error.

The callers compute the numbers, this module adds them up; it may be called from any thread.  Bytes are those
that this rank sends: for a quantized call its payloads, for a full-precision call the ring volume, that is
2 (N-1)/N x the tensor's bytes for all_reduce and (N-1)/N x for reduce_scatter and all_gather.
bytes_full_precision are the bytes that the same program would have sent without this plugin.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from flash_allreduce_plugin.policy import Role, Site

_log = logging.getLogger("flash_allreduce_plugin")


OUTSIDE = "outside the plugin"


@dataclass(slots=True)
class Counters:
    """Counters of one site.

    signal, noise: measured runs (collectives/sample.py) and the sum of their errors, over the `measured` calls.
    bits: of the last quantized call. bytes_plain: bytes of bytes_sent that went in full precision.
    """

    quantized: int = 0
    bits: int | None = None
    full_precision: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    bytes_full_precision: int = 0
    bytes_between_nodes: int = 0
    signal: float = 0.0
    noise: float = 0.0
    measured: int = 0
    residuals_dropped: Counter[str] = field(default_factory=Counter)
    guard: Counter[str] = field(default_factory=Counter)
    bytes_plain: int = 0

    @property
    def calls(self) -> int:
        return self.quantized + self.full_precision.total()

    def plus(self, later: Counters) -> Counters:
        """Return these counters plus the later ones."""
        return Counters(
            self.quantized + later.quantized,
            self.bits if later.bits is None else later.bits,
            self.full_precision + later.full_precision,
            self.bytes_sent + later.bytes_sent,
            self.bytes_full_precision + later.bytes_full_precision,
            self.bytes_between_nodes + later.bytes_between_nodes,
            self.signal + later.signal,
            self.noise + later.noise,
            self.measured + later.measured,
            self.residuals_dropped + later.residuals_dropped,
            self.guard + later.guard,
            self.bytes_plain + later.bytes_plain,
        )

    def minus(self, before: Counters) -> Counters:
        """The counts since `before`; bits is None if no call was quantized."""
        return Counters(
            self.quantized - before.quantized,
            self.bits if self.quantized > before.quantized else None,
            self.full_precision - before.full_precision,
            self.bytes_sent - before.bytes_sent,
            self.bytes_full_precision - before.bytes_full_precision,
            self.bytes_between_nodes - before.bytes_between_nodes,
            self.signal - before.signal,
            self.noise - before.noise,
            self.measured - before.measured,
            self.residuals_dropped - before.residuals_dropped,
            self.guard - before.guard,
            self.bytes_plain - before.bytes_plain,
        )


_OFTEN = 1000  # calls


@dataclass(slots=True)
class Kept:
    """The calls of a site in full precision for one reason. largest: bytes of the largest message, if known."""

    role: Role
    calls: int = 0
    largest: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurements (quality/trial.py) of a site: runs and sum of errors at `bits` as configured, and with `better`."""

    bits: int
    own: tuple[float, float] = (0.0, 0.0)
    better: tuple[float, float] = (0.0, 0.0)


_TRIED = 128  # the last call of a site that is tried


class Tally:
    """The calls of one attachment (an engine, a model, or all sites of a framework), which its notices are about."""

    def __init__(self, often: Callable[[], None]) -> None:
        """often: called after 1000 calls, and again whenever their number has doubled."""
        self.often = often
        self._quantized: Counter[str] = Counter()
        self._kept: dict[str, dict[str, Kept]] = {}  # by site and reason
        self._calls, self._next = 0, _OFTEN
        self._trials: dict[str, Trial] | None = {}

    def record(self, site: Site, reason: str | None, message: int | None = None) -> bool:
        """Count a call; reason None: quantized. True if `often` is due."""
        if reason is None:
            self._quantized[site.name] += 1
        else:
            kept = self._kept.setdefault(site.name, {}).setdefault(reason, Kept(site.role))
            kept.calls += 1
            if message is not None:
                kept.largest = max(message, kept.largest or 0)
        self._calls += 1
        if self._calls < self._next:
            return False
        self._next *= 2
        return True

    def kept(self) -> dict[str, tuple[int, dict[str, Kept]]]:
        """For each site with calls in full precision: its quantized calls, and the others by reason. A copy."""
        with _lock:
            return {
                site: (self._quantized[site], {reason: replace(one) for reason, one in found.items()})
                for site, found in self._kept.items()
            }

    def trials(self) -> dict[str, Trial]:
        """Return a copy of the counters of each site."""
        with _lock:
            return dict(self._trials or {})

    def to_try(self, site: Site) -> int | None:
        """Return the number of the site's quantized call that begins if it is to be tried: 1, 2, 4, 8 ... 128."""
        number = self._quantized[site.name]
        return number if self._trials is not None and 0 < number <= _TRIED and not number & number - 1 else None

    def tried(self, site: Site, bits: int, own: tuple[float, float], better: tuple[float, float]) -> None:
        """Add a trial; those of another width than before are left out."""
        if self._trials is None:
            return
        before = self._trials.get(site.name, Trial(bits))
        if before.bits == bits:
            both = ((a[0] + b[0], a[1] + b[1]) for a, b in ((before.own, own), (before.better, better)))
            self._trials[site.name] = Trial(bits, *both)

    def clear(self) -> None:
        """The first steps are over: no calls are tried from now on."""
        with _lock:
            self._quantized.clear()
            self._kept.clear()
            self._trials = None


_lock = threading.Lock()
# A child that is forked while another thread counts must find it free.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_sites: dict[str, Counters] = {}
_forgotten: dict[str, Counters] = {}  # counters before reset_stats
_beside: dict[str, Counters] = {}  # the same two for torch.distributed's other traffic
_beside_forgotten: dict[str, Counters] = {}
_watched: WeakValueDictionary[str, Tally] = WeakValueDictionary()  # by the first part of a site's name
_logged: set[tuple[str, str]] = set()  # outlives reset_stats: a reason is logged once in a process


def _counters(site: Site) -> Counters:
    counters = _sites.get(site.name)
    if counters is None:
        counters = _sites[site.name] = Counters()
    return counters


def watch(framework: str, tally: Tally) -> None:
    """Count the calls of every site of a framework that has no tally of its own, as long as `tally` lives."""
    with _lock:
        _watched[framework] = tally


def _tally(site: Site) -> Tally | None:
    if site.tally is not None or not _watched:
        return site.tally
    return _watched.get(site.name.partition(".")[0])


def record_quantized(
    site: Site,
    bytes_sent: int,
    bytes_full_precision: int,
    bytes_between_nodes: int = 0,
    bits: int | None = None,
    bytes_plain: int = 0,
) -> None:
    """Count a quantized call.

    bytes_full_precision: sent without the plugin. bytes_between_nodes, bytes_plain: parts of the bytes, sent to another
    node, and in full precision. bits: width of the codes.
    """
    with _lock:
        counters = _counters(site)
        counters.quantized += 1
        counters.bits = bits
        counters.bytes_sent += bytes_sent
        counters.bytes_full_precision += bytes_full_precision
        counters.bytes_between_nodes += bytes_between_nodes
        counters.bytes_plain += bytes_plain
        tally = _tally(site)
        often = tally is not None and tally.record(site, None)
    if tally is not None and often:
        tally.often()


def trial(site: Site) -> int | None:
    """Return the number of the quantized call that begins if its attachment wants it to be tried."""
    with _lock:
        tally = _tally(site)
        return None if tally is None else tally.to_try(site)


def record_trial(site: Site, bits: int, own: tuple[float, float], better: tuple[float, float]) -> None:
    """Add a trial to those of the site; one that is not finite is left out."""
    if not all(map(math.isfinite, (*own, *better))):
        return
    with _lock:
        tally = _tally(site)
        if tally is not None:
            tally.tried(site, bits, own, better)


def record_full_precision(
    site: Site, reason: str, bytes: int, *, instead_of: int | None = None, message: int | None = None
) -> None:
    """Count a call in full precision that sent `bytes`; log each (site, reason) the first time, at INFO.

    instead_of: bytes sent without the plugin, if not `bytes`. message: bytes of the whole tensor, which min_bytes is
    compared with.
    """
    with _lock:
        counters = _counters(site)
        counters.full_precision[reason] += 1
        counters.bytes_sent += bytes
        counters.bytes_full_precision += bytes if instead_of is None else instead_of
        counters.bytes_plain += bytes
        first = (site.name, reason) not in _logged
        _logged.add((site.name, reason))
        tally = _tally(site)
        often = tally is not None and tally.record(site, reason, message)
    if first:
        _log.info("%s runs in full precision: %s", site.name, reason)
    if tally is not None and often:
        tally.often()


def record_beside(what: str, bytes: int) -> None:
    """Count a call of torch.distributed's other traffic. what: its collective and group."""
    with _lock:
        counters = _beside.get(what)
        if counters is None:
            counters = _beside[what] = Counters()
        counters.full_precision[OUTSIDE] += 1
        counters.bytes_sent += bytes
        counters.bytes_full_precision += bytes
        counters.bytes_plain += bytes


def record_residual_dropped(site: Site, reason: str) -> None:
    """Count a residual of error feedback that was dropped."""
    with _lock:
        _counters(site).residuals_dropped[reason] += 1


def record_guard(site: str, change: str) -> None:
    """Count a change that the guard made at a site: "raised" or "lowered"."""
    with _lock:
        _sites.setdefault(site, Counters()).guard[change] += 1


def record_sqnr(site: Site, signal: float, noise: float) -> None:
    """Add one measurement, folded (collectives/sample.py): the number of runs and the sum of their errors.

    A measurement that is not finite (a step that overflowed) says nothing about the codec and is left out.
    """
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return
    with _lock:
        counters = _counters(site)
        counters.signal += signal
        counters.noise += noise
        counters.measured += 1


def sqnr_db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise); inf without noise, -inf with noise alone."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def stats() -> dict[str, Any]:
    """A snapshot of the counters since the last reset: totals, and the same per site with its SQNR.

    {"calls", "quantized", "full_precision": {reason: count}, "bytes_sent", "bytes_full_precision",
     "bytes_plain", "bytes_between_nodes", "residuals_dropped": {reason: count},
     "guard": {"raised" or "lowered": count},
     "sites": {name: {the same keys, "bits": int or None, "sqnr_db": float or None}},
     "beside": {collective and group: {"calls", "bytes_sent"}}}

    bytes_full_precision: bytes that would have been sent without this plugin.
    bytes_plain: the part of bytes_sent that the plugin left in full precision. "beside": torch.distributed's other
    traffic while an integration was attached (other_traffic.py).
    bytes_between_nodes: the part of bytes_sent to other nodes, in two-level calls; other calls have no nodes.
    residuals_dropped is of error feedback, see Feedback. guard: the changes that min_sqnr_db made.
    bits is the width of the last quantized call of the site, of its narrower half; in two levels that between nodes.
    sqnr_db is 10 log10(measured runs / sum of their errors) over the measured calls of the site: None if none was
    measured, inf if there was no noise at all.
    """
    with _lock:
        return {
            **_counts(_sites.values()),
            "sites": {
                name: {**_counts([site]), "bits": site.bits, "sqnr_db": _sqnr_db(site)} for name, site in _sites.items()
            },
            "beside": {name: {"calls": one.calls, "bytes_sent": one.bytes_sent} for name, one in _beside.items()},
        }


def reset_stats() -> None:
    """Forget every count and every measurement."""
    with _lock:
        for kept, counted in ((_forgotten, _sites), (_beside_forgotten, _beside)):
            kept.update(_together(kept, counted))
            counted.clear()


def totals() -> dict[str, Counters]:
    """Return the counters of each site since the start of the process, independent of reset_stats."""
    with _lock:
        return _together(_forgotten, _sites)


def beside() -> dict[str, Counters]:
    """Return the same of torch.distributed's other traffic, per collective and group."""
    with _lock:
        return _together(_beside_forgotten, _beside)


def _together(before: dict[str, Counters], now: dict[str, Counters]) -> dict[str, Counters]:
    return {
        name: before.get(name, Counters()).plus(now.get(name, Counters())) for name in dict.fromkeys((*before, *now))
    }


def shares(sites: Iterable[Counters], others: Iterable[Counters]) -> str:
    """Return a sentence: the shares of this rank's bytes quantized, left in full precision, and outside the plugin."""
    sent = plain = 0
    for site in sites:
        sent, plain = sent + site.bytes_sent, plain + site.bytes_plain
    other = sum(one.bytes_sent for one in others)
    whole = max(sent + other, 1)
    parts = [f"{100 * part / whole:.1f} %" for part in (sent - plain, plain, other)]
    return (
        f"of {(sent + other) / 1e6:.2f} MB that this rank sent, {parts[0]} were quantized, "
        f"{parts[1]} left in full precision by the plugin, {parts[2]} {OUTSIDE}"
    )


def beside_us() -> list[str]:
    """Since the last reset: a line for each collective and group, the one with the most bytes first, and `shares`."""
    with _lock:
        if not _beside:
            return []
        largest = sorted(_beside.items(), key=lambda item: -item[1].bytes_sent)
        lines = [f"{OUTSIDE}: {what}: {one.calls} calls, {one.bytes_sent / 1e6:.2f} MB sent" for what, one in largest]
        return [*lines, shares(_sites.values(), _beside.values())]


def difference(now: dict[str, Counters], before: dict[str, Counters]) -> dict[str, Counters]:
    """Between two totals: the sites in which anything was counted meanwhile."""
    found = {name: counters.minus(before.get(name, Counters())) for name, counters in now.items()}
    return {name: counters for name, counters in found.items() if counters != Counters()}


def _counts(sites: Iterable[Counters]) -> dict[str, Any]:
    quantized = bytes_sent = bytes_full_precision = bytes_plain = bytes_between_nodes = 0
    reasons: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    guard: Counter[str] = Counter()
    for site in sites:
        quantized += site.quantized
        bytes_sent += site.bytes_sent
        bytes_full_precision += site.bytes_full_precision
        bytes_plain += site.bytes_plain
        bytes_between_nodes += site.bytes_between_nodes
        reasons.update(site.full_precision)
        dropped.update(site.residuals_dropped)
        guard.update(site.guard)
    return {
        "calls": quantized + reasons.total(),
        "quantized": quantized,
        "full_precision": dict(reasons),
        "bytes_sent": bytes_sent,
        "bytes_full_precision": bytes_full_precision,
        "bytes_plain": bytes_plain,
        "bytes_between_nodes": bytes_between_nodes,
        "residuals_dropped": dict(dropped),
        "guard": dict(guard),
    }


def _sqnr_db(site: Counters) -> float | None:
    return None if site.measured == 0 else sqnr_db(site.signal, site.noise)
