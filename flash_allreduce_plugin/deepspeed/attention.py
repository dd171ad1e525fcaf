"""DeepSpeed-Ulysses: every rank has a part of the sequence, and attends over the whole of it for its part of the heads.

    query, key, value    all-to-all: to the rank of their heads         attention_bits
    output               all-to-all: back to the rank of its tokens     attention_bits
    their gradients      the same ways, in the backward pass            attention_bits, if backward_bits is not "full"

One rounding each; what a rank keeps is rounded like what it sends. An attention goes by the engine whose model it is
part of. DeepSpeed's functions belong to the process; they behave as before for the models of everybody else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import dispatch
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.deepspeed.reduction import Reduction, given_group
from flash_allreduce_plugin.patching import Function, Seam, names_used, rebound
from flash_allreduce_plugin.policy import EVALUATION, Role, Site
from flash_allreduce_plugin.traced import never_trace

FORWARD = Site("deepspeed.attention.forward", Role.ATTENTION)
BACKWARD = Site("deepspeed.attention.backward", Role.ATTENTION_GRADIENT)

_LAYER = "deepspeed.sequence.layer"
_TRANSFORMERS = "deepspeed.runtime.sequence_parallel.ulysses_sp"  # for the models of Hugging Face's transformers


@dataclass(frozen=True, slots=True)
class _Attention:
    """Of which engine an attention is that runs now, in which pass, and why exactly, if it is."""

    reduction: Reduction
    full_precision: str | None
    site: Site = FORWARD


_running: ContextVar[_Attention | None] = ContextVar("flash_allreduce_attention", default=None)
_owners: WeakKeyDictionary[torch.nn.Module, Reduction] = WeakKeyDictionary()


def wanted(config: FlashConfig) -> bool:
    return config.attention_bits != "full"


def own(engine: Any, reduction: Reduction) -> None:
    """Exchanges of this engine's model go by its configuration from now on."""
    _owners.update(dict.fromkeys(engine.module.modules(), reduction))


def disown(engine: Any, reduction: Reduction) -> None:
    for module in engine.module.modules():
        if _owners.get(module) is reduction:
            del _owners[module]


def is_there(engine: Any) -> bool:
    """Whether the model attends across ranks.

    The attention that DeepSpeed gives transformers is in none of a model's modules: ranks that share a sequence tell.
    """
    from deepspeed.sequence.layer import DistributedAttention

    found = [one for one in engine.module.modules() if isinstance(one, DistributedAttention)]
    shared = "transformers" in sys.modules and engine.sequence_parallel_size > 1
    return shared or any(dist.get_world_size(one.spg) > 1 for one in found)


# ---- seams


def of_process() -> list[Seam]:
    """Functions of DeepSpeed's that belong to no engine, replaced while an engine has attention_bits."""
    exchange = ("input", "scatter_idx", "gather_idx", "batch_dim_idx", "group")
    one = (*exchange, "async_op", "handle", "type")
    hugging_face = "UlyssesSPAttentionHF"

    def seam(name: str, path: str, signature: Any, replacement: Function, covers: str) -> Seam:
        module = _TRANSFORMERS if path.startswith(hugging_face) else _LAYER
        return Seam(f"deepspeed.ulysses.{name}", module, path, signature, replacement, covers)

    layer = ("self", "query", "key", "value", "batch_dim_idx", "rotary_pos_emb", "args", "kwargs")
    attention = ("self", "module", "query", "key", "value", "attention_mask", "args", "kwargs")
    kept = "keeps for the backward whose attention runs"
    return [
        seam("layer", "DistributedAttention.forward", layer, _attends(0), "tells whose attention runs"),
        seam("forward", "_SeqAllToAll.forward", ("ctx", ...), _remembers, kept),
        seam("backward", "_SeqAllToAll.backward", ("ctx", "grad_output"), _recalls, "tells whose gradients travel"),
        # With num_kv_heads in 0.19.8, not yet in 0.19.4.
        seam("exchange", "single_all_to_all", (one, (*one, "num_kv_heads")), _exchanged, "all-to-all of even runs"),
        seam(
            "uneven",
            "uneven_heads_all2all",
            (exchange, (*exchange, "num_kv_heads")),
            _exchanged,
            "all-to-all where ranks have different numbers of heads",
        ),
        seam("transformers", f"{hugging_face}.forward", attention, _attends(1), "tells whose attention runs"),
        seam(
            "transformers.inputs",
            f"{hugging_face}._combine_local_sequences",
            ("self", "query", "key", "value"),
            _exchanged_by_rows,
            "all-to-all of queries, keys and values of a model of transformers",
        ),
        seam(
            "transformers.output",
            f"{hugging_face}._partition_global_sequence",
            ("self", "input"),
            _exchanged_by_rows,
            "all-to-all of the output",
        ),
    ]


def _attends(which: int) -> Function:
    """which: the argument that is the module of a model."""

    def replacement(original: Function) -> Function:
        @functools.wraps(original)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            module = arguments[which]
            reduction = _owners.get(module)
            if reduction is None:
                return original(*arguments, **keywords)
            evaluates = not module.training and not reduction.config.quantize_evaluation
            token = _running.set(_Attention(reduction, EVALUATION if evaluates else None))
            try:
                return original(*arguments, **keywords)
            finally:
                _running.reset(token)

        return forward

    return replacement


def _remembers(original: Function) -> Function:
    @functools.wraps(original)
    def forward(ctx: Any, *arguments: Any, **keywords: Any) -> Tensor:
        ctx.flash_allreduce_attention = _running.get()
        result: Tensor = original(ctx, *arguments, **keywords)
        return result

    return forward


def _recalls(original: Function) -> Function:
    """It applies the forward again, the other way round."""

    @functools.wraps(original)
    def backward(ctx: Any, *gradients: Any) -> Any:
        attention = getattr(ctx, "flash_allreduce_attention", None)
        token = _running.set(None if attention is None else replace(attention, site=BACKWARD))
        try:
            return original(ctx, *gradients)
        finally:
            _running.reset(token)

    return backward


def _exchanged(original: Function) -> Function:
    """`original`, which sees our all-to-all where it calls DeepSpeed's."""

    def all_to_all_single(output: Tensor, input: Tensor, **how: Any) -> Any:
        return _exchange(_running.get(), output, input, **how)

    return rebound(original, "dist.all_to_all_single", all_to_all_single)


def _exchanged_by_rows(original: Function) -> Function:
    """`original`, which sees ours where it calls `_dim_zero_all_to_all`, an autograd function in older ones."""
    name = "_dim_zero_all_to_all"
    if name in names_used(original.__code__):
        return rebound(original, name, _by_rows)
    return rebound(original, "_DimZeroAllToAll", SimpleNamespace(apply=_by_rows))


def _by_rows(group: dist.ProcessGroup, input: Tensor) -> Tensor:
    """Row r goes to rank r."""
    result: Tensor = _ByRows.apply(_running.get(), group, input)
    return result


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: _Attention | None, group: dist.ProcessGroup, input: Tensor) -> Tensor:
        ctx.attention, ctx.group = attention, group
        input = input.contiguous()
        output = torch.empty_like(input)
        _exchange(attention, output, input, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        attention = None if ctx.attention is None else replace(ctx.attention, site=BACKWARD)
        return None, None, _ByRows.apply(attention, ctx.group, *gradients)


never_trace(_by_rows)


def _exchange(
    attention: _Attention | None,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    from deepspeed import comm

    given = output, input, output_split_sizes, input_split_sizes, group, async_op
    theirs = functools.partial(comm.all_to_all_single, *given)
    if attention is None:
        return theirs()
    reduction = attention.reduction
    return dispatch.all_to_all(
        *(output, input, output_split_sizes, input_split_sizes, given_group(group), async_op),
        config=reduction.config,
        site=attention.site,
        step=reduction.finished_steps(),
        plain=theirs,
        full_precision=attention.full_precision,
    )
