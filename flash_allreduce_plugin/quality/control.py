"""Measurement of live calls. widths.py and guard.py choose widths by it.

SQNR = 10 log10(number of runs / sum of their errors), in dB. Runs of some hundred elements weigh the same
(collectives/sample.py).

Every config.quality_interval-th call of a site on a process group is measured: locally (collectives/meter.py), or
exactly, against the same call in full precision. Collectives other than all_reduce, reduce_scatter and all_gather are
always measured locally. The ranks add their measurements at the start of the next measured call (sites.py has the
reason), for the counters, for target_sqnr_db (widths.py) and for min_sqnr_db (guard.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_allreduce_plugin.codec.format import MAX_BITS
from flash_allreduce_plugin.collectives import messages, sample, transport
from flash_allreduce_plugin.collectives.meter import Meter
from flash_allreduce_plugin.collectives.transport import Label, Pending
from flash_allreduce_plugin.policy import LOW_SQNR, SUMS, Collective, FullPrecision, Plan, Site
from flash_allreduce_plugin.quality.guard import FULL, SiteGuard
from flash_allreduce_plugin.quality.sites import Sums
from flash_allreduce_plugin.quality.trial import try_codebook
from flash_allreduce_plugin.quality.widths import SiteWidth
from flash_allreduce_plugin.telemetry import counters

if TYPE_CHECKING:
    from flash_allreduce_plugin.codec.format import Format
    from flash_allreduce_plugin.config import FlashConfig

_log = logging.getLogger("flash_allreduce_plugin")

_MEASURED_EXACTLY = ("all_reduce", "reduce_scatter", "all_gather")  # with quality_measure "exact"


class SiteStates:
    """The widths, guards and measurements of the sites of one process group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        #: number of quantized calls of a site on this group; equal on all its ranks
        self.calls: Counter[str] = Counter()
        #: of a site and configuration with a target
        self._widths: dict[tuple[str, FlashConfig], SiteWidth] = {}
        #: of a site and configuration with a floor
        self._guards: dict[tuple[str, FlashConfig], SiteGuard] = {}
        #: local measurements of a site that the ranks have not added yet
        self._errors: dict[str, Sums] = {}
        #: loaded states, by kind, site and digest of the configuration, until the site is called
        self._kept: dict[tuple[str, str, str], Mapping[str, Any]] = {}

    def width(self, site: str, config: FlashConfig, bits: int) -> SiteWidth:
        """Return the width of a site, which starts at `bits`."""
        width = self._widths.get((site, config))
        if width is None:
            assert config.target_sqnr_db is not None
            width = self._widths[site, config] = SiteWidth(site, bits, config.target_sqnr_db, config.symmetric)
            self._go_on("width", site, config, width)
        return width

    def guard(self, site: str, config: FlashConfig, bits: int) -> SiteGuard:
        """Return the guard of a site. bits: the least configured width of its calls."""
        guard = self._guards.get((site, config))
        if guard is None:
            assert config.min_sqnr_db is not None
            guard = self._guards[site, config] = SiteGuard(site, bits, config.min_sqnr_db, config.symmetric)
            self._go_on("guard", site, config, guard)
        return guard

    def error(self, site: str) -> Sums:
        """Return the measurements of a site since the last sum over the ranks."""
        return self._errors.setdefault(site, Sums())

    def _go_on(self, kind: str, site: str, config: FlashConfig, new: SiteWidth | SiteGuard) -> None:
        """Load the checkpoint's state into a new width or guard, if there is one."""
        kept = self._kept.pop((kind, site, config.digest().hex()), None)
        if kept is not None:
            new.load_state_dict(kept)
        elif self.rank == 0 and any((kind, site) == key[:2] for key in self._kept):
            _log.warning(
                "%s: the checkpoint's %s is of another configuration; it begins as configured now", *(site, kind)
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: equal on all ranks of the group, except `measured` of a site."""
        sites = dict(self._kept)
        for (site, config), width in self._widths.items():
            sites["width", site, config.digest().hex()] = width.state_dict()
        for (site, config), guard in self._guards.items():
            sites["guard", site, config.digest().hex()] = guard.state_dict()
        return {
            "calls": dict(self.calls),
            "sites": [
                {"kind": kind, "site": site, "config": digest, **kept} for (kind, site, digest), kept in sites.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that state_dict returned; empty: as a new group."""
        self.calls = Counter(state.get("calls", {}))
        self._widths.clear()
        self._guards.clear()
        self._errors.clear()
        self._kept = {(kept["kind"], kept["site"], kept["config"]): kept for kept in state.get("sites", ())}


class Quality:
    """The measurement of one call that may be quantized, and its width by earlier measurements."""

    def __init__(
        self, collective: Collective, site: Site, label: Label, state: SiteStates, config: FlashConfig
    ) -> None:
        self.measured = False
        #: for the collective, if the call is measured locally
        self.meter: Meter | None = None
        self._collective, self._site, self._label, self._state, self._config = collective, site, label, state, config
        self._exact: Measurement | None = None
        self._error: Sums | None = None  # of local measurements, for the counters
        self._width: SiteWidth | None = None
        self._guard: SiteGuard | None = None
        self._bits = self._level = 0  # of the width and of the guard, in this call
        self._number = 0  # of the call
        self._starts: list[int] = []  # numbers of the first groups of watched parts, and the end
        self._watched: Plan | None = None  # the plan in 8 bits, for the guard's return from full precision

    @property
    def watching(self) -> bool:
        """Return True if the guard keeps the call in full precision, and measures the error of 8 bits."""
        return self._watched is not None

    def decide(self, plan: Plan, at: Callable[[int], Plan], device: torch.device) -> Plan | FullPrecision:
        """Return the plan at the widths of the site, or full precision. Counts the call.

        In a measured call the ranks agree on the width first. at: returns the plan with another width than plan.width.
        """
        config, name = self._config, self._site.name
        if config.quality_interval == 0:
            return plan
        number = self._number = self._state.calls[name]
        self._state.calls[name] += 1
        self.measured = number % config.quality_interval == 0
        if config.quality_measure == "local" or self._collective not in _MEASURED_EXACTLY:
            self._error = self._state.error(name)
        if plan.width is not None:
            self._width = self._state.width(name, config, plan.width)
        if config.min_sqnr_db is not None:
            # With a target, the target moves the width, and the guard only chooses full precision.
            start = plan.narrowest(self._collective) if plan.width is None else MAX_BITS
            self._guard = self._state.guard(name, config, start)
        if self.measured and number:
            self._agree(number, device)
        if self._width is not None:
            self._bits = self._width.bits
            plan = at(self._bits)
        return plan if self._guard is None else self._guarded(plan, self._guard)

    def try_codebook(self, plan: Plan, parts: Tensor | Sequence[Tensor]) -> None:
        """Try the codebook at the start of a call. parts: this rank's input, [numel], [rows, numel] or 1-D tensors."""
        halves = [plan.reduce] if self._collective in SUMS else [plan.gather]
        if self._collective == "all_reduce":
            halves.append(plan.gather)
        try_codebook(self._site, min(halves, key=lambda half: half.bits), parts)

    def measure_locally(self, factor: float, device: torch.device, wire: Format, sizes: Iterable[int]) -> None:
        """Prepare the local measurement of a call in the format `wire`. factor: of its sum.

        sizes: elements of the parts of the call; without a sum, of this rank's parts.
        """
        self._meter_of(factor, device, sum(map(wire.groups, sizes)), wire.group_size)

    def _meter_of(self, factor: float, device: torch.device, groups: int, group_size: int) -> Meter:
        chosen = sample.sample_of(groups, group_size, self._number // self._config.quality_interval)
        self.meter = Meter(factor, device, chosen, summed=self._collective in SUMS)
        return self.meter

    def measure_exactly(self, input: Tensor, op: object, factor: float, parts: list[int] | None = None) -> None:
        """Prepare the exact measurement of a call. Arguments as for Measurement."""
        self._exact = Measurement(self._collective, input, op, factor, self._label, parts)

    def end(self, result: Tensor) -> None:
        """Finish the measurement with the result [numel] of the call."""
        if self._exact is not None:
            measured = self._exact.record(result, self._site)
        elif self.meter is not None and self._error is not None:
            measured = self.meter.read()
            self._error.add(measured)
        else:
            return
        if self._width is not None:
            self._width.record(self._bits, measured)
        if self._guard is not None:
            self._guard.record(self._level, measured)

    def watch(self, parts: Iterable[Tensor], factor: float) -> None:
        """Measure the error that 8 bits would make in a call in full precision.

        parts: this rank's input, 1-D. factor: of their sum.
        """
        if self._watched is None:
            return
        plan, parts = self._watched, list(parts)
        if not parts:
            return
        self._starts = [0, *accumulate(plan.reduce.groups(part.numel()) for part in parts)]
        meter = self._meter_of(factor, parts[0].device, self._starts[-1], plan.reduce.group_size)
        for first, part in zip(self._starts, parts, strict=False):
            if self._collective not in SUMS:
                meter.result(part, first)
                meter.would_lose(part, plan.gather, first, summed=False)
            else:
                meter.would_lose(part, plan.reduce, first, summed=True)
                if plan.inside is not None:
                    meter.would_lose(part, plan.inside, first, summed=True)

    def watch_weights(self, master: Tensor, weights: Tensor) -> None:
        """Measure the error that differences in 8 bits would make in weights [numel]. master [numel]: exact."""
        if self._watched is not None:
            wire = self._watched.gather
            self._meter_of(1.0, weights.device, wire.groups(master.numel()), wire.group_size).held(master, weights)

    def watched(self, result: Tensor) -> None:
        """Finish `watch` with the result [numel], and give the guard the error of 8 bits."""
        if self._watched is None or self.meter is None or self._guard is None:
            return
        state, wire = self._state, self._watched.gather
        if self._collective == "reduce_scatter":
            self.meter.result(result, self._starts[state.rank])
        elif self._collective == "reduce":
            self.meter.result(result, 0)
        elif self._collective == "all_reduce":
            share = -(-wire.groups(result.numel()) // state.world_size)
            first, end = state.rank * share, (state.rank + 1) * share
            part = result[first * wire.group_size : end * wire.group_size]
            self.meter.result(part, first)
            self.meter.would_lose(part, wire, first, summed=False)
        self._guard.record(FULL, self.meter.read())

    def _agree(self, number: int, device: torch.device) -> None:
        """Add the measurements of all ranks at the start of the site's measured call `number`."""
        known = [sums for sums in (self._error, self._width, self._guard) if sums is not None]
        if not known:
            return
        total = messages.add_up(torch.stack([one.take() for one in known]), self._label, device)
        for one, (runs, errors) in zip(known, sample.fold_all(total), strict=True):
            if one is self._error:
                if runs:
                    counters.record_sqnr(self._site, runs, errors)
            elif one is self._width:
                self._width.update(runs, errors, number, log=self._state.rank == 0)
            elif one is self._guard:
                self._guard.update(runs, errors, number, log=self._state.rank == 0)

    def _guarded(self, plan: Plan, guard: SiteGuard) -> Plan | FullPrecision:
        if guard.bits < FULL:
            self._level = guard.bits if self._width is None else self._bits
            return plan if guard.bits == guard.start else plan.at_least(guard.bits)
        if self.measured:
            self._watched = plan if guard.start == MAX_BITS else plan.at_least(MAX_BITS)
        return FullPrecision(LOW_SQNR)


class Measurement:
    """The exact result of one call, in flight together with the quantized one: quality_measure "exact".

    Costs a float32 copy of the input and a collective in full precision.
    """

    def __init__(
        self, collective: str, input: Tensor, op: object, factor: float, label: Label, parts: list[int] | None = None
    ) -> None:
        """input: as for torch's collective, evenly split. factor: multiplies its result.

        parts: for an all_gather, the elements of each rank's part, if they differ.
        """
        self._factor = factor
        self._exact = input.detach().flatten().to(torch.float32, copy=True)
        self._pending: Pending
        world = label.group.size()
        if collective == "all_reduce":
            self._pending = transport.all_reduce(self._exact, op, label)
        elif collective == "reduce_scatter":
            whole, self._exact = self._exact, self._exact.new_empty(self._exact.numel() // world)
            self._pending = transport.reduce_scatter(self._exact, whole, op, label)
        else:
            shard = self._exact
            self._exact = shard.new_empty(shard.numel() * world if parts is None else sum(parts))
            self._pending = transport.all_gather(self._exact, shard, label, transport.PLAINLY, parts)

    def record(self, result: Tensor, site: Site) -> Tensor:
        """Compare the quantized result, count it at the site, and return the measurement of this rank's result."""
        self._pending.wait()
        measured = sample.compare(self._exact[: result.numel()] * self._factor, result)
        runs, errors = sample.fold(measured)
        if runs:
            counters.record_sqnr(site, runs, errors)
        return measured
