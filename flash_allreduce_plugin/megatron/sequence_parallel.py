"""Sequence-parallel reduce-scatters of megatron-core: row-parallel output forward, input gradients backward.

With sequence parallelism Megatron splits each all-reduce in two: a reduce-scatter here, an all-gather
elsewhere. The all-gathers are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin import dispatch
from flash_allreduce_plugin.megatron.tensor_parallel import (
    LAYERS,
    MAPPINGS,
    OTHER_GROUP,
    CurrentConfig,
    Function,
    is_tensor_parallel,
    record_original,
    site_of,
)
from flash_allreduce_plugin.patching import Seam, rebound
from flash_allreduce_plugin.policy import ONE_RANK, Role, Site

SPLIT_SIZES = "uneven split sizes"

G_FORWARD = Site("megatron.sequence_parallel.g.forward", Role.FORWARD)
F_BACKWARD = Site("megatron.sequence_parallel.f.backward", Role.BACKWARD)
LINEAR_DGRAD = Site("megatron.sequence_parallel.linear.dgrad", Role.BACKWARD)

_REDUCE_SCATTER = "_reduce_scatter_along_first_dim"


def seams(config: CurrentConfig) -> list[Seam]:
    """The seams of this file; `config` is asked at every call."""
    return [
        Seam(
            G_FORWARD.name,
            MAPPINGS,
            "_ReduceScatterToSequenceParallelRegion.forward",
            ("ctx", "input_", "group", "input_split_sizes", "use_global_buffer"),
            lambda original: rebound(original, _REDUCE_SCATTER, _along_first_dim(G_FORWARD, config)),
            "reduce-scatter of a row-parallel layer's output, forward",
        ),
        Seam(
            F_BACKWARD.name,
            MAPPINGS,
            "_GatherFromSequenceParallelRegion.backward",
            ("ctx", "grad_output"),
            lambda original: rebound(original, _REDUCE_SCATTER, _along_first_dim(F_BACKWARD, config)),
            "reduce-scatter of the gradient at an explicit gather (frozen weights, custom code), backward",
        ),
        Seam(
            LINEAR_DGRAD.name,
            LAYERS,
            "dist_reduce_scatter_func",  # layers.py uses this name of its own for the input gradient only
            ("output", "input", "op", "group", "async_op"),
            lambda original: _reduce_scatter(LINEAR_DGRAD, config, original),
            "asynchronous reduce-scatter of a column-parallel layer's input gradient, backward",
        ),
    ]


def _along_first_dim(site: Site, config: CurrentConfig) -> Function:
    """What stands in for `mappings._reduce_scatter_along_first_dim`: [s, ...] -> [s / ranks, ...]."""

    def reduce_scatter(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        from megatron.core.parallel_state import get_global_memory_buffer
        from megatron.core.tensor_parallel import mappings

        here = site_of(site)
        reason = _left_alone(group, input_split_sizes)
        if reason is not None:
            record_original(here, reason, input_, group, all_reduce=False)
            return mappings._reduce_scatter_along_first_dim(input_, group, input_split_sizes, use_global_buffer)
        world_size = group.size()
        if input_.shape[0] % world_size:
            raise ValueError(
                f"{here.name}: the first dimension, {input_.shape[0]}, is no multiple of {world_size} ranks"
            )
        shape = [input_.shape[0] // world_size, *input_.shape[1:]]
        if use_global_buffer:
            output = get_global_memory_buffer().get_tensor(shape, input_.dtype, "mpu")
        else:
            output = torch.empty(shape, dtype=input_.dtype, device=input_.device)
        dispatch.reduce_scatter(output, input_.contiguous(), group=group, config=config(), site=here)
        return output

    return reduce_scatter


def _reduce_scatter(site: Site, config: CurrentConfig, original: Function) -> Function:
    """What stands in for the reduce-scatter that layers.py starts for an input gradient."""

    def reduce_scatter(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if not is_tensor_parallel(group):
            record_original(site, OTHER_GROUP, input, group, all_reduce=False)
            return original(output, input, op=op, group=group, async_op=async_op)
        return dispatch.reduce_scatter(output, input, op=op, group=group, config=config(), async_op=async_op, site=site)

    return reduce_scatter


def _left_alone(group: dist.ProcessGroup, split_sizes: list[int] | None) -> str | None:
    """Why Megatron's own function serves a call, or None if this plugin does."""
    if not is_tensor_parallel(group):
        return OTHER_GROUP
    if group.size() == 1:  # Megatron hands the input itself back
        return ONE_RANK
    return SPLIT_SIZES if split_sizes is not None else None
