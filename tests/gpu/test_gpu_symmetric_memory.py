"""The parts of torch that the two-shot kernel needs: ranks of one GPU that write to each other's memory.

If this fails, torch's symmetric memory does not work on this machine, and nothing that builds on it can.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Ranks
from tests.gpu import device

device.need_device()
pytestmark = device.needs_cuda


def write_to_the_next(numel: int) -> list[int]:
    """Write this rank's number to the next rank. Return the numbers that the ranks then have."""
    import torch.distributed._symmetric_memory as symmetric_memory

    rank, world = dist.get_rank(), dist.get_world_size()
    mine = symmetric_memory.empty(numel, dtype=torch.uint8, device=torch.device("cuda", 0))
    handle = symmetric_memory.rendezvous(mine, dist.group.WORLD)
    mine.fill_(255)
    handle.barrier(channel=0)
    handle.get_buffer((rank + 1) % world, (numel,), torch.uint8).fill_(rank)
    handle.barrier(channel=0)
    seen = [handle.get_buffer(peer, (numel,), torch.uint8) for peer in range(world)]
    values = [int(buffer[numel // 2]) if bool((buffer == buffer[0]).all()) else -1 for buffer in seen]
    handle.barrier(channel=0)
    return values


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_one_gpu_write_to_each_other(gpu_ranks: Callable[..., Ranks], world_size: int) -> None:
    expected = [(peer - 1) % world_size for peer in range(world_size)]
    assert gpu_ranks(world_size, "gloo").run(write_to_the_next, 1 << 20) == [expected] * world_size
