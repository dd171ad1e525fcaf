"""The local measure of a call's error, against the exact one on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import messages, sample
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.quality.guard import FULL
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters
from tests.codecs import gaussian, sqnr_db
from tests.distributed import Ranks
from tests.quality.test_guard import SITE, cancelling, in_group

GetRanks = Callable[[int], Ranks]


def correlated(numel: int, seed: int, rank: int) -> Tensor:
    """Return values like gradients of parts of a batch: the ranks' share is a half."""
    return gaussian(numel, seed=1000 + seed) + gaussian(numel, seed=100 * seed + rank)


def channels(numel: int, seed: int, rank: int) -> Tensor:
    """Return values like activations: one of 64 channels has 20 times the others' size, and all sizes differ."""
    sizes = torch.linspace(0.2, 2.0, 64)
    sizes[17] = 20.0
    return (gaussian(numel, seed=100 * seed + rank).view(-1, 64) * sizes).view(-1)


def heavy(numel: int, seed: int, rank: int) -> Tensor:
    """Return Laplace values of sizes that differ from group to group by 1e6."""
    x = gaussian(numel, seed=100 * seed + rank) * gaussian(numel, seed=100 * seed + rank + 50)
    return (x.view(128, -1) * torch.logspace(-9, -3, 128).unsqueeze(1)).view(-1)


KINDS = {"gaussian": lambda numel, seed, rank: cancelling(numel, 0.0, seed, rank)} | {
    function.__name__: function for function in (correlated, channels, heavy)
}


def both_measures(kind: str, changes: dict[str, Any], collective: str, floor_db: float | None) -> list[float]:
    """Return the calls' SQNR, measured exactly and locally; with a floor, the SQNR that full precision avoids."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for measure in ("exact", "local"):
        watched = floor_db if measure == "local" else None
        config = fap.FlashConfig(
            **{"min_bytes": 0, "quality_interval": 1, "quality_measure": measure, "min_sqnr_db": watched, **changes}
        )

        def run(group: dist.ProcessGroup, config: fap.FlashConfig = config) -> Any:
            for number in range(5):
                x = KINDS[kind](16384 * world, number, rank)
                op = dist.ReduceOp.AVG
                if collective == "all_gather":
                    fap.all_gather(x.new_empty(world * len(x)), x, group=group, config=config, site=SITE)
                elif collective == "reduce_scatter":
                    fap.reduce_scatter(x.new_empty(16384), x, op, group, config, site=SITE)
                else:
                    fap.all_reduce(x, op, group, config, site=SITE)
            if config.min_sqnr_db is None:
                return None
            guard = groups.state_of(group).sites.guard(SITE.name, config, 8)
            assert guard.bits == FULL
            taken = messages.add_up(guard.take(), Label("test", SITE.name, group), torch.device("cpu"))
            return sample.fold(taken)

        outcome = in_group(run)
        found.append(outcome["sqnr_db"] if outcome["result"] is None else counters.sqnr_db(*outcome["result"]))
    return found


NODES = {"hierarchical": {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}}


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def all_measures(
    kinds: list[str], changes: dict[str, Any], floor_db: float | None = None
) -> dict[tuple[str, str], list[float]]:
    """Return both_measures of every kind and collective."""
    return {
        (kind, collective): both_measures(kind, changes, collective, floor_db)
        for kind in kinds
        for collective in COLLECTIVES
    }


@pytest.mark.parametrize(
    ("world", "changes", "tolerance"),
    [
        (2, {"bits": 4}, 0.3),
        (3, {"bits": 3, "symmetric": True}, 0.6),
        (3, {"bits": 2}, 0.6),
        (3, {"bits": 4, **NODES}, 0.3),
        (2, {"bits": 4, "hadamard": True, "rounding": "stochastic"}, 0.3),
        (2, {"reduce_bits": 4, "gather_bits": 8, "chunk_bytes": 4096}, 0.3),
    ],
    ids=["4", "3 symmetric", "2", "two levels", "options", "4 and 8 in chunks"],
)
def test_the_local_measure_agrees_with_the_exact_one(
    ranks: GetRanks, world: int, changes: dict[str, Any], tolerance: float
) -> None:
    for outcome in ranks(world).run(all_measures, list(KINDS), changes):
        off = {
            call: (exact, local)
            for call, (exact, local) in outcome.items()
            # In a reduce-scatter a rank that measures exactly sees its own part. Below 0 dB the signal is lost.
            if abs(max(exact, 0.0) - max(local, 0.0)) > tolerance + 0.2 * (call[1] == "reduce_scatter")
        }
        assert not off


def dominated(numel: int, seed: int) -> Tensor:
    """Return tokens of 512 elements. The first has all the energy; an outlier in each group ruins the others."""
    x = gaussian(numel // 512, 512, seed=seed)
    x[:, ::128] = 60.0
    x[0] = 1e4 * gaussian(512, seed=seed + 1)
    return x.view(-1)


def measured_of_dominated(collective: str, measure: str) -> tuple[float, float]:
    """Return the measured SQNR of such a tensor, and the SQNR of the whole result."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = fap.FlashConfig(bits=4, min_bytes=0, quality_interval=1, quality_measure=measure)
    inputs = [dominated(16384 * world, seed=10 * r) for r in range(world)]

    def run(group: dist.ProcessGroup) -> float:
        for _ in range(2):
            x = inputs[rank].clone()
            if collective == "all_gather":
                whole, exact = x.new_empty(world * len(x)), torch.cat(inputs)
                fap.all_gather(whole, x, group=group, config=config, site=SITE)
            else:
                whole, exact = x, torch.stack(inputs).sum(0)
                fap.all_reduce(whole, group=group, config=config, site=SITE)
        return sqnr_db(exact, whole)

    outcome = in_group(run)
    return outcome["sqnr_db"], outcome["result"]


@pytest.mark.parametrize("measure", ["local", "exact"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_one_token_with_all_the_energy_hides_no_others(ranks: GetRanks, collective: str, measure: str) -> None:
    found = ranks(2).run(measured_of_dominated, collective, measure)
    for measured, whole in found:
        assert whole > 15.5 and measured < 14
    if measure == "local":
        assert found[0][0] == found[1][0], "the ranks decide by the same number"


def long_calls(measure: str) -> float:
    """Return the SQNR of Gaussian all-reduces; a small part of each is measured locally."""
    config = fap.FlashConfig(bits=4, min_bytes=0, quality_interval=1, quality_measure=measure)

    def run(group: dist.ProcessGroup) -> None:
        for number in range(3):
            x = gaussian(1 << 20, seed=10 * number + dist.get_rank())
            fap.all_reduce(x, group=group, config=config, site=SITE)

    return float(in_group(run)["sqnr_db"])


def test_a_long_gaussian_call_has_17_db_at_4_bits(ranks: GetRanks) -> None:
    """Check that the SQNR is that of the whole tensor (docs/trust/numerics.md)."""
    for measure in ("local", "exact"):
        first, second = ranks(2).run(long_calls, measure)
        assert first == second == pytest.approx(17.1, abs=0.2)
