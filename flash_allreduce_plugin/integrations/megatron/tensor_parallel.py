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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.integrations.megatron import scopes
from flash_allreduce_plugin.integrations.megatron.scopes import (
    EMBEDDING,
    LAYERS,
    MAPPINGS,
    CurrentConfig,
    left_alone,
    recalls,
    remembers,
    site_of,
)
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import Role, Site

G_FORWARD = Site("megatron.g.forward", Role.FORWARD)
F_BACKWARD = Site("megatron.f.backward", Role.BACKWARD)
LINEAR_DGRAD = Site("megatron.linear.dgrad", Role.BACKWARD)
FROZEN_LINEAR_DGRAD = Site("megatron.frozen_linear.dgrad", Role.BACKWARD)


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
            lambda original: recalls(rebound(original, "_reduce", _reduce(F_BACKWARD, config))),
            "all-reduce of the gradient at an explicit f (MoE shared experts, custom code), backward",
        ),
        Seam(
            LINEAR_DGRAD.name,
            LAYERS,
            "LinearWithGradAccumulationAndAsyncCommunication.backward",
            ("ctx", "grad_output"),
            lambda original: recalls(rebound(original, _ALL_REDUCE, _all_reduce(LINEAR_DGRAD, config))),
            "asynchronous all-reduce of a column-parallel layer's input gradient, backward",
        ),
        Seam(
            FROZEN_LINEAR_DGRAD.name,
            LAYERS,
            "LinearWithFrozenWeight.backward",
            ("ctx", "grad_output"),
            lambda original: recalls(rebound(original, _ALL_REDUCE, _all_reduce(FROZEN_LINEAR_DGRAD, config))),
            "all-reduce of the input gradient of a column-parallel layer with a frozen weight, backward",
        ),
        Seam(
            EMBEDDING.name,
            LAYERS,
            "VocabParallelEmbedding.forward",
            ("self", "input_"),
            mark_embedding,
            "reduction of the embedding's output, forward",
        ),
    ]


def helpers() -> list[Seam]:
    """Seams that reduce nothing: they keep the scope of a forward call for its backward."""
    return [
        Seam(
            "megatron.f.forward",
            MAPPINGS,
            "_CopyToModelParallelRegion.forward",
            ("ctx", "input_", "group"),
            remembers,
            "remembers the module for the backward",
        ),
        Seam(
            "megatron.frozen_linear.forward",
            LAYERS,
            "LinearWithFrozenWeight.forward",
            ("ctx", "input", "weight", "bias", "allreduce_dgrad", "tp_group"),
            remembers,
            "remembers the module for the backward",
        ),
    ]


_ALL_REDUCE = "torch.distributed.all_reduce"


def _reduce(site: Site, config: CurrentConfig) -> Function:
    """Stands in for `mappings._reduce`: sums in place, and returns the sum for a non-contiguous input
    too.
    """

    def reduce(input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        scope = scopes.current()
        tensor = input_.contiguous()
        reductions.all_reduce(
            tensor,
            group=group,
            config=config(),
            site=site_of(site, scope),
            step=scope.step,
            plain=partial(mappings._reduce, tensor, group),
            full_precision=left_alone(group, scope),
        )
        return tensor

    return reduce


def _all_reduce(site: Site, config: CurrentConfig) -> Function:
    """Stands in for `torch.distributed.all_reduce` inside one backward function of Megatron's."""

    def all_reduce(
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        scope = scopes.current()
        return reductions.all_reduce(
            tensor,
            op,
            group,
            config=config(),
            async_op=async_op,
            site=site_of(site, scope),
            step=scope.step,
            plain=partial(dist.all_reduce, tensor, op=op, group=group, async_op=async_op),
            full_precision=left_alone(group, scope),
        )

    return all_reduce


def mark_embedding(original: Function) -> Function:
    """`original` (VocabParallelEmbedding.forward) with `site_of` answering EMBEDDING while it runs."""

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        with scopes.inside_embedding():
            return original(self, input_)

    return forward
