"""Sequence-parallel collectives of megatron-core: reduce-scatters and all-gathers along the first dimension.

With sequence parallelism Megatron splits each all-reduce in two: a reduce-scatter after a row-parallel layer, an
all-gather before a column-parallel one, and the other way round for the gradients. A column-parallel layer keeps
its part of the input and gathers it again in the backward for the weight's gradient: the same codec on the same
input in the same scope, hence the same bits as in the forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.integrations.megatron import attention, expert_parallel, scopes
from flash_allreduce_plugin.integrations.megatron.scopes import (
    LAYERS,
    MAPPINGS,
    CurrentConfig,
    Scope,
    left_alone,
    recalls,
    record_original,
    remembers,
    site_of,
)
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import ONE_RANK, Role, Site
from flash_allreduce_plugin.telemetry.other_traffic import ours

SPLIT_SIZES = "uneven split sizes"

G_FORWARD = Site("megatron.sequence_parallel.g.forward", Role.FORWARD)
G_BACKWARD = Site("megatron.sequence_parallel.g.backward", Role.SEQUENCE_PARALLEL_GRADIENT)
F_FORWARD = Site("megatron.sequence_parallel.f.forward", Role.SEQUENCE_PARALLEL_GATHER)
F_BACKWARD = Site("megatron.sequence_parallel.f.backward", Role.BACKWARD)
SCATTER_BACKWARD = Site("megatron.sequence_parallel.scatter.backward", Role.SEQUENCE_PARALLEL_GRADIENT)
LINEAR_GATHER = Site("megatron.sequence_parallel.linear.gather", Role.SEQUENCE_PARALLEL_GATHER)
LINEAR_REGATHER = Site("megatron.sequence_parallel.linear.regather", Role.SEQUENCE_PARALLEL_GATHER)
LINEAR_DGRAD = Site("megatron.sequence_parallel.linear.dgrad", Role.BACKWARD)

_GATHER = "_gather_along_first_dim"
_REDUCE_SCATTER = "_reduce_scatter_along_first_dim"
_LINEAR_FORWARD = (
    "ctx",
    "input",
    "weight",
    "bias",
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
    "grad_output_buffer",
    "wgrad_deferral_limit",
    "tp_group",
)


def seams(config: CurrentConfig) -> list[Seam]:
    """The seams of this file; `config` is asked at every call."""
    return [*_in_mappings(config), *_in_layers(config)]


def _in_mappings(config: CurrentConfig) -> list[Seam]:
    return [
        Seam(
            G_FORWARD.name,
            MAPPINGS,
            "_ReduceScatterToSequenceParallelRegion.forward",
            ("ctx", "input_", "group", "input_split_sizes", "use_global_buffer"),
            lambda original: remembers(rebound(original, _REDUCE_SCATTER, _reduce_scatter(G_FORWARD, config))),
            "reduce-scatter of a row-parallel layer's output, forward",
        ),
        Seam(
            G_BACKWARD.name,
            MAPPINGS,
            "_ReduceScatterToSequenceParallelRegion.backward",
            ("ctx", "grad_output"),
            lambda original: recalls(rebound(original, _GATHER, _gather(G_BACKWARD, config))),
            "all-gather of the gradient of a row-parallel layer's output, backward",
        ),
        Seam(
            F_FORWARD.name,
            MAPPINGS,
            "_GatherFromSequenceParallelRegion.forward",
            (
                "ctx",
                "input_",
                "group",
                "tensor_parallel_output_grad",
                "output_split_sizes",
                "use_global_buffer",
            ),
            lambda original: remembers(rebound(original, _GATHER, _gather(F_FORWARD, config))),
            "all-gather at an explicit gather (frozen weights, latent attention, custom code), forward",
        ),
        Seam(
            F_BACKWARD.name,
            MAPPINGS,
            "_GatherFromSequenceParallelRegion.backward",
            ("ctx", "grad_output"),
            lambda original: recalls(rebound(original, _REDUCE_SCATTER, _reduce_scatter(F_BACKWARD, config))),
            "reduce-scatter of the gradient at an explicit gather (frozen weights, custom code), backward",
        ),
        Seam(
            SCATTER_BACKWARD.name,
            MAPPINGS,
            "_ScatterToSequenceParallelRegion.backward",
            ("ctx", "grad_output"),
            lambda original: recalls(rebound(original, _GATHER, _gather(SCATTER_BACKWARD, config))),
            "all-gather of the gradient at an explicit scatter (position embeddings, custom code), backward",
        ),
    ]


def _in_layers(config: CurrentConfig) -> list[Seam]:
    return [
        Seam(
            LINEAR_GATHER.name,
            LAYERS,
            "LinearWithGradAccumulationAndAsyncCommunication.forward",
            (_LINEAR_FORWARD, (*_LINEAR_FORWARD, "gtp_remat_size")),  # the last one from 0.19 on
            lambda original: remembers(rebound(original, "dist_all_gather_func", _all_gather(LINEAR_GATHER, config))),
            "all-gather of a column-parallel layer's input, forward",
        ),
        Seam(
            LINEAR_REGATHER.name,
            LAYERS,
            "dist_all_gather_func",  # layers.py uses this name of its own in the two functions of that layer only
            ("output_tensor", "input_tensor", "group", "async_op"),
            lambda original: _all_gather(LINEAR_REGATHER, config),
            "asynchronous all-gather of a column-parallel layer's input for the weight's gradient, backward",
        ),
        Seam(
            LINEAR_DGRAD.name,
            LAYERS,
            "dist_reduce_scatter_func",  # layers.py uses this name of its own for the input gradient only
            ("output", "input", "op", "group", "async_op"),
            lambda original: _linear_reduce_scatter(LINEAR_DGRAD, config, original),
            "asynchronous reduce-scatter of a column-parallel layer's input gradient, backward",
        ),
    ]


def helpers() -> list[Seam]:
    """Seams that move nothing: they keep the scope of a forward call for its backward."""
    return [
        Seam(
            "megatron.sequence_parallel.scatter.forward",
            MAPPINGS,
            "_ScatterToSequenceParallelRegion.forward",
            ("ctx", "input_", "group"),
            remembers,
            "remembers the module for the backward",
        ),
    ]


def _reduce_scatter(site: Site, config: CurrentConfig) -> Function:
    """Stands in for `mappings._reduce_scatter_along_first_dim`: [s, ...] -> [s / ranks, ...]."""

    def reduce_scatter(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        scope = scopes.current()
        if scope.hidden_states is not None:
            rows = input_split_sizes or [input_.shape[0] // group.size()] * group.size()
            output = _buffer(input_, rows[group.rank()], use_global_buffer)
            expert_parallel.reduce_scatter(output, input_, input_split_sizes, group, config(), scope)
            return output
        if input_split_sizes is None and attention.is_across(group):
            output = _buffer(input_, input_.shape[0] // group.size(), use_global_buffer)
            attention.reduce_scatter(output, input_, group, config(), scope)
            return output
        here = site_of(site, scope)
        reason = _left_alone(group, input_split_sizes, scope)
        if reason is not None:
            from megatron.core.tensor_parallel import mappings

            record_original(here, reason, "reduce_scatter", input_, group)
            with ours:
                return mappings._reduce_scatter_along_first_dim(input_, group, input_split_sizes, use_global_buffer)
        world_size = group.size()
        if input_.shape[0] % world_size:
            raise ValueError(
                f"{here.name}: the first dimension, {input_.shape[0]}, is no multiple of {world_size} ranks"
            )
        output = _buffer(input_, input_.shape[0] // world_size, use_global_buffer)
        reductions.reduce_scatter(output, input_.contiguous(), group=group, config=config(), site=here, step=scope.step)
        return output

    return reduce_scatter


def _gather(site: Site, config: CurrentConfig) -> Function:
    """Stands in for `mappings._gather_along_first_dim`: [s, ...] -> [s * ranks, ...]."""

    def gather(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        scope = scopes.current()
        if scope.hidden_states is not None:
            rows = output_split_sizes or [input_.shape[0]] * group.size()
            output = _buffer(input_, sum(rows), use_global_buffer)
            expert_parallel.gather(output, input_, output_split_sizes, group, config(), scope)
            return output
        if output_split_sizes is None and attention.is_across(group):
            output = _buffer(input_, input_.shape[0] * group.size(), use_global_buffer)
            attention.gather(output, input_, group, config(), scope)
            return output
        here = _gather_site_of(site, scope, config)
        reason = _left_alone(group, output_split_sizes, scope)
        if reason is not None:
            from megatron.core.tensor_parallel import mappings

            record_original(here, reason, "all_gather", input_, group)
            with ours:
                return mappings._gather_along_first_dim(input_, group, output_split_sizes, use_global_buffer)
        output = _buffer(input_, input_.shape[0] * group.size(), use_global_buffer)
        reductions.all_gather(output, input_.contiguous(), group=group, config=config(), site=here, step=scope.step)
        return output

    return gather


def _all_gather(site: Site, config: CurrentConfig) -> Function:
    """Stands in for the all-gather of a column-parallel layer's input."""

    def all_gather(
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        scope = scopes.current()
        return reductions.all_gather(
            output_tensor,
            input_tensor,
            group,
            config=config(),
            async_op=async_op,
            site=site_of(site, scope),
            step=scope.step,
            plain=partial(dist.all_gather_into_tensor, output_tensor, input_tensor, group=group, async_op=async_op),
            full_precision=left_alone(group, scope),
        )

    return all_gather


def _linear_reduce_scatter(site: Site, config: CurrentConfig, original: Function) -> Function:
    """Stands in for the reduce-scatter that layers.py starts for an input gradient."""

    def reduce_scatter(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        scope = scopes.current()
        return reductions.reduce_scatter(
            output,
            input,
            op,
            group,
            config=config(),
            async_op=async_op,
            site=site_of(site, scope),
            step=scope.step,
            plain=partial(original, output, input, op=op, group=group, async_op=async_op),
            full_precision=left_alone(group, scope),
        )

    return reduce_scatter


def _gather_site_of(site: Site, scope: Scope, config: CurrentConfig) -> Site:
    """The site of an all-gather with its module. The one behind the embedding's reduce-scatter stays in full
    precision with it.
    """
    if scope.embedding and not config().quantize_embedding:
        return Site(site.name, Role.EMBEDDING, scope.module)
    return site_of(site, scope)


def _left_alone(group: dist.ProcessGroup, split_sizes: list[int] | None, scope: Scope) -> str | None:
    """Why Megatron's own function serves a call, or None if this plugin does."""
    reason = left_alone(group, scope)
    if reason is None and group.size() == 1:  # Megatron hands the input itself back
        return ONE_RANK
    return SPLIT_SIZES if reason is None and split_sizes is not None else reason


def _buffer(like: torch.Tensor, first: int, use_global_buffer: bool) -> torch.Tensor:
    """Room for a result [first, ...], where Megatron would put it."""
    from megatron.core.parallel_state import get_global_memory_buffer

    shape = [first, *like.shape[1:]]
    if use_global_buffer:
        return get_global_memory_buffer().get_tensor(shape, like.dtype, "mpu")
    return torch.empty(shape, dtype=like.dtype, device=like.device)
