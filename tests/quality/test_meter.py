"""The local measure of a call's error, against the exact one on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import groups
from flash_allreduce_plugin.collectives import messages
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.quality.guard import FULL
from flash_allreduce_plugin.telemetry import counters
from tests.codecs import gaussian
from tests.distributed import Ranks
from tests.quality.test_guard import SITE, cancelling, in_group

GetRanks = Callable[[int], Ranks]


def correlated(numel: int, seed: int, rank: int) -> Tensor:
    """As gradients of parts of a batch: the ranks' share a half."""
    return gaussian(numel, seed=1000 + seed) + gaussian(numel, seed=100 * seed + rank)


def channels(numel: int, seed: int, rank: int) -> Tensor:
    """As activations: of every 64 channels one has 20 times the others' size, and all have sizes of their own."""
    sizes = torch.linspace(0.2, 2.0, 64)
    sizes[17] = 20.0
    return (gaussian(numel, seed=100 * seed + rank).view(-1, 64) * sizes).view(-1)


def heavy(numel: int, seed: int, rank: int) -> Tensor:
    """Laplace, of sizes that differ from group to group by 1e6."""
    x = gaussian(numel, seed=100 * seed + rank) * gaussian(numel, seed=100 * seed + rank + 50)
    return (x.view(128, -1) * torch.logspace(-9, -3, 128).unsqueeze(1)).view(-1)


KINDS = {"gaussian": lambda numel, seed, rank: cancelling(numel, 0.0, seed, rank)} | {
    function.__name__: function for function in (correlated, channels, heavy)
}


def both_measures(kind: str, changes: dict[str, Any], collective: str, floor_db: float | None) -> list[float]:
    """SQNR of the same calls, measured exactly and locally; with a floor, of what full precision is spared."""
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
            guard = groups.state_of(group).guard(SITE.name, config, 8)
            assert guard.bits == FULL
            return messages.add_up(guard.take(), Label("test", SITE.name, group), torch.device("cpu"))

        outcome = in_group(run)
        found.append(outcome["sqnr_db"] if outcome["result"] is None else counters.sqnr_db(*outcome["result"]))
    return found


NODES = {"hierarchical": {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}}


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def all_measures(
    kinds: list[str], changes: dict[str, Any], floor_db: float | None = None
) -> dict[tuple[str, str], list[float]]:
    """both_measures of every kind and collective."""
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
            # Of a reduce-scatter a rank that measures exactly sees its own part.
            if abs(exact - local) > tolerance + 0.2 * (call[1] == "reduce_scatter")
        }
        assert not off
