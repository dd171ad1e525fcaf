"""torch.optim.Muon after quantized gradients: the orthogonalization of each matrix, and trainings with DDP and FSDP2.

Orthogonalizing gives all singular directions of a matrix the same size: it enlarges the error of the small ones.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from tests.distributed import Ranks

WIDTH, HIDDEN, STEPS = 64, 96, 12
EIGHT = fap.FlashConfig(bits=8, min_bytes=0)


def orthogonalized(gradient: Tensor) -> Tensor:
    """Return the direction in which the first step of Muon moves a matrix."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -weight.detach()


def matrix(decay: float, size: int = 128) -> Tensor:
    """Return a matrix with k-th singular value k ** -decay."""
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator))[0] for _ in range(2))
    return (left * torch.arange(1, size + 1).float() ** -decay) @ right.T


def rounded(gradient: Tensor, config: fap.FlashConfig) -> Tensor:
    return fap.decode(fap.encode(gradient, config), gradient.shape, gradient.dtype, config)


def cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / one.norm() / other.norm())


@pytest.mark.parametrize(
    ("decay", "bits", "least", "most"),
    [(0.5, 8, 0.999, 1.0), (0.5, 4, 0.95, 0.99), (1.0, 8, 0.995, 1.0), (1.0, 4, 0.7, 0.9), (2.0, 8, 0.8, 0.98)],
)
def test_a_step_keeps_its_direction_where_singular_values_decay_slowly(
    decay: float, bits: int, least: float, most: float
) -> None:
    gradient = matrix(decay)
    assert cosine(rounded(gradient, fap.FlashConfig(bits=bits)), gradient) > 0.99
    seen = cosine(orthogonalized(rounded(gradient, fap.FlashConfig(bits=bits))), orthogonalized(gradient))
    assert least < seen <= most, seen


def test_error_feedback_and_momentum_give_the_direction_back() -> None:
    """Sum rounding errors that never cancel: the gradient is the same in every step."""
    config, gradient = fap.FlashConfig(preset="int4"), matrix(1.0)
    momentum, forgotten, residual = (torch.zeros_like(gradient) for _ in range(3))
    for _ in range(20):
        momentum.lerp_(rounded(gradient + residual, config), 0.05)
        forgotten.lerp_(rounded(gradient, config), 0.05)
        error = gradient + residual - rounded(gradient + residual, config)
        residual.lerp_(error, 1 - config.error_feedback_momentum)
    with_it, without = (cosine(orthogonalized(one), orthogonalized(gradient)) for one in (momentum, forgotten))
    assert with_it > 0.99 > 0.95 > without, (with_it, without)


def printed(train: Callable[..., dict[str, Any]], bits: int, optimizer: str) -> list[str]:
    """Return the lines of a training about its optimizer."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        train(fap.FlashConfig(bits=bits, min_bytes=0), optimizer)
    return [line for line in text.getvalue().splitlines() if "Muon" in line]


@pytest.mark.parametrize("train", ["by_ddp", "by_fsdp2"])
def test_one_line_where_gradients_have_fewer_than_8_bits(train: str) -> None:
    with Ranks(2) as ranks:
        for bits, optimizer in ((4, "SGD"), (8, "Muon")):
            assert ranks.run(printed, globals()[train], bits, optimizer) == [[], []]
        first, second = ranks.run(printed, globals()[train], 4, "Muon")
        assert ranks.run(printed, globals()[train], 4, "Muon") == [[], []], "the line comes once"
    [line] = first
    site = "ddp.gradients" if train == "by_ddp" else "fsdp.gradients"
    assert line.startswith(f"flash all-reduce: Muon steps on gradients of 4 bits ({site}), ")
    assert line.endswith("set bits to 8 (FLASH_ALLREDUCE_BITS=8, or the JSON)")
    assert second == []


def model() -> nn.Sequential:
    """Return a wide and a tall matrix: Muon on DTensors gathers the one and reduces products of the other."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias=False))


def steps(module: Any, optimizer_name: str) -> list[float]:
    """Train; return the losses of all ranks."""
    optimizer = getattr(torch.optim, optimizer_name)(module.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = (module(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def by_ddp(config: fap.FlashConfig | None, optimizer: str = "Muon") -> dict[str, Any]:
    """Train with DDP; config None: DDP's own reduction."""
    fap.reset_stats()
    fap.ddp.enable(config or fap.FlashConfig(enabled=False))
    ddp = DistributedDataParallel(model())
    losses = steps(ddp, optimizer)
    weights = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    found = {"losses": losses, "weights": weights, **fap.stats()}
    fap.ddp.disable()
    return found


def by_fsdp2(config: fap.FlashConfig | None, optimizer: str = "Muon") -> dict[str, Any]:
    """Train with FSDP2; config None: torch's own. DTensor's attached collectives must not quantize the optimizer's."""
    fap.reset_stats()
    fap.tensor_parallel.enable(EIGHT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded: Any = model()
    for module in (sharded[0], sharded[2], sharded):
        fully_shard(module, mesh=mesh)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no AVG
            if config is not None:
                module.set_custom_reduce_scatter(fap.FlashReduceScatter(config))
    losses = steps(sharded, optimizer)
    found = {"losses": losses, **fap.stats()}
    fap.tensor_parallel.disable()
    return {**found, "weights": torch.cat([p.full_tensor().detach().flatten() for p in sharded.parameters()])}


@pytest.mark.parametrize(("train", "site"), [(by_ddp, "ddp.gradients"), (by_fsdp2, "fsdp.gradients")])
def test_trains_as_without(train: Callable[..., dict[str, Any]], site: str) -> None:
    with Ranks(2) as ranks:
        plain, eight = ranks.run(train, None), ranks.run(train, EIGHT)
    for rank, seen in enumerate(eight):
        assert seen["losses"][-1] == pytest.approx(plain[rank]["losses"][-1], rel=0.01)
        assert seen["losses"][-1] < 0.8 * seen["losses"][0]
        assert torch.equal(seen["weights"], eight[0]["weights"]), "the replicas have drifted apart"
        assert not torch.equal(seen["weights"], plain[rank]["weights"])
        assert seen["sites"][site]["quantized"] == seen["sites"][site]["calls"] > 0
        others = {name: one for name, one in seen["sites"].items() if name != site}
        # The gathers and sums of FSDP2's optimizer: 5 iterations of 3 gathers or 2 sums, and a norm, for a matrix.
        assert [one["full_precision"] for one in others.values()] == (
            [{"no activation": STEPS * (16 + 11)}] if train is by_fsdp2 else []
        )
