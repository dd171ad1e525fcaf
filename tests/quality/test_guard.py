"""The guard: its decision alone, and ranks that must all take it at the same call."""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.report import log as report_log
from flash_allreduce_plugin.cli.report import text as report_text
from flash_allreduce_plugin.collectives import sample
from flash_allreduce_plugin.policy import LOW_SQNR
from flash_allreduce_plugin.quality.guard import FULL, LOW, MARGIN_DB, PATIENCE, SiteGuard, Stand, decide
from flash_allreduce_plugin.quality.sites import gain_db
from flash_allreduce_plugin.telemetry import counters, run_log
from tests.codecs import gaussian
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]

FLOOR = 14.0
# gaussian() reaches 17 dB in an all-reduce at 4 bits, 10 at 3 (docs/trust/numerics.md).
CONFIG = fap.FlashConfig(bits=4, min_bytes=1024, quality_interval=1, min_sqnr_db=FLOOR)
SITE = fap.Site("guarded")


# ---- the decision ----


def course(series: Iterable[float], start: int = 4) -> list[int]:
    """Return the bits after each measurement of a series. The series does not depend on the bits."""
    stand, bits = Stand(start), []
    for sqnr_db in series:
        stand = decide(stand, sqnr_db, FLOOR, start)
        bits.append(stand.bits)
    return bits


def test_below_the_floor_a_bit_at_a_time_then_full_precision() -> None:
    assert course([10.0] * 12) == [4, 5, 5, 6, 6, 7, 7, 8, 8, FULL, FULL, FULL]


def test_back_when_it_has_recovered() -> None:
    assert course([10.0] * 4 + [40.0] * 12) == [4, 5, 5, 6] + [6, 6, 6, 5] + [5, 5, 5, 4] + [4] * 4


def test_full_precision_ends_if_8_bits_would_suffice() -> None:
    full, enough = Stand(FULL), FLOOR + MARGIN_DB
    for sqnr_db in (enough - 0.1, -50.0):
        assert decide(full, sqnr_db, FLOOR, 4) == full
    stands = [full]
    for _ in range(PATIENCE):
        stands.append(decide(stands[-1], enough, FLOOR, 4))
    assert [stand.bits for stand in stands] == [FULL] * PATIENCE + [8]


def test_a_narrower_width_must_be_expected_above_the_floor_by_the_margin() -> None:
    enough = FLOOR + MARGIN_DB + gain_db(4, 5, False)
    assert decide(Stand(5), enough - 0.1, FLOOR, 4).good == 0
    assert decide(Stand(5), enough + 0.1, FLOOR, 4).good == 1
    assert decide(Stand(3), FLOOR + MARGIN_DB + 9.4, FLOOR, 2, symmetric=True).good == 0  # 9.5 dB from 2 bits to 3
    assert decide(Stand(3), FLOOR + MARGIN_DB + 9.4, FLOOR, 2, symmetric=False).good == 1


stands = st.builds(
    Stand, st.integers(2, FULL), st.integers(0, LOW - 1), st.integers(0, 3), st.integers(4, 64), st.booleans()
)


@given(stands, st.floats(allow_nan=False), st.floats(-200, 200), st.integers(2, 8), st.booleans())
def test_one_step_at_most_and_never_below_the_configured_width(
    stand: Stand, sqnr_db: float, floor_db: float, start: int, symmetric: bool
) -> None:
    start = min(start, stand.bits)
    after = decide(stand, sqnr_db, floor_db, start, symmetric)
    assert start <= after.bits <= FULL and abs(after.bits - stand.bits) <= 1
    assert after.bits <= stand.bits or sqnr_db < floor_db
    assert after.bits >= stand.bits or sqnr_db >= floor_db + MARGIN_DB
    assert after.patience >= stand.patience and not (after.low and after.good)


@given(st.lists(st.floats(-100, 100), max_size=200), st.floats(-100, 13.9))
def test_spikes_change_nothing(rest: list[float], spike: float) -> None:
    """Measure below the floor, never twice in a row."""
    series = [sqnr_db for one in rest for sqnr_db in (spike, max(one, FLOOR))]
    assert set(course(series)) <= {4}


@given(st.integers(2, 8), st.floats(-40, 60), st.lists(st.floats(-1, 1), min_size=300, max_size=300))
def test_it_settles_and_does_not_flap(start: int, at_eight: float, noise: list[float]) -> None:
    """Simulate a codec of at_eight dB at 8 bits, measured with up to 1 dB of noise: half of the margin."""

    def sqnr_db(bits: int) -> float:
        return at_eight - gain_db(min(bits, 8), 8, False)

    stand, bits = Stand(start), [start]
    for one in noise:
        stand = decide(stand, sqnr_db(stand.bits) + one, FLOOR, start)
        bits.append(stand.bits)
    assert bits == sorted(bits), "up, and never back"
    assert sqnr_db(bits[-1]) >= FLOOR - 1 or bits[-1] == FULL
    enough = [width for width in range(start, 9) if sqnr_db(width) >= FLOOR + 1]
    assert bits[-1] <= (enough[0] if enough else FULL)


@given(st.lists(st.sampled_from([-20.0, 13.0, 15.0, 17.0, 60.0]), max_size=400) | st.just([0.0] * 2 + [99.0] * 4))
def test_whatever_the_series_it_turns_round_ever_more_rarely(series: list[float]) -> None:
    check_turns(course(series * 3), 3 * len(series))


@pytest.mark.parametrize("period", range(1, 13))
def test_a_periodic_series_turns_it_round_ever_more_rarely(period: int) -> None:
    series = ([0.0] * period + [99.0] * period * PATIENCE) * 100
    assert (5 in course(series)) == (period >= LOW)
    check_turns(course(series), len(series))


def check_turns(bits: list[int], measurements: int) -> None:
    turns, down = 0, False
    for before, after in pairwise([4, *bits]):
        turns += down and after > before
        down = after < before or (down and after == before)
    assert turns <= math.log2(measurements / PATIENCE + 1)


@pytest.mark.parametrize("measured", [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf), (0.0, 0.0)])
def test_measurements_without_a_difference_decide_nothing(measured: tuple[float, float]) -> None:
    guard = SiteGuard("site", 4, FLOOR, symmetric=False)
    for call in range(2 * LOW):
        guard.update(*measured, call=call, log=False)
    assert guard.bits == 4
    guard.update(1.0, 1.0, call=8, log=False)
    guard.update(*measured, call=9, log=False)  # between two that are low
    guard.update(-1.0, 2.0, call=10, log=False)  # more noise than there is of anything
    assert guard.bits == 5


def test_measurements_at_another_width_are_left_out() -> None:
    guard = SiteGuard("site", 4, FLOOR, symmetric=False)
    guard.record(4, sample.alone(torch.ones(10), torch.full((10,), 0.1)))
    guard.record(5, sample.alone(torch.ones(1), torch.ones(1)))
    assert sample.fold(guard.take()) == pytest.approx((10.0, 1.0))
    assert sample.fold(guard.take()) == (0.0, 0.0)


# ---- the ranks ----


def cancelling(numel: int, times: float, seed: int, rank: int) -> Tensor:
    """Return Gaussian values; two ranks add `times` larger ones that cancel in the sum, so SQNR falls as much."""
    x = gaussian(numel, seed=100 * seed + rank)
    return x + (0.0, times, -times)[rank + 1 if rank < 2 else 0] * gaussian(numel, seed=100 * seed + 99)


class Logged(logging.Handler):
    """The messages that the plugin's logger has about the guard."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "floor" in record.getMessage():
            self.messages.append((record.levelname, record.getMessage()))


def in_group(run: Callable[[dist.ProcessGroup], Any]) -> dict[str, Any]:
    """Run run() in a new group. Return its result, the log, and the site's counters."""
    handler, logger, group = Logged(), logging.getLogger("flash_allreduce_plugin"), dist.new_group()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fap.reset_stats()
    try:
        result = run(group)
        return {"result": result, "logged": handler.messages, **fap.stats()["sites"][SITE.name]}
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        fap.reset_stats()
        dist.destroy_process_group(group)


def bits_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return the width of one call of the site (FULL in full precision) and the value that it returned."""
    before = fap.stats()["sites"].get(SITE.name, {"full_precision": {}})["full_precision"]
    returned = call()
    after = fap.stats()["sites"][SITE.name]
    if after["full_precision"] != before:
        assert set(after["full_precision"]) == {LOW_SQNR}
        return FULL, returned
    return after["bits"], returned


def reduces(
    phases: list[tuple[int, float]], changes: dict[str, Any], collective: str = "all_reduce", ahead: int = 0
) -> dict[str, Any]:
    """Return widths of the calls of phases (calls, cancelled size; nan: a NaN on the last rank), `ahead` in flight."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = CONFIG.model_copy(update=changes)
    feedback = fap.Feedback() if config.error_feedback else None

    def run(group: dist.ProcessGroup) -> list[int]:
        widths, flying = [], []
        for number, times in enumerate(times for calls, times in phases for _ in range(calls)):
            x = cancelling(4096 * world, 0.0 if math.isnan(times) else times, number, rank)
            exact = sum(cancelling(4096 * world, 0.0 if math.isnan(times) else times, number, r) for r in range(world))
            if math.isnan(times) and rank == world - 1:
                x[7] = math.nan
            how: dict[str, Any] = {"group": group, "config": config, "site": SITE, "async_op": ahead > 0}
            output = x
            if collective == "all_gather":
                output = torch.empty(world * len(x))
                bits, work = bits_of(lambda out=output, x=x, how=how: fap.all_gather(out, x, **how))
            elif collective == "reduce_scatter":
                output, exact = torch.empty(4096), exact.view(world, -1)[rank]
                bits, work = bits_of(lambda out=output, x=x, how=how: fap.reduce_scatter(out, x, **how))
            else:
                slot = None if feedback is None else feedback.slot("x")
                bits, work = bits_of(lambda x=x, how=how, slot=slot: fap.all_reduce(x, feedback=slot, **how))
            widths.append(bits)
            flying.append((work, output, exact, bits))
            while len(flying) > ahead:
                finish(*flying.pop(0))
        for one in flying:
            finish(*one)
        return widths

    def finish(work: Any, output: Tensor, exact: Tensor, bits: int) -> None:
        assert work is None or work.wait()
        if bits == FULL and collective != "all_gather":
            torch.testing.assert_close(output, exact, rtol=1e-4, atol=1e-3)

    return in_group(run)


@pytest.mark.parametrize(
    ("world", "ahead", "collective"),
    [
        (2, 0, "all_reduce"),
        (3, 0, "all_reduce"),
        (2, 2, "all_reduce"),
        (3, 0, "reduce_scatter"),
        (2, 1, "reduce_scatter"),
    ],
)
def test_more_bits_then_full_precision_then_back(ranks: GetRanks, world: int, ahead: int, collective: str) -> None:
    first, *others = ranks(world).run(reduces, [(4, 0.0), (12, 10.0), (10, 100.0), (40, 0.0)], {}, collective, ahead)
    widths = first["result"]
    assert widths[:6] == [4] * 6, "two measurements, the second known at the third call after"
    steps = [bits for i, bits in enumerate(widths) if i == 0 or bits != widths[i - 1]]
    up, down = steps[: steps.index(FULL) + 1], steps[steps.index(FULL) :]
    assert up == list(range(4, FULL + 1)) and down == up[::-1]
    if collective == "all_reduce":
        assert 5 < widths[15] < FULL, "10 times as large costs 20 dB: that is no reason for full precision"
    if ahead == 0:
        # Measured at every call from 4 on, known at the next one: two calls a bit.
        assert widths[4:10] == [4, 4, 5, 5, 6, 6]
    for other in others:
        assert other["result"] == widths and other["logged"] == []
        assert other["guard"] == first["guard"] == {"raised": 5, "lowered": 5}
        assert other["full_precision"] == first["full_precision"] == {LOW_SQNR: widths.count(FULL)}
    assert [level for level, _ in first["logged"]] == ["WARNING"] * 5 + ["INFO"] * 5
    at = widths.index(5)
    said = first["logged"][0][1]
    assert said.startswith(f"guarded changes from 4 bits to 5 bits at call {at}: "), said
    assert said.endswith(" dB measured, the floor is 14.0 dB")
    assert "changes from 8 bits to full precision at call" in first["logged"][4][1]
    assert "changes from full precision to 8 bits at call" in first["logged"][5][1]
    assert "dB expected of 8 bits, the floor is" in first["logged"][5][1]


@pytest.mark.parametrize("times", [math.nan, 1e4])
def test_an_overflow_and_a_spike_change_nothing(ranks: GetRanks, times: float) -> None:
    phases = [(3, 0.0), (1, times)] * 6 if times == 1e4 else [(2, 0.0), (5, times), (5, 0.0)]
    for outcome in ranks(2).run(reduces, phases, {}):
        assert set(outcome["result"]) == {4} and outcome["guard"] == {} and outcome["full_precision"] == {}


@pytest.mark.parametrize(
    ("world", "changes", "collective", "expected"),
    [
        (2, {"min_sqnr_db": 60.0}, "all_gather", [4, 5, 6, 7, 8, FULL]),
        (2, {"min_sqnr_db": 30.0}, "all_gather", [4, 5, 6]),
        (2, {"min_sqnr_db": 60.0, "reduce_bits": 7, "gather_bits": 8}, "all_reduce", [7, 8, FULL]),
        (2, {"min_sqnr_db": 30.0, "reduce_bits": 8, "gather_bits": 5}, "all_reduce", [5, 6]),
        (2, {"min_sqnr_db": 60.0, "reduce_bits": 8}, "reduce_scatter", [8, FULL]),
        (2, {"min_sqnr_db": 20.0, "hierarchical": "auto"}, "all_reduce", [8]),  # one node
        (3, {"min_sqnr_db": 60.0, "error_feedback": True, "bits": 7}, "all_reduce", [7, 8, FULL]),
        (3, {"min_sqnr_db": 60.0, "quality_measure": "exact", "bits": 7}, "all_reduce", [7, 8, FULL]),
        (2, {"min_sqnr_db": 22.0, "target_sqnr_db": 22.0, "bits": 4}, "all_reduce", [4, 5]),
        (2, {"min_sqnr_db": 60.0, "target_sqnr_db": 60.0, "bits": 4}, "all_reduce", [4, 8, FULL]),
    ],
)
def test_calls_that_the_guard_measures(
    ranks: GetRanks, world: int, changes: dict[str, Any], collective: str, expected: list[int]
) -> None:
    outcomes = ranks(world).run(reduces, [(16, 0.0)], changes, collective)
    assert len({tuple(outcome["result"]) for outcome in outcomes}) == 1
    assert sorted(set(outcomes[0]["result"])) == expected, outcomes[0]


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_two_levels(ranks: GetRanks, collective: str) -> None:
    """Raise all widths to the guard's, inside the node and between; the way back leads to where they began."""
    nodes = {"intra_bits": 5, "inter_bits": 4, "ranks_per_node": 2}
    phases = [(3, 0.0), (14, 300.0), (40, 0.0)]
    outcomes = ranks(3).run(reduces, phases, {"hierarchical": nodes, "min_sqnr_db": 12.0}, collective)
    widths = outcomes[0]["result"]
    assert all(outcome["result"] == widths for outcome in outcomes)
    assert FULL in widths and widths[0] == widths[-1] == 4


def test_with_a_target_the_guard_takes_the_last_step_only(ranks: GetRanks) -> None:
    phases = [(4, 0.0), (8, 100.0), (20, 0.0)]
    outcomes = ranks(2).run(reduces, phases, {"target_sqnr_db": 15.0})
    widths = outcomes[0]["result"]
    assert outcomes[1]["result"] == widths
    assert widths[:9] == [4, 4, 4, 4, 4, 8, 8, FULL, FULL], (
        "up to 8 at once for the target, full precision for the floor"
    )
    assert widths[-1] == 4 and outcomes[0]["guard"] == {"raised": 1, "lowered": 1}


def floors(floors_db: list[float]) -> str:
    group = dist.new_group()
    config = CONFIG.model_copy(update={"min_sqnr_db": floors_db[dist.get_rank()]})
    with pytest.raises(fap.MismatchError) as caught:
        fap.all_reduce(gaussian(5000), group=group, config=config)
    dist.destroy_process_group(group)
    return str(caught.value)


def test_ranks_with_different_floors_get_an_error(ranks: GetRanks) -> None:
    for message in ranks(2).run(floors, [14.0, 15.0]):
        assert "min_sqnr_db is 14.0 on rank 0; 15.0 on rank 1" in message


# ---- its counters and messages ----


class Writer:
    def __init__(self) -> None:
        self.given: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.given[tag] = value


def test_it_is_counted_in_stats_the_log_the_report_and_tensorboard() -> None:
    site = fap.Site(uuid.uuid4().hex)
    before = counters.totals()
    counters.record_quantized(site, 50, 400, bits=8)
    counters.record_guard(site.name, "raised")
    counters.record_guard(site.name, "raised")
    counters.record_guard(site.name, "lowered")
    for _ in range(3):
        counters.record_full_precision(site, LOW_SQNR, 400)
    assert fap.stats()["sites"][site.name]["guard"] == {"raised": 2, "lowered": 1}
    assert fap.stats()["guard"]["raised"] >= 2
    counted = counters.difference(counters.totals(), before)[site.name]
    line = json.loads(json.dumps(run_log._site(counted)))
    assert line["guard"] == {"raised": 2, "lowered": 1} and report_log._counters(line) == counted
    assert report_text.guard(counted) == "by min_sqnr_db raised 2 times, lowered 1 time"
    writer = Writer()
    fap.log_to(writer, 1)
    of_site = {tag.rpartition("/")[2]: value for tag, value in writer.given.items() if f"/{site.name}/" in tag}
    assert (of_site["guard_raised"], of_site["guard_lowered"], of_site["guard_share"]) == (2, 1, 0.75)
    counters.record_quantized(site, 50, 400, bits=8)
    writer.given.clear()
    fap.log_to(writer, 2)
    assert not [tag for tag in writer.given if "guard" in tag]
    fap.reset_stats()
    counters.record_guard(site.name, "raised")
    assert counters.totals()[site.name].guard == {"raised": 3, "lowered": 1}
