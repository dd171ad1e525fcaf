"""lab.benchmarks.bf16_ring: its simulation equals real ranks, and INT8 overtakes the ring."""

from __future__ import annotations

import pytest

from flash_allreduce_plugin.cli import ranks
from lab.benchmarks import bf16_ring

ELEMENTS = 1 << 14


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_real_ranks_have_the_simulated_error(correlation: float) -> None:
    settings = {"elements": ELEMENTS, "correlations": [correlation]}
    rows = ranks.run("lab.benchmarks.bf16_ring:measure", settings, world_size=4, timeout=120.0)
    simulated = bf16_ring.simulate(4, ELEMENTS, correlation)
    (measured,) = (row["sqnr_db"] for row in rows)
    assert measured.keys() == {bf16_ring.RING, *bf16_ring.CONFIGS}
    for variant, db in measured.items():
        assert db == pytest.approx(simulated[variant], abs=0.5), variant


def test_a_ring_loses_with_every_rank_and_two_steps_do_not() -> None:
    few, many = (bf16_ring.simulate(world, ELEMENTS, 0.0) for world in (8, 128))
    assert many[bf16_ring.RING] < few[bf16_ring.RING] - 8  # 10 log10 of 128 / 8 is 12
    assert abs(many["INT8"] - few["INT8"]) < 0.3
    assert few["INT8"] < few[bf16_ring.RING] and many["INT8"] > many[bf16_ring.RING]
    rows = [bf16_ring.row("simulated", world, 0.0, found) for world, found in ((8, few), (128, many))]
    at = bf16_ring.crossover(rows, 0.0)
    assert at is not None and 30 < at < 80
    assert bf16_ring.crossover(rows[:1], 0.0) is None
