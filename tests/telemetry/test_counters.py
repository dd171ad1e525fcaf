"""The counters: which call adds to which counter, from many threads, and the effect of a reset."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.counters import (
    Counters,
    record_beside,
    record_full_precision,
    record_guard,
    record_quantized,
    record_residual_dropped,
    record_sqnr,
    reset_stats,
    stats,
)

A, B = Site("a", Role.FORWARD), Site("b")
NOTHING = {
    **{"calls": 0, "quantized": 0, "full_precision": {}, "bytes_sent": 0, "bytes_full_precision": 0},
    "bytes_plain": 0,
    "bytes_between_nodes": 0,
    "residuals_dropped": {},
    "guard": {},
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(counters, "_logged", set())
    reset_stats()
    yield
    reset_stats()


def test_nothing_recorded() -> None:
    assert stats() == {**NOTHING, "sites": {}, "beside": {}}


def test_sites_and_totals() -> None:
    record_quantized(A, 100, 400)
    record_quantized(A, 50, 200, 30, bits=4)
    record_full_precision(A, "warm-up", 7)
    record_full_precision(B, "warm-up", 8)
    record_full_precision(B, "dtype int64", 9)
    record_residual_dropped(A, "another layout")
    record_residual_dropped(A, "another layout")
    record_guard("a", "raised")
    for nbytes in (10, 20):
        record_beside("all_gather, dp of 2 ranks", nbytes)
    assert stats() == {
        "calls": 5,
        "quantized": 2,
        "full_precision": {"warm-up": 2, "dtype int64": 1},
        "bytes_sent": 174,
        "bytes_full_precision": 624,
        "bytes_plain": 24,
        "bytes_between_nodes": 30,
        "residuals_dropped": {"another layout": 2},
        "guard": {"raised": 1},
        "sites": {
            "a": {
                "calls": 3,
                "quantized": 2,
                "full_precision": {"warm-up": 1},
                "bytes_sent": 157,
                "bytes_full_precision": 607,
                "bytes_plain": 7,
                "bytes_between_nodes": 30,
                "residuals_dropped": {"another layout": 2},
                "guard": {"raised": 1},
                "bits": 4,
                "sqnr_db": None,
            },
            "b": {
                "calls": 2,
                "quantized": 0,
                "full_precision": {"warm-up": 1, "dtype int64": 1},
                "bytes_sent": 17,
                "bytes_full_precision": 17,
                "bytes_plain": 17,
                "bytes_between_nodes": 0,
                "residuals_dropped": {},
                "guard": {},
                "bits": None,
                "sqnr_db": None,
            },
        },
        "beside": {"all_gather, dp of 2 ranks": {"calls": 2, "bytes_sent": 30}},
    }


def test_a_site_is_its_name() -> None:
    record_quantized(Site("a", Role.FORWARD), 1, 2)
    record_quantized(Site("a", Role.BACKWARD), 1, 2)
    assert stats()["sites"]["a"]["quantized"] == 2


def test_an_unknown_site_is_not_made_up() -> None:
    record_quantized(A, 1, 2)
    assert "never called" not in stats()["sites"]


def test_stats_is_a_snapshot() -> None:
    record_full_precision(A, "warm-up", 1)
    before = stats()
    before["full_precision"]["warm-up"] = 99
    before["sites"]["a"]["full_precision"]["warm-up"] = 99
    before["sites"].clear()
    assert stats()["full_precision"] == stats()["sites"]["a"]["full_precision"] == {"warm-up": 1}


def test_reset_forgets_counts_and_measurements() -> None:
    record_quantized(A, 1, 2)
    record_sqnr(A, 100.0, 1.0)
    record_beside("broadcast, dp of 2 ranks", 5)
    reset_stats()
    assert stats() == {**NOTHING, "sites": {}, "beside": {}}
    record_quantized(A, 3, 4, bits=8)
    assert stats()["sites"]["a"] == {
        **NOTHING,
        "calls": 1,
        "quantized": 1,
        "bytes_sent": 3,
        "bytes_full_precision": 4,
        "bits": 8,
        "sqnr_db": None,
    }


def test_sqnr_weighs_the_measured_calls_by_their_energy() -> None:
    record_sqnr(A, 900.0, 9.0)
    record_sqnr(A, 100.0, 1.0)
    record_sqnr(B, 1e6, 1.0)
    sites = stats()["sites"]
    assert sites["a"]["sqnr_db"] == pytest.approx(20.0)
    assert sites["b"]["sqnr_db"] == pytest.approx(60.0)
    assert sites["a"]["calls"] == 0


@pytest.mark.parametrize(
    ("signal", "noise", "expected"), [(1.0, 0.0, math.inf), (0.0, 0.0, math.inf), (0.0, 1.0, -math.inf)]
)
def test_sqnr_at_its_ends(signal: float, noise: float, expected: float) -> None:
    record_sqnr(A, signal, noise)
    assert stats()["sites"]["a"]["sqnr_db"] == expected


def test_a_measurement_that_overflowed_is_left_out() -> None:
    record_quantized(A, 1, 2)
    record_sqnr(A, math.inf, math.nan)
    record_sqnr(A, math.nan, 1.0)
    assert stats()["sites"]["a"]["sqnr_db"] is None
    record_sqnr(A, 100.0, 1.0)
    assert stats()["sites"]["a"]["sqnr_db"] == pytest.approx(20.0)


def test_a_reason_is_logged_once_per_site(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flash_allreduce_plugin"):
        for _ in range(3):
            record_full_precision(A, "warm-up", 1)
            record_full_precision(A, "dtype int64", 1)
            record_full_precision(B, "warm-up", 1)
        reset_stats()
        record_full_precision(A, "warm-up", 1)
    assert [record.getMessage() for record in caplog.records] == [
        "a runs in full precision: warm-up",
        "a runs in full precision: dtype int64",
        "b runs in full precision: warm-up",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_no_count_is_lost_between_threads() -> None:
    threads, rounds = 8, 500
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        site = A if number % 2 else B
        start.wait(timeout=30)
        for _ in range(rounds):
            record_quantized(site, 1, 4)
            record_full_precision(site, "warm-up", 2)
            record_sqnr(site, 10.0, 1.0)
            stats()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    result = stats()
    total = threads * rounds
    assert (result["calls"], result["quantized"]) == (2 * total, total)
    assert result["full_precision"] == {"warm-up": total}
    assert (result["bytes_sent"], result["bytes_full_precision"]) == (3 * total, 6 * total)
    assert all(site["sqnr_db"] == pytest.approx(10.0) for site in result["sites"].values())


def test_totals_outlive_a_reset_and_differences_are_between_two_of_them() -> None:
    start = counters.totals()
    record_quantized(A, 100, 400, 30, bits=4)
    record_sqnr(A, 8.0, 2.0)
    record_residual_dropped(A, "another layout")
    middle = counters.totals()
    reset_stats()
    record_quantized(A, 10, 40, bits=5)
    record_full_precision(A, "warm-up", 7)
    reset_stats()
    record_full_precision(A, "warm-up", 7)
    record_full_precision(B, "warm-up", 8)
    end = counters.totals()
    first, second = counters.difference(middle, start), counters.difference(end, middle)
    assert first == {"a": Counters(1, 4, Counter(), 100, 400, 30, 8.0, 2.0, 1, Counter({"another layout": 1}))}
    assert second == {
        "a": Counters(1, 5, Counter({"warm-up": 2}), 24, 54, bytes_plain=14),
        "b": Counters(0, None, Counter({"warm-up": 1}), 8, 8, bytes_plain=8),
    }
    assert second["a"].calls == 3
    record_full_precision(A, "warm-up", 1)
    assert counters.difference(counters.totals(), end)["a"].bits is None  # nothing was quantized meanwhile
    assert counters.difference(end, end) == {}


def test_counts_of_other_traffic_survive_a_reset() -> None:
    before = counters.beside()
    record_beside("all_gather, dp of 2 ranks", 10)
    reset_stats()
    record_beside("all_gather, dp of 2 ranks", 20)
    found = counters.difference(counters.beside(), before)["all_gather, dp of 2 ranks"]
    assert (found.calls, found.bytes_sent) == (2, 30)
