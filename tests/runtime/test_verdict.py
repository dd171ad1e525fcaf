"""The verdicts of a trial, from invented posts."""

from __future__ import annotations

import json
from typing import Any

from flash_allreduce_plugin.runtime import alternation, verdict
from flash_allreduce_plugin.runtime.verdict import FULL_PRECISION, LEVELS, QUANTIZED, Notes, Switches


def posts(base: float, other: float, sent: dict[str, int], ranks: int = 2, levels: bool = False) -> list[verdict.Post]:
    """Return the posts of one pair; the last rank is the slowest."""
    steps = [False] * alternation.BLOCK + [True] * alternation.BLOCK
    slower = [0.001 * rank for rank in range(ranks)]
    return [
        {"seconds": [(way, (other if way else base) + more) for way in steps], "sent": sent, "levels": levels}
        for more in slower
    ]


def trial(
    seconds: dict[frozenset[str], float], sent: dict[str, int], notes: Notes | None = None, levels: bool = False
) -> dict[str, Any]:
    """Return the last verdict of a training with these step times for each set of quantized sites, and its "trials".

    The next verdict reads the notes of the one before as JSON, as ranks do.
    """
    base, other, pairs, trials = FULL_PRECISION, QUANTIZED, 0, 1
    notes = notes or {}
    while True:
        pairs += 1
        named = (*sent, LEVELS) if levels else tuple(sent)
        times = [seconds[frozenset(site for site in named if ways.has(site))] for ways in (base, other)]
        posted = posts(times[0], times[1], sent, levels=levels)
        found = json.loads(json.dumps(verdict.judge(notes, posted, base, other, pairs)))
        notes = found["notes"]
        if found["base"] is None:
            continue
        base, pairs = Switches.of(found["base"]), 0
        if found["other"] is None:
            return {**found, "trials": trials}
        other, trials = Switches.of(found["other"]), trials + 1


def of(*sites: str) -> frozenset[str]:
    return frozenset(sites)


def test_one_site_has_one_trial() -> None:
    found = trial({of(): 0.100, of("a"): 0.080}, {"a": 1000})
    assert found["base"] == QUANTIZED.said() and found["trials"] == 1
    assert found["line"] == (
        "auto: a step takes 101 ms in full precision and 81 ms quantized (4 steps): on; to pin it: enabled=true"
    ), "the slowest rank's"
    found = trial({of(): 1.5, of("a"): 2.5}, {"a": 1000})
    assert found["base"] == FULL_PRECISION.said()
    assert found["line"].endswith(
        "1.5 s in full precision and 2.5 s quantized (4 steps): off; to pin it: enabled=false"
    )


def test_a_site_that_does_not_pay_is_switched_off() -> None:
    times = {of(): 0.100, of("a", "b"): 0.080, of("a"): 0.060, of("b"): 0.120}
    found = trial(times, {"a": 1000, "b": 1000})
    assert Switches.of(found["base"]) == Switches(True, of("b")) and found["trials"] == 3
    assert found["line"].endswith('on at a alone, 61 ms; to pin it: enabled=["a"]')


def test_a_site_that_pays_alone_is_switched_on() -> None:
    times = {of(): 0.100, of("a", "b"): 0.150, of("a"): 0.170, of("b"): 0.080}
    found = trial(times, {"a": 1000, "b": 1000})
    assert Switches.of(found["base"]) == Switches(False, of("b"))


def test_a_site_of_few_bytes_follows_the_others() -> None:
    found = trial({of(): 0.1, of("a", "b"): 0.08, of("a"): 0.08, of("b"): 0.1}, {"a": 1000, "b": 40})
    assert found["base"] == QUANTIZED.said() and found["trials"] == 2, "a alone, b never"


def test_no_more_than_the_largest_sites_are_tried() -> None:
    sites = {f"s{number:02}": 1000 - number for number in range(verdict.MOST_SITES + 4)}
    every = frozenset(sites)
    times = {of(): 0.100, every: 0.080, **{every - {site}: 0.090 for site in sites}}
    assert trial(times, sites)["trials"] == 1 + verdict.MOST_SITES


def test_one_level_where_two_do_not_pay() -> None:
    found = trial({of(): 0.1, of("a", LEVELS): 0.09, of("a"): 0.06}, {"a": 1000}, levels=True)
    assert Switches.of(found["base"]) == Switches(True, of(LEVELS)) and found["trials"] == 2
    assert found["line"].endswith('(12 steps): on, in one level; to pin it: enabled=true hierarchical="off"')
    found = trial({of(): 0.1, of("a", LEVELS): 0.06, of("a"): 0.09}, {"a": 1000}, levels=True)
    assert found["base"] == QUANTIZED.said() and found["line"].endswith(": on; to pin it: enabled=true")


def test_levels_are_not_tried_where_nothing_is_quantized() -> None:
    found = trial({of(): 0.1, of("a", LEVELS): 0.2}, {"a": 1000}, levels=True)
    assert found["base"] == FULL_PRECISION.said() and found["trials"] == 1


def test_a_new_trial_forgets_all_but_who_is_gone() -> None:
    found = trial({of(): 0.100, of("a"): 0.080}, {"a": 1000}, {"gone": [3]})
    assert found["notes"] == {"gone": [3]}
    again = trial({of(): 0.080, of("a"): 0.100}, {"a": 1000}, found["notes"])
    assert again["base"] == FULL_PRECISION.said() and "(4 steps)" in again["line"]


def test_the_steps_that_a_late_rank_has_missed_are_the_others() -> None:
    both = posts(0.1, 0.2, {"a": 10})
    late: verdict.Post = {"seconds": both[0]["seconds"][2:], "sent": {"a": 10}, "levels": False}
    found = verdict.judge({}, [*both, late], FULL_PRECISION, QUANTIZED, 1)
    assert found["base"] == FULL_PRECISION.said()
    silent: list[verdict.Post] = [{"seconds": [], "sent": {}, "levels": False}]
    assert verdict.judge({}, silent, FULL_PRECISION, QUANTIZED, 1)["base"] is None
