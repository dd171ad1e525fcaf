"""Sends between the stages of a PipelineModule: DeepSpeed's own schedule trains over two and four stages."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import NEWEST, configuration, deepspeed
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.integrations.deepspeed import pipeline
from tests.codecs import same_bits
from tests.distributed import Pool, Ranks, run_ranks

FORWARD, BACKWARD = pipeline.FORWARD.name, pipeline.BACKWARD.name
INT8 = {"pipeline_bits": 8, "pipeline_backward_bits": 8, "group_size": 32, "min_bytes": 0}
STEPS, MICRO_BATCHES, WIDTH = 3, 4, 64


@pytest.fixture(scope="module")
def pipelines() -> Iterator[Callable[[int], Ranks]]:
    """Run in separate ranks: a pipeline leaves its groups behind in DeepSpeed, and no other engine can be built."""
    pool = Pool()
    yield pool
    pool.close()


class Block(nn.Module):
    """A block that passes on the other tensors of a tuple unchanged: token numbers, and a mask."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return given + torch.tanh(self.linear(given))
        x, *others = given
        mask = others[-1]
        assert others[0].dtype == torch.int64 and (others[0] == torch.arange(8)).all()
        assert mask.dtype in (torch.bool, torch.int64)
        moved = torch.tanh(self.linear(x)).masked_fill(~mask.bool()[:, None], 0.0)
        return (x + moved, *others)


class First(nn.Module):
    """Return a tuple with the input as its first tensor."""

    def __init__(self, mask: torch.dtype) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> Any:
        return x * torch.ones(1, requires_grad=True), torch.arange(8), (torch.arange(8) % 3 > 0).to(self.mask)


def loss_of(given: Any, target: torch.Tensor) -> torch.Tensor:
    output = given if isinstance(given, torch.Tensor) else given[0]
    return (output - target).float().square().mean()


def train(flash: dict[str, Any] | None, mask: torch.dtype | None, steps: int = STEPS) -> dict[str, Any]:
    """Train; mask: of tuples; None: single tensors."""
    package = deepspeed()
    from deepspeed.pipe import PipelineModule

    package.init_distributed("gloo")
    fap.reset_stats()
    layers: list[Any] = [*([] if mask is None else [First(mask)]), *(Block(number) for number in range(4))]
    stages = dist.get_world_size()
    net = PipelineModule(layers=layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    options = {"gradient_accumulation_steps": MICRO_BATCHES}
    built, *_ = package.initialize(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=configuration(options, flash)
    )
    if mask is torch.bool:
        built.has_bool_tensors = True
    losses = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        inputs = [torch.randn(8, WIDTH, generator=generator) for _ in range(MICRO_BATCHES)]
        losses.append(float(built.train_batch(iter([(x, x.flip(1)) for x in inputs]))))
    losses.append(float(built.eval_batch(iter([(x, x.flip(1)) for x in inputs]))))
    sites = {name: one for name, one in fap.stats()["sites"].items() if "pipeline" in name}
    weights = torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()]) if list(net.parameters()) else None
    report = fap.deepspeed.report()
    fap.deepspeed.disable()
    return {
        **{"losses": losses, "weights": weights, "report": report},
        **{name: (one["quantized"], one["full_precision"]) for name, one in sites.items()},
    }


class Ends(nn.Module):
    """The first and the last layer, with one weight. Its last group in a bucket has other elements too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.weight = nn.Parameter(torch.randn(WIDTH * WIDTH + 40) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix, more = self.weight.split([WIDTH * WIDTH, 40])
        return torch.nn.functional.linear(x, matrix.view(WIDTH, WIDTH)) + more.square().mean()


def tied(flash: dict[str, Any] | None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train two stages, with data-parallel ranks on different batches if there are more ranks."""
    package = deepspeed()
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    package.init_distributed("gloo")
    fap.reset_stats()
    layers = [TiedLayerSpec("ends", Ends), Block(1), Block(2), Block(3), TiedLayerSpec("ends", Ends)]
    net = PipelineModule(layers=layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    config = configuration({"gradient_accumulation_steps": MICRO_BATCHES, **(options or {})}, flash)
    built, *_ = package.initialize(model=net, optimizer=optimizer, config=config)
    losses = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(10 * number + built.grid.get_data_parallel_rank())
        dtype = next(built.module.parameters()).dtype
        inputs = [torch.randn(8, WIDTH, generator=generator).to(dtype) for _ in range(MICRO_BATCHES)]
        losses.append(float(built.train_batch(iter([(x, x.flip(1)) for x in inputs]))))
    weight = net.tied_modules["ends"].weight.detach().clone()
    sites = {name: (one["quantized"], one["full_precision"]) for name, one in fap.stats()["sites"].items()}
    report = fap.deepspeed.report()
    fap.deepspeed.disable()
    return {"losses": losses, "weight": weight, "sites": sites, "report": report}


@pytest.mark.parametrize("world", [2, 4])
def test_tied_weights_stay_the_same_bits_on_all_stages(pipelines: Callable[[int], Ranks], world: int) -> None:
    """Check tied weights: in data-parallel buckets their neighbours are other parameters on each stage."""
    plain = pipelines(world).run(tied, None)
    for flash in ({"bits": 8}, {"bits": 4, "error_feedback": True}, {"bits": 3, "hadamard": True, "codebook": True}):
        seen = pipelines(world).run(tied, {**flash, "group_size": 128, "min_bytes": 0})
        for rank in seen:
            assert rank["sites"][pipeline.TIED.name] == (STEPS, {})
            assert rank["report"][pipeline.TIED.name]["in_place"]
            assert same_bits(rank["weight"], seen[0]["weight"]) and not same_bits(rank["weight"], plain[0]["weight"])
            assert rank["losses"] == pytest.approx(plain[0]["losses"], rel=0.1)
            if world > 2:
                assert rank["sites"]["deepspeed.stage0.gradients"][0] > 0
    full = pipelines(world).run(tied, {"bits": 8, "min_bytes": 1 << 20})
    for rank, theirs in zip(full, plain, strict=True):
        assert rank["sites"][pipeline.TIED.name] == (0, {policy.SMALL: STEPS})
        assert rank["losses"] == theirs["losses"] and same_bits(rank["weight"], theirs["weight"])


def test_tied_weights_that_are_gathered_stay_the_same_bits(pipelines: Callable[[int], Ranks]) -> None:
    """Check stage 1 in bf16: the differences of a weight have other neighbours on each stage too."""
    options = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    seen = pipelines(4).run(tied, {"bits": 8, "param_bits": 4, "min_bytes": 0}, options)
    for rank in seen:
        assert rank["sites"][pipeline.TIED.name] == (STEPS, {})
        assert rank["sites"]["deepspeed.stage1.parameters"][0] > 0
        assert same_bits(rank["weight"], seen[0]["weight"])


def crossings(rank: int, stages: int) -> tuple[int, int]:
    """Count the messages of one tensor at a rank: activations, of training and of the evaluation, and gradients."""
    borders = (rank > 0) + (rank < stages - 1)
    return borders * (STEPS + 1) * MICRO_BATCHES, borders * STEPS * MICRO_BATCHES


@pytest.mark.parametrize("world", [2, 4])
def test_training_in_8_bits_stays_near_and_full_precision_is_deepspeeds(
    pipelines: Callable[[int], Ranks], world: int
) -> None:
    widths = ({}, {"pipeline_bits": "full"}, {"min_bytes": 1 << 20}, {"warmup_steps": 2})
    plain, eight, back, small, warm = (
        pipelines(world).run(train, flash, None) for flash in (None, *({**INT8, **one} for one in widths))
    )
    for rank in range(world):
        forward, backward = crossings(rank, world)
        assert FORWARD not in plain[rank]
        assert eight[rank][FORWARD] == (forward, {}) and eight[rank][BACKWARD] == (backward, {})
        assert eight[rank]["report"][FORWARD]["in_place"] and eight[rank]["report"][BACKWARD]["in_place"]
        assert eight[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=5e-3)
        assert not torch.equal(eight[rank]["weights"], plain[rank]["weights"])
        assert back[rank][FORWARD] == (0, {policy.is_full("pipeline_bits"): forward}) and back[rank][BACKWARD] == (
            backward,
            {},
        )
        assert small[rank][FORWARD] == (0, {policy.SMALL: forward})
        assert small[rank][BACKWARD] == (0, {policy.SMALL: backward})
        assert small[rank]["losses"] == plain[rank]["losses"]
        assert same_bits(small[rank]["weights"], plain[rank]["weights"])
        assert warm[rank][BACKWARD] == (backward // STEPS, {policy.WARM_UP: 2 * backward // STEPS})


@pytest.mark.parametrize("mask", [torch.int64, torch.bool])
def test_tuples_with_numbers_and_masks(pipelines: Callable[[int], Ranks], mask: torch.dtype) -> None:
    plain, eight = (pipelines(2).run(train, flash, mask) for flash in (None, INT8))
    for rank in range(2):
        forward, backward = crossings(rank, 2)
        whole = (
            {"dtype int64": 2 * forward} if mask is torch.int64 else {"dtype int64": forward, pipeline.MASK: forward}
        )
        assert eight[rank][FORWARD] == (forward, whole)
        assert eight[rank][BACKWARD] == (backward, {})
        assert eight[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=5e-3)
        assert eight[rank]["losses"] != plain[rank]["losses"]


def noticed() -> tuple[list[str], int]:
    """Return the lines about sites with the default widths, and the bytes of sends that are not ours."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        train({"bits": 8, "min_bytes": 0}, None, steps=4)
    sends = [one["bytes_sent"] for name, one in fap.stats()["beside"].items() if name.startswith("send")]
    return [line for line in text.getvalue().splitlines() if "has quantized" in line], sum(sends)


@NEWEST
def test_sends_in_full_precision_are_named_with_their_fields(pipelines: Callable[[int], Ranks]) -> None:
    (first, others), (second, _) = pipelines(2).run(noticed)
    for line, site, key in zip(first, (FORWARD, BACKWARD), ("pipeline_bits", "pipeline_backward_bits"), strict=True):
        assert line.startswith(f"flash all-reduce: {site} has quantized none of its ")
        assert line.endswith(f'{key} is full (set "{key}" in the section "flash_allreduce")')
    assert second == [] and others <= 4, "a zero, by which PipelineEngine's constructor opens the connections"


def refused(flash: dict[str, Any]) -> str:
    package = deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfigError

    net = nn.Linear(4, 4)
    with pytest.raises(DeepSpeedConfigError) as raised:
        package.initialize(
            model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=configuration({}, flash)
        )
    fap.deepspeed.disable()
    return str(raised.value)


def test_widths_without_a_pipeline_are_refused() -> None:
    for said in run_ranks(2, refused, {"pipeline_bits": 8, "pipeline_backward_bits": 4}):
        assert said.splitlines() == [
            "flash_allreduce.pipeline_bits=8 has no effect: there is no pipeline here; leave it out.",
            "flash_allreduce.pipeline_backward_bits=4 has no effect: there is no pipeline here; leave it out.",
        ]


def different() -> str:
    with pytest.raises(fap.MismatchError) as raised:
        train({**INT8, "pipeline_bits": 7 if dist.get_rank() else 6}, None)
    fap.deepspeed.disable()
    return str(raised.value)


def test_stages_that_differ_are_named() -> None:
    for said in run_ranks(2, different):
        assert "pipeline_bits" in said
