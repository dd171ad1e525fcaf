"""Tensor-parallel all-reduces of megatron-core: g forward, f backward, and the linear layers' input
gradients.

Megatron's own functions keep running; each sees one name differently (`patching.rebound`), the collective it
calls. Hooking the functions that call `mappings._reduce`, rather than `_reduce`, tells forward from backward,
which have widths of their own.

A stock GPT does not reduce its gradients in `_CopyToModelParallelRegion.backward`: its column-parallel layers
start an asynchronous all-reduce of their own and compute the weight's gradient while it runs. That order, and
the wait, stay Megatron's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin import dispatch, telemetry
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.patching import Seam, rebound
from flash_allreduce_plugin.policy import Role, Site

MAPPINGS = "megatron.core.tensor_parallel.mappings"
LAYERS = "megatron.core.tensor_parallel.layers"
OTHER_GROUP = "not the tensor-parallel group"

CurrentConfig = Callable[[], FlashConfig]
Function = Callable[..., Any]

EMBEDDING = Site("megatron.embedding.forward", Role.EMBEDDING)
G_FORWARD = Site("megatron.g.forward", Role.FORWARD)
F_BACKWARD = Site("megatron.f.backward", Role.BACKWARD)
LINEAR_DGRAD = Site("megatron.linear.dgrad", Role.BACKWARD)
FROZEN_LINEAR_DGRAD = Site("megatron.frozen_linear.dgrad", Role.BACKWARD)

_in_embedding: ContextVar[bool] = ContextVar("flash_allreduce_in_embedding", default=False)


def seams(config: CurrentConfig) -> list[Seam]:
    """The seams of this file; `config` is asked at every call."""
    return [
        Seam(
            G_FORWARD.name,
            MAPPINGS,
            "_ReduceFromModelParallelRegion.forward",
            ("ctx", "input_", "group"),
            lambda original: rebound(original, "_reduce", _reduce(G_FORWARD, config)),
            "all-reduce of a row-parallel layer's output, forward",
        ),
        Seam(
            F_BACKWARD.name,
            MAPPINGS,
            "_CopyToModelParallelRegion.backward",
            ("ctx", "grad_output"),
            lambda original: rebound(original, "_reduce", _reduce(F_BACKWARD, config)),
            "all-reduce of the gradient at an explicit f (MoE shared experts, custom code), backward",
        ),
        Seam(
            LINEAR_DGRAD.name,
            LAYERS,
            "LinearWithGradAccumulationAndAsyncCommunication.backward",
            ("ctx", "grad_output"),
            lambda original: rebound(original, _ALL_REDUCE, _all_reduce(LINEAR_DGRAD, config)),
            "asynchronous all-reduce of a column-parallel layer's input gradient, backward",
        ),
        Seam(
            FROZEN_LINEAR_DGRAD.name,
            LAYERS,
            "LinearWithFrozenWeight.backward",
            ("ctx", "grad_output"),
            lambda original: rebound(original, _ALL_REDUCE, _all_reduce(FROZEN_LINEAR_DGRAD, config)),
            "all-reduce of the input gradient of a column-parallel layer with a frozen weight, backward",
        ),
        Seam(
            EMBEDDING.name,
            LAYERS,
            "VocabParallelEmbedding.forward",
            ("self", "input_"),
            mark_embedding,
            "marks the embedding's own reduction, which stays in full precision, forward",
        ),
    ]


_ALL_REDUCE = "torch.distributed.all_reduce"


def _reduce(site: Site, config: CurrentConfig) -> Function:
    """What stands in for `mappings._reduce`: sums in place, and returns the sum for a non-contiguous input
    too.
    """

    def reduce(input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        here = site_of(site)
        tensor = input_.contiguous()
        if not is_tensor_parallel(group):
            from megatron.core.tensor_parallel import mappings

            record_original(here, OTHER_GROUP, tensor, group, all_reduce=True)
            return mappings._reduce(tensor, group)
        dispatch.all_reduce(tensor, group=group, config=config(), site=here)
        return tensor

    return reduce


def _all_reduce(site: Site, config: CurrentConfig) -> Function:
    """What stands in for `torch.distributed.all_reduce` inside one backward function of Megatron's."""

    def all_reduce(
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if not is_tensor_parallel(group):
            record_original(site, OTHER_GROUP, tensor, group, all_reduce=True)
            return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
        return dispatch.all_reduce(tensor, op=op, group=group, config=config(), async_op=async_op, site=site)

    return all_reduce


def mark_embedding(original: Function) -> Function:
    """`original` (VocabParallelEmbedding.forward) with `site_of` answering EMBEDDING while it runs."""

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        token = _in_embedding.set(True)
        try:
            return original(self, input_)
        finally:
            _in_embedding.reset(token)

    return forward


def site_of(site: Site) -> Site:
    """The site a forward reduction belongs to: the embedding reaches the same functions as the row-parallel
    layers.
    """
    return EMBEDDING if _in_embedding.get() else site


def is_tensor_parallel(group: dist.ProcessGroup | None) -> bool:
    """Whether `group` is Megatron's tensor-parallel group; those of experts come by here too."""
    from megatron.core import parallel_state

    return group is not None and group is parallel_state.get_tensor_model_parallel_group(check_initialized=False)


def record_original(
    site: Site, reason: str, tensor: torch.Tensor, group: dist.ProcessGroup | None, *, all_reduce: bool
) -> None:
    """Count a call that goes to Megatron's own function, with the ring volume of `tensor` over `group`."""
    world_size = dist.get_world_size(group)
    volume = tensor.numel() * tensor.element_size() * (world_size - 1) // world_size
    telemetry.record_full_precision(site, reason, 2 * volume if all_reduce else volume)
