"""The communication hook in real DistributedDataParallel training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import replicated_params
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
    small = ranks(world).run(train, fap.FlashConfig(min_bytes=1 << 30))
    eight = ranks(world).run(train, fap.FlashConfig(bits=8, min_bytes=0))
    for rank in range(world):
        assert torch.equal(full[rank]["weights"], plain[rank]["weights"]), "full precision is DDP's own, bit for bit"
        assert torch.equal(small[rank]["weights"], plain[rank]["weights"])
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
    """Train an embedding of 512 rows and a projection. A rank's batch touches 9 rows. Count gradients after a step."""
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


@pytest.mark.parametrize(
    ("key", "value"), [("include", ["a"]), ("exclude", ["a"]), ("grad_bits", 4), ("param_backward_bits", 8)]
)
def test_a_key_without_effect_is_refused(key: str, value: Any) -> None:
    with pytest.raises(fap.ConfigError, match=rf"^{key}=.* has no effect in ddp_hook, where .*; leave it out\.$"):
        fap.ddp_hook(fap.FlashConfig(**{key: value}))


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_GRAD_BITS", "4")  # Megatron's, in the same job
    assert fap.ddp_hook().reduction.config.grad_bits == 4
    monkeypatch.setenv("FLASH_ALLREDUCE_EXCLUDE", "*.norm")
    with pytest.raises(fap.ConfigError, match=r"^FLASH_ALLREDUCE_EXCLUDE=\['\*\.norm'\] has no effect in ddp_hook"):
        fap.ddp_hook()


def test_buckets_in_flight_find_a_width_together(ranks: Callable[[int], Ranks]) -> None:
    config = fap.FlashConfig(bits=2, min_bytes=0, target_sqnr_db=20.0, quality_interval=2)
    outcomes = ranks(3).run(train, config)
    assert {outcome["sites"]["ddp.gradients"]["bits"] for outcome in outcomes} <= {5, 6}
    assert len({outcome["sites"]["ddp.gradients"]["bits"] for outcome in outcomes}) == 1
    assert all(torch.equal(outcome["weights"], outcomes[0]["weights"]) for outcome in outcomes)


def uneven(hook: bool, by_initial: bool) -> dict[str, Any]:
    """Train on uneven inputs: rank 0 runs out of data after two steps, rank 1 after four, rank 2 after six."""
    model, _ = model_and_batch()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    if hook:
        ddp.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8, min_bytes=0)))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(2 + 2 * dist.get_rank()):
            _, x = model_and_batch(step)
            optimizer.zero_grad()
            (ddp(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
    fap.reset_stats()
    return {"moved": torch.cat([p.detach().flatten() for p in model.parameters()]) - before}


@pytest.mark.parametrize("by_initial", [True, False])
def test_uneven_inputs_are_divided_as_join_is_configured(ranks: Callable[[int], Ranks], by_initial: bool) -> None:
    plain, eight = (ranks(3).run(uneven, hook, by_initial) for hook in (False, True))
    other = ranks(3).run(uneven, False, not by_initial)
    for rank in range(3):
        moved = plain[rank]["moved"]
        assert torch.equal(eight[rank]["moved"], eight[0]["moved"])
        assert not torch.equal(eight[rank]["moved"], moved)
        assert float((eight[rank]["moved"] - moved).norm() / moved.norm()) < 0.02
        assert float((other[rank]["moved"] - moved).norm() / moved.norm()) > 0.1, "it makes no difference here"


class Block(nn.Module):
    """Column, row, and a layer norm between: its weights, and the row-parallel bias, are copies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


class Split(nn.Module):
    """The same by hand: this rank's half of the columns, and of the rows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        torch.manual_seed(1 + group.rank())
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.down(self.up(Enters.apply(self.norm(x), self.group)).tanh())
        return x + Leaves.apply(inside, self.group) + self.bias  # type: ignore[no-any-return, no-untyped-call]


class Enters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def unwrapped(hook: Any) -> Any:
    return hook


SMALL = 4 * WIDTH + 1  # bytes: more than a norm's weight has, less than a bucket


def beside_tensor_parallelism(
    told: bool, options: dict[str, Any], wrapper: Any = unwrapped, steps: int = STEPS
) -> dict[str, Any]:
    """Train data parallel 2 x tensor parallel 2, by hand; return if copies are equal, and their difference."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, tensor = mesh.get_group("dp"), mesh.get_group("tp")
    torch.manual_seed(1)
    first, blocks = nn.Linear(WIDTH, WIDTH), [Split(tensor) for _ in range(2)]
    model = nn.Sequential(first, *blocks)
    same = [*first.parameters(), *(p for block in blocks for p in (*block.norm.parameters(), block.bias))]
    ddp = DistributedDataParallel(model, process_group=data, bucket_cap_mb=0.05)
    config = fap.FlashConfig(**{"bits": 4, "min_bytes": SMALL, **options})
    ddp.register_comm_hook(data, wrapper(fap.ddp_hook(config, replicated=same if told else ())))
    return {"apart": train_on(ddp, same, mesh, steps), **fap.stats()}


def train_on(model: nn.Module, same: list[nn.Parameter], mesh: DeviceMesh, steps: int = STEPS) -> float:
    """Train some steps and return the difference between tensor-parallel ranks of parameters that should be equal."""
    fap.reset_stats()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + mesh.get_local_rank("dp"))
        x = torch.randn(16, WIDTH, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    mine = torch.cat([p.detach().flatten() for p in same])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=mesh.get_group("tp"))
    return float((both[0] - both[1]).abs().max())


# Elements of the model: the first layer, and the split and the copied parameters of a block.
ELEMENTS = WIDTH * WIDTH + WIDTH + 2 * (2 * WIDTH * WIDTH + 4 * WIDTH)


@pytest.mark.parametrize(
    "options", [{}, {"error_feedback": True}, {"min_sqnr_db": 22.0, "quality_interval": 2}], ids=str
)
def test_copies_on_tensor_parallel_ranks_stay_the_same(ranks: Callable[[int], Ranks], options: dict[str, Any]) -> None:
    for outcome in ranks(4).run(beside_tensor_parallelism, True, options):
        assert outcome["apart"] == 0
        site = outcome["sites"]["ddp.gradients"]
        assert site["quantized"] > 0 and site["full_precision"][replicated_params.REASON] > 0
        assert site["bytes_full_precision"] == STEPS * 4 * ELEMENTS


@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{"error_feedback": True}, {"rounding": "stochastic", "min_bytes": 0}], ids=str)
def test_copies_are_the_same_after_many_steps_and_the_large_ones_are_quantized(
    ranks: Callable[[int], Ranks], options: dict[str, Any], steps: int
) -> None:
    for outcome in ranks(4).run(beside_tensor_parallelism, True, options, unwrapped, steps):
        assert outcome["apart"] == 0
        site = outcome["sites"]["ddp.gradients"]
        assert (replicated_params.REASON in site["full_precision"]) is ("min_bytes" not in options)
        assert site["bytes_full_precision"] == steps * 4 * ELEMENTS
        assert site["bytes_sent"] < 0.2 * site["bytes_full_precision"], "the first layer alone would be a fifth"


def test_unnamed_copies_drift_apart(ranks: Callable[[int], Ranks]) -> None:
    assert all(outcome["apart"] > 1e-4 for outcome in ranks(4).run(beside_tensor_parallelism, False, {}))


def as_dtensors(options: dict[str, Any], wrapper: Any = unwrapped, bucket_cap_mb: float = 0.05) -> dict[str, Any]:
    """Train the same with torch's own tensor parallelism: split weights are DTensors, layer norms too or not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    model = nn.Sequential(Block(), Block())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
    _pre_dp_module_transform(model)
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("dp"), bucket_cap_mb=bucket_cap_mb)
    ddp.register_comm_hook(None, wrapper(fap.ddp_hook(fap.FlashConfig(bits=4, min_bytes=SMALL, **options))))
    same = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("down.bias")]
    return {"apart": train_on(ddp, same, mesh), **fap.stats()}


def test_dtensors_tell_copies_from_shards(ranks: Callable[[int], Ranks]) -> None:
    for outcome in ranks(4).run(as_dtensors, {}):
        assert outcome["apart"] == 0
        assert outcome["sites"]["ddp.gradients"]["full_precision"][replicated_params.REASON] > 0


def test_a_bucket_of_copies_alone_is_reduced_as_where_it_has_neighbours(ranks: Callable[[int], Ranks]) -> None:
    """Check that a copy does not depend on the buckets, which may differ on another tensor-parallel rank."""
    for outcome in ranks(4).run(as_dtensors, {}, unwrapped, 0.0008):  # a norm and the bias before it, 1,152 bytes
        assert outcome["apart"] == 0
        counted = outcome["sites"]["ddp.gradients"]["full_precision"][replicated_params.REASON]
        assert counted > 2 * STEPS, "two buckets have a split parameter beside copies, the third has none"


def widths_that_are_chosen() -> str:
    with pytest.raises(fap.ConfigError) as refused:
        as_dtensors({"target_sqnr_db": 20.0, "quality_interval": 2})
    return str(refused.value)


def test_widths_that_each_group_chooses_are_refused_with_dtensors(ranks: Callable[[int], Ranks]) -> None:
    assert set(ranks(4).run(widths_that_are_chosen)) == {replicated_params.ADAPTIVE}


class Words(nn.Module):
    """An embedding with a sparse gradient, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.EmbeddingBag(50, 32, sparse=True), nn.Linear(32, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.embedding(words))
        return out


def sparse_gradients(config: fap.FlashConfig | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    fap.reset_stats()
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Words())
    if config is not None:
        ddp.register_comm_hook(None, fap.ddp_hook(config))
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        ddp(torch.randint(0, 50, (4, 3))).square().sum().backward()
    gradients = [parameter.grad for parameter in ddp.parameters()]
    assert gradients[0] is not None and gradients[0].is_sparse
    return [gradient.to_dense() for gradient in gradients if gradient is not None], fap.stats()["sites"]


@pytest.mark.parametrize("options", [{}, {"error_feedback": True}, {"enabled": False}], ids=str)
def test_sparse_gradients_are_reduced_as_without_a_hook(ranks: Callable[[int], Ranks], options: dict[str, Any]) -> None:
    config = fap.FlashConfig(bits=8, min_bytes=0, **options)
    plain = ranks(3).run(sparse_gradients, None)
    for (own, _), (gradients, sites) in zip(plain, ranks(3).run(sparse_gradients, config), strict=True):
        assert torch.equal(gradients[0], own[0])
        assert torch.equal(gradients[1], own[1]) is not config.enabled
        counts = sites["ddp.gradients"]
        assert counts["full_precision"].pop("sparse gradient") == 2
        assert counts["quantized"] == (2 if config.enabled else 0)


def in_a_group_of_its_own() -> torch.Tensor:
    """Train two models, each on two of four ranks. The hook is not told which ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, x = model_and_batch()
    ddp = DistributedDataParallel(model, process_group=groups[dist.get_rank() // 2])
    ddp.register_comm_hook(None, fap.ddp_hook(fap.FlashConfig(bits=8, min_bytes=0)))
    ddp(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_group_is_the_models(ranks: Callable[[int], Ranks]) -> None:
    one, two, three, four = ranks(4).run(in_a_group_of_its_own)
    assert torch.equal(one, two) and torch.equal(three, four) and not torch.equal(one, three)


def of_another_model() -> str:
    model, _ = model_and_batch()
    ddp = DistributedDataParallel(model)
    hook = fap.ddp_hook(fap.FlashConfig(bits=8), replicated=nn.LayerNorm(5).parameters())
    with pytest.raises(ValueError) as refused:
        ddp.register_comm_hook(None, hook)
    return str(refused.value)


def test_copies_that_the_model_does_not_have_are_refused(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2).run(of_another_model):
        assert message == "replicated has parameters of shapes [(5,), (5,)], of which the model reduces no gradient."
    with pytest.raises(TypeError, match="replicated holds str; expected parameters of the model"):
        fap.ddp_hook(replicated=["norm.weight"])  # type: ignore[list-item]


def test_a_tensor_of_fsdp1_is_sent_to_its_own_hook() -> None:
    for given in ([torch.zeros(4)], [torch.zeros(4), torch.zeros(2)]):  # without shards, and with them
        with pytest.raises(TypeError, match=r"called with a Tensor; .* fap\.fsdp1_hook"):
            fap.ddp_hook(fap.FlashConfig(bits=8))(None, *given)  # type: ignore[arg-type]
