"""DeepSpeed-Ulysses: every rank has a part of the sequence, and attends over the whole of it for its part of the heads.

    query, key, value    all-to-all: to the rank of their heads         attention_bits
    output               all-to-all: back to the rank of its tokens     attention_bits
    their gradients      the same ways, in the backward pass            attention_bits, if backward_bits is not "full"

One rounding each; the part that a rank keeps is rounded too. The configuration is that of the engine with the
attention's model (exchanges.py).
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.deepspeed import exchanges
from flash_allreduce_plugin.integrations.deepspeed.exchanges import Exchange
from flash_allreduce_plugin.integrations.patching import Function, Seam, names_used, rebound
from flash_allreduce_plugin.policy import Role, Site

FORWARD = Site("deepspeed.attention.forward", Role.ATTENTION)
BACKWARD = Site("deepspeed.attention.backward", Role.ATTENTION_GRADIENT)

_LAYER = "deepspeed.sequence.layer"
_TRANSFORMERS = "deepspeed.runtime.sequence_parallel.ulysses_sp"  # for the models of Hugging Face's transformers


# The attention that runs now; None: it is in no model with a configuration.
_running: ContextVar[Exchange | None] = ContextVar("flash_allreduce_attention", default=None)


def wanted(config: FlashConfig) -> bool:
    return config.attention_bits != "full"


def is_there(engine: Any) -> bool:
    """True if the model attends across ranks."""
    return bool(groups(engine))


def groups(engine: Any) -> list[dist.ProcessGroup]:
    """The groups of several ranks over which the attention of a model exchanges.

    DeepSpeed's attention for transformers is in no module of a model: ranks that share a sequence indicate it.
    """
    from deepspeed.sequence.layer import DistributedAttention

    found = [one.spg for one in engine.module.modules() if isinstance(one, DistributedAttention)]
    if "transformers" in sys.modules and engine.sequence_parallel_size > 1:
        found.append(engine.seq_parallel_group)
    return [group for group in found if dist.get_world_size(group) > 1]


# ---- seams


def of_process() -> list[Seam]:
    """Return the seams of DeepSpeed's functions in the process that are replaced while an engine has attention_bits."""
    exchange = ("input", "scatter_idx", "gather_idx", "batch_dim_idx", "group")
    one = (*exchange, "async_op", "handle", "type")
    hugging_face = "UlyssesSPAttentionHF"

    def seam(name: str, path: str, signature: Any, replacement: Function, covers: str) -> Seam:
        module = _TRANSFORMERS if path.startswith(hugging_face) else _LAYER
        return Seam(f"deepspeed.ulysses.{name}", module, path, signature, replacement, covers)

    layer = ("self", "query", "key", "value", "batch_dim_idx", "rotary_pos_emb", "args", "kwargs")
    attention = ("self", "module", "query", "key", "value", "attention_mask", "args", "kwargs")
    kept = "keeps the running attention for the backward"
    return [
        seam("layer", "DistributedAttention.forward", layer, _attends(0), "names the running attention"),
        seam("forward", "_SeqAllToAll.forward", ("ctx", ...), _remembers, kept),
        seam(
            "backward",
            "_SeqAllToAll.backward",
            ("ctx", "grad_output"),
            _recalls,
            "names the attention of the gradients",
        ),
        # With num_kv_heads in 0.19.8, not yet in 0.19.4.
        seam("exchange", "single_all_to_all", (one, (*one, "num_kv_heads")), _exchanged, "all-to-all of even runs"),
        seam(
            "uneven",
            "uneven_heads_all2all",
            (exchange, (*exchange, "num_kv_heads")),
            _exchanged,
            "all-to-all where ranks have different numbers of heads",
        ),
        seam("transformers", f"{hugging_face}.forward", attention, _attends(1), "names the running attention"),
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
            token = _running.set(exchanges.of_module(arguments[which], FORWARD, BACKWARD))
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
    """Return `original`, a backward that applies the forward in the other direction, with the attention set."""

    @functools.wraps(original)
    def backward(ctx: Any, *gradients: Any) -> Any:
        attention: Exchange | None = getattr(ctx, "flash_allreduce_attention", None)
        token = _running.set(None if attention is None else attention.of_gradient())
        try:
            return original(ctx, *gradients)
        finally:
            _running.reset(token)

    return backward


def _exchanged(original: Function) -> Function:
    """Return `original` with our all-to-all in place of DeepSpeed's."""

    def all_to_all_single(output: Tensor, input: Tensor, **how: Any) -> Any:
        return exchanges.all_to_all(_running.get(), output, input, **how)

    return rebound(original, "dist.all_to_all_single", all_to_all_single)


def _exchanged_by_rows(original: Function) -> Function:
    """Return `original` with our exchange in place of `_dim_zero_all_to_all`, an autograd function in old releases."""
    name = "_dim_zero_all_to_all"
    if name in names_used(original.__code__):
        return rebound(original, name, _by_rows)
    return rebound(original, "_DimZeroAllToAll", SimpleNamespace(apply=_by_rows))


def _by_rows(group: dist.ProcessGroup, input: Tensor) -> Tensor:
    """Send row r to rank r."""
    return exchanges.evenly(_running.get(), group, input)
