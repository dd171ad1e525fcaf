"""The scalars of a TensorBoard writer: per site, each time the change since the last time."""

from __future__ import annotations

import math
import uuid

import pytest

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry.counters import record_full_precision, record_quantized, record_sqnr


class Writer:
    def __init__(self) -> None:
        self.given: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.given.setdefault(tag, []).append((step, value))

    def of(self, site: Site) -> dict[str, list[tuple[int, float]]]:
        """Return the scalars of one site. Other tests have other sites in the same process."""
        start = f"flash_allreduce/{site.name}/"
        return {tag.removeprefix(start): values for tag, values in self.given.items() if tag.startswith(start)}


@pytest.fixture
def site() -> Site:
    return Site(uuid.uuid4().hex)


def test_each_interval_alone(site: Site) -> None:
    writer = Writer()
    record_full_precision(site, "warm-up", 400)
    fap.log_to(writer, 10)
    record_quantized(site, 50, 400, bits=4)
    record_sqnr(site, 100.0, 1.0)
    fap.reset_stats()  # the writer gets the values anyway
    record_quantized(site, 150, 400, bits=6)
    record_full_precision(site, "warm-up", 200)
    fap.log_to(writer, 20)
    fap.log_to(writer, 30)  # nothing new
    assert writer.of(site) == {
        "quantized_share": [(10, 0.0), (20, 2 / 3)],
        "bytes_saved": [(10, 0.0), (20, 1 - 400 / 1000)],
        "sqnr_db": [(20, pytest.approx(20.0))],
        "bits": [(20, 6)],
    }


def test_every_writer_gets_all_scalars(site: Site) -> None:
    first, second = Writer(), Writer()
    record_quantized(site, 50, 400, bits=4)
    fap.log_to(first, 1)
    record_quantized(site, 50, 400, bits=4)
    fap.log_to(second, 2)
    assert [step for step, _ in first.of(site)["bits"]] == [1]
    assert [step for step, _ in second.of(site)["bits"]] == [2]


def test_only_finite_numbers(site: Site) -> None:
    writer = Writer()
    record_quantized(site, 50, 400, bits=4)
    record_sqnr(site, 100.0, 0.0)  # no noise at all
    fap.log_to(writer, 1)
    assert "sqnr_db" not in writer.of(site)
    assert all(math.isfinite(value) for values in writer.given.values() for _, value in values)


def test_other_objects_than_writers_are_refused() -> None:
    with pytest.raises(TypeError, match="writer is str; expected one with add_scalar"):
        fap.log_to("runs", 1)  # type: ignore[arg-type]
