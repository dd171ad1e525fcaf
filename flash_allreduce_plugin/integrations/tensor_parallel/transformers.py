"""transformers' tp_plan: the one sum of an activation that bypasses DTensor.

A row-parallel layer with an output that needs no gradient (generation, evaluation) calls torch's all-reduce itself
(transformers.distributed.tensor_parallel, read in 5.23). Experts do too; they stay exact.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam, rebound
from flash_allreduce_plugin.integrations.tensor_parallel import activations
from flash_allreduce_plugin.integrations.tensor_parallel.activations import CurrentConfig
from flash_allreduce_plugin.integrations.tensor_parallel.placements import REDUCE_FORWARD, How

_MODULE = "transformers.distributed.tensor_parallel"


def is_loaded() -> bool:
    """Return True once the program has imported transformers' styles."""
    return _MODULE in sys.modules


def patchset(how: How, config: CurrentConfig) -> Patchset:
    """Return the seam, to be applied and undone with torch's."""

    def sums(original: Function) -> Function:
        def all_reduce(
            tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
        ) -> Any:
            if torch.compiler.is_compiling():
                return dist.all_reduce(tensor, op, group, async_op)
            call = how(REDUCE_FORWARD, activations.here(config()))
            return reductions.all_reduce(tensor, op, group, async_op=async_op, **call)

        return rebound(original, "dist.all_reduce", all_reduce)

    seam = Seam(
        "tensor_parallel.transformers",
        _MODULE,
        "RowwiseParallel.transform_output_post_forward",
        ("self", "module", "output", "mesh"),
        sums,
        "all-reduce of a row-parallel layer without a gradient",
    )
    return Patchset("tensor_parallel", [seam], "transformers 5.23")
