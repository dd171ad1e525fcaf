"""cli/bench/check.py in one process: every element is checked once, and the allowed error is exactly the codec's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.bench import check as bench_check
from flash_allreduce_plugin.cli.bench.check import Groups, Inputs, Segment
from flash_allreduce_plugin.codec.format import Draw
from flash_allreduce_plugin.policy import Collective, Plan, Site, make_plan
from tests import simulation
from tests.distributed import Ranks

WORLD = 3
OPTIONS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 4, "gather_bits": 6, "group_size": 32},
    {"bits": 3, "symmetric": True, "range": "mse"},
    {"bits": 4, "range": "mse", "group_size": 512},
    {"bits": 4, "compact": True, "range": "mse", "group_size": 64},
    {"bits": 5, "compact": True},
    {"bits": 2, "spike_reserving": True, "group_size": 64},
    {"bits": 4, "hadamard": True},
    {"bits": 3, "rounding": "stochastic", "hadamard": True},
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_check, "PIECE", 1024)


def results(inputs: Inputs, plan: Plan) -> list[Tensor]:
    """Return the result of every rank, by the codec in plain PyTorch."""
    tensors = [inputs.tensor(rank) for rank in range(WORLD)]
    draws = [Draw(rank + 1) for rank in range(WORLD)]
    if inputs.collective == "all_reduce":
        return [simulation.all_reduce(tensors, 1.0, plan.reduce, plan.gather)] * WORLD
    if inputs.collective == "all_gather":
        payloads = [simulation.encoded(x, plan.gather, draw) for x, draw in zip(tensors, draws, strict=True)]
        return [torch.cat([simulation.decoded(p, tensors[0], plan.gather) for p in payloads])] * WORLD
    shards = [x.view(WORLD, -1) for x in tensors]
    if inputs.collective == "all_to_all":
        sent = [
            [simulation.encoded(run, plan.gather, draw) for run in s] for s, draw in zip(shards, draws, strict=True)
        ]
        like = shards[0][0]
        return [torch.cat([simulation.decoded(s[r], like, plan.gather) for s in sent]) for r in range(WORLD)]
    return [simulation.reduce_shard([s[rank] for s in shards], 1.0, plan.reduce) for rank in range(WORLD)]


def wrong(inputs: Inputs, found: list[Tensor], plan: Plan) -> int:
    def travel(groups: Sequence[Groups]) -> Groups:
        return bench_check.two_step(groups, inputs.collective, plan)

    size = plan.reduce.group_size
    return sum(
        bench_check.compare(result, inputs, bench_check.segments(inputs, rank), size, travel)[0]
        for rank, result in enumerate(found)
    )


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_codec_keeps_within_and_little_more_is_wrong(collective: Collective, options: dict[str, Any]) -> None:
    inputs = Inputs(collective, 5003, torch.bfloat16 if options["bits"] == 4 else torch.float32, WORLD)
    config = fap.FlashConfig(min_bytes=0, **options)
    plan = make_plan(
        collective,
        numel=10**5,
        dtype=inputs.dtype,
        world_size=WORLD,
        op="sum",
        site=Site("test"),
        config=config,
    )
    assert isinstance(plan, Plan)
    found = results(inputs, plan)
    assert wrong(inputs, found, plan) == 0
    places = [2, 1023, 1024, 5002]
    worst = float((found[0].float() - exact_of(inputs, 0)).abs().max())
    if plan.reduce.hadamard:  # at worst the errors of a whole rotated group meet in one element
        worst *= plan.reduce.group_size**0.5
    each = collective in ("reduce_scatter", "all_to_all")  # ranks have different results
    for result in {id(result): result for result in found}.values():
        result[places] += 4 * worst + 0.01 * float(result.float().abs().max())
    assert wrong(inputs, found, plan) == len(places) * (WORLD if each else 1)


def exact_of(inputs: Inputs, rank: int) -> Tensor:
    tensors = [inputs.tensor(source).float() for source in range(WORLD)]
    if inputs.collective == "all_gather":
        return torch.cat(tensors)
    if inputs.collective == "all_to_all":
        return torch.cat([x.view(WORLD, -1)[rank] for x in tensors])
    total = torch.stack(tensors).sum(0)
    return total if inputs.collective == "all_reduce" else total.view(WORLD, -1)[rank]


@pytest.mark.parametrize("numel", [1, 1024, 5003])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_every_element_is_looked_at_once(collective: Collective, numel: int) -> None:
    inputs = Inputs(collective, numel, torch.float32, WORLD)
    for whole in (False, True):
        numbers = Inputs(collective, numel, torch.float32, WORLD, whole)
        signal = 0.0
        for rank in range(WORLD):
            parts = bench_check.segments(numbers, rank)
            found = bench_check.compare(exact_of(numbers, rank), numbers, parts, 128, None)
            assert found[0] == 0 or not whole
            signal += found[1]
        every = range(WORLD) if collective in ("reduce_scatter", "all_to_all") else [0]
        assert signal == pytest.approx(sum(float(exact_of(numbers, rank).double().square().sum()) for rank in every))
    assert not torch.equal(inputs.tensor(0), inputs.tensor(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_numbers_add_up_exactly(dtype: torch.dtype) -> None:
    tensors = [Inputs("all_reduce", 4000, dtype, 8, whole=True).tensor(rank) for rank in range(8)]
    total = tensors[0].clone()
    for x in tensors[1:]:
        total += x
    assert torch.equal(total.double(), torch.stack(tensors).double().sum(0)) and total.unique().numel() > 20


def test_in_full_precision_the_least_difference_is_wrong() -> None:
    inputs = Inputs("all_reduce", 2000, torch.float32, WORLD, whole=True)
    result = exact_of(inputs, 0)
    result[1500] += 1e-6 * max(1.0, abs(float(result[1500])))
    result[3] = float("nan")
    found = [bench_check.compare(result, inputs, bench_check.segments(inputs, r), 128, None)[0] for r in range(WORLD)]
    assert sum(found) == 2


def test_two_levels_are_allowed_three_roundings() -> None:
    config = fap.FlashConfig(hierarchical={"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}, min_bytes=0)
    plan = make_plan(
        "all_reduce",
        numel=128,
        dtype=torch.float32,
        world_size=3,
        op="sum",
        site=Site("test"),
        config=config,
        nodes=((0, 1), (2,)),
    )
    assert isinstance(plan, Plan)
    x = torch.linspace(0, 255, 128).double().view(1, -1)
    found = bench_check.two_step([Groups(x, torch.zeros(1))] * 3, "all_reduce", plan)
    inside, between = 3 * 0.5, 0.5 * (510 + 255) / 15
    after = 0.5 * (765 + 2 * (inside + between)) / 15  # the value rounded last may lie outside of the exact range
    assert float(found.error) == pytest.approx(inside + between + after, rel=0.02)


def differ() -> list[int]:
    """Return this rank's counts of a tensor that is equal on all ranks, and of two that differ on rank 1."""
    found = []
    for places in ([], [3], [0, 1 << 20, (2 << 20) - 1]):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.arange(2 << 20).remainder(100).to(dtype)
            if dist.get_rank() == 1:
                x[places] += 1
            found.append(bench_check.differing(x))
    x = torch.zeros(10)
    if dist.get_rank() == 1:
        x.neg_()  # equal values in other bits
    return [*found, bench_check.differing(x)]


def test_other_bits_than_rank_0_are_counted(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(differ) == [[0] * 7, [0, 0, 1, 1, 3, 3, 10]]


def test_a_segment_is_of_whole_groups() -> None:
    inputs = Inputs("all_gather", 3000, torch.float32, WORLD)
    assert list(bench_check.segments(inputs, 2)) == [
        Segment(3000 * part + 2048, 0, 2, 0, 952, (part,)) for part in range(WORLD)
    ]
