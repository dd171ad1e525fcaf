"""torch's DistributedDataParallel: gradient buckets reduced through a communication hook.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8)))

A bucket's reduction is started when the backward pass has filled it and finished when the next bucket is started,
so the first half of every reduction but the last travels behind the backward pass. DDP calls its hooks in the same
order on all ranks, and so are the collectives issued.
"""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants the types themselves.

from collections.abc import Mapping
from typing import Protocol, cast

import torch
import torch.distributed as dist

from flash_allreduce_plugin import beside, checkpoint, dispatch, run_log
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.feedback import Feedback, Slot, feedback_for
from flash_allreduce_plugin.notices import FirstSteps
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.work import Work

SITE = Site("ddp.gradients")

Future = torch.futures.Future[torch.Tensor]
REBUILT = "DDP rebuilt its buckets"


class Hook(Protocol):
    """A communication hook of DDP's.

    feedback: the residuals of `error_feedback`, with state_dict, load_state_dict and reset; None without it.
    """

    feedback: Feedback | None

    def __call__(self, state: dist.ProcessGroup | None, bucket: dist.GradBucket, /) -> Future: ...


def ddp_hook(config: FlashConfig | None = None) -> Hook:
    """A hook for `DistributedDataParallel.register_comm_hook(state, hook)`; one for each model.

    config: FlashConfig.from_env() if None; `bits`, `min_bytes` (of a bucket) and `warmup_steps` are those to think
    of, `include` and `exclude` do not apply. state is the model's process group, or None for the one of all ranks.
    The hook averages, as DDP does without one. Counters: site "ddp.gradients". With `error_feedback` the residuals are
    in its attribute `feedback`. fap.state_dict has them, and the steps: to be saved beside the model on every rank.
    """
    if config is not None and not isinstance(config, FlashConfig):
        raise TypeError(f"config is {type(config).__name__}; expected FlashConfig or None.")
    reduction = _Reduction(FlashConfig.from_env() if config is None else config)

    def flash_allreduce_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future:
        return reduction.start(state, bucket)

    steps = reduction.steps
    run_log.start(reduction.config, lambda: steps.finished)
    beside.attach(reduction)
    hook = cast(Hook, flash_allreduce_hook)
    hook.feedback = reduction.feedback
    checkpoint.register("ddp", reduction)
    return hook


class _Steps:
    """Backward passes; the log of a run reads them, when the reduction is maybe gone."""

    finished = 0


class _Reduction:
    """The buckets of one model: at most one is in flight between two hooks."""

    def __init__(self, config: FlashConfig) -> None:
        self.config = config
        self.steps = _Steps()
        self.first_steps = FirstSteps("ddp", attached_to="DistributedDataParallel")
        self.feedback = feedback_for(config)
        self.parameters: dict[int, list[int]] = {}  # of each bucket, as they were last time
        self.started: tuple[Work, torch.Tensor, Future] | None = None

    def start(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future:
        """bucket.buffer(), 1-D, holds the average when the future is done."""
        before, self.started = self.started, None  # nothing of a backward pass that failed stays for the next
        buffer, future = bucket.buffer(), Future()
        self.first_steps.at(self.steps.finished, self.config)
        work = dispatch.all_reduce(
            buffer,
            dist.ReduceOp.AVG,
            group,
            self.config,
            async_op=True,
            site=SITE,
            step=self.steps.finished,
            feedback=self.slot(bucket),
        )
        assert work is not None
        if before is not None:
            _finish(*before)
        if bucket.is_last():
            _finish(work, buffer, future)
            self.steps.finished += 1
        else:
            self.started = (work, buffer, future)
        return future

    def numbers(self) -> dict[str, float]:
        return {checkpoint.STEP: self.steps.finished}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        self.steps.finished = int(numbers.get(checkpoint.STEP, self.steps.finished))

    def slot(self, bucket: dist.GradBucket) -> Slot | None:
        if self.feedback is None:
            return None
        number, parameters = bucket.index(), bucket.parameters()
        if number == 0:
            self.feedback.begin()
        # After the first backward pass DDP forms its buckets anew, maybe as large as before, in another order.
        identities = [id(parameter) for parameter in parameters]
        if self.parameters.setdefault(number, identities) != identities:
            self.feedback.drop(number, REBUILT)
            self.parameters[number] = identities
        return self.feedback.slot(number, f"shapes {[tuple(parameter.shape) for parameter in parameters]}")


def _finish(work: Work, buffer: torch.Tensor, future: Future) -> None:
    work.wait()
    future.set_result(buffer)
