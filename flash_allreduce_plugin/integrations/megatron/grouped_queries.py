"""Grouped queries with fewer KV heads than tensor-parallel ranks: the joint QKV of megatron-core's self-attention.

A rank then has a part of a group's "q1 q2 k1 v1" and no whole head of it. Megatron gathers the last dimension, and each
rank cuts its heads out:

    forward      [s, b, n] of every rank  -> all-gather      -> [s, b, n * ranks]     width: bits
    backward     [s, b, n * ranks]        -> reduce-scatter  -> [s, b, n]             width: backward_bits

Every rank decodes the same payloads, its own too, so all ranks have the same QKV.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.integrations.megatron import scopes
from flash_allreduce_plugin.integrations.megatron.scopes import (
    MAPPINGS,
    CurrentConfig,
    left_alone,
    recalls,
    record_original,
    remembers,
    site_of,
)
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import ONE_RANK, Role, Site
from flash_allreduce_plugin.telemetry.other_traffic import ours

FORWARD = Site("megatron.grouped_queries.forward", Role.FORWARD)
BACKWARD = Site("megatron.grouped_queries.backward", Role.BACKWARD)

_GATHER, _REDUCE_SCATTER = "_gather_along_last_dim", "_reduce_scatter_along_last_dim"
_REGION = "_AllGatherFromTensorParallelRegion"


def seams(config: CurrentConfig) -> list[Seam]:
    """The seams of this file; `config` is asked at every call."""
    return [
        Seam(
            FORWARD.name,
            MAPPINGS,
            f"{_REGION}.forward",
            ("ctx", "input_", "group"),
            lambda original: remembers(rebound(original, _GATHER, _gather(config))),
            "all-gather of QKV with fewer KV heads than tensor-parallel ranks, forward",
        ),
        Seam(
            BACKWARD.name,
            MAPPINGS,
            f"{_REGION}.backward",
            ("ctx", "grad_output"),
            lambda original: recalls(rebound(original, _REDUCE_SCATTER, _reduce_scatter(config))),
            "reduce-scatter of the gradient of that QKV, backward",
        ),
    ]


def _gather(config: CurrentConfig) -> Function:
    """Stands in for `mappings._gather_along_last_dim`: [..., n] -> [..., n * ranks]."""

    def gather(input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        scope = scopes.current()
        here = site_of(FORWARD, scope)
        reason = left_alone(group, scope) or (ONE_RANK if group.size() == 1 else None)
        if reason is not None:
            from megatron.core.tensor_parallel import mappings

            record_original(here, reason, "all_gather", input_, group)
            with ours:
                return mappings._gather_along_last_dim(input_, group)
        parts = torch.empty(group.size(), *input_.shape, dtype=input_.dtype, device=input_.device)
        reductions.all_gather(parts, input_.contiguous(), group, config=config(), site=here, step=scope.step)
        return torch.cat(parts.unbind(), dim=-1)

    return gather


def _reduce_scatter(config: CurrentConfig) -> Function:
    """Stands in for `mappings._reduce_scatter_along_last_dim`: [..., n * ranks] -> [..., n]."""

    def reduce_scatter(input_: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        scope = scopes.current()
        here = site_of(BACKWARD, scope)
        reason = left_alone(group, scope) or (ONE_RANK if group.size() == 1 else None)
        if reason is not None:
            from megatron.core.tensor_parallel import mappings

            record_original(here, reason, "reduce_scatter", input_, group)
            with ours:
                return mappings._reduce_scatter_along_last_dim(input_, group)
        parts = torch.stack(input_.chunk(group.size(), dim=-1))
        output = torch.empty_like(parts[0])
        reductions.reduce_scatter(output, parts, group=group, config=config(), site=here, step=scope.step)
        return output

    return reduce_scatter
