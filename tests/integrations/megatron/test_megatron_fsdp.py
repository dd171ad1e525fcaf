"""The package megatron-fsdp without megatron-core: a training on two ranks with `fully_shard`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks

pytest.importorskip("megatron_fsdp", reason="the package megatron-fsdp is not installed")
pytest.importorskip("megatron.core")

from fsdp_training import NoCuda, without_cuda

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.telemetry import counters

EIGHT = fap.FlashConfig(grad_bits=8, param_bits=8, min_bytes=0)
STEPS = 6
KINDS = {1: "parameter_differences", 2: "parameter_differences", 3: "parameters"}


class Block(torch.nn.Module):
    """A unit that Megatron-FSDP gathers and frees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x))


def train(stage: int, config: fap.FlashConfig | None) -> tuple[list[float], dict[str, Any]]:
    from megatron_fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(Block() for _ in range(3)), torch.nn.Linear(64, 8))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    if config is not None:
        fap.megatron_fsdp.enable(config)
    counters.reset_stats()
    losses = []
    try:
        model, optimizer = fully_shard(
            model,
            optimizer,
            mesh,
            dp_shard_dim="dp",
            tp_dim="tp",
            fsdp_unit_modules=[Block],
            zero_dp_strategy=stage,
            device=torch.device("cpu"),
            calculate_per_token_loss=True,  # else gradients are multiplied in the collective, which gloo cannot
        )
        generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
        inputs = torch.randn(32, 64, generator=generator)
        for _ in range(STEPS):
            loss = (model(inputs) - inputs[:, :8]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, counters.stats()["sites"]
    finally:
        fap.megatron_fsdp.disable()


def observe() -> dict[Any, Any]:
    without_cuda()
    with NoCuda():
        return {(stage, on): train(stage, EIGHT if on else None) for stage in KINDS for on in (False, True)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(2, observe)


@pytest.mark.parametrize("stage", KINDS)
def test_each_stage_trains_as_in_full_precision(ranks: list[dict[Any, Any]], stage: int) -> None:
    for seen in ranks:
        losses, sites = seen[stage, True]
        assert losses == pytest.approx(seen[stage, False][0], rel=0.02) and losses[-1] < losses[0]
        assert set(sites) == {"megatron_fsdp.gradients", f"megatron_fsdp.{KINDS[stage]}"}
        assert all(site["quantized"] for site in sites.values())
        assert not seen[stage, False][1]
