"""torch's DistributedDataParallel: gradient buckets reduced through a communication hook.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8)))

The reduction of a bucket starts when the backward pass has filled it, and overlaps with the rest of the pass. The hook
of the last bucket waits for all of them. DDP calls its hooks in the same order on all ranks.

Tensor parallelism: parameters with copies on tensor-parallel ranks stay equal (replicated_params.py).
"""

# No `from __future__ import annotations` here: DDP requires the hook's annotations to be types.

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import Parameter

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.error_feedback import Feedback, Slot
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations import autosave, patching
from flash_allreduce_plugin.integrations.contract import serve
from flash_allreduce_plugin.integrations.ddp.owner import Owner, group_of, sharding_of
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.policy import SPARSE, Site, widths_follow_errors
from flash_allreduce_plugin.runtime import checkpoint
from flash_allreduce_plugin.telemetry import counters, other_traffic, run_log
from flash_allreduce_plugin.telemetry.notices import FirstSteps
from flash_allreduce_plugin.telemetry.unreduced import Reductions

SITE = Site("ddp.gradients")

Future = torch.futures.Future[torch.Tensor]
REBUILT = "DDP rebuilt its buckets"


def ddp_hook(config: FlashConfig | None = None, *, replicated: Iterable[Parameter] = ()) -> "Hook":
    """Return a hook for `DistributedDataParallel.register_comm_hook(state, hook)`; one for each model.

    config: FlashConfig.from_env() if None; set `preset` or `bits`, `min_bytes` (of a bucket) and `warmup_steps`.
    state: None, the process group to average over, or the model. With None the hook averages over the model's group,
    also inside of a wrapper (fp16_compress_wrapper, a function that logs): there the first step looks for the model
    once (ddp/owner.py).
    replicated: parameters of the model with copies on ranks outside of its process group that must stay equal (layer
    norms with tensor parallelism). Their gradients are reduced separately, small ones in full precision. DTensors are
    recognised (docs/use/torch.md).
    The hook averages, as DDP does without one. Counters: site "ddp.gradients". With `error_feedback` the residuals are
    in its attribute `feedback`. fap.state_dict has them, and the steps: save it next to the model on every rank.
    Raises TypeError if config is no FlashConfig, or `replicated` holds anything but parameters; ConfigError for
    `include`, `exclude` and the keys of Megatron. register_comm_hook, or inside of a wrapper the first step, raises
    ValueError if `replicated` has a parameter of another model, if two models have the hook, or if no model is found.
    """
    config = serve(config, BY_NAME["ddp"], "ddp_hook")
    told: list[Any] = [replicated] if isinstance(replicated, torch.Tensor) else list(replicated)
    for one in told:
        if not isinstance(one, Parameter):
            raise TypeError(f"replicated holds {type(one).__name__}; expected parameters of the model.")
    return started(Hook(config, told))


def started(hook: "Hook") -> "Hook":
    """Return `hook` after logging it, and after adding it to the counters and fap.state_dict."""
    steps = hook.reduction.steps
    run_log.start(hook.reduction.config, lambda: steps.finished)
    other_traffic.attach(hook.reduction)
    checkpoint.register("ddp", hook.reduction)
    return hook


class Hook:
    """A communication hook of DDP.

    feedback: the residuals of `error_feedback`, with state_dict, load_state_dict and reset; None without it.
    """

    def __init__(self, config: FlashConfig, replicated: list[Parameter], attached: str | None = None) -> None:
        self.__qualname__ = "flash_allreduce_hook"
        self.reduction = _Reduction(config, replicated, attached)
        self.feedback = self.reduction.feedback
        self._other: tuple[Any, Callable[..., Future]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or save the hook with its settings, without residuals. torch does not register it in the copy."""
        return Hook, (self.reduction.config, list(self.reduction.replicated))

    def give_way(self, state: Any, hook: Callable[..., Future]) -> None:
        """Call `hook` with `state` from now on: torch accepts one hook a model, which is this one."""
        self._other = (state, hook)

    @property
    def __name__(self) -> str:
        """The name. DDP reads it in register_comm_hook, where the model is a local variable."""
        asking = patching.locals_of("_check_comm_hook")
        if asking is not None:
            self.reduction.owner.registered_with(asking["self"])
        return self.__qualname__

    def __call__(self, state: Any, bucket: dist.GradBucket, *shard: torch.Tensor) -> Future:
        """Reduce a bucket; of torch's Python reducer, a gradient and its parameter. shard: from FSDP1 only."""
        if self._other is not None:
            own_state, other = self._other
            if not isinstance(bucket, tuple):  # Dynamo traces this
                self.reduction.reductions.noted()
            return other(own_state, bucket)
        if isinstance(bucket, tuple):
            return self.reduction.parameter(state, *bucket)
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                f"ddp_hook was called with a {type(bucket).__name__}; expected a bucket of DistributedDataParallel's. "
                "For FullyShardedDataParallel: register_comm_hook(None, fap.fsdp1_hook(config))."
            )
        return self.reduction.start(state, bucket)


class _Steps:
    """The count of backward passes. The log of a run reads it, maybe after the reduction's end."""

    finished = 0

    def passed(self) -> None:
        self.finished += 1


class _OptimizerSteps:
    """The count of the optimizer's steps, in place of _Steps."""

    @property
    def finished(self) -> int:
        return optimizer_steps.finished

    @finished.setter
    def finished(self, count: int) -> None:
        optimizer_steps.finished = count

    def passed(self) -> None:
        pass


class _Reduction:
    """The buckets of one model."""

    def __init__(self, config: FlashConfig, replicated: Sequence[Parameter] = (), attached: str | None = None) -> None:
        """attached: the name of an attached model, in words; None for a hook that was registered by hand."""
        self.config = config
        self.owner = Owner(replicated)
        self.active: _Active | None = None
        self.replicated = replicated
        self.attached = attached is not None
        self.steps: _Steps | _OptimizerSteps = _Steps() if attached is None else _OptimizerSteps()
        self.reductions = Reductions(attached or "DistributedDataParallel", self.owner.with_gradients)
        self.first_steps = FirstSteps(config, attached_to=attached or "DistributedDataParallel")
        self.feedback = Feedback.from_config(config) if config.error_feedback else None
        self.parameters: dict[int, list[int]] = {}  # of each bucket, at its last reduction
        self.started: list[tuple[Any, torch.Tensor, Future]] = []

    def start(self, state: Any, bucket: dist.GradBucket) -> Future:
        """Start the reduction. bucket.buffer(), 1-D, holds the average when the future is done."""
        parameters = bucket.parameters()
        model = self.owner.of(state, parameters)
        group = model.process_group if (given := group_of(state)) is None else given
        exact = self.exact(bucket, parameters)
        if bucket.index() == 0:
            if self.attached:
                autosave.before_reduction()
            self.started.clear()  # drop the reductions of a failed backward pass
            uneven = model._join_config.enable and not model._divide_by_initial_world_size
            self.active = _Active(group, bucket.buffer().device) if uneven else None
        buffer, future = bucket.buffer(), Future()
        self.first_steps.at(self.steps.finished)
        site = self.first_steps.of(SITE)
        self.reductions.noted()

        def theirs() -> Any:  # as DDP's reducer without a hook, which divides before it sums
            buffer.mul_(1 / dist.get_world_size(group))
            return dist.all_reduce(buffer, group=group, async_op=True)

        if buffer.is_sparse:
            work = _sparse(buffer, group, site)
        else:
            work = reductions.all_reduce(
                buffer,
                dist.ReduceOp.AVG,
                group,
                self.config,
                async_op=True,
                site=site,
                step=self.steps.finished,
                feedback=self.slot(bucket.index(), parameters),
                exact=exact,
                plain=theirs,
            )
        self.started.append((work, buffer, future))
        if bucket.is_last():
            started, self.started = self.started, []
            factor = None if self.active is None else self.active.factor()
            for each in started:
                _finish(*each, factor)
            self.steps.passed()
        return future

    def exact(self, bucket: dist.GradBucket, parameters: Sequence[torch.Tensor]) -> replicated_params.Copied:
        """Return the gradients in the bucket of parameters with copies on other ranks."""
        told = set(map(id, self.replicated))
        found = replicated_params.among(
            [sharding_of(parameter) for parameter in parameters], widths_follow_errors(self.config), self.owner.split
        )
        either = [one or id(parameter) in told for one, parameter in zip(found, parameters, strict=True)]
        if not any(either) or bucket.buffer().is_sparse:
            return []
        pairs = zip(parameters, bucket.gradients(), strict=True)
        return replicated_params.of((pair for pair, one in zip(pairs, either, strict=True) if one), bucket.buffer())

    def parameter(self, state: Any, gradient: torch.Tensor, parameter: torch.Tensor) -> Future:
        """Average one gradient in place, for torch's Python reducer (torch._dynamo.config.optimize_ddp).

        It compiles the backward pass, takes no future, and has no buckets and passes. A gradient that is reduced alone,
        at a fixed width, is equal on ranks with copies of its parameter.
        """
        if self.config.warmup_steps or self.config.error_feedback:
            raise ValueError(
                "warmup_steps and error_feedback need DDP's buckets, and its Python reducer has none; leave them out, "
                "or set torch._dynamo.config.optimize_ddp to True."
            )
        model = self.owner.in_graph(state, parameter)
        if widths_follow_errors(self.config) and (self.replicated or self.owner.has_dtensors):
            raise ConfigError(replicated_params.ADAPTIVE)
        group = model.process_group if (given := group_of(state)) is None else given
        reductions.all_reduce(gradient, dist.ReduceOp.AVG, group, self.config, site=SITE)
        return cast(Future, None)

    def numbers(self) -> dict[str, float]:
        return {checkpoint.STEP: self.steps.finished}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        self.steps.finished = int(numbers.get(checkpoint.STEP, self.steps.finished))

    def slot(self, number: int, parameters: Sequence[torch.Tensor]) -> Slot | None:
        """Return the slot of the residual of one bucket."""
        if self.feedback is None:
            return None
        if number == 0:
            self.feedback.begin()
        # After the first backward pass DDP rebuilds its buckets, maybe of the same sizes, in another order.
        identities = [id(parameter) for parameter in parameters]
        if self.parameters.setdefault(number, identities) != identities:
            self.feedback.drop(number, REBUILT)
            self.parameters[number] = identities
        return self.feedback.slot(number, f"shapes {[tuple(parameter.shape) for parameter in parameters]}")


class _Active:
    """The number of ranks that still have data, in a pass in which the others send zeros (join)."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        joined = patching.locals_of("_match_all_reduce_for_bwd_pass") is not None
        self._count = torch.full((), float(not joined), device=device)
        self._world_size = dist.get_world_size(group)
        self._work = dist.all_reduce(self._count, group=group, async_op=True)

    def factor(self) -> torch.Tensor:
        """Return the factor from the average over all ranks to the average over ranks with data."""
        self._work.wait()
        return self._world_size / self._count


def _finish(work: Any, buffer: torch.Tensor, future: Future, factor: torch.Tensor | None) -> None:
    work.wait()
    if factor is not None:
        buffer *= factor
    future.set_result(buffer)


def _sparse(gradient: torch.Tensor, group: dist.ProcessGroup | None, site: Site) -> Any:
    """Average a sparse gradient, alone in its bucket, as DDP does without a hook, and count it."""
    world = dist.get_world_size(group)
    gradient.div_(world)
    rows = gradient._indices().nbytes + gradient._values().nbytes  # not coalesced
    counters.record_full_precision(site, SPARSE, rows * (world - 1), message=0)
    return dist.all_reduce(gradient, group=group, async_op=True)
