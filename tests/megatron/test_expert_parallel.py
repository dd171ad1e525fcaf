"""The random numbers of what experts exchange: other ones at every call, and for every part but those of a gather."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import groups
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.megatron import expert_parallel
from flash_allreduce_plugin.megatron.scopes import Scope

SITE = Scope(None, 0, None, False, expert_parallel.EXCHANGE_DISPATCH)
ROWS, WIDTH = 3, 64


def config() -> FlashConfig:
    return FlashConfig.from_dict({"expert_bits": 2, "rounding": "stochastic", "group_size": 32, "min_bytes": 0})


def exchange(collective: str, x: torch.Tensor, group: Any) -> torch.Tensor:
    """x [ROWS, WIDTH] of this rank: to all ranks, or to every rank (the sum of what comes, or all of it)."""
    world = group.size()
    half = "reduce_scatter" if collective == "reduce_scatter" else "all_gather"
    encoding = expert_parallel.plan(half, x, x.numel(), group, config, SITE)
    assert encoding is not None and encoding.codec.stochastic
    if collective == "all_gather":
        output = x.new_empty(world * ROWS, WIDTH)
        expert_parallel.gather(output, x, [ROWS] * world, group, encoding, SITE)
        return output
    parts = torch.cat([x] * world)
    if collective == "reduce_scatter":
        output = torch.empty_like(x)
        expert_parallel.reduce_scatter(output, parts, [ROWS] * world, group, encoding, SITE)
        return output
    sizes = [x.numel()] * world
    payloads = expert_parallel._exchange(list(parts.view(world, -1)), sizes, group, encoding, "all_to_all", SITE)
    output = x.new_empty(world * ROWS, WIDTH)
    expert_parallel._decode(payloads, output, sizes, encoding.codec)
    return output


def results(collective: str, calls: int) -> dict[str, Any]:
    """Every rank has the same x."""
    group = dist.group.WORLD
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    seen = [exchange(collective, x, group) for _ in range(calls)]
    mean = torch.stack(seen).double().mean(0)
    exact = x * group.size() if collective == "reduce_scatter" else torch.cat([x] * group.size())
    return {
        "seen": seen[:2],
        "error": float((mean - exact).abs().max()),
        "draws": groups.state_of(group).draws,
        "step": float((x.view(-1, 32).amax(1) - x.view(-1, 32).amin(1)).max() / 3),
    }


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter"])
def test_two_calls_are_rounded_by_other_numbers_and_the_average_converges(collective: str) -> None:
    calls, world = 300, 2
    seen = run_ranks(world, results, collective, calls)
    for rank in range(world):
        first, second = seen[rank]["seen"]
        assert seen[rank]["draws"] == calls
        assert not torch.equal(first, second)
        bound = seen[rank]["step"] * 0.5 * math.sqrt(world) * 5 / math.sqrt(calls)
        assert seen[rank]["error"] < bound, (seen[rank]["error"], bound)
    if collective == "all_gather":
        assert torch.equal(seen[0]["seen"][0], seen[1]["seen"][0])
    else:  # the same elements to two ranks, and from two ranks
        assert not torch.equal(seen[0]["seen"][0], seen[1]["seen"][0])
    if collective != "reduce_scatter":
        own, others = seen[0]["seen"][0].split(ROWS)
        assert not torch.equal(own, others)


def state_after_rounding_to_the_nearest() -> int:
    group, x = dist.group.WORLD, torch.randn(ROWS, WIDTH)
    nearest = config().model_copy(update={"rounding": "nearest"})
    encoding = expert_parallel.plan("all_gather", x, x.numel(), group, lambda: nearest, SITE)
    assert encoding is not None and encoding.key == 0
    return groups.state_of(group).draws


def test_rounding_to_the_nearest_draws_nothing() -> None:
    assert run_ranks(2, state_after_rounding_to_the_nearest) == [0, 0]
