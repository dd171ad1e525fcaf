"""The custom communication in real FSDP2 training."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from pathlib import Path
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
from flash_allreduce_plugin.collectives import replicated_params
from tests.distributed import Ranks, run_ranks
from tests.integrations.ddp.test_hook import Block

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
def test_the_divisor_is_fsdps(ranks: Callable[[int], Ranks], case: str) -> None:
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
    """Check HSDP, 2 x 2: the reduce-scatter of 2 ranks is ours, the all-reduce across is torch's."""
    plain, eight = (ranks(4).run(train, c, None, None, None, (2, 2)) for c in (None, EIGHT))
    for rank in range(4):
        assert eight[rank]["losses"][-1] == pytest.approx(plain[rank]["losses"][-1], rel=5e-3)
        assert torch.equal(eight[rank]["weights"], eight[0]["weights"])
        assert list(eight[rank]["sites"]) == ["fsdp.gradients"]


def two_models(shared: bool) -> list[torch.Tensor]:
    """Return weights of two models that train alternately, with one FlashReduceScatter for both or one for each."""
    config = fap.FlashConfig(bits=2, min_bytes=0, error_feedback=True)
    ours = [fap.FlashReduceScatter(config)]
    ours.append(ours[0] if shared else fap.FlashReduceScatter(config))
    models, optimizers = [], []
    for number, one in enumerate(ours):
        torch.manual_seed(number)
        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        model.set_custom_reduce_scatter(one)
        models.append(model)
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.2))
    for step in range(4):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
    return [torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]) for model in models]


def test_models_that_share_an_object_have_residuals_of_their_own(ranks: Callable[[int], Ranks]) -> None:
    for mine, expected in zip(*(ranks(2).run(two_models, shared) for shared in (True, False)), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


def with_replicas(
    replicas: fap.FlashConfig | None,
    gradients: fap.FlashConfig | None = None,
    *,
    shape: tuple[int, int] = (2, 2),
    reduce_dtype: torch.dtype | None = None,
    reshard: bool = True,
    accumulate: str = "",
    disabled: bool = False,
    folder: str = "",
    resume: bool = False,
) -> dict[str, Any]:
    """Train on a mesh of shape (replicas, shards); replicas None: by torch's own HSDP.

    accumulate: over two batches a step, the first without "gradient_sync", "all_reduce" or "nothing".
    """
    fap.reset_stats()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in (*model, model):
        fully_shard(
            block, mesh=mesh if replicas is None else mesh["shard"], mp_policy=policy, reshard_after_forward=reshard
        )
    hooks = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no AVG
            if gradients is not None:
                module.set_custom_reduce_scatter(fap.FlashReduceScatter(gradients))
            if replicas is not None:
                hooks.append(fap.FlashAllReduce(mesh.get_group("replicate"), replicas))
                module.set_all_reduce_hook(hooks[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses, went_on, file = [], False, f"{folder}/{dist.get_rank()}.pt"
    if resume:
        state = torch.load(file, weights_only=True)
        for parameter, kept in zip(model.parameters(), state["shards"], strict=True):
            parameter.to_local().detach().copy_(kept)
        went_on = fap.load_state_dict(state["ours"])
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        if disabled:
            patch.setenv("FLASH_ALLREDUCE_DISABLE", "1")
        for step in range(STEPS // 2 if resume else 0, STEPS):
            if folder and not resume and step == STEPS // 2:
                shards = [parameter.to_local().detach().clone() for parameter in model.parameters()]
                torch.save({"shards": shards, "ours": fap.state_dict()}, file)
            optimizer.zero_grad()
            for batch in range(2 if accumulate else 1):
                last = batch == 1 or not accumulate
                model.set_is_last_backward(last)
                if accumulate == "gradient_sync":
                    model.set_requires_gradient_sync(last)
                elif accumulate == "all_reduce":
                    model.set_requires_all_reduce(last)
                seed = 1000 * step + 10 * batch + dist.get_rank()
                x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
                loss = (model(x) - x.flip(1)).square().mean()
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    weights = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    left = [not hook.feedback.keys() for hook in hooks[1:] if hook.feedback is not None]  # hooks[0]: the empty root
    repeated = said.getvalue().count("reduced between the replicas more than once") == 1
    return {"losses": losses, "weights": weights, "went_on": went_on, "left": left, "said": repeated, **fap.stats()}


def options(case: Callable[..., Any], *args: Any, **more: Any) -> functools.partial[Any]:
    named = functools.partial(case, *args, **more)
    functools.update_wrapper(named, case)
    return named


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("disabled", None),
        ("small", torch.bfloat16),
        ("no reduce-scatter of ours", None),
        ("no reduce-scatter of ours", torch.float16),
    ],
    ids=str,
)
def test_replicas_in_full_precision_are_torchs_own_to_the_bit(
    ranks: Callable[[int], Ranks], how: str, dtype: torch.dtype | None
) -> None:
    plain = ranks(4).run(options(with_replicas, None, reduce_dtype=dtype))
    config = fap.FlashConfig(bits=4, min_bytes=1 << 30 if how == "small" else 0)
    gradients = None if how == "no reduce-scatter of ours" else config
    full = ranks(4).run(
        options(
            with_replicas,
            fap.FlashConfig(enabled=False) if gradients is None else config,
            gradients,
            reduce_dtype=dtype,
            disabled=how == "disabled",
        )
    )
    for mine, torchs in zip(full, plain, strict=True):
        assert torch.equal(mine["weights"], torchs["weights"]) and mine["losses"] == torchs["losses"]
        site = mine["sites"]["fsdp.replicas"]
        assert sum(site["full_precision"].values()) == site["calls"] == STEPS * LAYERS


def test_without_shards_too(ranks: Callable[[int], Ranks]) -> None:
    """Check one shard, three replicas: torch has nothing to divide by, and sums divided by 3 are sums divided by 3."""
    plain, full = (
        ranks(3).run(options(with_replicas, config, shape=(3, 1))) for config in (None, fap.FlashConfig(enabled=False))
    )
    for mine, torchs in zip(full, plain, strict=True):
        assert torch.equal(mine["weights"], torchs["weights"])


@pytest.mark.parametrize("reshard", [True, False])
def test_shards_and_replicas_are_reduced_quantized(ranks: Callable[[int], Ranks], reshard: bool) -> None:
    config = fap.FlashConfig(bits=4, min_bytes=0)
    plain = ranks(4).run(options(with_replicas, None, reshard=reshard))
    four = ranks(4).run(options(with_replicas, config, config, reshard=reshard))
    for mine, torchs in zip(four, plain, strict=True):
        assert mine["losses"][-1] == pytest.approx(torchs["losses"][-1], rel=1e-2)
        assert not torch.equal(mine["weights"], torchs["weights"])
        assert torch.equal(mine["weights"], four[0]["weights"])
        assert set(mine["sites"]) == {"fsdp.gradients", "fsdp.replicas"}
        for site in mine["sites"].values():
            assert site["quantized"] == site["calls"] == STEPS * LAYERS
        assert mine["bytes_sent"] < 0.14 * mine["bytes_full_precision"]
        halves = [site["bytes_full_precision"] for site in mine["sites"].values()]
        assert halves[0] == halves[1] == 4 * STEPS * LAYERS * (WIDTH * WIDTH + WIDTH) // 2


@pytest.mark.parametrize("config", [fap.FlashConfig(enabled=False), EIGHT], ids=["full precision", "8 bits"])
@pytest.mark.parametrize("without", ["gradient_sync", "all_reduce"])
def test_replicas_with_gradient_accumulation(
    ranks: Callable[[int], Ranks], without: str, config: fap.FlashConfig
) -> None:
    """Check that replicas are reduced in the last backward pass of a step."""
    plain, mine = (ranks(4).run(options(with_replicas, one, accumulate=without)) for one in (None, config))
    for rank in range(4):
        assert mine[rank]["sites"]["fsdp.replicas"]["calls"] == STEPS * LAYERS
        assert torch.equal(mine[rank]["weights"], mine[0]["weights"])
        if config is EIGHT:
            assert mine[rank]["losses"][-1] == pytest.approx(plain[rank]["losses"][-1], rel=5e-3)
        else:
            assert torch.equal(mine[rank]["weights"], plain[rank]["weights"])
        assert not mine[rank]["said"]


def test_replicas_that_are_reduced_in_every_micro_batch_get_one_line(ranks: Callable[[int], Ranks]) -> None:
    for rank, seen in enumerate(ranks(4).run(options(with_replicas, EIGHT, accumulate="nothing"))):
        assert seen["sites"]["fsdp.replicas"]["calls"] == 2 * STEPS * LAYERS
        assert seen["said"] == (rank == 0)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return self.second(y) if deep else y


def other_parameters() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = Sometimes()
    fully_shard(model, mesh=mesh["shard"])
    model.set_all_reduce_hook(fap.FlashAllReduce(mesh.get_group("replicate"), EIGHT))
    model.set_requires_all_reduce(False)
    model(torch.ones(2, 8), False).sum().backward()
    model.set_requires_all_reduce(True)
    with pytest.raises(ValueError, match="different parameters") as refused:
        model(torch.ones(2, 8), True).sum().backward()
    return str(refused.value)


def test_micro_batches_of_different_parameters_are_refused(ranks: Callable[[int], Ranks]) -> None:
    assert all("leave set_requires_all_reduce at True" in message for message in ranks(4).run(other_parameters))


def test_replicas_resume_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    config = fap.FlashConfig(bits=3, min_bytes=0, error_feedback=True, rounding="stochastic")
    straight, again = (
        run_ranks(4, options(with_replicas, config, config, folder=str(tmp_path), resume=resume))
        for resume in (False, True)
    )
    for expected, found in zip(straight, again, strict=True):
        assert found["went_on"] and torch.equal(found["weights"], expected["weights"])
        assert found["left"] == expected["left"] == [False] * LAYERS and not found["residuals_dropped"]


def refused_groups() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas, shards = mesh.get_group("replicate"), mesh.get_group("shard")
    others = [dist.new_group([rank]) for rank in range(4)][(dist.get_rank() + 1) % 4]
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]

    def in_backward(mesh: Any, group: dist.ProcessGroup) -> None:
        model = nn.Linear(8, 8)
        fully_shard(model, mesh=mesh)
        model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        model.set_all_reduce_hook(fap.FlashAllReduce(group, EIGHT))  # type: ignore[operator]
        model(torch.ones(2, 8)).sum().backward()

    cases: dict[str, Callable[[], Any]] = {
        "no group": lambda: fap.FlashAllReduce(None),  # type: ignore[arg-type]
        "a mesh": lambda: fap.FlashAllReduce(mesh["replicate"]),
        "others": lambda: fap.FlashAllReduce(others),
        "a dict": lambda: fap.FlashAllReduce(replicas, {"bits": 8}),  # type: ignore[arg-type]
        "a key": lambda: fap.FlashAllReduce(replicas, fap.FlashConfig(param_bits=4)),
        "by hand": lambda: fap.FlashAllReduce(replicas)(torch.zeros(4)),
        "shards": lambda: in_backward(mesh["shard"], shards),
        "crossed": lambda: in_backward(mesh["shard"], crossed),
        "torch's own": lambda: in_backward(mesh, replicas),
    }
    messages = {}
    for name, case in cases.items():
        with pytest.raises((TypeError, ValueError, fap.PatchError)) as refused:
            case()
        messages[name] = f"{refused.type.__name__}: {refused.value}"
    return messages


def test_other_groups_than_the_replicas_are_refused(ranks: Callable[[int], Ranks]) -> None:
    expected = 'expected the ProcessGroup of the replicas, for example mesh["replicate"].get_group().'
    for rank, messages in enumerate(ranks(4).run(refused_groups)):
        assert messages["no group"] == f"TypeError: group is NoneType; {expected}"
        assert messages["a mesh"] == f"TypeError: group is DeviceMesh; {expected}"
        assert messages["others"] == "ValueError: this rank is not a member of the group."
        assert messages["a dict"].startswith("TypeError: config is dict; expected FlashConfig or None")
        assert messages["a key"].startswith("ConfigError: param_bits=4 has no effect in FlashAllReduce, ")
        assert messages["by hand"].startswith("PatchError: FlashAllReduce was not called by foreach_reduce of FSDP2 ")
        both = [0, 1] if rank < 2 else [2, 3]
        assert messages["shards"] == (
            f"ValueError: the group of FlashAllReduce has ranks {both} of one group of shards; expected this rank "
            "alone, and those of other groups that have the same shard."
        )
        assert messages["crossed"] == (
            f"ValueError: the ranks {[0, 3] if rank in (0, 3) else [1, 2]} of FlashAllReduce's group hold the shards "
            f"{[0, 1] if rank in (0, 3) else [1, 0]}; expected ranks of one shard, for example "
            'mesh["replicate"].get_group().'
        )
        assert messages["torch's own"] == (
            "ValueError: FlashAllReduce is the hook of a module whose replicas torch reduces itself; shard it over one "
            'dimension of the mesh: fully_shard(module, mesh=mesh["shard"]).'
        )


@pytest.mark.parametrize("made", [fap.FlashReduceScatter, fap.FlashAllGather])
@pytest.mark.parametrize(
    ("key", "value"),
    [("include", ["a"]), ("exclude", ["a"]), ("warmup_steps", 1), ("expert_bits", 8), ("param_backward_bits", 8)],
)
def test_a_key_without_effect_is_refused(made: Any, key: str, value: Any) -> None:
    with pytest.raises(fap.ConfigError, match=rf"^{key}=.* has no effect in {made.__name__}, .*; leave it out\.$"):
        made(fap.FlashConfig(**{key: value}))
    assert made(fap.FlashConfig(preset="int4")).config == fap.FlashConfig(preset="int4", param_bits="full")


def test_a_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="config is dict; expected FlashConfig or None"):
        fap.FlashReduceScatter({"bits": 8})  # type: ignore[arg-type]


SMALL = 4 * WIDTH + 1  # bytes: more than a norm's weight has, less than a module


def beside_tensor_parallelism(
    plan: str, unseen: bool, options: dict[str, Any], sizes: tuple[int, int] = (1, 2), steps: int = STEPS
) -> dict[str, Any]:
    """Train replicas x shards of these sizes x tensor parallel 2. Return the difference of copies between
    tensor-parallel ranks after some steps.
    """
    fap.reset_stats()
    mesh = init_device_mesh("cpu", (*sizes, 2), mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(7)
    model = nn.Sequential(Block(), nn.LayerNorm(WIDTH), Block())
    if large := plan == "large":
        for block in (model[0], model[2]):
            block.norm = nn.Sequential(block.norm, nn.Linear(WIDTH, WIDTH))
    config = fap.FlashConfig(**{"bits": 4, "min_bytes": SMALL, **options})
    for block in (model[0], model[2]):
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if plan == "norm a DTensor":
            distribute_module(
                block.norm,
                mesh["tp"],
                input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
                output_fn=lambda _, output, mesh: output.to_local(),
            )
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(fap.FlashReduceScatter(config))
            if sizes[0] > 1:
                module.set_all_reduce_hook(fap.FlashAllReduce(mesh.get_group("replicate"), config))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        if unseen:
            patch.setattr(replicated_params, "among", lambda shardings, _config: [False] * len(shardings))
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank() // 2)
            x = torch.randn(16, WIDTH, generator=generator)
            optimizer.zero_grad()
            if step == 3 and not large:  # without gradients of the norm and the bias at the end
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
        assert site["quantized"] == 3 * STEPS and site["full_precision"] == {replicated_params.REASON: 2 * STEPS}
        assert site["bytes_sent"] < 0.3 * site["bytes_full_precision"]


@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{"error_feedback": True}, {"rounding": "stochastic", "min_bytes": 0}], ids=str)
@pytest.mark.parametrize(("sizes", "name"), [((1, 2), "gradients"), ((2, 1), "replicas")])
def test_copies_are_the_same_after_many_steps_and_the_large_ones_are_quantized(
    ranks: Callable[[int], Ranks], sizes: tuple[int, int], name: str, options: dict[str, Any], steps: int
) -> None:
    for outcome in ranks(4).run(beside_tensor_parallelism, "large", False, options, sizes, steps):
        assert outcome["apart"] == 0
        site = outcome["sites"][f"fsdp.{name}"]
        assert site["quantized"] > 3 * steps, "copies in calls of their own"
        assert site["bytes_sent"] < 0.2 * site["bytes_full_precision"], "the copies alone would be more than a third"


@pytest.mark.parametrize(("sizes", "sites"), [((2, 1), ["replicas"]), ((2, 2), ["gradients", "replicas"])])
def test_copies_stay_the_same_on_replicas(
    ranks: Callable[[int], Ranks], sizes: tuple[int, int], sites: list[str]
) -> None:
    world = 2 * sizes[0] * sizes[1]
    for outcome in ranks(world).run(beside_tensor_parallelism, "norm a plain tensor", False, {}, sizes):
        assert outcome["apart"] == 0
        assert sorted(outcome["sites"]) == [f"fsdp.{name}" for name in sites]
        for site in outcome["sites"].values():  # the replicas' shard of the norm alone may be below SMALL
            assert site["quantized"] >= 2 * STEPS and site["full_precision"][replicated_params.REASON] == 2 * STEPS


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_they_would_drift_apart(ranks: Callable[[int], Ranks], sizes: tuple[int, int]) -> None:
    for outcome in ranks(4).run(beside_tensor_parallelism, "norm a plain tensor", True, {}, sizes):
        assert outcome["apart"] > 1e-4


def widths_that_are_chosen() -> str:
    with pytest.raises(fap.ConfigError) as refused:
        beside_tensor_parallelism("norm a plain tensor", False, {"target_sqnr_db": 20.0, "quality_interval": 2})
    return str(refused.value)


def test_widths_that_each_group_chooses_are_refused_with_tensor_parallelism(ranks: Callable[[int], Ranks]) -> None:
    assert set(ranks(4).run(widths_that_are_chosen)) == {replicated_params.ADAPTIVE}


def called_by_hand() -> str:
    whole = torch.zeros(dist.get_world_size() * 4)
    with pytest.raises(fap.PatchError) as refused:
        fap.FlashReduceScatter(EIGHT)(torch.zeros(4), whole, dist.group.WORLD, dist.ReduceOp.SUM)  # type: ignore[arg-type]
    return str(refused.value)


def test_another_caller_than_fsdp_is_refused(ranks: Callable[[int], Ranks]) -> None:
    assert all("foreach_reduce" in message for message in ranks(2).run(called_by_hand))
