"""The order of the steps, and the meaning of their times."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_allreduce_plugin.runtime.alternation import (
    BLOCK,
    MARGIN,
    MOST_PAIRS,
    end_of,
    faster,
    is_measured,
    is_other,
)


def measured(pair: int) -> dict[bool, list[int]]:
    """Return the measured steps of a pair: with the other way, and with the base."""
    steps = [step for step in range(end_of(pair - 1) if pair else 0, end_of(pair)) if is_measured(step)]
    return {way: [step for step in steps if is_other(step) is way] for way in (False, True)}


def test_the_order_is_the_drawn_one() -> None:
    drawn = "base base base other other other other other base base base base other other other other"
    assert ["other" if is_other(step) else "base" for step in range(16)] == drawn.split()
    assert [step for step in range(16) if not is_measured(step)] == [0, 3]
    assert [end_of(pair) for pair in range(3)] == [6, 10, 14]


@given(st.integers(0, 100))
def test_both_ways_have_as_many_steps_in_every_pair(pair: int) -> None:
    found = measured(pair)
    assert len(found[True]) == len(found[False]) == BLOCK


@given(st.integers(0, 20))
def test_a_machine_that_grows_slower_speaks_for_neither_way(turn: int) -> None:
    """Check that steps of two alternating pairs have the same mean number: growth by the step cancels out."""
    pairs = [measured(2 * turn + 1), measured(2 * turn + 2)]
    assert mean(pairs[0][True] + pairs[1][True]) == mean(pairs[0][False] + pairs[1][False])


def times(seconds: float, spread: float, count: int, random: random.Random) -> list[float]:
    return [seconds * max(0.1, random.gauss(1, spread)) for _ in range(count)]


def judged(ratio: float, spread: float, seed: int) -> tuple[bool, int]:
    """Return True if the other way, at `ratio` of the base's time, is judged faster, and after how many pairs."""
    draws = random.Random(seed)
    base: list[float] = []
    other: list[float] = []
    for pairs in range(1, MOST_PAIRS + 1):
        base += times(0.1, spread, BLOCK, draws)
        other += times(0.1 * ratio, spread, BLOCK, draws)
        if (answer := faster(base, other, pairs)) is not None:
            return answer, pairs
    raise AssertionError("undecided after the last pair")


@pytest.mark.parametrize("ratio", [2.0, 1.5, 0.66, 0.5])
def test_a_great_difference_is_seen_after_one_pair_or_two(ratio: float) -> None:
    """Bound the cost of a way that takes twice the time: 300 steps with a trial cost 1.02 x those without."""
    found = [judged(ratio, 0.01, seed) for seed in range(200)]
    assert all(answer is (ratio < 1) for answer, _ in found)
    assert max(pairs for _, pairs in found) <= 2


@pytest.mark.parametrize("spread", [0.005, 0.02, 0.05])
@pytest.mark.parametrize("ratio", [0.90, 0.95, 1.05, 1.10])
def test_a_difference_of_five_percent_is_seen(ratio: float, spread: float) -> None:
    """Check 90 of 100 trainings where steps vary by 5 %, and 99 where they vary less."""
    right = mean(judged(ratio, spread, seed)[0] is (ratio < 1) for seed in range(300))
    assert right >= (0.9 if spread > 0.02 else 0.99)


@pytest.mark.parametrize("ratio", [1 - MARGIN / 2, 1.0, 1 + MARGIN])
def test_sites_that_gain_less_than_the_margin_stay_off(ratio: float) -> None:
    assert not any(judged(ratio, 0.0, seed)[0] for seed in range(20))


def test_one_step_with_a_checkpoint_in_it_decides_nothing() -> None:
    base, other = [0.1, 0.1, 0.1, 0.1], [0.08, 0.08, 5.0, 0.08]
    assert faster(base, other, 2) is True
    assert faster(other, base, 2) is False


def test_steps_that_were_not_measured_decide_nothing_until_the_last_pair() -> None:
    assert faster([], [], 1) is None and faster([0.1], [], 3) is None
    assert faster([], [], MOST_PAIRS) is False
