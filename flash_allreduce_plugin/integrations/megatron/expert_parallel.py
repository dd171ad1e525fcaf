"""Hidden states sent to the experts of a mixture and back: all-to-all, all-gather, reduce-scatter.

The token dispatchers move routing maps, counts and probabilities through the same functions as the hidden states, and
those must stay exact. So the seams are on the dispatchers' methods. The hidden states are the argument of a method, and
the scope names the method only while that tensor is moved. The autograd functions keep the scope for their backward,
which sends the gradient of the hidden states back.

Ranks hold different numbers of tokens. collectives/all_to_all.py sends them; this file selects the tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.api.checks import group_of
from flash_allreduce_plugin.collectives.transport import all_gather_single, reduce_scatter_single
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import attention, scopes
from flash_allreduce_plugin.integrations.megatron.scopes import MAPPINGS, CurrentConfig, Scope, recalls, remembers
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.runtime import groups

DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"

GATHER_DISPATCH = "megatron.expert.all_gather.dispatch"
GATHER_COMBINE = "megatron.expert.all_gather.combine"
EXCHANGE_DISPATCH = "megatron.expert.all_to_all.dispatch"
EXCHANGE_COMBINE = "megatron.expert.all_to_all.combine"
TENSOR_DISPATCH = "megatron.expert.tensor_parallel.dispatch"
TENSOR_COMBINE = "megatron.expert.tensor_parallel.combine"

_COMBINES = (GATHER_COMBINE, EXCHANGE_COMBINE, TENSOR_COMBINE)
_THERE, _BACK = (Role.EXPERT, Role.EXPERT_GRADIENT), (Role.EXPERT_COMBINE, Role.EXPERT_COMBINE_GRADIENT)

_GATHER, _REDUCE_SCATTER = "gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"

# The hidden states that a dispatcher's method was given, and the dispatcher; they may pass as another tensor if their
# dtype changes.
_given: ContextVar[tuple[torch.Tensor | None, object]] = ContextVar("flash_allreduce_given", default=(None, None))


def seams() -> list[Seam]:
    """One for each method of a dispatcher that moves hidden states; its counters are of both directions."""

    def seam(site: str, method: str, arguments: tuple[str, ...], moved_by: str, covers: str) -> Seam:
        replacement = functools.partial(_names_hidden_states, site=site, moved_by=moved_by)
        return Seam(site, DISPATCHERS, method, ("self", *arguments), replacement, f"{covers}, forward and backward")

    gather, exchange = "MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher"
    given = ("permutated_local_input_tokens", "permuted_probs")
    back = ("hidden_states", "async_finish", "allocate_on_comm_stream")
    return [
        seam(
            GATHER_DISPATCH,
            f"{gather}.token_dispatch",
            ("hidden_states", "probs"),
            _GATHER,
            "all-gather of hidden states to all experts",
        ),
        seam(
            GATHER_COMBINE,
            f"{gather}.token_combine",
            ("hidden_states",),
            _REDUCE_SCATTER,
            "reduce-scatter of the experts' outputs",
        ),
        seam(
            EXCHANGE_DISPATCH,
            f"{exchange}.token_dispatch",
            given,
            "all_to_all",
            "all-to-all of hidden states to their experts",
        ),
        seam(EXCHANGE_COMBINE, f"{exchange}.token_combine", back, "all_to_all", "all-to-all of the experts' outputs"),
        seam(
            TENSOR_DISPATCH,
            f"{exchange}.dispatch_postprocess",
            ("global_input_tokens", "global_probs"),
            _GATHER,
            "all-gather of hidden states over the parts of an expert",
        ),
        seam(
            TENSOR_COMBINE,
            f"{exchange}.combine_preprocess",
            ("hidden_states",),
            _REDUCE_SCATTER,
            "reduce-scatter of outputs over the parts of an expert",
        ),
    ]


def helpers(config: CurrentConfig) -> list[Seam]:
    """Return the seam of the all-to-all below the dispatchers, which attention uses too. It counts no other calls."""
    parameters = ("ctx", "group", "input", "output_split_sizes", "input_split_sizes")
    return [
        Seam(
            "megatron.all_to_all.forward",
            MAPPINGS,
            "_AllToAll.forward",
            (parameters, (*parameters, "use_nccl_stream")),
            lambda original: remembers(
                rebound(original, "torch.distributed.all_to_all_single", _all_to_all_single(config))
            ),
            "all-to-all, forward, and called again by the backward",
        ),
        Seam(
            "megatron.all_to_all.backward",
            MAPPINGS,
            "_AllToAll.backward",
            ("ctx", "grad_output"),
            recalls,
            "recalls the module of the forward",
        ),
    ]


def _names_hidden_states(original: Function, *, site: str, moved_by: str) -> Function:
    """Return a dispatcher's method whose scope names `site` in the calls of `moved_by` that move hidden states."""
    theirs = original.__globals__
    combines = moved_by == _REDUCE_SCATTER  # moves nothing else, but casts first

    def move(*arguments: Any, **keywords: Any) -> Any:
        hidden_states, dispatcher = _given.get()
        if not combines and not any(argument is hidden_states for argument in arguments):
            with scopes.routing():  # the group may be the tensor-parallel one: the tensor decides
                return theirs[moved_by](*arguments, **keywords)
        with scopes.moving_hidden_states(site, dispatcher):
            return theirs[moved_by](*arguments, **keywords)

    body = rebound(original, moved_by, move)

    @functools.wraps(original)
    def method(self: Any, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        token = _given.set((hidden_states, self))
        try:
            return body(self, hidden_states, *arguments, **keywords)
        finally:
            _given.reset(token)

    return method


def gather(
    output: torch.Tensor,
    input: torch.Tensor,
    rows: Sequence[int] | None,
    group: dist.ProcessGroup,
    config: FlashConfig,
    scope: Scope,
) -> None:
    """input [rows[rank], ...] of every rank -> output [sum of rows, ...]; rows: None if all ranks have as many."""
    input = input.contiguous()

    def theirs() -> Any:
        if rows is None:
            return all_gather_single(output, input, group=group)
        return dist.all_gather(list(torch.split(output, list(rows))), input, group=group)

    how = {"output_split_sizes": rows, "plain": theirs, **_how(config, scope, group)}
    reductions.all_gather(output, input, group, **how)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    rows: Sequence[int] | None,
    group: dist.ProcessGroup,
    config: FlashConfig,
    scope: Scope,
) -> None:
    """input [sum of rows, ...] -> output [rows[rank], ...], summed over the ranks; rows: None if all get as many."""
    given = input.contiguous() if rows is None else list(torch.split(input, list(rows)))

    def theirs() -> Any:
        if isinstance(given, torch.Tensor):
            return reduce_scatter_single(output, given, group=group)
        return dist.reduce_scatter(output, given, group=group)

    reductions.reduce_scatter(output, given, group=group, plain=theirs, **_how(config, scope, group))


def _all_to_all_single(config: CurrentConfig) -> Function:
    """Replace `torch.distributed.all_to_all_single` inside `mappings._AllToAll.forward`."""

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        given = output, input, output_split_sizes, input_split_sizes, group, async_op
        theirs = functools.partial(dist.all_to_all_single, *given)
        scope = scopes.current()
        if scope.hidden_states is None and attention.is_across(group):
            return attention.all_to_all(*given, config=config(), scope=scope, plain=theirs)
        if scope.hidden_states is None:
            return theirs()
        return reductions.all_to_all(*given, plain=theirs, **_how(config(), scope, group))

    return all_to_all_single


def _how(config: FlashConfig, scope: Scope, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the arguments of every call that moves hidden states or their gradient."""
    assert scope.hidden_states is not None
    forward, backward = _BACK if scope.hidden_states in _COMBINES else _THERE
    role = backward if scopes.running_pass() == "backward" else forward
    layer = None if scope.dispatcher is None else groups.state_of(group_of(group)).layer(scope.dispatcher)
    site = Site(scope.hidden_states, role, scope.module, layer)
    return {"config": config, "site": site, "step": scope.step, "full_precision": scope.full_precision}
