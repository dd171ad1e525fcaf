"""FSDP1's hook in real training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flash_allreduce_plugin as fap
from tests.distributed import Ranks

WIDTH, STEPS, LAYERS = 97, 12, 3  # odd: FSDP1 pads
EIGHT = fap.FlashConfig(bits=8, min_bytes=0)


def train(
    config: fap.FlashConfig | None, strategy: str, options: dict[str, Any], wrapper: Any = lambda hook: hook
) -> dict[str, Any]:
    """Train; config None: without a hook."""
    fap.reset_stats()
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        **options,
    )
    if config is not None:
        wrapped.register_comm_hook(None, wrapper(fap.fsdp1_hook(config)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = (wrapped(x) - x.flip(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with FullyShardedDataParallel.summon_full_params(wrapped):
        weights = torch.cat([p.detach().float().flatten() for p in wrapped.parameters()])
    return {"losses": losses, "weights": weights, **fap.stats()}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world", [2, 3])
def test_trains_as_without(ranks: Callable[[int], Ranks], world: int, strategy: str) -> None:
    run = partial(ranks(world).run, train)
    plain, full, eight = (run(c, strategy, {}) for c in (None, fap.FlashConfig(enabled=False), EIGHT))
    for rank in range(world):
        torch.testing.assert_close(full[rank]["weights"], plain[rank]["weights"], rtol=1e-4, atol=1e-6)
        assert eight[rank]["losses"][-1] == pytest.approx(plain[rank]["losses"][-1], rel=5e-3)
        assert not torch.equal(eight[rank]["weights"], plain[rank]["weights"])
        assert torch.equal(eight[rank]["weights"], eight[0]["weights"])
        site = eight[rank]["sites"]["fsdp1.gradients"]
        assert site["quantized"] == site["calls"] == STEPS * LAYERS
        assert site["bytes_sent"] < 0.3 * site["bytes_full_precision"]
        halves = 2 if strategy == "NO_SHARD" else 1
        padded = WIDTH * (WIDTH + 1) + (0 if halves == 2 else -(WIDTH * (WIDTH + 1)) % world)
        assert site["bytes_full_precision"] == STEPS * LAYERS * halves * (4 * padded * (world - 1) // world)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_bf16_and_accumulation(ranks: Callable[[int], Ranks], strategy: str) -> None:
    mixed = {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}
    plain, eight = (ranks(2).run(train, config, strategy, mixed) for config in (None, EIGHT))
    assert eight[0]["losses"][-1] == pytest.approx(plain[0]["losses"][-1], rel=2e-2)
    assert torch.equal(eight[0]["weights"], eight[1]["weights"])
    site = eight[0]["sites"]["fsdp1.gradients"]
    assert site["quantized"] == site["calls"] == STEPS * LAYERS


def in_wrappers(hook: Any) -> Any:
    for _ in range(9):
        hook = partial(lambda inner, *arguments: inner(*arguments), hook)
    return hook


def subgroups() -> dict[str, Any]:
    """Train two models, each on two of four ranks: the hook finds the group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return train(EIGHT, "NO_SHARD", {"process_group": groups[dist.get_rank() // 2]}, in_wrappers)


def test_the_group_is_the_models(ranks: Callable[[int], Ranks]) -> None:
    outcomes = ranks(4).run(subgroups)
    assert torch.equal(outcomes[0]["weights"], outcomes[1]["weights"])
    assert torch.equal(outcomes[2]["weights"], outcomes[3]["weights"])
    assert not torch.equal(outcomes[0]["weights"], outcomes[2]["weights"])


@pytest.mark.parametrize("state", [None, "group"])
def test_a_hook_that_fsdp1_does_not_call_refuses_to_guess_the_group(state: Any) -> None:
    with pytest.raises(fap.PatchError, match="fsdp1_hook was not called by FullyShardedDataParallel"):
        fap.fsdp1_hook(EIGHT)(state, torch.zeros(4))


def beside_tensor_parallelism() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(fap.ConfigError) as refused:
        train(EIGHT, "FULL_SHARD", {"device_mesh": mesh["dp"]})
    return str(refused.value)


def test_tensor_parallelism_is_refused(ranks: Callable[[int], Ranks]) -> None:
    assert all("take FSDP2" in message for message in ranks(4).run(beside_tensor_parallelism))


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(TypeError, match="config is dict; expected FlashConfig or None"):
        fap.fsdp1_hook({"bits": 8})  # type: ignore[arg-type]
    given = {
        "include": ["a"],
        "exclude": ["a"],
        "warmup_steps": 1,
        "error_feedback": True,
        "grad_bits": 8,
        "param_backward_bits": 8,
    }
    for key, value in given.items():
        with pytest.raises(fap.ConfigError, match=rf"^{key}=.* has no effect in fsdp1_hook, .*; leave it out\.$"):
            fap.fsdp1_hook(fap.FlashConfig(**{key: value}))


def test_error_feedback_of_a_preset_is_left_out(ranks: Callable[[int], Ranks]) -> None:
    four = ranks(2).run(train, fap.FlashConfig(preset="int4", min_bytes=0), "FULL_SHARD", {})
    same = ranks(2).run(train, fap.FlashConfig(preset="int4", error_feedback=False, min_bytes=0), "FULL_SHARD", {})
    for a, b in zip(four, same, strict=True):
        assert torch.equal(a["weights"], b["weights"]) and a["quantized"] == a["calls"] > 0
