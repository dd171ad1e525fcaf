"""reduce_scatter of one tensor a rank: the owners of the sums have parts of different sizes.

The oracle is the even collective. An element's result depends on its group alone (guarantee 3), so each part,
reduced by a call in which all parts have equal sizes, must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives.chunks import aligned
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


def test_bytes_count_messages_to_other_ranks(ranks: Callable[[int], Ranks]) -> None:
    sizes = (100, 3000, 0)
    for rank, stats in enumerate(ranks(3).run(counted, sizes, CONFIG)):
        others = [size for owner, size in enumerate(sizes) if owner != rank]
        assert stats["bytes_full_precision"] == 4 * sum(others)
        assert stats["bytes_sent"] == sum(aligned(-(-size // 32) * (4 + 16)) for size in others)


def test_full_precision_is_exact_and_the_error_is_measured(ranks: Callable[[int], Ranks]) -> None:
    sizes = (100, 3000, 0)
    for stats in ranks(3).run(counted, sizes, fap.FlashConfig(enabled=False)):
        assert stats["error"] < 1e-5 and stats["quantized"] == 0
    exactly = CONFIG.model_copy(update={"quality_interval": 1, "quality_measure": "exact"})
    measured = ranks(3).run(counted, sizes, exactly)
    assert all(18 < stats["sites"]["reduce_scatter"]["sqnr_db"] < 23 for stats in measured[:2])


# ---- all_gather ----

LEVELS = CONFIG.model_copy(update={"hierarchical": {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2}})


def gathered(sizes: tuple[int, ...], dtype: torch.dtype, config: fap.FlashConfig, async_op: bool) -> None:
    """Gather rows of 3 elements. Compare with a gather of each rank's part in which all parts have equal sizes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [torch.randn(size, 3, generator=torch.Generator().manual_seed(r)).to(dtype) for r, size in enumerate(sizes)]
    output = torch.full((sum(sizes), 3), 7.0, dtype=dtype)
    splits = list(sizes)
    work = fap.all_gather(output, parts[rank], config=config, async_op=async_op, output_split_sizes=splits)
    if work is not None:
        work.wait()
    for owner, (size, mine) in enumerate(zip(sizes, output.split(splits), strict=True)):
        even = torch.empty(world * size, 3, dtype=dtype)
        fap.all_gather(even, parts[owner], config=config)
        assert torch.equal(mine, even.split([size] * world)[owner]), owner
    assert sum(sizes) == 0 or not torch.equal(output, torch.cat(parts))
    plain = torch.empty_like(output)
    fap.all_gather(plain, parts[rank], config=fap.FlashConfig(enabled=False), output_split_sizes=splits)
    assert torch.equal(plain, torch.cat(parts))
    transposed = torch.empty(3, sum(sizes), dtype=dtype).t()
    fap.all_gather(transposed, parts[rank], config=config, output_split_sizes=splits)
    assert torch.equal(transposed, output)


@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("world", SIZES)
def test_a_gather_of_uneven_parts_has_the_bits_of_the_even_one(
    ranks: Callable[[int], Ranks], world: int, levels: bool
) -> None:
    """Gather in chunks, flat and in two levels; some parts are empty."""
    for number, sizes in enumerate(SIZES[world]):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        ranks(world).run(gathered, sizes, dtype, LEVELS if levels else CONFIG, bool(number % 2))


def gathered_and_counted(sizes: tuple[int, ...], config: fap.FlashConfig) -> list[dict[str, Any]]:
    rank, found = dist.get_rank(), []
    x = torch.randn(sizes[rank], generator=torch.Generator().manual_seed(rank))
    for given in (config, fap.FlashConfig(enabled=False), fap.FlashConfig(min_bytes=4 * sum(sizes) + 1)):
        counters.reset_stats()
        for _ in range(2):
            fap.all_gather(torch.empty(sum(sizes)), x, config=given, output_split_sizes=list(sizes))
        found.append(counters.stats()["sites"]["all_gather"])
    return found


@pytest.mark.parametrize("how", ["local", "exact"])
def test_bytes_and_error_of_an_uneven_gather(ranks: Callable[[int], Ranks], how: str) -> None:
    sizes = (100, 3000, 0)
    config = CONFIG.model_copy(update={"quality_interval": 1, "quality_measure": how})
    for size, (quantized, off, small) in zip(sizes, ranks(3).run(gathered_and_counted, sizes, config), strict=True):
        assert quantized["bytes_full_precision"] == off["bytes_sent"] == small["bytes_sent"] == 2 * 2 * 4 * size
        assert quantized["bytes_sent"] == 2 * 2 * aligned(-(-size // 32) * (4 + 16))
        assert 18 < quantized["sqnr_db"] < 23
        assert small["full_precision"] == {"message below min_bytes": 2}


def gathered_at_random(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    config = CONFIG.model_copy(update={"rounding": "stochastic"})
    outputs = [torch.empty(sum(sizes)) for _ in range(2)]
    for output in outputs:
        x = torch.ones(sizes[dist.get_rank()]).cumsum(0)
        fap.all_gather(output, x, config=config, output_split_sizes=list(sizes))
    return outputs


def test_every_rank_gathers_the_same_random_bits(ranks: Callable[[int], Ranks]) -> None:
    first, *others = ranks(3).run(gathered_at_random, (500, 500, 300))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0][:500], first[0][500:1000])


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
    """Reduce quantized, and in full precision too: a small message must not fail where a large one works."""
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
