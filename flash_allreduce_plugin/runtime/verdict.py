"""The verdict of a trial: full precision or quantized, then one site after another, then one level or two.

`judge` is a function of earlier verdicts' notes and the ranks' posts. A different rank may call it each time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypedDict

from flash_allreduce_plugin.runtime import alternation

LEAST_SHARE = 0.05  # of the bytes: a site with less is not tried alone
MOST_SITES = 8
LEVELS = "two levels"
"""Switched as a site is: what hierarchical "auto" does. Off: such calls are flat."""


@dataclass(frozen=True, slots=True)
class Switches:
    """The sites that are quantized (and LEVELS): all or none, and the exceptions."""

    on: bool
    but: frozenset[str] = frozenset()

    def has(self, site: str) -> bool:
        return (site in self.but) != self.on

    def toggled(self, site: str) -> Switches:
        return Switches(self.on, self.but ^ {site})

    def said(self) -> dict[str, Any]:
        """Return the switches in JSON types."""
        return {"on": self.on, "but": sorted(self.but)}

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Switches:
        return cls(said["on"], frozenset(said["but"]))


FULL_PRECISION, QUANTIZED = Switches(False), Switches(True)


class Post(TypedDict):
    """The measurements of a rank in a pair of blocks.

    seconds: of each measured step, with True if it ran the other way. sent: bytes of a site in full precision.
    levels: True after calls of several nodes with hierarchical "auto".
    """

    seconds: list[tuple[bool, float]]
    sent: dict[str, int]
    levels: bool


class Notes(TypedDict, total=False):
    """The notes of a verdict for the next one, in JSON types.

    base, other: seconds of the slowest rank in every measured step of the present alternation.
    sent, levels: as in a Post, of all ranks.
    steps: number of steps measured in earlier alternations.
    sites: still to be tried alone; missing while full precision alternates with quantized.
    first: the first part of the line.
    seconds: of a step as decided.
    gone: members that no longer post.
    """

    base: list[float]
    other: list[float]
    sent: dict[str, int]
    levels: bool
    steps: int
    sites: list[str]
    first: str
    seconds: float
    gone: list[int]


def judge(notes: Notes, posts: Sequence[Post], base: Switches, other: Switches, pairs: int) -> dict[str, Any]:
    """Return the verdict after `pairs` pairs of blocks of `base` and `other`, in JSON types.

    {"base": the switches that stay; None: measure more, "other": the switches to try against them; None: the end,
    "line": to print, "notes": for the next verdict}
    """
    notes = _taken(notes, posts)
    seconds = notes["base"], notes["other"]
    faster = alternation.faster(*seconds, pairs)
    if faster is None:
        return {"base": None, "notes": notes}
    stays = other if faster else base
    notes |= {"base": [], "other": [], "steps": notes.get("steps", 0) + sum(map(len, seconds))}
    medians = [median(one) if one else 0.0 for one in seconds]
    if "sites" not in notes:
        notes["first"] = f"a step takes {_shown(medians[0])} in full precision and {_shown(medians[1])} quantized"
        notes["seconds"], notes["sites"] = medians[faster], _to_try(notes["sent"])
        notes["sites"] += [LEVELS] * notes["levels"]
    elif faster:
        notes["seconds"] = medians[1]
    if notes["sites"] == [LEVELS] and not any(map(stays.has, notes["sent"])):
        notes["sites"] = []
    if notes["sites"]:
        toggled = stays.toggled(notes["sites"][0])
        notes["sites"] = notes["sites"][1:]
        return {"base": stays.said(), "other": toggled.said(), "notes": notes}
    return {"base": stays.said(), "other": None, "line": _line(notes, stays), "notes": {"gone": notes["gone"]}}


def _taken(notes: Notes, posts: Sequence[Post]) -> Notes:
    """Add the ranks' posts to the notes: the slowest rank's time of every step."""
    sent = Counter(notes.get("sent", {}))
    for post in posts:
        sent.update(post["sent"])
    times = {False: list(notes.get("base", [])), True: list(notes.get("other", []))}
    most = max((len(post["seconds"]) for post in posts), default=0)  # a late rank has fewer
    for steps in zip(*(post["seconds"] for post in posts if len(post["seconds"]) == most), strict=True):
        times[steps[0][0]].append(max(seconds for _, seconds in steps))
    levels = notes.get("levels", False) or any(post["levels"] for post in posts)
    return {"gone": [], **notes, "levels": levels, "base": times[False], "other": times[True], "sent": dict(sent)}


def _to_try(sent: Mapping[str, int]) -> list[str]:
    """Return the sites to try alone, the largest first."""
    if len(sent) < 2:
        return []
    total = sum(sent.values())
    return [site for site, one in Counter(sent).most_common(MOST_SITES) if one >= LEAST_SHARE * total]


def _line(notes: Notes, switches: Switches) -> str:
    on = [site for site in sorted(notes["sent"]) if switches.has(site)]
    if len(on) in (0, len(notes["sent"])):
        answer, pinned = "on" if on else "off", json.dumps(bool(on))
    else:
        answer, pinned = f"on at {' and '.join(on)} alone, {_shown(notes['seconds'])}", json.dumps(on)
    if on and notes["levels"] and not switches.has(LEVELS):
        answer, pinned = f"{answer}, in one level", f'{pinned} hierarchical="off"'
    return f"auto: {notes['first']} ({notes['steps']} steps): {answer}; to pin it: enabled={pinned}"


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
