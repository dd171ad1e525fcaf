"""The sends of pipeline stages: activations to the next stage, their gradients to the stage before.

All sends of Megatron's schedules use one of two functions: `_batched_p2p_ops`, which starts sends and receives in one
call, and `_p2p_ops`, for overlapped ones. Their arguments name the destination of each tensor; with two stages the
ranks alone would not identify it. Megatron sends the shapes of tensors with variable lengths elsewhere.

While both widths are "full" Megatron's own functions run. Otherwise all messages are sends of this package, in full
precision too, so that an error can name ends that differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from flash_allreduce_plugin import environment, policy
from flash_allreduce_plugin.api import sends
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.collectives.work import Work
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import scopes
from flash_allreduce_plugin.integrations.megatron.scopes import CurrentConfig
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.other_traffic import ours

FORWARD = Site("megatron.pipeline.forward", Role.PIPELINE)
BACKWARD = Site("megatron.pipeline.backward", Role.PIPELINE_BACKWARD)
COVERS = {
    FORWARD: "activations sent to the next pipeline stage",
    BACKWARD: "gradients sent to the pipeline stage before",
}

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_BATCHED, _OVERLAPPED = "megatron.pipeline.batched", "megatron.pipeline.overlapped"
_SITES = {
    "tensor_send_prev": BACKWARD,
    "tensor_recv_prev": FORWARD,
    "tensor_send_next": FORWARD,
    "tensor_recv_next": BACKWARD,
}
_REASONS = {FORWARD: policy.is_full("pipeline_bits"), BACKWARD: policy.is_full("pipeline_backward_bits")}


def helpers(config: CurrentConfig) -> list[Seam]:
    """Return the seams of the two functions and of the schedules that call them. `rows` reports sends by direction."""
    parameters = (*_SITES, "group", "prev_pipeline_rank", "next_pipeline_rank")

    def seam(name: str, function: str, replacement: Callable[[Function, CurrentConfig], Function]) -> Seam:
        covers = "sends and receives between pipeline stages"
        return Seam(name, _MODULE, function, parameters, lambda original: replacement(original, config), covers)

    def schedule(name: str) -> Seam:
        return Seam(
            f"megatron.pipeline.{name}",
            "megatron.core.pipeline_parallel.schedules",
            f"forward_backward_pipelining_{name}_interleaving",
            ("forward_step_func", "data_iterator", "model", ...),
            lambda original: _agreed(original, config),
            "the stages compare their configurations",
        )

    sends_and_receives = [seam(_BATCHED, "_batched_p2p_ops", _batched), seam(_OVERLAPPED, "_p2p_ops", _overlapped)]
    return [*sends_and_receives, schedule("without"), schedule("with")]


def rows(report: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sites of this file for `report()`. report: of a Patchset."""
    in_place = report[_BATCHED]["in_place"] and report[_OVERLAPPED]["in_place"]
    row = {"target": f"{_MODULE}.{{_batched_p2p_ops,_p2p_ops}}", "in_place": in_place}
    return {site.name: {**row, "covers": covers} for site, covers in COVERS.items()}


def _agreed(original: Function, config: CurrentConfig) -> Function:
    """A schedule. No rank but its two ends knows of a send, so the stages compare their configurations here: later one
    may wait for the shapes of another that would wait for it.
    """

    @functools.wraps(original)
    def schedule(*args: Any, **given: Any) -> Any:
        from megatron.core import parallel_state

        group = getattr(given.get("p2p_communicator"), "pp_group", None)
        if group is None:
            group = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
        if isinstance(group, dist.ProcessGroup):
            device = torch.device(torch.cuda.current_device())  # as Megatron asks where its tensors are to be
            disabled = environment.is_on(environment.DISABLE)
            groups.agree(Label("send", FORWARD.name, group), config(), disabled, device)
        return original(*args, **given)

    return schedule


class _Exchange(NamedTuple):
    """The sends and receives of one call of Megatron.

    tensors: by Megatron's names. how: arguments of every send. stage: the number of the random numbers. With two stages
    some messages use the group of all ranks, in which tensor-parallel ranks, maybe with the same activations, have
    different ranks.
    """

    tensors: dict[str, Any]
    how: dict[str, Any]
    stage: int

    def site(self, tensor: torch.Tensor) -> Site:
        return next(site for name, site in _SITES.items() if self.tensors[name] is tensor)


_running: ContextVar[_Exchange] = ContextVar("flash_allreduce_exchange_of_stages")


def _batched(original: Function, config: CurrentConfig) -> Function:
    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        running = _running.get()
        return sends.batch_isend_irecv(operations, site=[running.site(one.tensor) for one in operations], **running.how)

    return _served(original, rebound(original, "torch.distributed.batch_isend_irecv", batch_isend_irecv), config)


def _overlapped(original: Function, config: CurrentConfig) -> Function:
    def isend(tensor: torch.Tensor, dst: int, group: dist.ProcessGroup) -> _Handle:
        running = _running.get()
        return _Handle(
            sends.isend(tensor, dst, group, site=running.site(tensor), drawn_as=running.stage, **running.how)
        )

    def irecv(tensor: torch.Tensor, src: int, group: dist.ProcessGroup) -> Work:
        running = _running.get()
        return sends.irecv(tensor, src, group, site=running.site(tensor), **running.how)

    body = rebound(rebound(original, "torch.distributed.isend", isend), "torch.distributed.irecv", irecv)
    served = _served(original, body, config)

    @functools.wraps(original)
    def _p2p_ops(*, group: dist.ProcessGroup, **given: Any) -> dict[str, Any]:
        handles: dict[str, Any] = served(group=group, **given)
        _wait_for_the_one_before(handles, group)
        return handles

    return _p2p_ops


def _served(original: Function, body: Function, config: CurrentConfig) -> Function:
    """`body` if anything may be quantized, else `original`."""

    @functools.wraps(original)
    def exchange(*, group: dist.ProcessGroup, **given: Any) -> Any:
        tensors = {name: given[name] for name in _SITES}
        current, scope = config(), scopes.current()
        disabled = environment.is_on(environment.DISABLE)
        reason = _plain(current, disabled)
        if reason is not None:
            _count(tensors, reason)
            with ours:
                return original(group=group, **given)
        evaluation = not torch.is_grad_enabled() and not current.quantize_evaluation
        full_precision = scope.full_precision or (scopes.EVALUATION if evaluation else None)
        how = {"config": current, "step": scope.step, "full_precision": full_precision}
        token = _running.set(_Exchange(tensors, how, group.rank()))
        try:
            return body(group=group, **given)
        finally:
            _running.reset(token)

    return exchange


def _plain(config: FlashConfig, disabled: bool) -> Callable[[Site], str] | None:
    """Why nothing at all is quantized, by site; None if something may be."""
    if disabled:
        return lambda _: environment.DISABLE
    if not config.enabled:
        return lambda _: policy.DISABLED
    return _REASONS.__getitem__ if config.pipeline_bits == config.pipeline_backward_bits == "full" else None


def _count(tensors: Mapping[str, torch.Tensor | None], reason: Callable[[Site], str]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            nbytes = tensor.numel() * tensor.element_size()
            site = _SITES[name]
            counters.record_full_precision(site, reason(site), nbytes if "send" in name else 0, message=nbytes)


class _Handle:
    """The handle of a send, which frees the tensor after it was received."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work

    def wait(self) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return True


# Of each group the last send in either direction.
_last: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Handle]] = WeakKeyDictionary()


def _wait_for_the_one_before(handles: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Megatron waits for a send once it has started the next one, but not for the last one of a step: its memory would
    stay with the group. In the next step it has long arrived.
    """
    last = _last.setdefault(group, {})
    for name in ("send_next", "send_prev"):
        if isinstance(handle := handles.get(name), _Handle):
            before, last[name] = last.get(name), handle
            if before is not None:
                before.wait()
