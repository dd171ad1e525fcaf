"""What all tests on a GPU share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.distributed import Ranks

# Several ranks of a group share one GPU here.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[[int, str], Ranks]]:
    """gpu_ranks(n, backend): n running ranks, spawned: a process that was forked cannot always use CUDA."""
    started: dict[tuple[int, str], Ranks] = {}

    def get(world_size: int, backend: str = "gloo") -> Ranks:
        key = world_size, backend
        if key not in started or not started[key].alive:
            started[key] = Ranks(world_size, backend=backend, method="spawn")
        return started[key]

    yield get
    for pool in started.values():
        pool.close()
