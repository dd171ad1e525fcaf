"""The line on rank 0 about optimizer steps without a reduction: it comes once, and not where training is healthy."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import flash_allreduce_plugin as fap
from tests.distributed import Ranks, run_ranks

CONFIG = fap.FlashConfig(preset="int4", min_bytes=0)
LINE = "3 steps of the optimizer in a row had no reduction of gradients"


class SometimesDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, deep: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return self.second(y) if deep else y


def steps(model: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def ddp() -> Any:
    model = DistributedDataParallel(SometimesDeep())
    model.register_comm_hook(None, fap.ddp_hook(CONFIG))
    return model


def fsdp1() -> Any:
    # torch's optimizer refuses the gradients that the other strategies leave inside of no_sync.
    how: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True}
    model = FullyShardedDataParallel(SometimesDeep(), device_id=torch.device("cpu"), **how)
    model.register_comm_hook(None, fap.fsdp1_hook(fap.FlashConfig(min_bytes=0)))
    return model


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.01)


def after_an_error(attached: bool) -> None:
    """Continue after pytorch#196996: torch refuses a parameter that only the last micro-batch uses."""
    if attached:
        fap.fsdp.enable(CONFIG)
    model: Any = SometimesDeep()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    if not attached:
        model.set_custom_reduce_scatter(fap.FlashReduceScatter(CONFIG))
    optimizer = sgd(model)
    steps(model, optimizer, 2)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 8), deep=False).sum().backward()
    model.set_requires_gradient_sync(True)
    with contextlib.suppress(AssertionError):
        model(torch.ones(2, 8)).sum().backward()
    steps(model, optimizer, 5)
    if attached:
        fap.fsdp.disable()


def left_on(build: Callable[[], Any]) -> None:
    """Train two healthy steps, then in no_sync forever."""
    model = build()
    optimizer = sgd(model)
    steps(model, optimizer, 2)
    with model.no_sync():
        steps(model, optimizer, 5)


def healthy() -> None:
    """Train with gradient accumulation, two optimizers of one model, a second model that trains alone, an inner model
    wrapped a second time, a frozen model.
    """
    model, other, wrapped = ddp(), nn.Linear(8, 8), ddp()
    first, second = sgd(model.module.first), sgd(model.module.second, other, wrapped)
    for _ in range(4):
        with model.no_sync():
            for _ in range(4):
                model(torch.ones(2, 8)).sum().backward()
        model(torch.ones(2, 8)).sum().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    both = sgd(wrapped)
    steps(wrapped, both, 2)
    steps(model, second, 5)  # not wrapped, which `second` holds too
    again = DistributedDataParallel(wrapped.module)
    again.register_comm_hook(None, fap.ddp_hook(CONFIG))
    steps(again, both, 5)
    again.requires_grad_(False)
    both.zero_grad()
    for _ in range(5):
        both.step()


def said(case: Callable[..., None], *arguments: Any) -> list[str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        case(*arguments)
    return [line for line in text.getvalue().splitlines() if "had no reduction" in line]


@pytest.mark.parametrize(
    ("case", "argument", "model"),
    [
        (after_an_error, False, "FSDP2"),
        (after_an_error, True, "FSDP2"),
        (left_on, ddp, "DistributedDataParallel"),
        (left_on, fsdp1, "FullyShardedDataParallel"),
    ],
)
def test_steps_without_a_reduction_are_named_once(
    ranks: Callable[[int], Ranks], case: Any, argument: Any, model: str
) -> None:
    first, second = ranks(2).run(said, case, argument)
    assert len(first) == 1 and first[0].startswith(f"flash all-reduce: {model}: {LINE}")
    assert second == []


def apex() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "integrations" / "apex_stub"))
    from apex.parallel import DistributedDataParallel as OfApex

    fap.apex.enable(CONFIG)
    model = OfApex(SometimesDeep())
    optimizer = sgd(model)
    steps(model, optimizer, 2)
    model.disable_allreduce()
    steps(model, optimizer, 5)


def test_apex_too() -> None:
    first, second = run_ranks(2, said, apex)
    assert len(first) == 1 and first[0].startswith(f"flash all-reduce: apex.parallel.DistributedDataParallel: {LINE}")
    assert second == []


def test_healthy_training_does_not_lead_to_the_line(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(said, healthy) == [[], []]


def after_the_model() -> int:
    """Return how many hooks are left: the model is gone, and a hook of the program's follows ours."""
    before = len(_global_optimizer_post_hooks)
    model = ddp()
    steps(model, sgd(model), 1)
    theirs = register_optimizer_step_post_hook(lambda *_: None)
    del model
    gc.collect()
    other = nn.Linear(8, 8)
    steps(other, sgd(other), 2)  # torch raises RuntimeError if a hook leaves before the last one
    theirs.remove()
    steps(other, sgd(other), 1)
    return len(_global_optimizer_post_hooks) - before


def test_the_hook_leaves_without_an_error() -> None:
    assert run_ranks(2, after_the_model) == [0, 0]
