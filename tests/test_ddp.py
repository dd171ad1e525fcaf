"""The communication hook in real DistributedDataParallel training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from tests.distributed import Ranks

WIDTH, STEPS = 96, 12
PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH)


def model_and_batch(step: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return model, torch.randn(32, WIDTH, generator=generator)


def train(config: fap.FlashConfig | None, accumulate: bool = False, bucket_mb: float = 0.05) -> dict[str, Any]:
    """Train; config None: DDP's own reduction."""
    fap.reset_stats()
    model, _ = model_and_batch()
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=accumulate)
    hook = None if config is None else fap.ddp_hook(config)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    losses = []
    for step in range(STEPS):
        _, x = model_and_batch(step)
        optimizer.zero_grad()
        if accumulate:
            with ddp.no_sync():
                (ddp(x[:16]) - x[:16].flip(1)).square().mean().backward()
            loss = (ddp(x[16:]) - x[16:].flip(1)).square().mean()
        else:
            loss = (ddp(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights, **fap.stats()}


@pytest.mark.parametrize("world", [2, 3])
def test_trains_as_without_and_counts_every_bucket(ranks: Callable[[int], Ranks], world: int) -> None:
    plain = ranks(world).run(train, None)
    full = ranks(world).run(train, fap.FlashConfig(enabled=False))
    eight = ranks(world).run(train, fap.FlashConfig(bits=8, min_bytes=0))
    for rank in range(world):
        torch.testing.assert_close(full[rank]["weights"], plain[rank]["weights"], rtol=1e-4, atol=1e-6)
        assert eight[rank]["losses"][-1] == pytest.approx(plain[rank]["losses"][-1], rel=5e-3)
        assert not torch.equal(eight[rank]["weights"], plain[rank]["weights"])
        assert torch.equal(eight[rank]["weights"], eight[0]["weights"]), "the replicas have drifted apart"
        site = eight[rank]["sites"]["ddp.gradients"]
        assert site["quantized"] == site["calls"] > STEPS, "more than one bucket"
        assert site["bytes_full_precision"] == STEPS * 4 * 2 * (world - 1) * PARAMETERS // world
        assert site["bytes_sent"] < 0.3 * site["bytes_full_precision"]
        assert full[rank]["sites"]["ddp.gradients"]["full_precision"] == {"disabled by configuration": site["calls"]}
        assert plain[rank]["calls"] == 0


def embedding_gradients(fields: dict[str, Any]) -> dict[str, int]:
    """An embedding of 512 rows of which each rank's batch touches 9, beside a projection: gradients after one step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(512, 40), nn.Linear(40, 8))
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(min_bytes=0, **fields)))
    untouched, zeros, step_size = torch.ones(512, dtype=torch.bool), 0, 0.0
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(3):
        tokens = torch.stack([torch.arange(9) * 37 + 5 * rank + step for rank in range(dist.get_world_size())]) % 512
        untouched[tokens.flatten()] = False
        optimizer.zero_grad()
        ddp(tokens[dist.get_rank()]).square().mean().backward()
        zeros += int((model[0].weight.grad[untouched] == 0).sum())
        optimizer.step()
    moved = (model[0].weight.detach() - before).abs().amax(1)
    step_size = float(moved[~untouched].amin())
    return {
        "zeros": zeros,
        "moved": int((moved[untouched] != 0).sum()),
        "untouched": int(untouched.sum()),
        "still": int(step_size == 0),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_guarantee_8_rows_of_an_embedding_that_no_token_touched_do_not_move(
    ranks: Callable[[int], Ranks], world: int
) -> None:
    for bits in (8, 4, 2):
        for options in ({}, {"compact": True}, {"rounding": "stochastic"}, {"error_feedback": True}):
            for seen in ranks(world).run(embedding_gradients, {"bits": bits, **options}):
                assert seen["moved"] == seen["still"] == 0, (bits, options)
                assert seen["zeros"] >= 3 * 40 * seen["untouched"] > 3 * 40 * 400


def test_accumulation_reduces_once_a_step(ranks: Callable[[int], Ranks]) -> None:
    plain, eight = (ranks(2).run(train, config, True) for config in (None, fap.FlashConfig(bits=8, min_bytes=0)))
    assert eight[0]["losses"][-1] == pytest.approx(plain[0]["losses"][-1], rel=5e-3)
    assert torch.equal(eight[0]["weights"], eight[1]["weights"])
    assert eight[0]["bytes_full_precision"] == STEPS * 4 * PARAMETERS


def test_warm_up_steps_are_in_full_precision(ranks: Callable[[int], Ranks]) -> None:
    config = fap.FlashConfig(bits=8, min_bytes=0, warmup_steps=5)
    site = ranks(2).run(train, config)[0]["sites"]["ddp.gradients"]
    assert site["full_precision"] == {"warm-up": 5 * site["calls"] // STEPS}


def poisoned() -> bool:
    model, x = model_and_batch()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8, min_bytes=0)))
    loss = ddp(x).square().mean()
    if dist.get_rank() == 1:
        loss = loss * torch.nan
    loss.backward()
    return all(not bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None)


def test_a_nan_of_one_rank_reaches_all(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(poisoned) == [True, True]


def test_a_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="config is dict; expected FlashConfig or None"):
        fap.ddp_hook({"bits": 8})  # type: ignore[arg-type]


def test_buckets_in_flight_find_a_width_together(ranks: Callable[[int], Ranks]) -> None:
    config = fap.FlashConfig(bits=2, min_bytes=0, target_sqnr_db=20.0, quality_interval=2)
    outcomes = ranks(3).run(train, config)
    assert {outcome["sites"]["ddp.gradients"]["bits"] for outcome in outcomes} <= {5, 6}
    assert len({outcome["sites"]["ddp.gradients"]["bits"] for outcome in outcomes}) == 1
    assert all(torch.equal(outcome["weights"], outcomes[0]["weights"]) for outcome in outcomes)
