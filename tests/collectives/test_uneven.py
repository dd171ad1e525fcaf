"""reduce_scatter of one tensor a rank: the sums go straight to owners whose parts differ in size.

The oracle is the even collective: what an element becomes depends on its group alone (guarantee 3), so each part,
reduced by a call in which all parts are alike, must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.telemetry import counters
from tests.distributed import Ranks

CONFIG = fap.FlashConfig(bits=4, group_size=32, min_bytes=0, chunk_bytes=4096)
SIZES = {
    2: [(1000, 70_003), (0, 5), (128, 0), (33, 32)],
    3: [(0, 0, 7), (5000, 1, 64), (1, 1, 1)],
    5: [(0, 40_000, 31, 1024, 2)],
}


def parts_of(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def against_the_even_one(sizes: tuple[int, ...], dtype: torch.dtype, op: Any, async_op: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = parts_of(rank, sizes, dtype)
    before = [part.clone() for part in parts]
    output = torch.full((sizes[rank],), 7.0, dtype=dtype)
    work = fap.reduce_scatter(output, parts, op, config=CONFIG, async_op=async_op)
    if work is not None:
        work.wait()
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
    for owner, size in enumerate(sizes):
        shard = torch.empty(size, dtype=dtype)
        fap.reduce_scatter(shard, parts[owner].repeat(world), op, config=CONFIG)
        assert owner != rank or torch.equal(output, shard)


@pytest.mark.parametrize("world", SIZES)
def test_the_bits_are_those_of_the_even_collective(ranks: Callable[[int], Ranks], world: int) -> None:
    for number, sizes in enumerate(SIZES[world]):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        op = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[number % 2]
        ranks(world).run(against_the_even_one, sizes, dtype, op, bool(number % 2))


def counted(sizes: tuple[int, ...], config: fap.FlashConfig) -> dict[str, Any]:
    rank = dist.get_rank()
    counters.reset_stats()
    output = torch.empty(sizes[rank])
    fap.reduce_scatter(output, parts_of(rank, sizes, torch.float32), config=config)
    exact = sum(parts_of(r, sizes, torch.float32)[rank] for r in range(dist.get_world_size()))
    assert isinstance(exact, torch.Tensor)
    return {**counters.stats(), "error": float((output - exact).abs().max()) if len(exact) else 0.0}


def test_bytes_count_what_goes_to_the_others(ranks: Callable[[int], Ranks]) -> None:
    sizes = (100, 3000, 0)
    for rank, stats in enumerate(ranks(3).run(counted, sizes, CONFIG)):
        others = [size for owner, size in enumerate(sizes) if owner != rank]
        assert stats["bytes_full_precision"] == 4 * sum(others)
        assert stats["bytes_sent"] == sum(-(-size // 32) * (4 + 16) for size in others)


def test_full_precision_is_exact_and_the_error_is_measured(ranks: Callable[[int], Ranks]) -> None:
    sizes = (100, 3000, 0)
    for stats in ranks(3).run(counted, sizes, fap.FlashConfig(enabled=False)):
        assert stats["error"] < 1e-5 and stats["quantized"] == 0
    exactly = CONFIG.model_copy(update={"quality_interval": 1, "quality_measure": "exact"})
    measured = ranks(3).run(counted, sizes, exactly)
    assert all(18 < stats["sites"]["reduce_scatter"]["sqnr_db"] < 23 for stats in measured[:2])


def averages(config: fap.FlashConfig) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((4096,), float(rank + 1))
    whole, shard, premul = x.clone(), torch.empty(4096 // world), x.clone()
    fap.all_reduce(whole, dist.ReduceOp.AVG, config=config)
    fap.reduce_scatter(shard, x, dist.ReduceOp.AVG, config=config)
    fap.all_reduce(premul, dist._make_nccl_premul_sum(0.5), config=config)
    assert torch.equal(whole, torch.full_like(whole, (world + 1) / 2))
    assert torch.equal(shard, torch.full_like(shard, (world + 1) / 2))
    assert torch.equal(premul, torch.full_like(premul, world * (world + 1) / 4))


@pytest.mark.parametrize("enabled", [True, False])
def test_gloo_averages_and_multiplies_though_it_can_only_sum(ranks: Callable[[int], Ranks], enabled: bool) -> None:
    """Quantized and, because a small message must not fail where a large one works, in full precision."""
    ranks(2).run(averages, fap.FlashConfig(enabled=enabled, min_bytes=0, quality_interval=1))


def refused() -> list[str]:
    messages = []
    for output, parts in (
        (torch.empty(3), [torch.ones(3)]),
        (torch.empty(4), [torch.ones(3), torch.ones(3)]),
        (torch.empty(3), [torch.ones(3), torch.ones(3).half()]),
    ):
        try:
            fap.reduce_scatter(output, parts, config=CONFIG)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_wrong_parts_are_refused(ranks: Callable[[int], Ranks]) -> None:
    messages = ranks(2).run(refused)[0]
    assert "input has 1 tensors; expected one for each of 2 ranks" in messages[0]
    assert "output has 4 elements; expected 3" in messages[1]
    assert "input[1] is torch.float16" in messages[2]
