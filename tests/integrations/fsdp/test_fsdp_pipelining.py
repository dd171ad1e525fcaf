"""Stages of torch.distributed.pipelining that FSDP2 shards: a stage reduces its gradients outside of autograd."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.telemetry import counters
from tests.distributed import run_ranks

STEPS, MICRO_BATCHES, WIDTH = 4, 4, 64
GRADIENTS = "fsdp.gradients"


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.inside, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.outside(torch.tanh(self.inside(x))))


def train(name: str, how: str, config: fap.FlashConfig) -> dict[str, Any]:
    """Train; how: "stock", "by hand" (one object of all modules) or "attached"."""
    from torch.distributed.pipelining import PipelineStage, schedules

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    rank = mesh["pipeline"].get_local_rank()
    numbers = [rank, 3 - rank] if name == "ZBVZeroBubble" else [rank]
    counters.reset_stats()
    if how == "attached":
        fap.fsdp.enable(config)
    ours = fap.FlashReduceScatter(config)
    blocks = [Block(number) for number in numbers]
    for block in blocks:
        for module in (block.inside, block):
            fully_shard(module, mesh=mesh["shard"])
            if how == "by hand":
                assert isinstance(module, FSDPModule)
                module.set_custom_reduce_scatter(ours)
    stages = [
        PipelineStage(block, number, 2 * len(numbers), torch.device("cpu"), group=mesh["pipeline"].get_group())
        for number, block in zip(numbers, blocks, strict=True)
    ]
    kind: Any = schedules.get_schedule_class(name)
    loss = nn.functional.mse_loss
    schedule = kind(stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD([one for block in blocks for one in block.parameters()], lr=0.05)
    last = numbers[-1] == 2 * len(numbers) - 1
    losses: list[float] = []
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for step in range(STEPS):
            x = torch.randn(MICRO_BATCHES * 2, WIDTH, generator=torch.Generator().manual_seed(step))
            found: list[torch.Tensor] = []
            optimizer.zero_grad()
            given = {"target": x.flip(1), "losses": found} if last else {}
            schedule.step(*((x,) if rank == 0 else ()), **given)
            optimizer.step()
            losses += [float(one.detach()) for one in found]
    if how == "attached":
        fap.fsdp.disable()
    return {
        "losses": losses,
        "counts": counters.stats()["sites"].get(GRADIENTS),
        "passes": 0 if ours.feedback is None else ours.feedback.step,
        "said": said.getvalue(),
    }


def every_way(name: str) -> dict[str, dict[str, Any]]:
    config = fap.FlashConfig(preset="int4", param_bits="full", min_bytes=0)
    small = train(name, "by hand", config.model_copy(update={"min_bytes": 1 << 20}))
    return {"small": small, **{how: train(name, how, config) for how in ("stock", "by hand", "attached")}}


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_stages_train_with_error_feedback_and_count_their_passes(name: str) -> None:
    ranks = run_ranks(4, every_way, name)
    for rank, seen in enumerate(ranks):
        assert ("fsdp.gradients has quantized none of its" in seen["small"]["said"]) == (rank == 0)
        assert seen["stock"]["counts"] is None
        assert seen["by hand"]["counts"]["quantized"] == seen["by hand"]["counts"]["calls"] > 0
        assert seen["attached"]["counts"] == seen["by hand"]["counts"]
        assert seen["by hand"]["passes"] == STEPS
        assert seen["by hand"]["losses"] == pytest.approx(seen["stock"]["losses"], rel=0.02)
        assert seen["attached"]["losses"] == seen["by hand"]["losses"]
    assert any(seen["stock"]["losses"] for seen in ranks)
