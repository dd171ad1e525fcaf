"""The exchanges of attention with context parallelism. One rounding each.

In megatron-core, through functions that other groups use too, so that the group decides:

    Mamba and gated delta net layers    all-to-all, forward and backward
    sparse attention (DSA, from 0.19)   all-gather of keys and values; reduce-scatter of their gradients

In Transformer Engine, which calls torch.distributed itself:

    cp_comm_type a2a, and in a2a+p2p    all-to-all of queries, keys, values and output, and of their gradients
    its ring, its all-gathers           not reached
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives.transport import all_gather_single, reduce_scatter_single
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import process_groups, scopes
from flash_allreduce_plugin.integrations.megatron.scopes import MAPPINGS, CurrentConfig, Scope, recalls, remembers
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.runtime.stages import Plain

EXCHANGE = Site("megatron.attention.all_to_all.forward", Role.ATTENTION)
EXCHANGE_BACKWARD = Site("megatron.attention.all_to_all.backward", Role.ATTENTION_GRADIENT)
GATHER = Site("megatron.attention.gather.forward", Role.ATTENTION)
GATHER_BACKWARD = Site("megatron.attention.gather.backward", Role.ATTENTION_GRADIENT)

TE_EXCHANGE = Site("megatron.transformer_engine.attention.forward", Role.ATTENTION)
TE_EXCHANGE_BACKWARD = Site("megatron.transformer_engine.attention.backward", Role.ATTENTION_GRADIENT)
# From 2.3 on, and until 2.2.
TE_MODULES = (
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
    "transformer_engine.pytorch.attention",
)
_TE_FUNCTION = "flash_attn_a2a_communicate"
_TE_SEAM = "megatron.transformer_engine.attention.exchange"
OUTSIDE = "outside of the attention's autograd function"

# Site -> (its seam, the function, covered tensors).
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
    """The sites of this file for `report()`: others' seams serve them, or one of Transformer Engine's two.

    report: of a Patchset; without the seams of Transformer Engine its sites are left out.
    """
    found = {
        site.name: {
            "target": f"{MAPPINGS}.{function}, over the context-parallel group",
            "covers": covers,
            "in_place": report[seam]["in_place"],
        }
        for site, (seam, function, covers) in _ROWS.items()
    }
    if _TE_SEAM in report:
        seam = report[_TE_SEAM]
        found[TE_EXCHANGE.name] = seam
        found[TE_EXCHANGE_BACKWARD.name] = {**seam, "covers": "all-to-all of their gradients"}
    return found


def of_transformer_engine(module: str, config: CurrentConfig) -> list[Seam]:
    """The seams of Transformer Engine's attention, which is in that module of TE_MODULES."""
    name = _TE_SEAM.rpartition(".")[0]
    arguments = ("a2a_inputs", "chunk_ids_for_a2a", "seq_dim", "cp_size", "cp_group", "cp_stream", "before_attn", ...)
    found = [
        Seam(
            _TE_SEAM,
            module,
            _TE_FUNCTION,
            arguments,
            lambda original: rebound(original, "torch.distributed.all_to_all_single", _te_all_to_all_single(config)),
            "all-to-all of queries, keys, values and output in Transformer Engine",
        )
    ]
    for function in ("AttnFuncWithCPAndQKVOA2A", "AttnFuncWithCPAndKVP2P"):
        note = "remembers the module for the backward"
        found += [
            Seam(f"{name}.{function}.forward", module, f"{function}.forward", ("ctx", ...), remembers, note),
            Seam(f"{name}.{function}.backward", module, f"{function}.backward", ("ctx", ...), recalls, note),
        ]
    return found


def te_module() -> str:
    """The one of TE_MODULES that is here; the newest where none is."""
    for name in TE_MODULES:
        try:
            if hasattr(importlib.import_module(name), _TE_FUNCTION):
                return name
        except ImportError:
            continue
    return TE_MODULES[0]


def _te_all_to_all_single(config: CurrentConfig) -> Function:
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        given = output, input, output_split_sizes, input_split_sizes, group, async_op
        how = _how(TE_EXCHANGE, TE_EXCHANGE_BACKWARD, config(), scopes.current())
        if scopes.running_pass() is None:
            how["full_precision"] = how["full_precision"] or OUTSIDE  # which width applies is not known
        return reductions.all_to_all(*given, plain=functools.partial(dist.all_to_all_single, *given), **how)

    return all_to_all_single


def is_across(group: dist.ProcessGroup | None) -> bool:
    """True if `group` is the context-parallel group of a model and has several ranks."""
    return group is not None and group.size() > 1 and process_groups.is_context_parallel(group)


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
    return reductions.all_to_all(*given, plain=plain, **_how(EXCHANGE, EXCHANGE_BACKWARD, config, scope))


def gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, config: FlashConfig, scope: Scope
) -> None:
    """input [s, ...] of every rank -> output [s * ranks, ...]."""
    input = input.contiguous()
    theirs = functools.partial(all_gather_single, output, input, group=group)
    reductions.all_gather(output, input, group, plain=theirs, **_how(GATHER, GATHER_BACKWARD, config, scope))


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, config: FlashConfig, scope: Scope
) -> None:
    """input [s * ranks, ...] -> output [s, ...], summed over the ranks."""
    input = input.contiguous()
    theirs = functools.partial(reduce_scatter_single, output, input, group=group)
    how = _how(GATHER, GATHER_BACKWARD, config, scope)
    reductions.reduce_scatter(output, input, group=group, plain=theirs, **how)


def _how(forward: Site, backward: Site, config: FlashConfig, scope: Scope) -> dict[str, Any]:
    site = scopes.site_of(backward if scopes.running_pass() == "backward" else forward, scope)
    return {"config": config, "site": site, "step": scope.step, "full_precision": scope.full_precision}
