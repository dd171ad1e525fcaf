"""Data-parallel gradients of megatron-core: the all-reduce, or with the distributed optimizer the reduce-scatter,
of the gradient buckets of its DistributedDataParallel.

One method issues both, inside a coalescing manager of torch.distributed. That manager delays collectives and merges
them, and cannot do so with ours. Our manager replaces it: it starts every bucket's collective immediately, and waits
for all of them where Megatron waits. If nothing is quantized, the method runs with torch.distributed's own manager and
Megatron's own functions.

Other methods gather parameters (parameters.py) and broadcast them, which is unchanged.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.error_feedback import Feedback, Slot
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.megatron import refusals, replicated, scopes
from flash_allreduce_plugin.integrations.megatron.scopes import CurrentConfig
from flash_allreduce_plugin.integrations.patching import Function, Seam, rebound
from flash_allreduce_plugin.policy import Role, Site
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.runtime.stages import Plain
from flash_allreduce_plugin.telemetry.other_traffic import ours
from flash_allreduce_plugin.telemetry.unreduced import Reductions

BUFFERS = "megatron.core.distributed.param_and_grad_buffer"

GRADIENTS = Site("megatron.data_parallel.gradients", Role.GRADIENT)


def seams(config: CurrentConfig) -> list[Seam]:
    """The seams of this file; `config` is asked at every call."""
    return [
        Seam(
            GRADIENTS.name,
            BUFFERS,
            "_ParamAndGradBucketGroup.start_grad_sync",
            (("self",), ("self", "force_all_reduce")),  # without the flag up to 0.15
            lambda original: _start_grad_sync(original, config),
            "all-reduce or reduce-scatter of the data-parallel gradient buckets, after or during the backward pass",
        ),
    ]


def _start_grad_sync(original: Function, config: CurrentConfig) -> Function:
    """`original` with its manager and its two collectives replaced."""
    body = rebound(original, "_coalescing_manager", _manager(original, config))
    body = rebound(body, "dist_reduce_scatter_func", _reduce_scatter(config))
    body = rebound(body, "torch.distributed.all_reduce", _all_reduce(config))

    @functools.wraps(original)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        # The ranks compare configurations before they part ways: one that keeps its gradients in full precision
        # never reaches api/reductions.py.
        sharded = self.ddp_config.use_distributed_optimizer
        if not sharded and refusals.by_hand(config(), "param_bits"):
            source = scopes.source()
            source.refuse(ConfigError(f"{source.spelled('param_bits')} {refusals.GATHERS_NOTHING}"))
        group = self.intra_distributed_optimizer_instance_group if sharded else self.data_parallel_group
        label = Label("reduce_scatter" if sharded else "all_reduce", GRADIENTS.name, group)
        groups.agree(label, config(), environment.is_on(environment.DISABLE), self.buckets[0].grad_data.device)
        reduced.noted()
        token, reducing = _slots.set(residuals.slots(self)), _reducing.set(self)
        try:
            body(self, *args, **kwargs)
        finally:
            _slots.reset(token)
            _reducing.reset(reducing)

    return start_grad_sync


class Handle:
    """The handle for Megatron's wait: the collectives of all buckets of one call, in the order of their start."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def wait(self) -> None:
        for handle in self.started:
            handle.wait()


class Residuals:
    """Keeps the residuals of all gradients of this process. step: counts finished training steps."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self.feedback: Feedback | None = None
        # Bucket groups, numbered in the order in which they are first reduced, and those of the current pass.
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._started: set[int] = set()

    def configure(self, config: FlashConfig | None) -> None:
        """Set the configuration. None, or one without error_feedback, drops all residuals."""
        if config is None or not config.error_feedback:
            self.feedback = None
        elif self.feedback is None:
            self.feedback = Feedback.from_config(config)

    def slots(self, bucket_group: Any) -> Iterator[Slot] | None:
        """Return the slots of one bucket group's collectives, in order."""
        if self.feedback is None:
            return None
        number = self._numbers.get(bucket_group)
        if number is None:
            number = self._numbers[bucket_group] = max(self._numbers.values(), default=-1) + 1
            weakref.finalize(bucket_group, self._forget, number)
        if number in self._started or not self._started:
            self.feedback.begin(self._step())
            self._started.clear()
        self._started.add(number)
        feedback = self.feedback
        return (feedback.slot(f"{number}.{place}") for place in itertools.count())

    def _forget(self, number: int) -> None:
        """Drop the residuals of a deleted bucket group."""
        self._started.discard(number)
        if self.feedback is not None:
            for key in self.feedback.keys():  # noqa: SIM118
                if key.startswith(f"{number}."):
                    self.feedback.drop(key)


residuals = Residuals(scopes.step)
# Its optimizers step on copies and views of parameters: any optimizer counts.
reduced = Reductions("Megatron's DistributedDataParallel")
# For the collectives of the bucket group that is being started.
_slots: ContextVar[Iterator[Slot] | None] = ContextVar("flash_allreduce_slots_of_buckets", default=None)


# The bucket group that is being started.
_reducing: ContextVar[Any] = ContextVar("flash_allreduce_reducing_buckets", default=None)

# The handle of the call that starts its buckets now, None under torch.distributed's own manager.
_starting: ContextVar[Handle | None] = ContextVar("flash_allreduce_starting_buckets", default=None)


@contextmanager
def each_at_once(group: dist.ProcessGroup, async_ops: bool = False) -> Iterator[Handle]:
    """In the place of `torch.distributed._coalescing_manager`: its handle waits for all that is `started` inside."""
    handle = Handle()
    token = _starting.set(handle)
    try:
        yield handle
    finally:
        _starting.reset(token)


def _manager(original: Function, config: CurrentConfig) -> Function:
    """Replace `torch.distributed._coalescing_manager`."""

    @contextmanager
    def theirs(group: dist.ProcessGroup, async_ops: bool) -> Iterator[Any]:
        with ours, original.__globals__["_coalescing_manager"](group, async_ops=async_ops) as handle:
            yield handle

    def manager(group: dist.ProcessGroup, async_ops: bool = False) -> AbstractContextManager[Any]:
        off = environment.is_on(environment.DISABLE) or not config().enabled or config().grad_bits == "full"
        if off or group.size() == 1:
            return theirs(group, async_ops)
        return each_at_once(group, async_ops)

    return manager


def _reduce_scatter(config: CurrentConfig) -> Function:
    """Replace the reduce-scatter of one bucket: `output` is this rank's part of `input`, in place."""

    def reduce_scatter(
        output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        # Looked up now: with reduce_scatter_with_fp32_accumulation a constructor of Megatron's replaces this global.
        from megatron.core.distributed import param_and_grad_buffer

        theirs = partial(param_and_grad_buffer.dist_reduce_scatter_func, output, input, op=op, group=group)
        how = _how(input, partial(theirs, async_op=async_op))
        return started(reductions.reduce_scatter(output, input, op, group, config(), async_op, **how))

    return reduce_scatter


def _all_reduce(config: CurrentConfig) -> Function:
    """Replace the all-reduce of one bucket."""

    def all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool) -> Any:
        how = _how(tensor, partial(dist.all_reduce, tensor, op=op, group=group, async_op=async_op))
        return started(reductions.all_reduce(tensor, op, group, config(), async_op, **how))

    return all_reduce


def _how(bucket: torch.Tensor, theirs: Plain) -> dict[str, Any]:
    """Return the arguments of the collective of one bucket. theirs: Megatron's own."""
    scope = scopes.current()
    return {
        "site": GRADIENTS,
        "step": scope.step,
        "feedback": _slot(),
        "exact": _copies(bucket),
        "plain": theirs,
        "full_precision": scope.full_precision,
    }


def _copies(bucket: torch.Tensor) -> replicated_params.Copied:
    """The gradients of copies in a bucket, or in a shard of one, which tensor-parallel ranks cut elsewhere."""
    reducing = _reducing.get()
    if reducing is None:
        return ()
    found = replicated.ranges(reducing, bucket)
    place = bucket.data_ptr(), bucket.numel()
    is_whole = any((one.grad_data.data_ptr(), one.grad_data.numel()) == place for one in reducing.buckets)
    return found if is_whole else replicated_params.ranges_of(found)


def _slot() -> Slot | None:
    slots = _slots.get()
    return None if slots is None else next(slots)


def started(handle: Any) -> Any:
    """Note a bucket's handle (None if it was not asynchronous) for the call's own."""
    starting = _starting.get()
    if starting is not None and handle is not None:
        starting.started.append(handle)
    return handle
