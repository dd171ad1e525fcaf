"""enabled "auto": the first steps run alternately in full precision and quantized, and the faster way stays.

1. After warm-up three steps run in full precision: programs compile and allocate in them.
2. Full precision and quantized steps alternate (runtime/alternation.py). A step is the time between the first calls of
   two steps; the integrations count them.
3. At the end of each pair of blocks a rank posts the seconds of its steps in the store of the default group. The
   first rank there reads all posts and posts its verdict (runtime/verdict.py). All ranks wait for it and switch at the
   same step.
4. Then each site with a share of the bytes alternates alone: one site may pay where the others do not. With
   hierarchical "auto", two levels and one level alternate last.
5. The decision stays, for `auto_interval` steps if that is set. Rank 0 prints it, with the setting that pins it.

All ranks of the default group that make calls with "auto" take part in one trial, as parts of one training. Calls
without a step (`fap.all_reduce` in a program's own code) are quantized, without a trial.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.policy import SLOWER, TRIAL, Site
from flash_allreduce_plugin.runtime import alternation, verdict
from flash_allreduce_plugin.runtime.verdict import FULL_PRECISION, LEVELS, QUANTIZED, Switches
from flash_allreduce_plugin.telemetry import notices, run_log

SETTLE = 3  # steps
#: Seconds. A benchmark stops this clock while other trainings of its process run their steps.
clock = time.perf_counter

_log = logging.getLogger("flash_allreduce_plugin")
_WITHOUT_STEPS = (
    'enabled "auto" measures no call that has no step or no default group: such calls are quantized (give step=, the '
    "finished training steps)"
)
_DOING = 'agreeing on enabled "auto"'
_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Segment:
    """The steps from number `start` on. other: None if all run as `base`. over: True if no step is measured."""

    start: int
    base: Switches
    other: Switches | None = None
    over: bool = False

    def switches(self, step: int) -> Switches:
        if self.other is not None and alternation.is_other(step - self.start):
            return self.other
        return self.base


class Auto:
    """The trial and the decision of this process, in one default group.

    The number of its step alone decides about a call, on all ranks. A second engine that counts more slowly, or a
    second training, follows these numbers too.
    """

    def __init__(self, world: dist.ProcessGroup, number: int, interval: int, decided: Switches | None = None) -> None:
        """number: of this trial, equal on all ranks. interval: auto_interval. decided: the decision of a checkpoint."""
        self.world = weakref.ref(world)
        self._name = f"flash_allreduce/auto/{number}"
        self._interval = interval
        self._lock = threading.Lock()
        self._store: Any = None
        self._member = 0
        self._latest: int | None = None  # the last step
        self._began = 0.0
        self._plan = [Segment(0, FULL_PRECISION if decided is None else decided, over=decided is not None)]
        self._pair = self._verdicts = 0
        self._notes: verdict.Notes = {}
        self._seconds: list[tuple[bool, float]] = []  # this rank's steps of the pair
        self._sent: Counter[str] = Counter()  # bytes of a site in full precision, in the pair
        self._levels = False  # True after calls of several nodes with hierarchical "auto"

    @property
    def decision(self) -> Switches | None:
        """The decision; None before the first one and while it is measured again."""
        segment = self._segment(self._latest or 0)
        return segment.base if segment.over else None

    def reason(self, site: Site, step: int, nbytes: int, label: Label, device: torch.device) -> str | None:
        """Return why a call of `nbytes` runs in full precision; None: it is quantized.

        Raises CollectiveError if a rank did not answer within the timeout of the store.
        """
        if self._latest is None or step > self._latest:
            with self._lock:
                if self._latest is None or step > self._latest:
                    self._begins(step, label, device)
        segment = self._segment(step)
        if not segment.over:
            self._sent[site.name] += nbytes
        if segment.switches(step).has(site.name):
            return None
        return SLOWER if segment.over else TRIAL

    def is_flat(self, step: int) -> bool:
        """Return True if a quantized call of several nodes, with hierarchical "auto", runs in one level."""
        self._levels = True
        return not self._segment(step).switches(step).has(LEVELS)

    def _segment(self, step: int) -> Segment:
        return next((one for one in reversed(self._plan) if one.start <= step), self._plan[0])

    def _begins(self, step: int, label: Label, device: torch.device) -> None:
        """Start a step at its first call."""
        segment, before = self._plan[-1], self._latest
        if segment.other is not None and step >= segment.start:
            if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)
            offset = step - 1 - segment.start
            if step - 1 == before and offset >= 0 and alternation.is_measured(offset):
                self._seconds.append((alternation.is_other(offset), clock() - self._began))
        try:
            if before is None and not (segment.over and not self._interval):
                self._enter(step, segment)
            self._advance(step)
        except RuntimeError as error:  # of the store
            raise label.error(_DOING, error) from error
        self._latest, self._began = step, clock()

    def _enter(self, step: int, segment: Segment) -> None:
        """Join the trial. A late rank reads the step at which the others started."""
        world = self.world()
        assert world is not None
        # Another connection: torch uses the group's at the same time.
        store: Any = world.get_group_store()
        self._store = store.clone()
        self._member = self._store.add(f"{self._name}/members", 1)
        if self._member == 1:
            self._store.set(f"{self._name}/first", str(step))
        first = int(self._store.get(f"{self._name}/first"))
        self._plan.append(Segment(first + (self._interval if segment.over else SETTLE), FULL_PRECISION, QUANTIZED))

    def _advance(self, step: int) -> None:
        """Read the verdicts that are due at the start of a step."""
        while True:
            segment = self._plan[-1]
            start = segment.start + alternation.end_of(self._pair)
            if segment.other is None or step < start:
                return
            self._pair += 1
            self._judged(start, self._verdict(segment.base, segment.other))

    def _verdict(self, base: Switches, other: Switches) -> dict[str, Any]:
        """Return the first rank's verdict on the measurements of all ranks in the pair."""
        name = f"{self._name}/{self._verdicts}"
        self._verdicts += 1
        post = {"seconds": self._seconds, "sent": self._sent, "levels": self._levels}
        self._store.set(f"{name}/{self._member}", json.dumps(post))
        self._seconds, self._sent = [], Counter()
        if self._store.add(f"{name}/here", 1) == 1:
            self._store.set(name, json.dumps(verdict.judge(self._notes, self._posts(name), base, other, self._pair)))
        found: dict[str, Any] = json.loads(self._store.get(name))
        self._notes = found["notes"]
        return found

    def _posts(self, name: str) -> list[verdict.Post]:
        """Return the posts of all members. A member without further calls is not waited for again."""
        gone = self._notes.setdefault("gone", [])
        members = [one for one in range(1, self._store.add(f"{self._name}/members", 0) + 1) if one not in gone]
        keys = {member: f"{name}/{member}" for member in members}
        try:
            self._store.wait(list(keys.values()), _PATIENCE)
        except RuntimeError:
            late = [member for member in members if not self._store.check([keys[member]])]
            _log.warning("auto: %d of %d ranks make no calls any more; the trial leaves them out", len(late), len(keys))
            gone += late
            keys = {member: key for member, key in keys.items() if member not in late}
        posts = [json.loads(self._store.get(key)) for key in keys.values()]
        for key in keys.values():
            self._store.delete_key(key)
        return posts

    def _judged(self, start: int, found: dict[str, Any]) -> None:
        """Apply a verdict from step `start` on."""
        if found["base"] is None:
            return
        base, self._pair = Switches.of(found["base"]), 0
        if found["other"] is not None:
            self._plan.append(Segment(start, base, Switches.of(found["other"])))
            return
        self._plan.append(Segment(start, base, over=True))
        if self._interval:
            self._plan.append(Segment(start + self._interval, FULL_PRECISION, QUANTIZED))
        notices.say(found["line"])
        run_log.decided({**base.said(), "line": found["line"]})


_current: Auto | None = None
_loaded: Switches | None = None  # of a checkpoint, until the first call
_told = False
_number = 0  # of the trial: part of its keys in the store, which outlives the trial


def reason(site: Site, step: int | None, nbytes: int, interval: int, label: Label, device: torch.device) -> str | None:
    """Return Auto.reason of the trial in the default group of this process. Calls without a step are quantized."""
    global _current, _loaded, _number, _told
    world = dist.group.WORLD
    if step is None or world is None:
        if not _told:
            _told = True
            notices.say(_WITHOUT_STEPS)
        return None
    if _current is None or _current.world() is not world:
        _number += _current is not None
        _current, _loaded = Auto(world, _number, interval, _loaded), None
    return _current.reason(site, step, nbytes, label, device)


def is_flat(step: int) -> bool:
    """Return Auto.is_flat, after `reason` for the same call. False without a trial."""
    return _current is not None and _current.is_flat(step)


def decision() -> Switches | None:
    """Return the present decision; None if there is none yet."""
    return _loaded if _current is None else _current.decision


def state_dict() -> dict[str, Any]:
    """Return the decision for a checkpoint, equal on all ranks; empty if there is none yet."""
    decided = decision()
    return {} if decided is None else decided.said()


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Load a decision that state_dict returned; {}: measure. All ranks call it."""
    global _current, _loaded, _number
    _current, _loaded, _number = None, Switches.of(state) if state else None, _number + 1
