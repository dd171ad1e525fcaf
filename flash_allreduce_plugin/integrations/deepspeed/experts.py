"""DeepSpeed's mixture of experts (deepspeed.moe.layer.MoE): every rank has some of the experts.

    dispatch    tokens to the ranks of their experts      expert_bits
    combine     the experts' outputs back                 expert_combine_bits, or else expert_bits
    gradients   each against its way                      the same width, if backward_bits is not "full"

A slot without a token is zero, and stays so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.deepspeed import exchanges
from flash_allreduce_plugin.integrations.deepspeed.exchanges import Exchange
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import Role, Site

DISPATCH = Site("deepspeed.experts.dispatch.forward", Role.EXPERT)
DISPATCH_BACKWARD = Site("deepspeed.experts.dispatch.backward", Role.EXPERT_GRADIENT)
COMBINE = Site("deepspeed.experts.combine.forward", Role.EXPERT_COMBINE)
COMBINE_BACKWARD = Site("deepspeed.experts.combine.backward", Role.EXPERT_COMBINE_GRADIENT)
SITES = (DISPATCH, DISPATCH_BACKWARD, COMBINE, COMBINE_BACKWARD)

# The remaining exchanges of the running layer, in order; None: they are DeepSpeed's own.
_coming: ContextVar[Iterator[Exchange | None]] = ContextVar("flash_allreduce_experts")


def wanted(config: FlashConfig) -> bool:
    return config.expert_bits != "full" or config.expert_combine_bits not in (None, "full")


def is_there(engine: Any) -> bool:
    """True if the model has experts on several ranks."""
    return bool(groups(engine))


def groups(engine: Any) -> list[dist.ProcessGroup]:
    """Return the groups of several ranks over which the layers of a model exchange tokens."""
    from deepspeed.moe.sharded_moe import MOELayer

    return [one.ep_group for one in engine.module.modules() if isinstance(one, MOELayer) and one.ep_size > 1]


def of_process() -> list[Seam]:
    """Return the seam of DeepSpeed's function that is replaced while an engine has quantized experts."""
    return [
        Seam(
            "deepspeed.experts.layer",
            "deepspeed.moe.sharded_moe",
            "MOELayer.forward",
            ("self", "input", "kwargs"),
            _exchanges,
            "all-to-all of tokens to their experts and of their outputs back",
        )
    ]


def _exchanges(original: Function) -> Function:
    body = rebound(original, "_AllToAll", SimpleNamespace(apply=_apply))

    @functools.wraps(original)
    def forward(self: Any, *input: Tensor, **keywords: Any) -> Tensor:
        ways = (DISPATCH, DISPATCH_BACKWARD), (COMBINE, COMBINE_BACKWARD)
        token = _coming.set(iter([exchanges.of_module(self, *sites) for sites in ways]))
        try:
            result: Tensor = body(self, *input, **keywords)
            return result
        finally:
            _coming.reset(token)

    return forward


def _apply(group: dist.ProcessGroup, input: Tensor) -> Tensor:
    return exchanges.evenly(next(_coming.get()), group, input)
