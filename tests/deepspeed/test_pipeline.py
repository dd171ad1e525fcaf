"""Sends between the stages of a PipelineModule: DeepSpeed's own schedule trains over two and four stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_training import configuration, deepspeed
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.deepspeed import pipeline
from tests.codecs import same_bits
from tests.distributed import Pool, Ranks, run_ranks

FORWARD, BACKWARD = pipeline.FORWARD.name, pipeline.BACKWARD.name
INT8 = {"pipeline_bits": 8, "pipeline_backward_bits": 8, "group_size": 32, "min_bytes": 0}
STEPS, MICRO_BATCHES, WIDTH = 3, 4, 64


@pytest.fixture(scope="module")
def pipelines() -> Iterator[Callable[[int], Ranks]]:
    """Ranks of their own: a pipeline leaves its groups behind in DeepSpeed, and no other engine can be built."""
    pool = Pool()
    yield pool
    pool.close()


class Block(nn.Module):
    """Passes on what a tuple has beside its first tensor: token numbers, and a mask."""

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
    """Makes a tuple of the input."""

    def __init__(self, mask: torch.dtype) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> Any:
        return x * torch.ones(1, requires_grad=True), torch.arange(8), (torch.arange(8) % 3 > 0).to(self.mask)


def loss_of(given: Any, target: torch.Tensor) -> torch.Tensor:
    output = given if isinstance(given, torch.Tensor) else given[0]
    return (output - target).float().square().mean()


def train(flash: dict[str, Any] | None, mask: torch.dtype | None, steps: int = STEPS) -> dict[str, Any]:
    """mask: of tuples; None: single tensors."""
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


def crossings(rank: int, stages: int) -> tuple[int, int]:
    """Activations, of training and of the evaluation, and gradients that a rank sends or receives of one tensor."""
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
        assert back[rank][FORWARD] == (0, {policy.PIPELINE_FULL: forward}) and back[rank][BACKWARD] == (backward, {})
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
