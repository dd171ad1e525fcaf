"""Adaptive bits: the decision alone, and ranks that must all take it at the same call."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import sample
from flash_allreduce_plugin.quality.sites import gain_db
from flash_allreduce_plugin.quality.widths import SiteWidth, decide
from tests.codecs import gaussian
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]

# gaussian() needs 4 bits for 18 dB where it is rounded once, 5 where it is rounded twice (docs/trust/numerics.md).
CONFIG = fap.FlashConfig(min_bytes=1024, quality_interval=2, target_sqnr_db=18.0)
SITE = fap.Site("adaptive")


# ---- the decision ----


@pytest.mark.parametrize(
    ("bits", "sqnr_db", "spare", "expected"),
    [
        (4, 18.0, False, (4, False)),
        (4, 20.0, True, (4, False)),  # a bit less would be 13.4
        (4, 17.9, True, (5, False)),  # up immediately
        (4, 12.0, False, (5, False)),
        (4, 11.6, False, (6, False)),  # 5 bits bring 6.3 dB
        (2, -5.0, False, (6, False)),
        (2, -50.0, False, (8, False)),
        (7, -math.inf, False, (8, False)),
        (8, 17.0, False, (8, False)),  # and it stays there
        (8, 44.0, False, (8, True)),  # down at the second one
        (8, 44.0, True, (7, False)),
        (4, 25.7, False, (4, True)),  # 6.6 a bit, and 1 of margin
        (4, 25.5, True, (4, False)),
        (2, math.inf, True, (2, False)),
        (3, math.inf, True, (2, False)),
    ],
)
def test_decisions(bits: int, sqnr_db: float, spare: bool, expected: tuple[int, bool]) -> None:
    assert decide(bits, sqnr_db, 18.0, spare) == expected


def test_a_symmetric_code_of_two_bits_has_two_steps_only() -> None:
    assert decide(3, 27.0, 18.0, True, symmetric=False) == (2, False)
    assert decide(3, 27.0, 18.0, True, symmetric=True) == (3, False)
    assert gain_db(2, 3, True) == pytest.approx(9.54, abs=0.01)
    assert gain_db(2, 3, False) == pytest.approx(7.36, abs=0.01)


@given(st.integers(2, 8), st.floats(allow_nan=False), st.floats(-200, 200), st.booleans(), st.booleans())
def test_a_width_stays_a_width(bits: int, sqnr_db: float, target_db: float, spare: bool, symmetric: bool) -> None:
    after, again = decide(bits, sqnr_db, target_db, spare, symmetric)
    assert 2 <= after <= 8 and after >= bits - 1
    assert not (again and after != bits)
    assert sqnr_db >= target_db or after > bits or bits == 8


def six_a_bit(bits: int) -> float:
    return 6.02 * (bits - 8)


def steps_alone(bits: int) -> float:
    return -gain_db(bits, 8, False)


@given(
    st.sampled_from([six_a_bit, steps_alone]),
    st.floats(-10, 80),
    st.integers(2, 8),
    st.lists(st.floats(-0.5, 0.5), min_size=60, max_size=60),
)
def test_it_settles_at_the_least_width_and_does_not_flap(
    loss: Callable[[int], float], at_eight: float, start: int, noise: list[float]
) -> None:
    """Simulate a codec with an SQNR of at_eight + loss at a width, measured with up to half a dB of noise."""
    widths, spare = [start], False
    for one in noise:
        bits, spare = decide(widths[-1], at_eight + loss(widths[-1]) + one, 18.0, spare)
        widths.append(bits)
    # A measurement of noise alone may cost one more bit than the mean asks for, or lift a width that is just below.
    reaches = [bits for bits in range(2, 9) if at_eight + loss(bits) >= 18.0 + 0.5]
    least = reaches[0] if reaches else 8
    assert widths[-1] <= min(least + 1, 8)
    assert at_eight + loss(widths[-1]) >= 18.0 - 0.5 or widths[-1] == 8
    turns = [b - a for a, b in pairwise(widths) if a != b]
    # Down from where it started, or up; up again at the end at most, and not down from there.
    ups = [i for i, turn in enumerate(turns) if turn > 0]
    assert all(turn > 0 for turn in turns[ups[0] :]) if ups else True


@pytest.mark.parametrize("measured", [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf), (0.0, 0.0)])
def test_measurements_without_a_difference_decide_nothing(measured: tuple[float, float]) -> None:
    width = SiteWidth("site", 2, 18.0, symmetric=False)
    width.update(*measured, call=1, log=False)
    assert width.bits == 2
    width.update(1.0, 1.0, call=2, log=False)
    assert width.bits == 5


def test_measurements_at_another_width_are_left_out() -> None:
    width = SiteWidth("site", 4, 18.0, symmetric=False)
    width.record(4, sample.alone(torch.ones(10), torch.full((10,), 0.1)))
    width.record(5, sample.alone(torch.ones(1), torch.ones(1)))
    width.record(4, sample.alone(torch.ones(20), torch.full((20,), 0.1)))
    assert sample.fold(width.take()) == pytest.approx((30.0, 3.0))
    assert sample.fold(width.take()) == (0.0, 0.0)


# ---- the ranks ----


def outliers(numel: int, seed: int) -> Tensor:
    """Return Gaussian values, one element of a group 20 times as large: one or two more bits for equal SQNR."""
    x = gaussian(numel, seed=seed)
    x[::128] *= 20
    return x


def last_bits(site: str) -> Any:
    return fap.stats()["sites"][site]["bits"]


class Logged(logging.Handler):
    """The messages of the plugin's logger."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def in_group(run: Callable[[dist.ProcessGroup], Any]) -> tuple[Any, list[str]]:
    """Run run() in a new group. Return its result and the log about widths."""
    handler, logger, group = Logged(), logging.getLogger("flash_allreduce_plugin"), dist.new_group()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fap.reset_stats()
    try:
        result = run(group)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        fap.reset_stats()
        dist.destroy_process_group(group)
    return result, [message for message in handler.messages if "target" in message]


def scatter_of_two_kinds(start: int, calls: int) -> tuple[list[int], list[str]]:
    """Return widths of a site's calls: rank 0 has an easy shard and the last rank a hard one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = CONFIG.model_copy(update={"bits": start})

    def run(group: dist.ProcessGroup) -> list[int]:
        widths = []
        for i in range(calls):
            parts = [gaussian(4000, seed=10 * i + rank) for _ in range(world - 1)] + [outliers(4000, 10 * i + rank)]
            output = torch.empty(4000)
            fap.reduce_scatter(output, torch.cat(parts), group=group, config=config, site=SITE)
            assert output.isfinite().all()
            widths.append(last_bits(SITE.name))
        return widths

    return in_group(run)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_shards_change_width_at_the_same_call(ranks: GetRanks, world: int) -> None:
    first, *others = ranks(world).run(scatter_of_two_kinds, 2, 12)
    widths, logged = first
    # Alone rank 0 would choose 4 bits, and its peers 6.
    assert widths[:2] == [2, 2] and widths[2] > 4
    assert sorted(set(widths)) == [2, widths[-1]] and widths[-1] in (5, 6)
    for other in others:
        assert other == (widths, [])
    assert len(logged) == 1
    assert logged[0].startswith(f"adaptive changes from 2 to {widths[-1]} bits at call 2: ")
    assert logged[0].endswith(" dB measured, the target is 18.0 dB")
    assert ranks(world).run(scatter_of_two_kinds, 2, 12)[0] == first  # the same run, the same decisions


def two_sites(asynchronous: bool) -> tuple[dict[str, list[int]], list[str]]:
    """Return widths of three sites: easy, hard, and one without a target; small calls and others between them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fixed = CONFIG.model_copy(update={"target_sqnr_db": None, "bits": 3})

    def run(group: dist.ProcessGroup) -> dict[str, list[int]]:
        widths: dict[str, list[int]] = {"easy": [], "hard": [], "fixed": []}
        for i in range(18):
            handles = []
            for name in widths:
                make, config = outliers if name == "hard" else gaussian, fixed if name == "fixed" else CONFIG
                for part in range(2):  # as buckets of one step
                    x = make(4000 * world, seed=100 * i + 10 * part + rank)
                    site = fap.Site(name)
                    handles.append(fap.all_reduce(x, group=group, config=config, async_op=asynchronous, site=site))
                    widths[name].append(last_bits(name))
            fap.all_reduce(torch.ones(3), group=group, config=CONFIG, site=fap.Site("easy"))  # below min_bytes
            for handle in handles:
                assert handle is None or handle.wait()
        return widths

    return in_group(run)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sites_have_widths_of_their_own(ranks: GetRanks, asynchronous: bool) -> None:
    (widths, logged), *others = ranks(2).run(two_sites, asynchronous)
    assert others == [(widths, [])]
    assert widths["easy"][-1] == 5 and widths["hard"][-1] == 6
    assert widths["fixed"] == [3] * 36
    # From 8, a bit every second measurement: the first at call 4, whether handles are in flight or not.
    assert widths["easy"][:6] == [8, 8, 8, 8, 7, 7]
    assert widths["easy"] == sorted(widths["easy"], reverse=True)
    assert len(logged) == 5


def with_nan() -> tuple[list[int], list[str]]:
    """Return widths of calls; the first four have a NaN in the last rank's part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = CONFIG.model_copy(update={"bits": 2, "quality_interval": 1})

    def run(group: dist.ProcessGroup) -> list[int]:
        widths = []
        for i in range(8):
            x = gaussian(4000 * world, seed=10 * i + rank)
            if i < 4:
                x[-1] = math.nan
            fap.reduce_scatter(torch.empty(4000), x, group=group, config=config, site=SITE)
            widths.append(last_bits(SITE.name))
        return widths

    return in_group(run)


def test_a_measurement_that_is_not_finite_decides_nothing(ranks: GetRanks) -> None:
    for widths, _ in ranks(2).run(with_nan):
        assert widths == [2, 2, 2, 2, 2, 4, 4, 4]


def with_config(changes: dict[str, Any], collective: str) -> tuple[list[int], list[str]]:
    """Return widths of 8 calls."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = CONFIG.model_copy(update={"bits": 2, "quality_interval": 1, **changes})
    feedback = fap.Feedback() if config.error_feedback else None

    def run(group: dist.ProcessGroup) -> list[int]:
        widths = []
        for i in range(8):
            x = gaussian(4000 * world, seed=10 * i + rank)
            if collective == "all_gather":
                fap.all_gather(torch.empty(world * len(x)), x, group=group, config=config, site=SITE)
            elif collective == "reduce_scatter":
                fap.reduce_scatter(torch.empty(4000), x, group=group, config=config, site=SITE)
            else:
                slot = feedback.slot("x") if feedback is not None else None
                fap.all_reduce(x, group=group, config=config, site=SITE, feedback=slot)
            widths.append(last_bits(SITE.name))
        assert feedback is None or fap.stats()["residuals_dropped"] == {"another layout": len(set(widths)) - 1}
        return widths

    return in_group(run)


@pytest.mark.parametrize(
    ("world", "changes", "collective", "expected"),
    [
        (2, {}, "all_gather", [2, 4]),
        (2, {"reduce_bits": 3}, "reduce_scatter", [3]),
        (2, {"gather_bits": 3}, "all_gather", [3]),
        (2, {"reduce_bits": 6, "gather_bits": 3}, "all_reduce", [3]),
        (2, {"gather_bits": 8}, "all_reduce", [2, 4]),  # the half before the sum adapts, once rounded
        (2, {"hierarchical": "auto"}, "all_reduce", [8]),  # one node
        (3, {"hierarchical": {"intra_bits": 8, "inter_bits": 3, "ranks_per_node": 2}}, "all_reduce", [3, 5]),
        (2, {"error_feedback": True}, "all_reduce", [2, 5]),
    ],
)
def test_fields_that_adapt(
    ranks: GetRanks, world: int, changes: dict[str, Any], collective: str, expected: list[int]
) -> None:
    outcomes = ranks(world).run(with_config, changes, collective)
    assert [sorted(set(widths)) for widths, _ in outcomes] == [expected] * world
    assert len({tuple(widths) for widths, _ in outcomes}) == 1


def test_a_target_out_of_reach_ends_at_eight_bits_and_is_logged_once(ranks: GetRanks) -> None:
    (widths, logged), _ = ranks(2).run(with_config, {"target_sqnr_db": 60.0}, "all_reduce")
    assert widths == [2] + [8] * 7
    assert [message.partition(":")[0] for message in logged] == [
        "adaptive changes from 2 to 8 bits at call 1",
        "adaptive misses the target of 60.0 dB at 8 bits",
    ]


def targets(targets_db: list[float]) -> str:
    group = dist.new_group()
    config = CONFIG.model_copy(update={"target_sqnr_db": targets_db[dist.get_rank()]})
    with pytest.raises(fap.MismatchError) as caught:
        fap.all_reduce(gaussian(5000), group=group, config=config)
    dist.destroy_process_group(group)
    return str(caught.value)


def test_ranks_with_different_targets_get_an_error(ranks: GetRanks) -> None:
    for message in ranks(2).run(targets, [18.0, 20.0]):
        assert "target_sqnr_db is 18.0 on rank 0; 20.0 on rank 1" in message
