"""fap.fsdp.enable and FLASH_ALLREDUCE_ATTACH=fsdp: FSDP2, its replicas and FSDP1 of programs that set nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.integrations.contract import unknown_group
from tests.attached import loss_of, program, said
from tests.distributed import Ranks, run_ranks

WIDTH, STEPS = 64, 4
QUANTIZED = fap.FlashConfig(bits=4, min_bytes=0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(mesh: DeviceMesh, **how: Any) -> Any:
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator)


def full(parameter: Any) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().flatten().clone()


def train(model: Any, steps: int = STEPS, accumulate: int = 1) -> torch.Tensor:
    """Return the weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            if isinstance(model, FSDPModule):
                model.set_requires_all_reduce(part == accumulate - 1)
            x = batch(accumulate * step + part)
            (model(x) - x.flip(1)).float().square().mean().backward()
        optimizer.step()
    return torch.cat([full(parameter) for parameter in model.parameters()])


def meshes(kind: str) -> DeviceMesh:
    world = dist.get_world_size()
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


def attached(kind: str, config: fap.FlashConfig, how: dict[str, Any], compiled: str | None = None) -> Any:
    """Return (weights, counts, lines) of an attached model, and of one that is given ours by hand where it can be."""
    mesh = meshes(kind)
    found = []
    for by_hand in (False, True):
        fap.reset_stats()
        if not by_hand:
            fap.fsdp.enable(config)
        model: Any = build(mesh, **how)
        if by_hand:
            for module in modules(model):
                module.set_custom_reduce_scatter(
                    fap.FlashReduceScatter(config.model_copy(update={"param_bits": "full"}))
                )
                if config.param_bits != "full":
                    module.set_custom_all_gather(
                        fap.FlashAllGather(fap.FlashConfig(bits=config.param_bits, min_bytes=0))
                    )
        weights = train(torch.compile(model, backend=compiled) if compiled else model)
        found.append((weights, fap.stats()["sites"], fap.fsdp.report().models))
        fap.fsdp.disable()
    return found


HOW = {
    "default": lambda: {},
    "kept": lambda: {"reshard_after_forward": False},
    "mixed": lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def flat(how: str, config: fap.FlashConfig, compiled: str | None = None) -> Any:
    return attached("flat", config, HOW[how](), compiled)


@pytest.mark.parametrize("how", HOW)
def test_the_same_bits_as_set_by_hand(ranks: Callable[[int], Ranks], how: str) -> None:
    config = fap.FlashConfig(bits=4, min_bytes=0, param_bits=8)
    for (weights, counts, lines), (by_hand, expected, _) in ranks(2).run(flat, how, config):
        assert torch.equal(weights, by_hand)
        assert counts["fsdp.gradients"]["quantized"] == expected["fsdp.gradients"]["quantized"] == 2 * STEPS
        assert counts["fsdp.parameters"]["quantized"] == expected["fsdp.parameters"]["quantized"] > 0
        assert "Sequential, 16896 parameters in float32" in lines[0]
        assert "gradients of 2 of 2 modules in 4 bits, parameters of 2 in 8" in lines[0]


def with_an_adapter(quantize_frozen: bool) -> tuple[bool, Any, int]:
    """Return True if the frozen layer computes with exact weights; why its gathers were exact; the count of others."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].requires_grad_(False)
    weight, seen = model[0].weight.detach().clone(), []
    model[0].register_forward_hook(lambda module, *_: seen.append(torch.equal(module.weight, weight)))
    fap.fsdp.enable(fap.FlashConfig(preset="int8", min_bytes=0, quantize_frozen=quantize_frozen))
    fap.reset_stats()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    counts = fap.stats()["sites"]["fsdp.parameters"]
    fap.fsdp.disable()
    return all(seen), counts["full_precision"], counts["quantized"]


def test_frozen_parameters_stay_exact(ranks: Callable[[int], Ranks]) -> None:
    for exactly, reasons, quantized in ranks(2).run(with_an_adapter, False):
        assert exactly and reasons[policy.FROZEN] > 0 and quantized > 0
    for exactly, reasons, quantized in ranks(2).run(with_an_adapter, True):
        assert not exactly and not reasons and quantized > 0


def test_a_compiled_model(ranks: Callable[[int], Ranks]) -> None:
    for (weights, counts, _), (by_hand, _, _) in ranks(2).run(flat, "default", QUANTIZED, "eager"):
        assert torch.equal(weights, by_hand)
        assert counts["fsdp.gradients"]["quantized"] == 2 * STEPS


def hsdp(accumulate: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], tuple[str, ...]]:
    """Return weights of full precision and attached; counts and lines of the latter."""
    mesh = meshes("hsdp")
    plain = train(build(mesh), accumulate=accumulate)
    fap.fsdp.enable(fap.FlashConfig(bits=8, min_bytes=0))
    fap.reset_stats()
    weights = train(build(mesh), accumulate=accumulate)
    counts, lines = fap.stats()["sites"], fap.fsdp.report().models
    fap.fsdp.disable()
    return plain, weights, counts, lines


@pytest.mark.parametrize("accumulate", [1, 2])
def test_replicas_of_shards(ranks: Callable[[int], Ranks], accumulate: int) -> None:
    results = ranks(4).run(hsdp, accumulate)
    for plain, weights, counts, lines in results:
        assert torch.equal(weights, results[0][1])
        assert not torch.equal(weights, plain)
        assert (weights - plain).abs().max() < 0.01 * plain.abs().max()
        assert counts["fsdp.gradients"]["quantized"] == 2 * STEPS * accumulate
        assert counts["fsdp.replicas"]["quantized"] == 2 * STEPS  # torch adds up before it reduces between replicas
        assert "shards x replicas 2 x 2" in lines[0]


def switched_off() -> tuple[torch.Tensor, torch.Tensor, int]:
    mesh = meshes("hsdp")
    plain = train(build(mesh))
    fap.fsdp.enable(fap.FlashConfig(enabled=False))
    fap.reset_stats()
    weights = train(build(mesh))
    fap.fsdp.disable()
    return plain, weights, fap.stats()["quantized"]


def test_in_full_precision_replicas_have_torchs_own_bits(ranks: Callable[[int], Ranks]) -> None:
    for plain, weights, quantized in ranks(4).run(switched_off):
        assert torch.equal(plain, weights)
        assert quantized == 0


def beside_tensor_parallelism() -> tuple[bool, dict[str, Any], torch.Tensor]:
    """Return True if copies on the tensor-parallel ranks have the same bits after training; counts; one copy."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fap.fsdp.enable(fap.FlashConfig(bits=4, min_bytes=0, param_bits=8))
    fap.reset_stats()
    for block in model:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * 10 + mesh["shard"].get_local_rank())
        x = torch.randn(8, WIDTH, generator=generator)
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    counts = fap.stats()["sites"]
    fap.fsdp.disable()
    norm = model[0].norm.weight.full_tensor().detach().clone()
    gathered = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(gathered, norm, group=mesh["tensor"].get_group())
    return torch.equal(*gathered), counts, norm


def test_copies_under_tensor_parallelism_stay_equal(ranks: Callable[[int], Ranks]) -> None:
    for same, counts, _ in ranks(4).run(beside_tensor_parallelism):
        assert same
        # Of each block one call of its split weights, and one of each copy: a norm's weight and bias, the last bias.
        assert counts["fsdp.gradients"]["quantized"] == 2 * 4 * STEPS
        parameters = counts["fsdp.parameters"]
        assert parameters["quantized"] == 0
        assert parameters["full_precision"] == {"replicated over tensor-parallel ranks": parameters["calls"]}


class Theirs(fap.FlashReduceScatter):
    """A reduce-scatter that the program wrote."""


def by_the_program() -> tuple[bool, tuple[str, ...]]:
    fap.fsdp.enable(QUANTIZED)
    model = build(meshes("flat"))
    own = Theirs(fap.FlashConfig(bits=8, min_bytes=0))
    for module in modules(model):
        module.set_custom_reduce_scatter(own)
    groups = [group for module in modules(model) for group in module._get_fsdp_state()._fsdp_param_groups]
    lines = fap.fsdp.report().models
    same = all(group._reduce_scatter_comm is own for group in groups)
    fap.fsdp.disable()
    return same and all(group._reduce_scatter_comm is own for group in groups), lines


def test_the_programs_own_settings_override_the_environment(ranks: Callable[[int], Ranks]) -> None:
    for same, lines in ranks(2).run(by_the_program):
        assert same
        assert any("the program's own Theirs replaces ours" in line for line in lines)


def with_torchs_buffers() -> tuple[list[str], tuple[str, ...]]:
    """Set torch's own buffers, which torch refuses with custom communication: they have precedence over ours."""
    fap.fsdp.enable(QUANTIZED)
    model = build(meshes("flat"))
    for module in modules(model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    groups = [group for module in modules(model) for group in module._get_fsdp_state()._fsdp_param_groups]
    found = [type(group._reduce_scatter_comm).__name__ for group in groups]
    lines = fap.fsdp.report().models
    fap.fsdp.disable()
    return found, lines


def test_buffers_of_the_process_group_stay_unchanged(ranks: Callable[[int], Ranks]) -> None:
    for found, lines in ranks(2).run(with_torchs_buffers):
        assert found == ["ProcessGroupAllocReduceScatter"] * 2
        assert all("left alone: set_allocate_memory_from_process_group needs torch's own" in line for line in lines)


def undone() -> tuple[bool, torch.Tensor, torch.Tensor, int]:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    before = (dict(vars(module.FSDPParamGroup)), module.foreach_reduce, dict(vars(FullyShardedDataParallel)))
    fap.fsdp.enable(QUANTIZED)
    model = build(meshes("hsdp"))
    fap.fsdp.disable()
    after = (dict(vars(module.FSDPParamGroup)), module.foreach_reduce, dict(vars(FullyShardedDataParallel)))
    fap.reset_stats()
    return before == after, train(model), train(build(meshes("hsdp"))), fap.stats()["calls"]


def test_disable_restores(ranks: Callable[[int], Ranks]) -> None:
    for same, weights, plain, calls in ranks(4).run(undone):
        assert same
        assert torch.equal(weights, plain)
        assert calls == 0


def warmed_up() -> list[int]:
    fap.fsdp.enable(fap.FlashConfig(bits=4, min_bytes=0, param_bits=8, warmup_steps=2))
    model = build(meshes("flat"))
    optimizer = torch.optim.AdamW(model.parameters())
    counts = []
    for step in range(4):
        for _ in range(2):
            model(batch(step)).square().mean().backward()
        optimizer.step()
        counts.append(fap.stats()["sites"]["fsdp.gradients"]["quantized"])
    fap.fsdp.disable()
    return counts


def test_warm_up_counts_steps_of_the_optimizer() -> None:
    assert run_ranks(2, warmed_up) == [[0, 0, 4, 8]] * 2


def few_bits() -> tuple[str, ...]:
    fap.fsdp.enable(fap.FlashConfig(bits=4, min_bytes=0, param_bits=4))
    train(build(meshes("flat")), steps=1)
    lines = fap.fsdp.report().models
    fap.fsdp.disable()
    return lines


def test_few_bits_of_parameters_are_doubted(ranks: Callable[[int], Ranks]) -> None:
    for lines in ranks(2).run(few_bits):
        assert "param_bits is 4: at 4 bits the values of weights are off by 10 %" in lines[1]


# ---- FSDP1 ----


def first_generation(strategy: ShardingStrategy, by_hand: bool, own: bool = False) -> Any:
    config = fap.FlashConfig(bits=4, min_bytes=0)
    fap.reset_stats()
    if not by_hand:
        fap.fsdp.enable(config)
    torch.manual_seed(7)
    mesh = meshes("hsdp") if strategy == ShardingStrategy.HYBRID_SHARD else None
    model = FullyShardedDataParallel(
        nn.Sequential(Block(), Block()), sharding_strategy=strategy, device_mesh=mesh, device_id=torch.device("cpu")
    )
    if by_hand or own:
        model.register_comm_hook(None, fap.fsdp1_hook(fap.FlashConfig(bits=8 if own else 4, min_bytes=0)))
    weights = train(model)
    found = weights, fap.stats()["sites"].get("fsdp1.gradients"), fap.fsdp.report().models
    fap.fsdp.disable()
    return found


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_fsdp1_has_the_bits_of_the_hook_by_hand(ranks: Callable[[int], Ranks], strategy: ShardingStrategy) -> None:
    attached, by_hand = (ranks(2).run(first_generation, strategy, each) for each in (False, True))
    for (weights, counts, _), (expected, _, _) in zip(attached, by_hand, strict=True):
        assert torch.equal(weights, expected)
        assert counts["quantized"] == STEPS


def test_a_hook_of_the_programs_wins_in_fsdp1(ranks: Callable[[int], Ranks]) -> None:
    for _, counts, lines in ranks(2).run(first_generation, ShardingStrategy.FULL_SHARD, False, True):
        assert counts["quantized"] == STEPS
        assert "the program's own hook" in lines[-1]


def test_hybrid_strategies_of_fsdp1_stay_in_full_precision(ranks: Callable[[int], Ranks]) -> None:
    for _, counts, lines in ranks(4).run(first_generation, ShardingStrategy.HYBRID_SHARD, False):
        assert counts is None
        assert "is left alone: torch takes no hook for the hybrid strategies" in lines[0]


# ---- bad input, and the environment ----


def test_bad_arguments_change_nothing() -> None:
    with pytest.raises(TypeError, match="config is int; expected FlashConfig"):
        fap.fsdp.enable(4)  # type: ignore[arg-type]
    with pytest.raises(fap.ConfigError, match=r"exclude=.* has no effect in FSDP"):
        fap.fsdp.enable(fap.FlashConfig(exclude=["a"]))
    assert not fap.fsdp.is_enabled()


@pytest.mark.parametrize(
    ("generation", "name"),
    [pytest.param("fsdp1", "FullyShardedDataParallel", marks=pytest.mark.slow), ("fsdp2", "FSDP2")],
)
def test_one_variable_attaches_an_unedited_program(tmp_path: Path, generation: str, name: str) -> None:
    quantized = {"FLASH_ALLREDUCE_BITS": "4", "FLASH_ALLREDUCE_MIN_BYTES": "0"}
    quantized["FLASH_ALLREDUCE_BACKWARD_BITS"] = "8"  # for tensor parallelism in the same job
    served = program(tmp_path, generation, FLASH_ALLREDUCE_ATTACH="all", **quantized)
    by_hand = program(tmp_path, generation, "by_hand", **quantized)
    plain = program(tmp_path, generation)
    assert loss_of(served) == loss_of(by_hand) != loss_of(plain)
    lines = said(served)
    if generation == "fsdp2":  # FSDP2's gathers have a field
        assert "fsdp.parameters has quantized none of its 3 calls: param_bits is full (set " in lines.pop()
    assert len(lines) == 1
    assert f"attached to {name} (" in lines[0]
    assert "in 4 bits" in lines[0]
    assert "flash all-reduce" not in plain.stdout + plain.stderr


class OfAProgram(dist.ProcessGroup):
    """A group without backends, as programs that write their own have it, and torch's tests with threads as ranks."""


def test_a_group_of_a_custom_backend_stays_in_full_precision(ranks: Callable[[int], Ranks]) -> None:
    assert unknown_group([OfAProgram(0, 2)], torch.device("cpu")) == (
        "its process group (OfAProgram) has no backend of torch's for cpu tensors"
    )
    assert ranks(2).run(of_world) == [None, None]


def of_world() -> str | None:
    world = dist.group.WORLD
    assert world is not None
    return unknown_group([world], torch.device("cpu"))
