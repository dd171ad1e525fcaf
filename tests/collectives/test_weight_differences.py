"""Gathers of weights by differences, against the same arithmetic done by hand with fap.encode and fap.decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import weight_differences
from flash_allreduce_plugin.collectives.replicated_params import REASON
from flash_allreduce_plugin.policy import LOW_SQNR, Role, Site
from flash_allreduce_plugin.telemetry import counters
from tests.distributed import Ranks

SITE = Site("weights", Role.PARAMETER_DIFFERENCE)
CONFIG = fap.FlashConfig(param_bits=4, group_size=64, min_bytes=0, chunk_bytes=4096)
STEP = 1e-3


def masters(sizes: list[int], step: int) -> list[torch.Tensor]:
    """Return the exact values of every rank's part after so many steps."""
    parts = []
    for rank, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(rank)
        part = torch.randn(size, generator=generator)
        for _ in range(step):
            part += STEP * torch.randn(size, generator=generator)
        parts.append(part)
    return parts


def by_hand(held: torch.Tensor, parts: list[torch.Tensor], config: fap.FlashConfig) -> None:
    """Update held [numel] in place."""
    wire = config.model_copy(update={"bits": config.param_bits, "param_bits": "full"})
    for shard, master in zip(held.split([len(part) for part in parts]), parts, strict=True):
        difference = master.float() - shard.float()
        decoded = fap.decode(fap.encode(difference, wire), difference.shape, torch.float32, wire)
        shard.copy_((shard.float() + decoded).to(held.dtype))


def gather(weights: torch.Tensor, master: torch.Tensor, held: fap.HeldWeights, **how: Any) -> None:
    work = fap.all_gather(weights, master, held=held, **{"config": CONFIG, "site": SITE, **how})
    if work is not None:
        work.wait()


def runs(sizes: list[int], dtype: torch.dtype, how: dict[str, Any], steps: int = 4) -> None:
    rank, even = dist.get_rank(), len(set(sizes)) == 1
    if not even:
        how = {**how, "output_split_sizes": sizes}
    weights = torch.zeros(sum(sizes), dtype=dtype)
    expected, held = weights.clone(), fap.HeldWeights()
    counters.reset_stats()
    for step in range(steps):
        parts = masters(sizes, step)
        gather(weights, parts[rank], held, **how)
        if step == 0 or len(sizes) == 1:  # a group of one rank loses nothing
            expected = torch.cat(parts).to(dtype)
        else:
            by_hand(expected, parts, CONFIG)
        assert torch.equal(weights, expected), step
    stats = counters.stats()["sites"]["weights"]
    if sum(sizes) and dist.get_world_size() > 1:
        assert stats["full_precision"] == {weight_differences.FIRST: 1} and stats["quantized"] == steps - 1


SIZES = {1: [300], 2: [5000, 5000], 3: [70_001, 0, 63], 4: [33] * 4, 5: [64, 1, 0, 4097, 2000], 8: [129] * 8}


@pytest.mark.parametrize("world", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bits_are_those_of_the_arithmetic(ranks: Callable[[int], Ranks], world: int, dtype: torch.dtype) -> None:
    ranks(world).run(runs, SIZES[world], dtype, {"async_op": dtype is torch.bfloat16})


@pytest.mark.parametrize("sizes", [[3000] * 4, [70_001, 0, 63, 500]])
def test_nodes_change_nothing(ranks: Callable[[int], Ranks], sizes: list[int]) -> None:
    nodes = {"intra_bits": 4, "inter_bits": 4, "ranks_per_node": 2}
    ranks(4).run(runs, sizes, torch.bfloat16, {"config": CONFIG.model_copy(update={"hierarchical": nodes})})


def test_other_layouts_of_the_payload(ranks: Callable[[int], Ranks]) -> None:
    for other in (
        {"compact": True},
        {"symmetric": True},
        {"spike_reserving": True, "bits": 8},
        {"chunk_bytes": 1 << 20},
    ):
        config = CONFIG.model_copy(update=other)
        ranks(2).run(by_config, config)


def by_config(config: fap.FlashConfig) -> None:
    weights, held, sizes = torch.zeros(20_000, dtype=torch.bfloat16), fap.HeldWeights(), [10_000, 10_000]
    for step in range(3):
        parts = masters(sizes, step)
        gather(weights, parts[dist.get_rank()], held, config=config)
        if step == 0:
            expected = weights.clone()
        else:
            by_hand(expected, parts, config)
    assert torch.equal(weights, expected)


def drift(bits: int) -> list[float]:
    """Return the held weights' relative distances from the masters at every 100th of 400 steps, and those of bf16."""
    rank, sizes = dist.get_rank(), [4096, 4096]
    config = CONFIG.model_copy(update={"param_bits": bits})
    parts, held, found = masters(sizes, 0), fap.HeldWeights(), []
    weights = torch.zeros(sum(sizes), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(99)
    for step in range(401):
        gather(weights, parts[rank], held, config=config)
        if step % 100 == 0:
            exact = torch.cat(parts)
            found.append(float((weights.float() - exact).norm() / exact.norm()))
        for part in parts:
            part += 3e-4 * torch.randn(len(part), generator=generator)
    plain = exact.to(torch.bfloat16).float()
    return [*found, float((plain - exact).norm() / exact.norm())]


@pytest.mark.parametrize(("bits", "within"), [(4, 1.05), (2, 1.5)])
def test_errors_do_not_add_up(ranks: Callable[[int], Ranks], bits: int, within: float) -> None:
    first, *later, plain = ranks(2).run(drift, bits)[0]
    assert first == pytest.approx(plain, rel=0.1)
    assert max(later) < within * plain, (later, plain)


def nothing_changed() -> None:
    weights, held = torch.randn(2000).to(torch.bfloat16), fap.HeldWeights()
    dist.broadcast(weights, 0)
    part = weights.view(2, -1)[dist.get_rank()].float()
    gather(weights, part, held)
    before = weights.clone()
    part[:100] += 0.5  # its groups change, no others
    gather(weights, part, held)
    moved = torch.zeros(2, 1000, dtype=torch.bool)
    moved[:, :100] = True
    same = weights.view(torch.int16) == before.view(torch.int16)
    assert bool(same[~moved.view(-1)].all()) and not bool(same[moved.view(-1)].any())


def test_a_difference_of_zero_stays_zero(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(nothing_changed)


def changes(what: str) -> dict[str, Any]:
    rank, sizes = dist.get_rank(), [3000, 3000]
    weights, held = torch.zeros(6000, dtype=torch.bfloat16), fap.HeldWeights()
    for step in range(2):
        gather(weights, masters(sizes, step)[rank], held)
    if what == "one rank" and rank == 1:
        weights[17] += 1
    elif what == "all ranks":
        weights.mul_(0.5)
    elif what == "moved":
        weights.copy_(weights.roll(1024))
    elif what == "forgotten" and rank == 0:
        held = fap.HeldWeights()
    counters.reset_stats()
    parts = masters(sizes, 2)
    gather(weights, parts[rank], held)
    stats = counters.stats()["sites"]["weights"]
    if stats["full_precision"]:
        assert torch.equal(weights, torch.cat(parts).to(torch.bfloat16))
    gather(weights, masters(sizes, 3)[rank], held)
    assert counters.stats()["sites"]["weights"]["quantized"] == stats["quantized"] + 1
    return dict(stats["full_precision"])


@pytest.mark.parametrize(
    ("what", "reasons"),
    [
        ("nothing", {}),
        ("one rank", {weight_differences.CHANGED: 1}),
        ("all ranks", {weight_differences.CHANGED: 1}),
        ("moved", {weight_differences.CHANGED: 1}),
        ("forgotten", {weight_differences.FIRST: 1}),
    ],
)
def test_changed_weights_are_gathered_whole_once(
    ranks: Callable[[int], Ranks], what: str, reasons: dict[str, int]
) -> None:
    assert ranks(2).run(changes, what) == [reasons] * 2


def loses_a_group() -> tuple[list[bool], list[int], dict[str, int]]:
    """Check that a value that is not finite spoils its group for one step."""
    rank, sizes = dist.get_rank(), [3000, 3000]
    weights, held = torch.zeros(6000, dtype=torch.bfloat16), fap.HeldWeights()
    gather(weights, masters(sizes, 0)[rank], held)
    parts = masters(sizes, 1)
    parts[1][100] = float("nan")
    gather(weights, parts[rank], held)
    lost = (~weights.isfinite()).nonzero().view(-1).tolist()
    counters.reset_stats()
    parts = masters(sizes, 2)
    gather(weights, parts[rank], held)
    found = [bool(weights.isfinite().all()), torch.equal(weights, torch.cat(parts).to(torch.bfloat16))]
    return found, lost, dict(counters.stats()["sites"]["weights"]["full_precision"])


def test_non_finite_residuals_are_dropped(ranks: Callable[[int], Ranks]) -> None:
    for found, lost, reasons in ranks(2).run(loses_a_group):
        assert found == [True, True] and reasons == {weight_differences.CHANGED: 1}
        assert 3100 in lost and all(3064 <= at < 3128 for at in lost)


def with_copies(uneven: bool, config: fap.FlashConfig) -> dict[str, Any]:
    rank = dist.get_rank()
    sizes = [2000, 1000, 3000] if uneven else [2000] * 3
    how: dict[str, Any] = {"output_split_sizes": sizes} if uneven else {}
    exact = [(0, 7), (1990, 2010), (4100, 4164)]  # one of them across two ranks
    weights, held = torch.zeros(6000, dtype=torch.bfloat16), fap.HeldWeights()
    counters.reset_stats()
    for step in range(3):
        parts = masters(sizes, step)
        gather(weights, parts[rank], held, exact=exact, config=config, **how)
    plain = torch.cat(parts).to(torch.bfloat16)
    assert all(torch.equal(weights[first:last], plain[first:last]) for first, last in exact)
    assert not torch.equal(weights, plain)
    return dict(counters.stats()["sites"]["weights"]["full_precision"])


@pytest.mark.parametrize("uneven", [False, True])
def test_values_of_copies_are_gathered_in_full_precision(ranks: Callable[[int], Ranks], uneven: bool) -> None:
    for reasons in ranks(3).run(with_copies, uneven, CONFIG):
        assert reasons == {weight_differences.FIRST: 1, REASON: 2}


def warms_up() -> dict[str, Any]:
    rank, sizes, config = dist.get_rank(), [3000, 3000], CONFIG.model_copy(update={"warmup_steps": 2})
    weights, held = torch.zeros(6000, dtype=torch.bfloat16), fap.HeldWeights()
    counters.reset_stats()
    for step in range(4):
        parts = masters(sizes, step)
        gather(weights, parts[rank], held, config=config, step=step)
        assert step > 2 or torch.equal(weights, torch.cat(parts).to(torch.bfloat16))
    return dict(counters.stats()["sites"]["weights"])


def test_warm_up(ranks: Callable[[int], Ranks]) -> None:
    for stats in ranks(2).run(warms_up):
        assert stats["full_precision"] == {"warm-up": 2, weight_differences.FIRST: 1} and stats["quantized"] == 1


def measured(measure: str, floor: float | None) -> dict[str, Any]:
    rank, sizes = dist.get_rank(), [5000, 5000]
    config = CONFIG.model_copy(update={"quality_interval": 1, "quality_measure": measure, "min_sqnr_db": floor})
    weights, held = torch.zeros(sum(sizes), dtype=torch.bfloat16), fap.HeldWeights()
    counters.reset_stats()
    for step in range(24):
        parts = masters(sizes, step)
        gather(weights, parts[rank], held, config=config)
    exact = torch.cat(parts)
    now = 10 * float(torch.log10(exact.square().sum() / (weights.float() - exact).square().sum()))
    return {**counters.stats()["sites"]["weights"], "now": now}


@pytest.mark.parametrize("measure", ["local", "exact"])
def test_the_quality_is_that_of_the_weights(ranks: Callable[[int], Ranks], measure: str) -> None:
    for stats in ranks(2).run(measured, measure, None):
        assert stats["sqnr_db"] == pytest.approx(stats["now"], abs=0.5) and stats["now"] > 50


def test_the_guard_uses_it(ranks: Callable[[int], Ranks]) -> None:
    """Ask for more than bf16 itself reaches: more bits do not help, so the guard stays at full precision."""
    for stats in ranks(2).run(measured, "local", 50.0):
        assert LOW_SQNR not in stats["full_precision"] and stats["bits"] == 4
    for stats in ranks(2).run(measured, "local", 70.0):
        assert stats["full_precision"][LOW_SQNR] >= 1


def plainly() -> None:
    rank, sizes, held = dist.get_rank(), [500, 500], fap.HeldWeights()
    weights, parts, called = torch.zeros(1000, dtype=torch.bfloat16), masters([500, 500], 0), []

    def theirs() -> None:
        called.append(weights.view(2, -1)[rank].clone())
        dist.all_gather_into_tensor(weights, weights.view(2, -1)[rank].clone())

    for _ in range(3):
        gather(weights, parts[rank], held, config=CONFIG.model_copy(update={"min_bytes": 1 << 20}), plain=theirs)
    assert len(called) == 3 and torch.equal(called[0], parts[rank].to(torch.bfloat16))
    assert torch.equal(weights, torch.cat(parts).to(torch.bfloat16)) and sizes


def test_a_frameworks_own_gather_finds_the_exact_part_in_place(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(plainly)


def test_the_digest_is_of_every_bit() -> None:
    weights = torch.randn(3 * 512 + 77).to(torch.bfloat16)
    before = weight_differences.digest_of(weights)
    assert before == weight_differences.digest_of(weights.clone())
    shifted = torch.cat([weights[:1], weights])[1:]  # at an address that is no multiple of 8
    assert before == weight_differences.digest_of(shifted)
    for at in (0, 1, 2, 3, 511, 600, len(weights) - 1):
        for bit in range(16):  # the sign is the highest
            other = weights.clone()
            other.view(torch.int16)[at] ^= -(1 << 15) if bit == 15 else 1 << bit
            assert weight_differences.digest_of(other) != before, (at, bit)
    swapped = torch.cat([weights[512:1024], weights[:512], weights[1024:]])
    assert weight_differences.digest_of(swapped) != before
    assert weight_differences.digest_of(weights[:0]) == 0


def refused(case: str) -> str:
    weights, part = torch.zeros(200, dtype=torch.bfloat16), torch.zeros(100)
    how: dict[str, Any] = {"held": fap.HeldWeights()}
    if case == "shared":
        part = weights[:100]
    elif case == "dtype":
        part = part.double()
    elif case == "strides":
        weights = torch.zeros(100, 2, dtype=torch.bfloat16).t()
    elif case == "held":
        how["held"] = True
    elif case == "size":
        part = part[:99]
    with pytest.raises((TypeError, ValueError)) as caught:
        fap.all_gather(weights, part, config=CONFIG, site=SITE, **how)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shared", "share memory"),
        ("dtype", "in float32 or in output's dtype"),
        ("strides", "contiguous weights"),
        ("held", "expected fap.HeldWeights"),
        ("size", "x 2 ranks"),
    ],
)
def test_refused_before_anything_is_sent(ranks: Callable[[int], Ranks], case: str, message: str) -> None:
    assert all(message in said for said in ranks(2).run(refused, case))
