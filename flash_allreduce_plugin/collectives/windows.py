"""Buffers of a group in symmetric windows of NCCL, for its copy engines: opt-in, not yet run on a GPU.

NCCL >= 2.28 runs an all-to-all or all-gather without a kernel if the group has NCCL_CTA_POLICY_ZERO and the buffers are
windows: memory from NCCL's allocator, registered on all ranks (pytorch/pytorch#188697). A registration is a collective:
every rank has to allocate the same sizes in the same order. So only buffers of equal size on all ranks come from here,
their sizes are powers of two, and none is freed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment

_LEAST = 2 << 20  # bytes: the least that torch's allocator requests from the driver

Allocate = Callable[[int], Tensor]
"""nbytes -> a 1-D uint8 tensor of that many or more."""


def wanted() -> bool:
    """True if FLASH_ALLREDUCE_NCCL_WINDOWS is on. groups.agree has compared it on all ranks."""
    return environment.is_on(environment.NCCL_WINDOWS)


def open(group: dist.ProcessGroup, device: torch.device) -> Allocate | None:
    """Return an allocator of the group's windows; collective. None, with a warning, if torch cannot register any."""
    backend: Any = group._get_backend(device)
    if not (hasattr(backend, "register_mem_pool") and hasattr(backend, "mem_allocator")):
        warnings.warn(
            f"flash_allreduce: {environment.NCCL_WINDOWS} has no effect: torch {torch.__version__} cannot register "
            "memory with this group's backend.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    # A registration needs a communicator, in the same state on all ranks.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    dist.barrier(group)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool, symm=True)

    def allocate(nbytes: int) -> Tensor:
        with torch.cuda.use_mem_pool(pool), torch.inference_mode(False):
            size = max(_LEAST, 1 << (nbytes - 1).bit_length())
            return torch.empty(size, dtype=torch.uint8, device=device)

    return allocate
