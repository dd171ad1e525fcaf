"""Random numbers of exchanges between experts differ at every call, and for every part but those of a gather."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.megatron import arguments, expert_parallel, scopes
from flash_allreduce_plugin.integrations.megatron.scopes import Scope
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters
from tests.integrations.megatron import test_groups

SITE = Scope(None, 0, None, False, expert_parallel.EXCHANGE_DISPATCH)
ROWS, WIDTH = 3, 64


def config() -> FlashConfig:
    return FlashConfig.from_dict({"expert_bits": 2, "rounding": "stochastic", "group_size": 32, "min_bytes": 0})


def exchange(collective: str, x: torch.Tensor, group: Any, config: FlashConfig) -> torch.Tensor:
    """Exchange x [ROWS, WIDTH] of this rank: to all ranks, or to every rank (return the sum, or all parts)."""
    world = group.size()
    if collective == "all_gather":
        output = x.new_empty(world * ROWS, WIDTH)
        expert_parallel.gather(output, x, None, group, config, SITE)
        return output
    parts = torch.cat([x] * world)
    if collective == "reduce_scatter":
        output = torch.empty_like(x)
        expert_parallel.reduce_scatter(output, parts, [ROWS] * world, group, config, SITE)
        return output
    output = torch.empty_like(parts)
    with scopes.moving_hidden_states(expert_parallel.EXCHANGE_DISPATCH):
        expert_parallel._all_to_all_single(lambda: config)(output, parts, None, None, group)
    return output


def results(collective: str, calls: int) -> dict[str, Any]:
    """Return the results of calls in which every rank has the same x."""
    group = dist.group.WORLD
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    seen = [exchange(collective, x, group, config()) for _ in range(calls)]
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
    for collective in ("all_gather", "reduce_scatter", "all_to_all"):
        exchange(collective, x, group, nearest)
    return groups.state_of(group).draws


def test_rounding_to_the_nearest_draws_nothing() -> None:
    assert run_ranks(2, state_after_rounding_to_the_nearest) == [0, 0]


def counted(reason: str | None) -> tuple[dict[str, Any], list[bool]]:
    """Run every collective with different rows on each rank. Return its counters, and True if it was exact."""
    group, (rank, world) = dist.group.WORLD, (dist.get_rank(), dist.get_world_size())
    assert group is not None
    rows = [3, 50][:world]
    scope = dataclasses.replace(SITE, full_precision=reason)
    everything = config().model_copy(update={"expert_bits": 8, "rounding": "nearest", "min_bytes": 10_000})
    x = torch.randn(rows[rank], WIDTH, generator=torch.Generator().manual_seed(rank))
    others = [torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(r)) for r, count in enumerate(rows)]
    counters.reset_stats()
    exact = []
    with uneven_gloo():
        gathered = x.new_empty(sum(rows), WIDTH)
        expert_parallel.gather(gathered, x, rows, group, everything, scope)
        exact.append(torch.equal(gathered, torch.cat(others)))
        mine = torch.empty_like(x)
        expert_parallel.reduce_scatter(mine, torch.cat(others) * (rank + 1), rows, group, everything, scope)
        exact.append(torch.equal(mine, x + 2 * x))
    seen = counters.stats()["sites"][expert_parallel.EXCHANGE_DISPATCH]
    counters.reset_stats()
    return {key: seen[key] for key in ("quantized", "full_precision", "bytes_full_precision")}, exact


@contextmanager
def uneven_gloo() -> Iterator[None]:
    """Patch gloo as test_groups.py does: gloo has no gather and no scatter of parts of different sizes."""
    theirs = dist.all_gather, dist.reduce_scatter
    dist.all_gather, dist.reduce_scatter = test_groups.all_gather, test_groups.reduce_scatter
    try:
        yield
    finally:
        dist.all_gather, dist.reduce_scatter = theirs


@pytest.mark.parametrize("reason", [None, "full_precision()"])
def test_gathers_and_scatters_of_uneven_rows_are_the_doors(reason: str | None) -> None:
    for rank, (seen, exact) in enumerate(run_ranks(2, counted, reason)):
        assert exact == [reason is not None] * 2
        assert seen["quantized"] == (2 if reason is None else 0)
        assert seen["full_precision"] == ({} if reason is None else {reason: 2})
        # Each rank sends its rows to the other rank in a gather, and the other rank's rows in a reduce-scatter.
        assert seen["bytes_full_precision"] == (3 + 50) * WIDTH * 4, rank


def test_without_expert_parallelism_a_width_is_refused() -> None:
    config, said = FlashConfig(expert_bits=8), "has no effect: there is no expert parallelism here; leave it out."
    alone = SimpleNamespace(expert_model_parallel_size=1, expert_tensor_parallel_size=None, rank=0)
    alone.tensor_model_parallel_size = 1
    with pytest.raises(ConfigError) as caught:
        arguments.refuse_incompatible(alone, config)
    assert str(caught.value) == f"--flash-allreduce-expert-bits {said}"
    arguments.refuse_incompatible(alone, FlashConfig(expert_combine_bits="full"))
    for reached in ({"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}):
        arguments.refuse_incompatible(SimpleNamespace(**{**vars(alone), **reached}), config)
    split = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    with pytest.raises(ConfigError, match=r"^--flash-allreduce-expert-combine-bits has no effect"):
        arguments.refuse_incompatible(SimpleNamespace(**{**vars(alone), **split}), FlashConfig(expert_combine_bits=8))
    flex = SimpleNamespace(**{**vars(alone), "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex"})
    with pytest.raises(ConfigError, match=r"--moe-token-dispatcher-type flex moves tokens in kernels of its own"):
        arguments.refuse_incompatible(flex, config)


def without_expert_parallelism() -> str:
    """Return a training model's error. Groups of one rank alone raise none: a program may convert weights in them."""
    from megatron.core import parallel_state
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.transformer import TransformerConfig

    fap.megatron.enable(FlashConfig(expert_bits=8))
    parallel_state.initialize_model_parallel()
    fap.megatron.enable(FlashConfig(expert_bits=7))

    def wrapped(**sizes: int) -> None:
        layer = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
        config = TransformerConfig(**layer, num_moe_experts=2, add_bias_linear=False, **sizes)
        _BaseDataParallel(config=config, module=torch.nn.Linear(1, 1))

    wrapped(expert_model_parallel_size=2)
    with pytest.raises(ConfigError) as caught:
        wrapped()
    fap.megatron.disable()
    return str(caught.value)


def test_a_model_that_trains_without_it_refuses_a_width() -> None:
    [said] = run_ranks(1, without_expert_parallelism, preload=MEGATRON)
    assert said == "expert_bits has no effect: there is no expert parallelism here; leave it out."
