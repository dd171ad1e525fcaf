"""The public reductions: which calls are quantized, the counters, and the errors of wrong arguments."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import environment
from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.runtime import groups
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]

QUANTIZED = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
EXACT_DTYPES = ("float64", "int64", "int32", "uint8", "bool", "complex64")


def counts(call: Callable[[], Any]) -> dict[str, Any]:
    fap.reset_stats()
    call()
    counted = fap.stats()
    fap.reset_stats()
    return counted


def still_works() -> bool:
    x = torch.full((20_000,), dist.get_rank() + 1.0)
    fap.all_reduce(x, config=QUANTIZED)
    world = dist.get_world_size()
    return bool((x - world * (world + 1) / 2).abs().max() < 0.1)


# ---- ranges in full precision ----


def gathered_with_exact(asynchronous: bool) -> tuple[bool, bool, bool]:
    """Return whether the ranges are exact, the other elements as without ranges, and the own part rounded too."""
    own = gaussian(2000, seed=7 + dist.get_rank())
    whole, rounded, exact = (own.new_empty(len(own) * dist.get_world_size()) for _ in range(3))
    ranges = [(5, 9), (1990, 2010), (3999, 4000)]
    fap.all_gather(rounded, own, config=QUANTIZED)
    dist.all_gather_into_tensor(exact, own)
    handle = fap.all_gather(whole, own, config=QUANTIZED, exact=ranges, async_op=asynchronous)
    if asynchronous:
        handle.wait()
    inside = torch.zeros(len(whole), dtype=torch.bool)
    for first, last in ranges:
        inside[first:last] = True
    return (
        torch.equal(whole[inside], exact[inside]),
        torch.equal(whole[~inside], rounded[~inside]),
        not torch.equal(whole, exact),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_gather_of_values_keeps_ranges_in_full_precision(ranks: GetRanks, asynchronous: bool) -> None:
    assert ranks(2).run(gathered_with_exact, asynchronous) == [(True, True, True)] * 2


# ---- any stride ----


def single(dtype: str, numel: int, quantized: bool) -> list[str]:
    """Make every public call with views of one element or none, where strides mean nothing. Return the wrong ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = fap.FlashConfig(param_bits=8, min_bytes=0) if quantized else fap.FlashConfig(param_bits=8)
    shapes = [((numel,), (5,)), ((numel, 1), (7, 3)), ((1, 1, numel), (9, 0, 4))]
    wrong = []

    def view(value: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """Return a view of a tensor. The call must not leave that tensor's memory."""
        memory = torch.full((20,), -1, dtype=getattr(torch, dtype))
        memory[3:4] = value
        return memory.as_strided(shape, strides, 3)

    def check(name: str, found: Tensor, value: int) -> None:
        memory = found.new_empty(0).set_(found.untyped_storage(), 0, (20,))
        if not (found == value).all() or [*memory[:3].tolist(), *memory[4:].tolist()] != [-1] * 19:
            wrong.append(f"{name} {tuple(found.shape)} of strides {found.stride()}: {memory.tolist()}")

    for where in shapes:
        mine, other = view(rank + 1, *where), view(9, *where)
        fap.all_reduce(mine, config=config)
        check("all_reduce", mine, 3)
        shares = torch.tensor([[1.0] * numel, [2.0] * numel]).to(mine.dtype)
        fap.reduce_scatter(other, shares, config=config)
        check("reduce_scatter", other, 2 * (rank + 1))
        fap.reduce_scatter(other, [[view(r + 1, *where)] for r in range(world)], config=config)
        check("reduce_scatter of parts", other, 2 * (rank + 1))
        whole = torch.empty(world * numel, dtype=mine.dtype)
        fap.all_gather(whole, view(rank + 1, *where), config=config)
        assert whole.tolist() == [1, 2] * numel
        part = view(5, *where) if rank == 0 else shares[:0].view(0)
        fap.all_gather(other, part, config=config, output_split_sizes=[len(other), 0])
        check("all_gather", other, 5)
        if mine.is_floating_point():
            held, master = fap.HeldWeights(), part.float() if rank == 0 else part
            for step in range(3):
                how = {"held": held, "site": fap.Site("weights", fap.Role.PARAMETER)}
                fap.all_gather(other, master + step, config=config, output_split_sizes=[len(other), 0], **how)
                check("all_gather of differences", other, 5 + step)
        there, back = [0, 0], [0, 0]
        there[1 - rank] = back[1 - rank] = len(mine)
        fap.all_to_all(other, view(rank + 1, *where), back, there, config=config)
        check("all_to_all", other, 2 - rank)
        ends = (fap.send, fap.recv) if rank == 0 else (fap.recv, fap.send)
        for end in ends:
            at = {"dst": 1 - rank} if end is fap.send else {"src": 1 - rank}
            end(view(rank + 1, *where) if end is fap.send else other, **at, config=config)
        check("recv", other, 2 - rank)
        fap.broadcast(mine := view(rank + 1, *where), 1, config=config)
        check("broadcast", mine, 2)
        fap.reduce(mine := view(rank + 1, *where), 0, config=config)
        check("reduce", mine if rank == 0 else view(3, *where), 3)
        listed = [view(r + 4, *where) for r in range(world)] if rank == 0 else None
        fap.scatter(other, listed, 0, config=config)
        check("scatter", other, rank + 4)
        fap.gather(view(rank + 1, *where), listed, 0, config=config)
        for r, one in enumerate(listed or ()):
            check("gather", one, r + 1)
    return wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_guarantee_5_one_element_or_none_of_any_stride(ranks: GetRanks, dtype: str) -> None:
    """Use views that torch calls contiguous although view(-1) keeps their strides."""
    for numel, quantized in itertools.product((1, 0), (True, False)):
        assert ranks(2).run(single, dtype, numel, quantized) == [[], []]


# ---- full precision ----


def other_dtypes() -> list[tuple[str, bool, dict[str, int]]]:
    """Return (name, equal to the full-precision collective, reasons) of each dtype and collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outcomes = []
    for name in EXACT_DTYPES:
        dtype = getattr(torch, name)
        x = (gaussian(world * 50, seed=rank) * 10).to(dtype)
        plain, ours = x.clone(), x.clone()
        dist.all_reduce(plain)
        counted = counts(lambda ours=ours: fap.all_reduce(ours, config=QUANTIZED))
        outcomes.append((name, same_bits(plain, ours), counted["full_precision"]))
        plain, shard = x.new_empty(50), x.new_empty(50)
        transport.reduce_scatter_single(plain, x)
        counted = counts(lambda x=x, shard=shard: fap.reduce_scatter(shard, x, config=QUANTIZED))
        outcomes.append((name, same_bits(shard, plain), counted["full_precision"]))
        whole, parts = x.new_empty(world * world * 50), [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        counted = counts(lambda x=x, whole=whole: fap.all_gather(whole, x, config=QUANTIZED))
        outcomes.append((name, same_bits(whole, torch.cat(parts)), counted["full_precision"]))
    return outcomes


@pytest.mark.parametrize("world_size", [2, 3])
def test_guarantee_5_other_dtypes_stay_in_full_precision_and_are_counted(ranks: GetRanks, world_size: int) -> None:
    for outcomes in ranks(world_size).run(other_dtypes):
        for name, equal, reasons in outcomes:
            assert equal, name
            assert reasons == {f"dtype {name}": 1}


def other_operators() -> list[tuple[str, bool, dict[str, int]]]:
    outcomes = []
    for name in ("MAX", "MIN", "PRODUCT"):
        op = getattr(dist.ReduceOp, name)
        plain = gaussian(300, seed=dist.get_rank())
        ours = plain.clone()
        dist.all_reduce(plain, op)
        counted = counts(lambda ours=ours, op=op: fap.all_reduce(ours, op, config=QUANTIZED))
        outcomes.append((name.lower(), same_bits(plain, ours), counted["full_precision"]))
    return outcomes


def test_guarantee_5_other_operators_go_in_full_precision_and_are_counted(ranks: GetRanks) -> None:
    for outcomes in ranks(2).run(other_operators):
        for name, equal, reasons in outcomes:
            assert equal and reasons == {f"operator {name}": 1}


def alone() -> tuple[bool, dict[str, int]]:
    x = gaussian(1000)
    y, shard, whole, exchanged = x.clone(), torch.empty(1000), torch.empty(1000), torch.empty(1000)

    def call() -> None:
        fap.all_reduce(y, config=QUANTIZED)
        fap.reduce_scatter(shard, x, dist.ReduceOp.AVG, config=QUANTIZED)
        fap.all_gather(whole, x, config=QUANTIZED)
        fap.all_to_all(exchanged, x, [1000], config=QUANTIZED)

    counted = counts(call)
    assert counted["bytes_sent"] == 0
    return all(torch.equal(x, t) for t in (y, shard, whole, exchanged)), counted["full_precision"]


def test_one_rank_stays_in_full_precision(ranks: GetRanks) -> None:
    assert ranks(1).run(alone) == [(True, {"one-rank group": 4})]


def leaf() -> bool:
    x = torch.nn.Parameter(gaussian(5000, seed=dist.get_rank()))
    expected = x.detach().clone()
    fap.all_reduce(expected, config=QUANTIZED)
    fap.all_reduce(x, config=QUANTIZED)
    return same_bits(x.detach(), expected) and x.requires_grad and x.grad_fn is None


def test_a_leaf_that_needs_its_gradient_is_reduced_like_any_tensor(ranks: GetRanks) -> None:
    assert ranks(2).run(leaf) == [True, True]


# ---- agreement ----


def known_to_go_plainly() -> list[dict[str, int]]:
    """Return full_precision of consecutive calls, each different from those before it; -1: quantized."""
    found = []
    small = fap.FlashConfig(min_bytes=1 << 20)
    x = gaussian(5000, seed=dist.get_rank())

    def again(tensor: Tensor, config: fap.FlashConfig = small, **how: Any) -> None:
        plain = tensor.clone()
        dist.all_reduce(plain, how.get("op", dist.ReduceOp.SUM))
        counted = counts(lambda: fap.all_reduce(tensor, config=config, **how))
        assert same_bits(tensor, plain) == (counted["quantized"] == 0)
        found.append(counted["full_precision"])

    again(x.clone())
    again(x.clone())
    again(x.clone()[:4000])
    again(x.double())
    again(x.clone(), op=dist.ReduceOp.MAX)
    again(x.clone().view(50, 100).t())
    again(x.clone(), QUANTIZED)
    again(x.clone(), fap.FlashConfig(min_bytes=1 << 20, exclude=["b"]))
    warm = fap.FlashConfig(min_bytes=0, warmup_steps=1)
    again(x.clone(), warm, step=0)
    again(x.clone(), warm, step=1)
    os.environ[environment.DISABLE] = "1"
    try:
        again(x.clone()[:3000])
        again(x.clone())
    finally:
        del os.environ[environment.DISABLE]
    again(x.clone()[:3000])
    return found


def test_a_call_in_full_precision_keeps_its_reason(ranks: GetRanks) -> None:
    small, quantized = {"message below min_bytes": 1}, {}
    other = [{"dtype float64": 1}, {"operator max": 1}]
    expected = [small, small, small, *other, small, quantized, small, {"warm-up": 1}, quantized]
    expected += [{"FLASH_ALLREDUCE_DISABLE": 1}, small, small]
    assert ranks(2).run(known_to_go_plainly) == [expected] * 2


def plain_calls_of_other_shapes() -> list[Tensor]:
    """Make each call twice: the second call uses the cached decision."""
    small, rank, found = fap.FlashConfig(min_bytes=1 << 20), dist.get_rank(), []
    x = torch.arange(24.0) * (1 + rank)
    for _ in range(2):
        for shape in ((12,), (2, 6), (12, 1), (3, 2, 2)):
            output = torch.empty(shape)
            fap.reduce_scatter(output, x, config=small)
            found.append(output.flatten())
            whole = torch.empty(2, *shape)
            fap.all_gather(whole, x[:12].view(6, 2), config=small)
            found.append(whole.flatten())
    return found


def test_plain_calls_take_tensors_of_any_shapes_again_and_again(ranks: GetRanks) -> None:
    x = torch.arange(24.0)
    for rank, found in enumerate(ranks(2).run(plain_calls_of_other_shapes)):
        assert all(torch.equal(output, 3 * x[12 * rank : 12 * rank + 12]) for output in found[::2])
        assert all(torch.equal(whole, torch.cat([x[:12], 2 * x[:12]])) for whole in found[1::2])


def remembers_no_more_than() -> int:
    group = dist.new_group()
    config = fap.FlashConfig(check_ranks=False)
    reductions._REMEMBERED = 10
    for numel in range(1, 40):
        fap.all_reduce(torch.ones(numel), group=group, config=config)
        fap.all_gather(torch.ones(2 * numel), torch.ones(numel), group=group, config=config)
        fap.reduce_scatter(torch.ones(numel), torch.ones(2 * numel), group=group, config=config)
    return len(groups.state_of(group).plain)


def test_shapes_that_change_with_every_call_fill_no_memory(ranks: GetRanks) -> None:
    assert all(0 < count <= 10 for count in ranks(2).run(remembers_no_more_than))


def from_environment() -> tuple[int, dict[str, int]]:
    os.environ.update(FLASH_ALLREDUCE_MIN_BYTES="0", FLASH_ALLREDUCE_BITS="4")
    reductions.default_config.cache_clear()
    try:
        counted = counts(lambda: fap.all_reduce(torch.ones(1280)))
    finally:
        del os.environ["FLASH_ALLREDUCE_MIN_BYTES"], os.environ["FLASH_ALLREDUCE_BITS"]
        reductions.default_config.cache_clear()
    return counted["bytes_sent"], counted["full_precision"]


def test_without_a_config_the_environment_gives_it(ranks: GetRanks) -> None:
    assert ranks(2).run(from_environment) == [(2 * 5 * (4 + 64), {})] * 2


# ---- all_to_all in full precision ----


def exchanges_in_full_precision() -> list[tuple[bool, dict[str, int], int]]:
    """Return, for each kind of call: equal to torch's own, reasons, calls of `plain`; then the same with `plain`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [[(2 * a + b) % 3 for b in range(world)] for a in range(world)]
    sent, received = sizes[rank], [row[rank] for row in sizes]
    found = []
    kinds: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        **{name: (getattr(torch, name), {"config": QUANTIZED}) for name in EXACT_DTYPES},
        "off": (torch.float32, {"config": fap.FlashConfig(enabled=False)}),
        "warm-up": (torch.float32, {"config": fap.FlashConfig(min_bytes=0, warmup_steps=3), "step": 2}),
        "full": (torch.float32, {"config": QUANTIZED, "site": fap.Site("experts", fap.Role.EXPERT)}),
        "asked": (torch.float32, {"config": QUANTIZED, "full_precision": "evaluation"}),
    }
    for dtype, how in kinds.values():
        x = (10 * gaussian(sum(sent), 5, seed=rank)).to(dtype)
        exact = x.new_zeros(sum(received), 5)
        dist.all_to_all_single(exact, x, received, sent)
        for async_op in (False, True):
            for theirs in (False, True):
                output, called = torch.zeros_like(exact), 0

                def plain(output: Tensor = output, x: Tensor = x, async_op: bool = async_op) -> Any:
                    nonlocal called
                    called += 1
                    return dist.all_to_all_single(output, x, received, sent, async_op=async_op)

                def call(output: Tensor = output, x: Tensor = x, how: Any = how, async_op: bool = async_op) -> None:
                    more = {**how, "plain": plain} if theirs else how  # noqa: B023
                    work = fap.all_to_all(output, x, received, sent, None, async_op, **more)
                    assert (work is not None) == async_op
                    if work is not None:
                        work.wait()

                counted = counts(call)
                assert called == theirs and counted["bytes_sent"] == counted["bytes_full_precision"]
                assert counted["bytes_sent"] == 5 * (sum(sent) - sent[rank]) * x.element_size()
                found.append((same_bits(output, exact), counted["full_precision"]))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exchange_in_full_precision_is_the_frameworks_own(ranks: GetRanks, world_size: int) -> None:
    reasons = [f"dtype {name}" for name in EXACT_DTYPES]
    reasons += ["disabled by configuration", "warm-up", "expert_bits is full", "evaluation"]
    for found in ranks(world_size).run(exchanges_in_full_precision):
        assert found == [(True, {reason: 1}) for reason in reasons for _ in range(4)]


# ---- bad input ----


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized; call init_process_group first"):
        fap.all_reduce(torch.ones(3))
