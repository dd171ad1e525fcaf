"""Hidden states on their way to the experts of a mixture and back: all-to-all, all-gather, reduce-scatter.

The token dispatchers move routing maps, counts and probabilities through the same functions as the hidden states,
and those must stay exact. So the seams are on the dispatchers' methods: the hidden states are the tensor that a
method is given, and only while that tensor is moved does the scope name the method. The autograd functions keep
the scope for their backward, where the gradient of the hidden states goes the way back.

Every rank holds another number of tokens. Each run of tokens from one rank to another is encoded by itself, and a
rank decodes its own run as well, so a token's value does not depend on where its expert lives. `min_bytes` is not
asked: the ranks know different sizes and could not agree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin import environment, groups
from flash_allreduce_plugin.codec import rows as codecs
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.megatron import scopes
from flash_allreduce_plugin.megatron.scopes import MAPPINGS, CurrentConfig, Scope, recalls, remembers
from flash_allreduce_plugin.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import Collective, FullPrecision, Role, Site, make_plan
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.beside import ours

DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"

GATHER_DISPATCH = "megatron.expert.all_gather.dispatch"
GATHER_COMBINE = "megatron.expert.all_gather.combine"
EXCHANGE_DISPATCH = "megatron.expert.all_to_all.dispatch"
EXCHANGE_COMBINE = "megatron.expert.all_to_all.combine"
TENSOR_DISPATCH = "megatron.expert.tensor_parallel.dispatch"
TENSOR_COMBINE = "megatron.expert.tensor_parallel.combine"

_GATHER, _REDUCE_SCATTER = "gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"

# The hidden states that a dispatcher's method was given; they may pass as another tensor if their dtype changes.
_given: ContextVar[torch.Tensor | None] = ContextVar("flash_allreduce_given", default=None)


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
    """The all-to-all below the dispatchers. What passes through it and is no hidden state is not counted."""
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
    """A dispatcher's method in whose calls of `moved_by` the scope names `site` if they move hidden states."""
    theirs = original.__globals__
    combines = moved_by == _REDUCE_SCATTER  # moves nothing else, but casts first

    def move(*arguments: Any, **keywords: Any) -> Any:
        if not combines and not any(argument is _given.get() for argument in arguments):
            return theirs[moved_by](*arguments, **keywords)
        with scopes.moving_hidden_states(site):
            return theirs[moved_by](*arguments, **keywords)

    body = rebound(original, moved_by, move)

    @functools.wraps(original)
    def method(self: Any, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        token = _given.set(hidden_states)
        try:
            return body(self, hidden_states, *arguments, **keywords)
        finally:
            _given.reset(token)

    return method


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a call encodes. key: of its random numbers, where it rounds stochastically; the same on every rank."""

    codec: Format
    key: int = 0


def plan(
    collective: Collective,
    tensor: torch.Tensor,
    numel: int,
    group: dist.ProcessGroup,
    config: CurrentConfig,
    scope: Scope,
) -> Encoding | None:
    """The encoding of a call that moves hidden states or their gradient; None, counted, if Megatron's own serves it.

    numel: elements of `tensor` that this rank sends to others, for the counters; the answer does not depend on it.
    """
    site = _site(scope)
    disabled = environment.is_on(environment.DISABLE)
    groups.agree(Label(collective, site.name, group), config(), disabled, tensor.device)
    reason = environment.DISABLE if disabled else scope.full_precision
    if reason is None:
        answer = make_plan(
            collective,
            numel=config().min_bytes + 1,  # every rank has another number
            dtype=tensor.dtype,
            world_size=group.size(),
            op="sum",
            site=site,
            config=config(),
            step=scope.step,
        )
        if not isinstance(answer, FullPrecision):
            codec = answer.reduce if collective == "reduce_scatter" else answer.gather
            if not codec.stochastic:
                return Encoding(codec)
            state = groups.state_of(group)
            state.draws += 1
            return Encoding(codec, codecs.draw_key(config().seed, state.draws - 1))
        reason = answer.reason
    counters.record_full_precision(site, reason, numel * tensor.element_size())
    return None


def gather(
    output: torch.Tensor,
    input: torch.Tensor,
    rows: Sequence[int],
    group: dist.ProcessGroup,
    encoding: Encoding,
    scope: Scope,
) -> None:
    """input [rows[rank], ...] of every rank -> output [sum of rows, ...]; the same bits on every rank."""
    width = output.numel() // max(sum(rows), 1)
    sizes = [count * width for count in rows]
    payloads = _exchange([input.contiguous().view(-1)] * group.size(), sizes, group, encoding, "all_gather", scope)
    _decode(payloads, output, sizes, encoding.codec)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    rows: Sequence[int],
    group: dist.ProcessGroup,
    encoding: Encoding,
    scope: Scope,
) -> None:
    """input [sum of rows, ...] -> output [rows[rank], ...]: this rank's rows, summed over the ranks."""
    width = input.numel() // max(sum(rows), 1)
    parts = list(torch.split(input.contiguous().view(-1), [count * width for count in rows]))
    payloads = _exchange(parts, [output.numel()] * group.size(), group, encoding, "reduce_scatter", scope)
    if output.numel():
        codecs.decode_sum(torch.cat(payloads).view(group.size(), -1), output.view(-1), encoding.codec, 1.0)


def _all_to_all_single(config: CurrentConfig) -> Function:
    """What stands in for `torch.distributed.all_to_all_single` inside `mappings._AllToAll.forward`."""

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        scope = scopes.current()
        if scope.hidden_states is None or group is None:
            return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
        width = input[:1].numel() if len(input) else output[:1].numel()

        def sizes(splits: Sequence[int] | None, tensor: torch.Tensor) -> list[int]:
            if splits is None:
                return [tensor.numel() // group.size()] * group.size()
            return [int(count) * width for count in splits]

        given = sizes(input_split_sizes, input)
        # No sum: the half that moves results.
        encoding = plan("all_gather", input, sum(given) - given[group.rank()], group, config, scope)
        if encoding is None:
            with ours:
                return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
        parts = list(torch.split(input.view(-1), given))
        received = sizes(output_split_sizes, output)
        _decode(_exchange(parts, received, group, encoding, "all_to_all", scope), output, received, encoding.codec)
        return _Done() if async_op else None

    return all_to_all_single


class _Done:
    """The handle of a collective that is over."""

    def wait(self) -> bool:
        return True


def _exchange(
    parts: Sequence[torch.Tensor],
    received: Sequence[int],
    group: dist.ProcessGroup,
    encoding: Encoding,
    collective: str,
    scope: Scope,
) -> list[torch.Tensor]:
    """Encode parts[j] for rank j and return the payload of received[j] elements from each rank j; counted.

    Every part has random numbers of its own, but those of a gather, which are the same part: the same bytes.
    """
    codec = encoding.codec
    out_bytes = [codec.payload_bytes(part.numel()) for part in parts]
    in_bytes = [codec.payload_bytes(numel) for numel in received]
    sent = torch.empty(sum(out_bytes), dtype=torch.uint8, device=parts[0].device)
    arrived = torch.empty(sum(in_bytes), dtype=torch.uint8, device=sent.device)
    for to, (part, payload) in enumerate(zip(parts, torch.split(sent, out_bytes), strict=True)):
        if part.numel():
            numbers = (group.rank(),) if collective == "all_gather" else (group.rank(), to)
            draw = Draw(codecs.draw_key(encoding.key, *numbers))
            codecs.encode(part.view(1, -1), payload.view(1, -1), codec, draw)
    site = _site(scope)
    label = Label(collective, site.name, group)
    transport.all_to_all(arrived, sent, label, "exchanging hidden states", in_bytes, out_bytes).wait()
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    plain = sum(parts[rank].numel() for rank in others) * parts[0].element_size()
    counters.record_quantized(site, sum(out_bytes[rank] for rank in others), plain, bits=codec.bits)
    return list(torch.split(arrived, in_bytes))


def _decode(payloads: Sequence[torch.Tensor], output: torch.Tensor, sizes: Sequence[int], codec: Format) -> None:
    for payload, part in zip(payloads, torch.split(output.view(-1), list(sizes)), strict=True):
        if part.numel():
            codecs.decode(payload.view(1, -1), part.view(1, -1), codec)


def _site(scope: Scope) -> Site:
    assert scope.hidden_states is not None
    role = Role.EXPERT_GRADIENT if scopes.running_pass() == "backward" else Role.EXPERT
    return Site(scope.hidden_states, role, scope.module)
