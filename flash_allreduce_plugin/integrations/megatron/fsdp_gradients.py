"""Gradients of Megatron-FSDP (fsdp.py): the reductions of its buckets.

Megatron-FSDP adds a reduced shard to the gradients of earlier micro-batches as soon as the coalescing manager has
ended. So each reduction is complete, or on a GPU enqueued on Megatron-FSDP's own stream, when the call returns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.error_feedback import Slot
from flash_allreduce_plugin.collectives.replicated_params import Copied, Copy
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import by_hand
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.megatron import fsdp, refusals
from flash_allreduce_plugin.integrations.megatron.data_parallel import each_at_once
from flash_allreduce_plugin.integrations.megatron.fsdp import Host
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry.other_traffic import counted_at
from flash_allreduce_plugin.telemetry.unreduced import Reductions

_REDUCE_SCATTER, _ALL_REDUCE = "torch.distributed.reduce_scatter_tensor", "torch.distributed.all_reduce"

reduced = Reductions("Megatron-FSDP")
# ParamAndGradBuffers with gradients that were reduced since their last step: fsdp_parameters.py tells a step by them.
stepping: WeakSet[Any] = WeakSet()


def seams(host: Host) -> list[Seam]:
    """Return the seam of the reductions."""
    return [
        Seam(
            host.gradients.name,
            host.module,
            "GradReducePipeline._bucket_group_gradient_reduce",
            ("self", "bucket_group", "async_op", "outer_fsdp_group_grad_reduce"),
            lambda original: _pipelined(original, host),
            "reduce-scatter or all-reduce of Megatron-FSDP's gradient buckets, during the backward pass",
        )
    ]


def helpers(host: Host) -> list[Seam]:
    """Return the seams of the same reductions where they do not overlap with the backward pass."""

    def seam(attribute: str, path: str) -> Seam:
        return Seam(
            f"{host.name}.{attribute}",
            host.module,
            f"ParamAndGradBuffer.{attribute}",
            ("self", "async_op"),
            lambda original: _after_backward(original, path, host),
            "the same reductions after the backward pass",
        )

    return [seam("reduce_scatter_gradients", _REDUCE_SCATTER), seam("all_reduce_gradients", _ALL_REDUCE)]


class _Reduction(NamedTuple):
    """One reduction to come. outer: it is between the instances of HSDP."""

    buffers: Any  # the ParamAndGradBuffer
    group: Any  # the ParameterGroup
    gradients: Any  # the DataParallelBuffer
    outer: bool
    slot: Slot | None

    def exact(self) -> Copied:
        """Return the gradients of copies in the input. Tensor-parallel ranks have the same layout of buckets."""
        found = fsdp.copies(self.buffers.dist_index, self.group, self.gradients, fsdp.has_copied_gradient)
        if self.outer:
            return fsdp.clipped((place for place, _ in found), fsdp.window(self.gradients))
        return [Copy(replicated_params.number_of(one), (place,), cut_alike=True) for place, one in found]


# The reductions of the running method, in the order of its calls.
_coming: ContextVar[Iterator[_Reduction]] = ContextVar("flash_allreduce_fsdp_reductions")


def _off(config: FlashConfig) -> bool:
    return not config.enabled or environment.is_on(environment.DISABLE) or config.grad_bits == "full"


def _pipelined(original: Function, host: Host) -> Function:
    """`original` with its manager and its collectives replaced."""
    body = rebound(original, "_coalescing_manager", each_at_once)
    body = rebound(body, _REDUCE_SCATTER, _reduce_scatter(host))
    body = rebound(body, _ALL_REDUCE, _all_reduce(host))

    @functools.wraps(original)
    def _bucket_group_gradient_reduce(self: Any, bucket_group: list[int], *args: Any, **kwargs: Any) -> Any:
        every = [(self.buffer.parameter_groups[one], self.get_fsdp_buffer(one)) for one in bucket_group]
        return _run(host, self.buffer, every, original, body, (self, bucket_group, *args), kwargs)

    return _bucket_group_gradient_reduce


def _after_backward(original: Function, path: str, host: Host) -> Function:
    body = rebound(original, path, (_reduce_scatter if path == _REDUCE_SCATTER else _all_reduce)(host))

    @functools.wraps(original)
    def reduce_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        every = [(one, one.main_grad_buffer) for one in self.parameter_groups if one.main_grad_buffer is not None]
        return _run(host, self, every, original, body, (self, *args), kwargs)

    return reduce_gradients


def _run(
    host: Host,
    buffers: Any,
    every: list[tuple[Any, Any]],
    original: Function,
    body: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `body`, which reduces every (ParameterGroup, DataParallelBuffer) once, or once and between instances."""
    config = host.config()
    if buffers.ddp_config.data_parallel_sharding_strategy == "no_shard" and by_hand(config, "param_bits"):
        raise ConfigError(f"param_bits {refusals.NO_GATHER}")
    stepping.add(buffers)
    if every:  # the ranks compare configurations before one of them reduces in full precision
        group, device = every[0][1].data_parallel_group, every[0][1].data.device
        label = Label("reduce_scatter", host.gradients.name, group)
        groups.agree(label, config, environment.is_on(environment.DISABLE), device)
    reduced.noted()
    host.reduces()
    if _off(config):
        with counted_at(host.gradients, config):
            return original(*args, **kwargs)
    slots = [host.residuals.slots(gradients) for _, gradients in every]
    coming = (
        _Reduction(buffers, group, gradients, outer, None if slot is None else next(slot))
        for outer in (False, True)
        for (group, gradients), slot in zip(every, slots, strict=True)
    )
    token = _coming.set(coming)
    try:
        return body(*args, **kwargs)
    finally:
        _coming.reset(token)


def _how(one: _Reduction, host: Host) -> dict[str, Any]:
    return {
        "site": host.gradients,
        "step": host.step(),
        "feedback": one.slot,
        "exact": one.exact(),
        "full_precision": host.full_precision(),
    }


def _reduce_scatter(host: Host) -> Function:
    def reduce_scatter_tensor(
        output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        one = next(_coming.get())
        if not one.outer:  # between instances the padding is a sum of these zeros
            fsdp.clear_padding(one.gradients, input, (0, len(input)))
        theirs = partial(dist.reduce_scatter_tensor, output, input, op=op, group=group, async_op=async_op)
        return reductions.reduce_scatter(
            output, input, op, group, host.config(), async_op, plain=theirs, **_how(one, host)
        )

    return reduce_scatter_tensor


def _all_reduce(host: Host) -> Function:
    def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        one = next(_coming.get())
        if not one.outer:
            fsdp.clear_padding(one.gradients, tensor, (0, len(tensor)))
        theirs = partial(dist.all_reduce, tensor, op=op, group=group, async_op=async_op)
        return reductions.all_reduce(tensor, op, group, host.config(), async_op, plain=theirs, **_how(one, host))

    return all_reduce
