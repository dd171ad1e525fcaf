"""torch's DistributedDataParallel: gradient buckets reduced through a communication hook.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8)))

A bucket's reduction is started when the backward pass has filled it, and travels behind the rest of the pass; the hook
of the last bucket waits for all of them. DDP calls its hooks in the same order on all ranks.

Tensor parallelism: parameters that the tensor-parallel ranks have copies of stay the same (replicated_params.py).
"""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants the types themselves.

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
    """A hook for `DistributedDataParallel.register_comm_hook(state, hook)`; one for each model.

    config: FlashConfig.from_env() if None; think of `preset` or `bits`, `min_bytes` (of a bucket) and
    `warmup_steps`. state: None, the process group to average over, or the model. With None the hook averages over the
    model's group, inside of a wrapper (fp16_compress_wrapper, a function that logs) too: there the first step looks
    for the model once (ddp/owner.py).
    replicated: parameters of the model that other ranks, outside of its process group, have copies of which have to
    stay the same (layer norms beside tensor parallelism): their gradients are reduced apart from the others, in full
    precision where they are small. DTensors are recognised (docs/use/torch.md).
    The hook averages, as DDP does without one. Counters: site "ddp.gradients". With `error_feedback` the residuals are
    in its attribute `feedback`. fap.state_dict has them, and the steps: to be saved beside the model on every rank.
    Raises TypeError where config is no FlashConfig, or `replicated` holds anything but parameters; ConfigError for
    `include`, `exclude` and the keys of Megatron's. register_comm_hook, or inside of a wrapper the first step, raises
    ValueError if `replicated` has a parameter of another model, if the hook serves two models, or if it finds no model.
    """
    config = serve(config, BY_NAME["ddp"], "ddp_hook")
    told: list[Any] = [replicated] if isinstance(replicated, torch.Tensor) else list(replicated)
    for one in told:
        if not isinstance(one, Parameter):
            raise TypeError(f"replicated holds {type(one).__name__}; expected parameters of the model.")
    return started(Hook(config, told))


def started(hook: "Hook") -> "Hook":
    """`hook`, logged, counted and seen by fap.state_dict."""
    steps = hook.reduction.steps
    run_log.start(hook.reduction.config, lambda: steps.finished)
    other_traffic.attach(hook.reduction)
    checkpoint.register("ddp", hook.reduction)
    return hook


class Hook:
    """A communication hook of DDP's.

    feedback: the residuals of `error_feedback`, with state_dict, load_state_dict and reset; None without it.
    """

    def __init__(self, config: FlashConfig, replicated: list[Parameter], attached: str | None = None) -> None:
        self.__qualname__ = "flash_allreduce_hook"
        self.reduction = _Reduction(config, replicated, attached)
        self.feedback = self.reduction.feedback
        self._other: tuple[Any, Callable[..., Future]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Of a copied or saved model: with the same settings and no residuals; torch does not register it there."""
        return Hook, (self.reduction.config, list(self.reduction.replicated))

    def give_way(self, state: Any, hook: Callable[..., Future]) -> None:
        """Be `hook`, called with `state`, from now on: torch takes one hook of a model, and this is it."""
        self._other = (state, hook)

    @property
    def __name__(self) -> str:
        """The name, which DDP asks for in register_comm_hook: there the model is a local variable."""
        asking = patching.locals_of("_check_comm_hook")
        if asking is not None:
            self.reduction.owner.registered_with(asking["self"])
        return self.__qualname__

    def __call__(self, state: Any, bucket: dist.GradBucket, *shard: torch.Tensor) -> Future:
        """bucket: of torch's Python reducer a gradient and its parameter. shard: what only FSDP1 gives its hooks."""
        if self._other is not None:
            own_state, other = self._other
            if not isinstance(bucket, tuple):  # which Dynamo traces
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
    """Backward passes; the log of a run reads them, when the reduction is maybe gone."""

    finished = 0

    def passed(self) -> None:
        self.finished += 1


class _OptimizerSteps:
    """As _Steps, where those of the optimizer are counted."""

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
        """attached: what fap.ddp.enable serves, in words; None for a hook that was registered by hand."""
        self.config = config
        self.owner = Owner(replicated)
        self.active: _Active | None = None
        self.replicated = replicated
        self.attached = attached is not None
        self.steps: _Steps | _OptimizerSteps = _Steps() if attached is None else _OptimizerSteps()
        self.reductions = Reductions(attached or "DistributedDataParallel", self.owner.with_gradients)
        self.first_steps = FirstSteps(config, attached_to=attached or "DistributedDataParallel")
        self.feedback = Feedback.from_config(config) if config.error_feedback else None
        self.parameters: dict[int, list[int]] = {}  # of each bucket, as they were last time
        self.started: list[tuple[Any, torch.Tensor, Future]] = []

    def start(self, state: Any, bucket: dist.GradBucket) -> Future:
        """bucket.buffer(), 1-D, holds the average when the future is done."""
        parameters = bucket.parameters()
        model = self.owner.of(state, parameters)
        group = model.process_group if (given := group_of(state)) is None else given
        exact = self.exact(bucket, parameters)
        if bucket.index() == 0:
            if self.attached:
                autosave.before_reduction()
            self.started.clear()  # nothing of a backward pass that failed stays for the next
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
        """Return the gradients of the bucket of whose parameters other ranks have copies."""
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
        """Of torch's Python reducer (torch._dynamo.config.optimize_ddp), which compiles the backward pass: one gradient
        at a time, averaged in place; it takes no future, and knows no buckets and no passes. A gradient that is
        reduced alone, at a fixed width, is the same on ranks that have copies of its parameter.
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
        """Return the place of the residual of one bucket."""
        if self.feedback is None:
            return None
        if number == 0:
            self.feedback.begin()
        # After the first backward pass DDP forms its buckets anew, maybe as large as before, in another order.
        identities = [id(parameter) for parameter in parameters]
        if self.parameters.setdefault(number, identities) != identities:
            self.feedback.drop(number, REBUILT)
            self.parameters[number] = identities
        return self.feedback.slot(number, f"shapes {[tuple(parameter.shape) for parameter in parameters]}")


class _Active:
    """How many ranks still have data, in a pass that the others only shadow with zeros; counted beside the buckets."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        joined = patching.locals_of("_match_all_reduce_for_bwd_pass") is not None
        self._count = torch.full((), float(not joined), device=device)
        self._world_size = dist.get_world_size(group)
        self._work = dist.all_reduce(self._count, group=group, async_op=True)

    def factor(self) -> torch.Tensor:
        """From the average over all ranks to that over those with data."""
        self._work.wait()
        return self._world_size / self._count


def _finish(work: Any, buffer: torch.Tensor, future: Future, factor: torch.Tensor | None) -> None:
    work.wait()
    if factor is not None:
        buffer *= factor
    future.set_result(buffer)


def _sparse(gradient: torch.Tensor, group: dist.ProcessGroup | None, site: Site) -> Any:
    """A sparse gradient, alone in its bucket, is averaged as DDP does without a hook, and counted."""
    world = dist.get_world_size(group)
    gradient.div_(world)
    rows = gradient._indices().nbytes + gradient._values().nbytes  # not coalesced
    counters.record_full_precision(site, SPARSE, rows * (world - 1), message=0)
    return dist.all_reduce(gradient, group=group, async_op=True)
