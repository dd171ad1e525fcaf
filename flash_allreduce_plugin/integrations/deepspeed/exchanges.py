"""The exchanges of a model's layers among ranks: their engine, their pass, and their configuration.

Every run from one rank to another is rounded once, also the run that a rank keeps. DeepSpeed's functions belong to the
process; for models of other engines they are unchanged.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.deepspeed.reduction import Reduction, given_group
from flash_allreduce_plugin.policy import EVALUATION, Site
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.runtime.traced import never_trace


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange: its engine, its site, and the reason for full precision, if there is one.

    backward: the site of the gradient. layer: the module of the exchange.
    """

    reduction: Reduction
    full_precision: str | None
    site: Site
    backward: Site
    layer: torch.nn.Module

    def of_gradient(self) -> Exchange:
        return replace(self, site=self.backward)


_owners: WeakKeyDictionary[torch.nn.Module, Reduction] = WeakKeyDictionary()


def own(engine: Any, reduction: Reduction) -> None:
    """Use an engine's configuration for the exchanges of its model from now on."""
    _owners.update(dict.fromkeys(engine.module.modules(), reduction))


def disown(reduction: Reduction) -> None:
    for module in [module for module, owner in _owners.items() if owner is reduction]:
        del _owners[module]


def of_module(module: torch.nn.Module, forward: Site, backward: Site) -> Exchange | None:
    """Return the exchange of a module, or None if it is in no quantized model."""
    reduction = _owners.get(module)
    if reduction is None:
        return None
    evaluates = not module.training and not reduction.config.quantize_evaluation
    return Exchange(reduction, EVALUATION if evaluates else None, forward, backward, module)


def all_to_all(
    exchange: Exchange | None,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Replace `dist.all_to_all_single`. exchange: None: DeepSpeed's own."""
    from deepspeed import comm

    given = output, input, output_split_sizes, input_split_sizes, group, async_op
    theirs = functools.partial(comm.all_to_all_single, *given)
    if exchange is None:
        return theirs()
    reduction = exchange.reduction
    group = given_group(group)
    return reductions.all_to_all(
        *(output, input, output_split_sizes, input_split_sizes, group, async_op),
        config=reduction.config,
        site=replace(reduction.site(exchange.site), layer=groups.state_of(group).layer(exchange.layer)),
        step=reduction.finished_steps(),
        plain=theirs,
        full_precision=exchange.full_precision,
    )


def counted(
    reduction: Reduction, forward: Sequence[Site], backward: Sequence[Site]
) -> Callable[[], tuple[Site, FlashConfig] | None]:
    """Return a function of the site of each all-to-all that stays DeepSpeed's (other_traffic.exchanges_of).

    It returns None after the engine's release. A layer makes one exchange at each of the sites, in their order.
    """
    alive, ways = weakref.ref(reduction), (cycle(forward), cycle(backward))

    def served() -> tuple[Site, FlashConfig] | None:
        found = alive()
        site = next(ways[torch._C._current_graph_task_id() != -1])  # -1 outside of a backward pass
        return None if found is None or found.released else (found.site(site), found.config)

    return served


def evenly(exchange: Exchange | None, group: dist.ProcessGroup, input: Tensor) -> Tensor:
    """Send part r of the first dimension to rank r, and its gradient back."""
    result: Tensor = _Evenly.apply(exchange, group, input)
    return result


class _Evenly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange | None, group: dist.ProcessGroup, input: Tensor) -> Tensor:
        ctx.exchange, ctx.group = exchange, group
        input = input.contiguous()
        output = torch.empty_like(input)
        all_to_all(exchange, output, input, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        exchange = None if ctx.exchange is None else ctx.exchange.of_gradient()
        return None, None, _Evenly.apply(exchange, ctx.group, *gradients)


never_trace(evenly)
