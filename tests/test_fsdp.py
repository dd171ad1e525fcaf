"""The custom communication in real FSDP2 training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import copies
from tests.distributed import Ranks
from tests.test_ddp import Block

WIDTH, STEPS = 96, 12
LAYERS = 3
EIGHT = fap.FlashConfig(bits=8, min_bytes=0)


def train(
    gradients: fap.FlashConfig | None,
    parameters: fap.FlashConfig | None = None,
    divisor: float | None = None,
    reduce_dtype: torch.dtype | None = None,
    mesh_shape: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Train; gradients None: torch's own reduce-scatter, told to sum and divide itself, since gloo has no AVG.

    mesh_shape: (replicas, shards).
    """
    fap.reset_stats()
    world, rank = dist.get_world_size(), dist.get_rank()
    names = ("replicate", "shard") if mesh_shape else ("shard",)
    mesh = init_device_mesh("cpu", mesh_shape or (world,), mesh_dim_names=names)
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if divisor is not None:
                module.set_gradient_divide_factor(divisor)
            if gradients is None or mesh_shape:
                module.set_force_sum_reduction_for_comms(True)
            if gradients is not None:
                module.set_custom_reduce_scatter(fap.FlashReduceScatter(gradients))
            if parameters is not None:
                module.set_custom_all_gather(fap.FlashAllGather(parameters))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(STEPS):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights, **fap.stats()}


@pytest.mark.parametrize("world", [2, 3])
def test_trains_as_without_and_counts_every_call(ranks: Callable[[int], Ranks], world: int) -> None:
    plain, full = (ranks(world).run(train, config) for config in (None, fap.FlashConfig(enabled=False)))
    eight = ranks(world).run(train, EIGHT)
    for rank in range(world):
        torch.testing.assert_close(full[rank]["weights"], plain[rank]["weights"], rtol=1e-4, atol=1e-6)
        assert eight[rank]["losses"][-1] == pytest.approx(plain[rank]["losses"][-1], rel=5e-3)
        assert not torch.equal(eight[rank]["weights"], plain[rank]["weights"])
        assert torch.equal(eight[rank]["weights"], eight[0]["weights"])
        site = eight[rank]["sites"]["fsdp.gradients"]
        assert site["quantized"] == site["calls"] == STEPS * LAYERS
        assert site["bytes_sent"] < 0.3 * site["bytes_full_precision"]


@pytest.mark.parametrize("case", ["a divisor of one's own", "fp16, which divides before and after", "bf16"])
def test_the_divisor_is_what_fsdp_asks_for(ranks: Callable[[int], Ranks], case: str) -> None:
    arguments = {
        "a divisor of one's own": (None, 5.0, None),
        "fp16, which divides before and after": (None, None, torch.float16),
        "bf16": (None, None, torch.bfloat16),
    }[case]
    plain, eight = (ranks(2).run(train, config, *arguments)[0] for config in (None, EIGHT))
    assert eight["quantized"] == eight["calls"] > 0
    torch.testing.assert_close(eight["weights"], plain["weights"], rtol=0.02, atol=2e-3)


def test_parameters_are_gathered_at_their_own_width(ranks: Callable[[int], Ranks]) -> None:
    plain, both = (ranks(2).run(train, *configs) for configs in ((None, None), (EIGHT, EIGHT)))
    assert both[0]["losses"][-1] == pytest.approx(plain[0]["losses"][-1], rel=2e-2)
    assert torch.equal(both[0]["weights"], both[1]["weights"])
    assert both[0]["sites"]["fsdp.parameters"]["quantized"] >= STEPS * LAYERS


def test_replicas_of_shards_reduce_quantized_inside_and_plain_between(ranks: Callable[[int], Ranks]) -> None:
    """HSDP, 2 x 2: the reduce-scatter of 2 ranks is ours, the all-reduce across is torch's."""
    plain, eight = (ranks(4).run(train, c, None, None, None, (2, 2)) for c in (None, EIGHT))
    for rank in range(4):
        assert eight[rank]["losses"][-1] == pytest.approx(plain[rank]["losses"][-1], rel=5e-3)
        assert torch.equal(eight[rank]["weights"], eight[0]["weights"])
        assert list(eight[rank]["sites"]) == ["fsdp.gradients"]


@pytest.mark.parametrize("made", [fap.FlashReduceScatter, fap.FlashAllGather])
@pytest.mark.parametrize(
    ("key", "value"),
    [("include", ["a"]), ("exclude", ["a"]), ("warmup_steps", 1), ("expert_bits", 8), ("param_backward_bits", 8)],
)
def test_a_key_without_effect_is_refused(made: Any, key: str, value: Any) -> None:
    with pytest.raises(fap.ConfigError, match=rf"^{key}=.* has no effect in {made.__name__}, .*; leave it out\.$"):
        made(fap.FlashConfig(**{key: value}))
    assert made(fap.FlashConfig(preset="int4")).config == fap.FlashConfig(preset="int4")


def test_a_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="config is dict; expected FlashConfig or None"):
        fap.FlashReduceScatter({"bits": 8})  # type: ignore[arg-type]


def beside_tensor_parallelism(plan: str, unseen: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Data parallel 2 x tensor parallel 2; how far copies are apart on the tensor-parallel ranks after some steps."""
    fap.reset_stats()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    model = nn.Sequential(Block(), nn.LayerNorm(WIDTH), Block())
    config = fap.FlashConfig(bits=4, min_bytes=0, **options)
    for block in (model[0], model[2]):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if plan == "norm a DTensor":
            distribute_module(
                block.norm,
                mesh["tp"],
                input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
                output_fn=lambda _, output, mesh: output.to_local(),
            )
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(fap.FlashReduceScatter(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        if unseen:
            patch.setattr(copies, "among", lambda shardings, _config: [False] * len(shardings))
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(1000 * step + mesh.get_local_rank("dp"))
            x = torch.randn(16, WIDTH, generator=generator)
            optimizer.zero_grad()
            if step == 3:  # without gradients of the norm and the bias at the end
                for p in model[0].norm.parameters():
                    p.requires_grad_(False)
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
    same = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("down.bias") or name[0] == "1"]
    mine = torch.cat([p.to_local().detach().flatten() for p in same])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=mesh.get_group("tp"))
    return {"apart": float((both[0] - both[1]).abs().max()), **fap.stats()}


@pytest.mark.parametrize("options", [{}, {"error_feedback": True}], ids=str)
@pytest.mark.parametrize("plan", ["norm a plain tensor", "norm a DTensor"])
def test_copies_on_tensor_parallel_ranks_stay_the_same(
    ranks: Callable[[int], Ranks], plan: str, options: dict[str, Any]
) -> None:
    for outcome in ranks(4).run(beside_tensor_parallelism, plan, False, options):
        assert outcome["apart"] == 0
        site = outcome["sites"]["fsdp.gradients"]
        assert site["quantized"] == 3 * STEPS and site["full_precision"] == {copies.REASON: 2 * STEPS}
        assert site["bytes_sent"] < 0.3 * site["bytes_full_precision"]


def test_they_would_drift_apart(ranks: Callable[[int], Ranks]) -> None:
    for outcome in ranks(4).run(beside_tensor_parallelism, "norm a plain tensor", True, {}):
        assert outcome["apart"] > 1e-4


def widths_that_are_chosen() -> str:
    with pytest.raises(fap.ConfigError) as refused:
        beside_tensor_parallelism("norm a plain tensor", False, {"target_sqnr_db": 20.0, "quality_interval": 2})
    return str(refused.value)


def test_widths_that_each_group_chooses_are_refused_beside_tensor_parallelism(ranks: Callable[[int], Ranks]) -> None:
    assert set(ranks(4).run(widths_that_are_chosen)) == {copies.ADAPTIVE}


def called_by_hand() -> str:
    whole = torch.zeros(dist.get_world_size() * 4)
    with pytest.raises(fap.PatchError) as refused:
        fap.FlashReduceScatter(EIGHT)(torch.zeros(4), whole, dist.group.WORLD, dist.ReduceOp.SUM)  # type: ignore[arg-type]
    return str(refused.value)


def test_another_caller_than_fsdp_is_refused(ranks: Callable[[int], Ranks]) -> None:
    assert all("foreach_reduce" in message for message in ranks(2).run(called_by_hand))
