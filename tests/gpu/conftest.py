"""Fixtures shared by all tests on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from flash_allreduce_plugin import environment
from tests.distributed import Ranks

# Several ranks of a group share one GPU here.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
# Nothing here needs a multicast mapping, and torch's rendezvous fails at it on some machines.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[..., Ranks]]:
    """Yield gpu_ranks(n, backend, two_shot, nvls): n running ranks, spawned: a forked process cannot always use CUDA.

    two_shot: bytes of the largest all-reduce that takes the two-shot kernel; 0: none does. nvls: with a multicast
    address, which torch does not map where ranks may share a GPU.
    """
    started: dict[tuple[int, str, int, bool], Ranks] = {}

    def get(world_size: int, backend: str = "gloo", two_shot: int = 0, nvls: bool = False) -> Ranks:
        key = world_size, backend, two_shot, nvls
        if key not in started or not started[key].alive:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(environment.TWO_SHOT_BYTES, str(two_shot))
                if nvls:
                    patch.setenv(environment.NVLS, "1")
                    patch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
                    patch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
                started[key] = Ranks(world_size, backend=backend, method="spawn")
        return started[key]

    yield get
    for pool in started.values():
        pool.close()
