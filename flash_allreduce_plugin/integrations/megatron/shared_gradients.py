"""Megatron's sums after the data-parallel reduction, for gradients of parameters with copies on several ranks:

    embeddings, if the first and the last pipeline stage share one     all-reduce between the two     grad_bits
    layer norms and others, with sequence parallelism                  all-reduce of tensor parallelism,
                                                                       exact without quantize_layernorm

Data-parallel ranks compute the same sums at the same time, in different groups, and must get the same bits. So no call
here depends on the placement of ranks: none runs in two levels.
"""

from __future__ import annotations

import functools
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import data_parallel, scopes
from flash_allreduce_plugin.integrations.megatron.scopes import CurrentConfig
from flash_allreduce_plugin.integrations.patching import Function, Seam, names_used, rebound
from flash_allreduce_plugin.policy import Role, Site

_MODULE = "megatron.core.distributed.finalize_model_grads"
_ALL_REDUCE = "torch.distributed.all_reduce"
_HELPER = "_allreduce_embedding_grad"  # which reduces for both embeddings, from 0.14 on

WORD_EMBEDDING = Site("megatron.shared_gradients.word_embedding", Role.GRADIENT)
POSITION_EMBEDDING = Site("megatron.shared_gradients.position_embedding", Role.GRADIENT)
LAYER_NORM = Site("megatron.shared_gradients.layer_norm", Role.LAYER_NORM)

_EMBEDDING = (("model", "config"), ("model", "config", ...))


def seams(config: CurrentConfig) -> list[Seam]:
    """The seams of this file; `config` is asked at every call."""

    def seam(site: Site, function: str, covers: str) -> Seam:
        return Seam(site.name, _MODULE, function, _EMBEDDING, lambda original: _reduced(original, site, config), covers)

    embedding = (
        "embedding's gradients that the first and the last pipeline stage share: all-reduce, at the end of a step"
    )
    return [
        seam(WORD_EMBEDDING, "_allreduce_word_embedding_grads", f"word {embedding}"),
        seam(POSITION_EMBEDDING, "_allreduce_position_embedding_grads", f"position {embedding}"),
        seam(
            LAYER_NORM,
            "_allreduce_non_tensor_model_parallel_grads",
            "gradients of layer norms with sequence parallelism: all-reduce, at the end of a step",
        ),
    ]


@functools.lru_cache(maxsize=8)
def _flat(config: FlashConfig) -> FlashConfig:
    """Return the same object for the same configuration: calls are cached by its identity."""
    return config if config.hierarchical == "off" else config.model_copy(update={"hierarchical": "off"})


def _reduced(original: Function, site: Site, config: CurrentConfig) -> Function:
    """`original` with its all-reduce, or that of the function it leaves it to, replaced."""

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
        scope, feedback = scopes.current(), data_parallel.residuals.feedback
        reductions.all_reduce(
            tensor,
            op,
            group,
            _flat(config()),
            site=site,
            step=scope.step,
            feedback=None if feedback is None else feedback.slot(f"{site.name} {op}"),
            plain=partial(dist.all_reduce, tensor, op=op, group=group),
            full_precision=scope.full_precision,
        )

    if _HELPER not in names_used(original.__code__):
        return rebound(original, _ALL_REDUCE, all_reduce)

    def helper(*args: Any, **given: Any) -> None:
        rebound(original.__globals__[_HELPER], _ALL_REDUCE, all_reduce)(*args, **given)

    if isinstance(original.__globals__[_HELPER], FunctionType):  # which it is but where sources alone are checked
        rebound(original.__globals__[_HELPER], _ALL_REDUCE, all_reduce)
    return functools.wraps(original)(rebound(original, _HELPER, helper))
