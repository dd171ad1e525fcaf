"""Collectives of CUDA tensors on real ranks, against the simulation of simulation.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.runtime import groups
from tests.distributed import Ranks
from tests.gpu import device
from tests.simulation import Call, digest, expected_of

#: The fixture gpu_ranks of conftest.py.
GetRanks = Callable[..., Ranks]
CONFIGS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 4},
    {"bits": 4, "group_size": 64, "compact": True},
    {"reduce_bits": 5, "gather_bits": 8, "group_size": 64},
    {"bits": 2, "group_size": 64, "spike_reserving": True, "range": "mse"},
    {"bits": 3, "group_size": 256, "symmetric": True, "hadamard": True, "rounding": "stochastic"},
]


def here() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cpu") if device.ON_CPU else torch.device("cuda", torch.cuda.current_device())


def digests_of(calls: list[Call]) -> list[str]:
    """Return digests of this rank's results. Each call draws random numbers as the group's first call."""
    digests = []
    for call in calls:
        groups.state_of(dist.group.WORLD).draws = 0
        x = call.input(dist.get_rank(), dist.get_world_size()).to(here())
        digests.append(digest(call.run(x).cpu()))
    return digests


def check(ranks: Ranks, calls: list[Call]) -> None:
    results, expected = ranks.run(digests_of, calls), expected_of(calls, ranks.world_size)
    for rank in range(ranks.world_size):
        for call, ours, theirs in zip(calls, results[rank], expected[rank], strict=True):
            assert ours == theirs, f"rank {rank} of {ranks.world_size}: {call}"
