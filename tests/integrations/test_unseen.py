"""The line of FLASH_ALLREDUCE_ATTACH where optimizers step and the plugin has seen no call."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations import unseen
from tests.attached import loss_of, program, said
from tests.distributed import run_ranks

NOT_REDUCED = "no gradient was reduced by a model that it serves"
Parts = tuple[Callable[[torch.Tensor], torch.Tensor], Iterable[torch.Tensor]]


def plain() -> Parts:
    """Return a model that nothing wraps: its forward pass, and its parameters."""
    model = nn.Linear(8, 8)
    return model, model.parameters()


def by_ddp() -> Parts:
    model = DistributedDataParallel(nn.Linear(8, 8))
    return model, model.parameters()


def inside() -> Parts:
    """Return a model of DDP, called without its wrapper."""
    model = DistributedDataParallel(nn.Linear(8, 8))
    return model.module, model.parameters()


def with_hook_of_its_own() -> Parts:
    """Return a model of DDP that has a line of its own, and is not served."""
    model = DistributedDataParallel(nn.Linear(8, 8))
    model.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    return model.module, model.parameters()


def adapter() -> Parts:
    """Return a frozen model of FSDP2 with an adapter that was added later: a plain parameter, as with LoRA."""
    model: Any = nn.Linear(8, 8).requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    added = nn.Linear(8, 8)
    return lambda x: model(x) + added(x), added.parameters()


def lines(build: Callable[[], Parts], steps: int) -> tuple[list[str], str | None]:
    """Return the printed lines and the line of the end."""
    os.environ["FLASH_ALLREDUCE_ATTACH"] = "all"
    fap.ddp.enable(fap.FlashConfig(min_bytes=0))
    fap.fsdp.enable(fap.FlashConfig(min_bytes=0))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        unseen.expect()
        forward, parameters = build()
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        for _ in range(steps):
            forward(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return text.getvalue().splitlines(), unseen.line()


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (plain, "FLASH_ALLREDUCE_ATTACH=all, and this program has built no such model on rank 0 in 3 steps of its"),
        (inside, f"FLASH_ALLREDUCE_ATTACH=all, and in 3 steps of its optimizer {NOT_REDUCED}"),
        (adapter, f"FLASH_ALLREDUCE_ATTACH=all, and in 3 steps of its optimizer {NOT_REDUCED}"),
        (by_ddp, "attached to DistributedDataParallel"),
        (with_hook_of_its_own, "DistributedDataParallel (Linear): the program's own hook"),
    ],
)
def test_the_third_step_has_one_line(build: Callable[[], Parts], expected: str) -> None:
    (first, at_the_end), (second, _) = run_ranks(2, lines, build, 5)
    assert len(first) == 1 and first[0].startswith(f"flash all-reduce: {expected}"), first
    assert second == [] and at_the_end is None


@pytest.mark.parametrize(("steps", "expected"), [(0, False), (1, True)])
def test_fewer_steps_have_it_at_the_end(steps: int, expected: bool) -> None:
    for printed, at_the_end in run_ranks(2, lines, inside, steps):
        assert printed == []
        assert (at_the_end is not None) == expected
        assert not expected or f"in 1 step of its optimizer {NOT_REDUCED}" in str(at_the_end)


def test_a_program_with_adapters_that_no_rank_reduces(tmp_path: Path) -> None:
    done = program(tmp_path, "adapter", FLASH_ALLREDUCE_ATTACH="all", FLASH_ALLREDUCE_MIN_BYTES="0")
    assert loss_of(done)
    [line] = said(done)
    assert line.startswith("flash all-reduce: FLASH_ALLREDUCE_ATTACH=all, and in 3 steps of its optimizer no gradient")
