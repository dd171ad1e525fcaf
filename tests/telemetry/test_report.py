"""The report of an integration's attachments: its entries, and how it prints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flash_allreduce_plugin.policy import ONE_RANK, Site
from flash_allreduce_plugin.telemetry import report
from flash_allreduce_plugin.telemetry.counters import (
    record_beside,
    record_full_precision,
    record_quantized,
    reset_stats,
)

A, B = Site("a"), Site("b")


@pytest.fixture(autouse=True)
def from_zero() -> Iterator[None]:
    reset_stats()
    yield
    reset_stats()


def test_sites_are_there_with_and_without_calls() -> None:
    attached = {
        "b": {"target": "module.g", "covers": "the gather", "in_place": False},
        "a": {"target": "module.f", "covers": "the sum", "in_place": True},
    }
    record_quantized(A, 100, 400)
    record_full_precision(A, "warm-up", 7)
    record_quantized(Site("another"), 100, 400)
    found = report.of_sites(attached)
    assert list(found.items()) == [
        ("b", {**attached["b"], "calls": 0, "quantized": 0, "full_precision": {}}),
        ("a", {**attached["a"], "calls": 2, "quantized": 1, "full_precision": {"warm-up": 1}}),
    ]
    assert str(found).splitlines() == [
        "a: 2 calls, 1 quantized, in full precision: 1 warm-up",
        "    the sum [module.f]",
        "not in place: b",
    ]


def test_sites_that_sent_nothing_share_one_line() -> None:
    names = ("absent", "idle", "a", "alone", "idle 2")
    attached = {name: {"target": "m.f", "covers": "the sum", "in_place": name != "absent"} for name in names}
    record_full_precision(A, "warm-up", 7)
    record_full_precision(Site("alone"), ONE_RANK, 0)
    assert str(report.of_sites(attached)).splitlines() == [
        "a: 1 calls, 0 quantized, in full precision: 1 warm-up",
        "    the sum [m.f]",
        "in place, nothing sent: idle, alone, idle 2",
        "not in place: absent",
    ]


def test_a_report_accounts_for_all_bytes() -> None:
    record_quantized(A, 400_000, 1_600_000)
    record_full_precision(A, "warm-up", 200_000)
    assert str(report.Report()) == ""
    record_beside("broadcast, dp of 2 ranks", 0)
    record_beside("all_gather, dp of 2 ranks", 400_000)
    assert str(report.Report()).splitlines() == [
        "outside the plugin: all_gather, dp of 2 ranks: 1 calls, 0.40 MB sent",
        "outside the plugin: broadcast, dp of 2 ranks: 1 calls, 0.00 MB sent",
        "of 1.00 MB that this rank sent, 40.0 % were quantized, 20.0 % left in full precision by the plugin, "
        "40.0 % outside the plugin",
    ]
