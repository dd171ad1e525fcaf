"""What attention exchanges over Megatron's context-parallel group, in code of megatron-core itself.

    Mamba and gated delta net layers    all-to-all, forward and backward
    sparse attention (DSA, from 0.19)   all-gather of keys and values; reduce-scatter of their gradients

All of it passes through the functions that serve other groups too, so the group tells. One rounding each. Transformer
Engine's attention has collectives of its own (transformer_engine.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin import dispatch
from flash_allreduce_plugin.collectives.transport import all_gather_single, reduce_scatter_single
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.megatron import scopes
from flash_allreduce_plugin.megatron.scopes import MAPPINGS, Scope
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.running import Plain

EXCHANGE = Site("megatron.attention.all_to_all.forward", Role.ATTENTION)
EXCHANGE_BACKWARD = Site("megatron.attention.all_to_all.backward", Role.ATTENTION_GRADIENT)
GATHER = Site("megatron.attention.gather.forward", Role.ATTENTION)
GATHER_BACKWARD = Site("megatron.attention.gather.backward", Role.ATTENTION_GRADIENT)

# Site -> (its seam, the function, what is covered).
_ROWS = {
    EXCHANGE: ("megatron.all_to_all.forward", "_AllToAll", "all-to-all of Mamba and gated delta net layers"),
    EXCHANGE_BACKWARD: ("megatron.all_to_all.backward", "_AllToAll", "all-to-all of their gradients"),
    GATHER: (
        "megatron.sequence_parallel.f.forward",
        "_GatherFromSequenceParallelRegion",
        "all-gather of keys and values of sparse attention",
    ),
    GATHER_BACKWARD: (
        "megatron.sequence_parallel.f.backward",
        "_GatherFromSequenceParallelRegion",
        "reduce-scatter of their gradients",
    ),
}


def rows(report: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sites of this file for `report()`: others' seams serve them. report: of a Patchset."""
    return {
        site.name: {
            "target": f"{MAPPINGS}.{function}, over the context-parallel group",
            "covers": covers,
            "in_place": report[seam]["in_place"],
        }
        for site, (seam, function, covers) in _ROWS.items()
    }


def is_across(group: dist.ProcessGroup | None) -> bool:
    """Whether `group` is Megatron's context-parallel group, of several ranks."""
    from megatron.core import parallel_state

    found = parallel_state.get_context_parallel_group(check_initialized=False)
    return group is not None and group is found and group.size() > 1


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: dist.ProcessGroup | None,
    async_op: bool,
    *,
    config: FlashConfig,
    scope: Scope,
    plain: Plain,
) -> Any:
    given = output, input, output_split_sizes, input_split_sizes, group, async_op
    return dispatch.all_to_all(*given, plain=plain, **_how(EXCHANGE, EXCHANGE_BACKWARD, config, scope))


def gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, config: FlashConfig, scope: Scope
) -> None:
    """input [s, ...] of every rank -> output [s * ranks, ...]."""
    input = input.contiguous()
    theirs = functools.partial(all_gather_single, output, input, group=group)
    dispatch.all_gather(output, input, group, plain=theirs, **_how(GATHER, GATHER_BACKWARD, config, scope))


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, config: FlashConfig, scope: Scope
) -> None:
    """input [s * ranks, ...] -> output [s, ...], summed over the ranks."""
    input = input.contiguous()
    theirs = functools.partial(reduce_scatter_single, output, input, group=group)
    how = _how(GATHER, GATHER_BACKWARD, config, scope)
    dispatch.reduce_scatter(output, input, group=group, plain=theirs, **how)


def _how(forward: Site, backward: Site, config: FlashConfig, scope: Scope) -> dict[str, Any]:
    site = scopes.site_of(backward if scopes.running_pass() == "backward" else forward, scope)
    return {"config": config, "site": site, "step": scope.step, "full_precision": scope.full_precision}
