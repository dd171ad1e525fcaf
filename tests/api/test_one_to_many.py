"""broadcast, reduce, gather and scatter on real ranks, against the reference codec bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives.chunks import aligned
from flash_allreduce_plugin.runtime import groups
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks
from tests.simulation import QUANTIZED, VALUES, decoded, digest, encoded, reduce_shard

GetRanks = Callable[[int], Ranks]

COLLECTIVES = ("broadcast", "reduce", "gather", "scatter")
WORLDS = [1, 2, 3, 4, 5]
LENGTHS = [0, 1, 31, 128, 129, 997, 7919]
DTYPES = ("float32", "bfloat16", "float16")
CONFIGS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 4},
    {"reduce_bits": 3, "gather_bits": 5, "group_size": 32},
    {"bits": 6, "group_size": 256, "symmetric": True},
    {"bits": 2, "group_size": 64, "spike_reserving": True, "range": "mse"},
    {"bits": 3, "group_size": 32, "rounding": "stochastic", "hadamard": True},
]


@dataclass(frozen=True)
class Call:
    """One call with inputs that every process can make again; numel: of each rank's tensor."""

    collective: str
    numel: int
    dtype: str = "float32"
    config: dict[str, Any] = field(default_factory=dict)
    root: int = 0
    op: str = "SUM"
    kind: str = "gaussian"
    async_op: bool = False
    strided: bool = False

    @property
    def flash_config(self) -> fap.FlashConfig:
        return fap.FlashConfig(**{**QUANTIZED, **self.config})

    def input(self, rank: int, part: int = 0) -> Tensor:
        """Return this call's input on a rank. part: the number of a tensor that a root scatters."""
        noise = gaussian(self.numel, seed=100 * part + rank)
        return VALUES[self.kind](noise, rank).to(getattr(torch, self.dtype))

    def start(self) -> tuple[list[Tensor], Any]:
        """Start the call. Return the tensors that it writes on this rank, and its handle."""
        rank, world = dist.get_rank(), dist.get_world_size()

        def laid_out(x: Tensor) -> Tensor:
            return torch.stack([x, x], dim=-1)[:, 0] if self.strided else x

        x, at_root = laid_out(self.input(rank)), rank == self.root
        how: dict[str, Any] = {"config": self.flash_config, "async_op": self.async_op}
        if self.collective == "broadcast":
            return [x], fap.broadcast(x, self.root, **how)
        if self.collective == "reduce":
            return [x], fap.reduce(x, self.root, getattr(dist.ReduceOp, self.op), **how)
        if self.collective == "gather":
            outputs = [torch.full_like(x, 7.0) for _ in range(world)] if at_root else []
            return outputs, fap.gather(x, outputs or None, self.root, **how)
        inputs = [laid_out(self.input(rank, part)) for part in range(world)] if at_root else None
        x.fill_(7.0)
        return [x], fap.scatter(x, inputs, self.root, **how)

    def run(self) -> list[Tensor]:
        outputs, work = self.start()
        if work is not None:
            work.wait()
        return outputs

    def simulate(self, rank: int, world: int) -> list[Tensor]:
        """Return the tensors that run() gives on a rank, as the first call of its group."""
        config = self.flash_config
        reduce, gather = (config.format(bits or config.bits) for bits in (config.reduce_bits, config.gather_bits))
        key = rows.draw_key(config.seed, 0)

        def arrives(x: Tensor, source: int, group: int = 0) -> Tensor:
            if world == 1 or not self.numel:
                return x
            return decoded(encoded(x, gather, Draw(rows.draw_key(key, source), group)), x, gather)

        if self.collective == "broadcast":
            return [arrives(self.input(self.root), 0)]
        if self.collective == "reduce":
            if rank != self.root or world == 1:
                return [self.input(rank)]
            factor = 1 / world if self.op == "AVG" else 1.0
            return [reduce_shard([self.input(other) for other in range(world)], factor, reduce, key)]
        if self.collective == "gather":
            return [arrives(self.input(other), other) for other in range(world)] if rank == self.root else []
        return [arrives(self.input(self.root, rank), self.root, rank * gather.groups(self.numel))]


def results_of(calls: list[Call]) -> list[list[str]]:
    found = []
    for call in calls:
        groups.state_of(dist.group.WORLD).draws = 0
        found.append([digest(output) for output in call.run()])
    return found


def check(ranks: GetRanks, world: int, calls: list[Call]) -> None:
    for rank, results in enumerate(ranks(world).run(results_of, calls)):
        for call, result in zip(calls, results, strict=True):
            assert result == [digest(one) for one in call.simulate(rank, world)], f"rank {rank}: {call}"


# ---- bit for bit ----


@pytest.mark.parametrize("world", WORLDS)
def test_guarantee_5_any_world_length_dtype_root_and_stride(ranks: GetRanks, world: int) -> None:
    calls = [
        Call(
            *(collective, numel, DTYPES[(i + j) % 3], CONFIGS[(i + j) % len(CONFIGS)], (i + j) % world),
            op="AVG" if i % 2 else "SUM",
            async_op=(i + j) % 2 == 1,
            strided=i % 3 == 1,
        )
        for j, collective in enumerate(COLLECTIVES)
        for i, numel in enumerate(LENGTHS)
    ]
    check(ranks, world, calls)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_guarantee_3_many_chunks(ranks: GetRanks, world: int) -> None:
    """Check chunks of 4096 bytes, about thirty of them, asynchronous too."""
    calls = [
        Call(collective, 100_003, dtype, config, world - 1, async_op=async_op)
        for collective in COLLECTIVES
        for dtype, config, async_op in (("float32", CONFIGS[0], False), ("bfloat16", CONFIGS[5], True))
    ]
    check(ranks, world, calls)


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf", "from 1e-30 to 1e30", "zero", "constant", "huge"])
def test_guarantees_2_6_and_8_values_of_any_kind(ranks: GetRanks, kind: str) -> None:
    """Let rank 1, which has the values that are not finite, be the root: all of them are sent."""
    check(ranks, 3, [Call(one, 3003, "float32", CONFIGS[i % 2], 1, kind=kind) for i, one in enumerate(COLLECTIVES)])


def not_finite(call: Call) -> list[list[int]]:
    return [(~output.isfinite()).nonzero().view(-1).tolist() for output in call.run()]


def test_guarantee_2_a_nan_loses_its_group_alone(ranks: GetRanks) -> None:
    lost = list(range(128))
    for collective in ("broadcast", "reduce"):
        seen = ranks(3).run(not_finite, Call(collective, 1000, config=CONFIGS[1], root=1, kind="nan"))
        assert seen[1] == [lost] and (collective == "reduce" or seen[0] == seen[2] == [lost])
    assert ranks(3).run(not_finite, Call("gather", 1000, config=CONFIGS[1], kind="nan"))[0] == [[], lost, []]


def in_flight(calls: list[Call]) -> list[bool]:
    """Start all calls, then wait for them in another order on each rank."""
    expected = [replace(call, async_op=False).run() for call in calls]
    started = [call.start() for call in calls]
    order = sorted(range(len(calls)), key=lambda i: (i * 7 + 3 * dist.get_rank()) % len(calls))
    for i in order:
        assert started[i][1].wait() is True and started[i][1].is_completed()
    return [
        all(map(same_bits, before, outputs)) for before, (outputs, _) in zip(expected, started, strict=True) if before
    ]


def test_calls_in_flight_do_not_take_each_others_bytes(ranks: GetRanks) -> None:
    calls = [
        Call(collective, 20_000 + 100 * root, config=CONFIGS[1], root=root, async_op=True)
        for root in range(3)
        for collective in COLLECTIVES
    ]
    assert all(map(all, ranks(3).run(in_flight, calls)))


# ---- in full precision ----


def plainly(dtype: torch.dtype, async_op: bool) -> list[tuple[str, bool, dict[str, int]]]:
    """Compare calls in full precision with torch's own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = (torch.arange(600) + 1000 * rank).to(dtype)
    found = []

    def both(name: str, call: Callable[[Any, Tensor, dict[str, Any]], list[Tensor]]) -> None:
        fap.reset_stats()
        ours = call(fap, x.view(20, 30).t().contiguous().t(), {"async_op": async_op})
        exact = call(dist, x.clone().view(20, 30), {})
        found.append((name, all(map(same_bits, ours, exact)), fap.stats()["full_precision"]))

    def broadcast(module: Any, y: Tensor, how: dict[str, Any]) -> list[Tensor]:
        work = module.broadcast(y, 1, **how)
        if work is not None:
            work.wait()
        return [y]

    def reduce(module: Any, y: Tensor, how: dict[str, Any]) -> list[Tensor]:
        work = module.reduce(y, 1, dist.ReduceOp.SUM, **how)
        if work is not None:
            work.wait()
        return [y] if rank == 1 else []

    def gather(module: Any, y: Tensor, how: dict[str, Any]) -> list[Tensor]:
        outputs = [torch.zeros_like(y, memory_format=torch.contiguous_format) for _ in range(world)]
        work = module.gather(y, outputs if rank == 0 else None, **how)
        if work is not None:
            work.wait()
        return outputs if rank == 0 else []

    def scatter(module: Any, y: Tensor, how: dict[str, Any]) -> list[Tensor]:
        inputs = [(y.double() + r).to(dtype).contiguous() for r in range(world)]
        work = module.scatter(y, inputs if rank == 0 else None, **how)
        if work is not None:
            work.wait()
        return [y]

    for name, call in (("broadcast", broadcast), ("reduce", reduce), ("gather", gather), ("scatter", scatter)):
        both(name, call)
    return found


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64])
def test_small_and_integer_tensors_are_exact(ranks: GetRanks, dtype: torch.dtype, async_op: bool) -> None:
    """Pass torch's arguments in torch's order, and use its default roots."""
    small = "message below min_bytes"
    reason = small if dtype in (torch.float32, torch.bfloat16) else f"dtype {str(dtype).removeprefix('torch.')}"
    for found in ranks(2).run(plainly, dtype, async_op):
        assert found == [(name, True, {reason: 1}) for name in COLLECTIVES]


def masks() -> bool:
    mask = torch.arange(100) % (2 + dist.get_rank()) == 0
    fap.broadcast(mask, 1)
    return torch.equal(mask, torch.arange(100) % 3 == 0)


def test_a_mask(ranks: GetRanks) -> None:
    assert ranks(2).run(masks) == [True, True]


def averages() -> list[float]:
    """Check averages, which gloo does not support itself."""
    found = []
    for op in (dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.25)):
        x = torch.full((10,), 2.0 * dist.get_rank())
        fap.reduce(x, 0, op)
        found.append(float(x[0]))
    return found


def test_averages_in_full_precision(ranks: GetRanks) -> None:
    assert ranks(2).run(averages)[0] == [1.0, 0.5]


def a_maximum() -> tuple[float, dict[str, int]]:
    fap.reset_stats()
    x = torch.full((1000,), float(dist.get_rank()))
    fap.reduce(x, 1, dist.ReduceOp.MAX, config=fap.FlashConfig(min_bytes=0))
    return float(x.max()), fap.stats()["full_precision"]


def test_other_operators_go_in_full_precision(ranks: GetRanks) -> None:
    assert ranks(3).run(a_maximum)[1] == (2.0, {"operator max": 1})


# ---- groups, two levels, bytes, measurements ----


def in_a_part_of_the_ranks() -> list[float]:
    """Call among ranks 1 and 3, by ranks of the default group and by ranks of the subgroup."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return []
    found = []
    for how in ({"src": 3}, {"group_src": 1}):
        x = torch.full((1000,), float(dist.get_rank()))
        fap.broadcast(x, group=group, config=fap.FlashConfig(min_bytes=0), **how)
        found.append(float(x.mean()))
    x = torch.full((1000,), 1.0 + dist.get_rank())
    fap.reduce(x, group=group, group_dst=0, config=fap.FlashConfig(min_bytes=0))
    return [*found, float(x.mean())]


def test_the_root_is_a_rank_of_all_or_of_the_group(ranks: GetRanks) -> None:
    seen = ranks(4).run(in_a_part_of_the_ranks)
    assert seen == [[], [3.0, 3.0, 6.0], [], [3.0, 3.0, 4.0]]


def in_two_levels(levels: bool) -> tuple[list[float], dict[str, Any]]:
    hierarchical = {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2} if levels else "off"
    config = fap.FlashConfig(bits=8, min_bytes=0, hierarchical=hierarchical)
    fap.reset_stats()
    x = gaussian(20_000, seed=dist.get_rank())
    exact = sum(gaussian(20_000, seed=rank) for rank in range(4))
    fap.reduce(x, 3, config=config)
    y = gaussian(20_000, seed=dist.get_rank())
    fap.broadcast(y, 2, config=config)
    errors = [float((x - exact).norm() / exact.norm()), float((y - gaussian(20_000, seed=2)).norm() / y.norm())]
    return errors, fap.stats()["sites"]


def test_a_reduce_has_two_levels_and_a_broadcast_one(ranks: GetRanks) -> None:
    flat, levels = (ranks(4).run(in_two_levels, how) for how in (False, True))
    assert flat[3][0][0] < 0.01 < levels[3][0][0] < 0.2
    assert all(rank[0][1] < 0.01 for rank in (*flat, *levels))
    between = sum(rank[1]["reduce"]["bytes_between_nodes"] for rank in levels)
    assert between == Format(4, 128).payload_bytes(20_000)
    assert all(rank[1]["broadcast"]["bytes_between_nodes"] == 0 for rank in levels)


def counted(call: Call) -> tuple[int, int, int]:
    fap.reset_stats()
    call.run()
    site = fap.stats()["sites"][call.collective]
    return site["quantized"], site["bytes_sent"], site["bytes_full_precision"]


def test_bytes_are_the_ones_that_a_rank_sends(ranks: GetRanks) -> None:
    payload, exact = Format(4, 128).payload_bytes(9999), 4 * 9999
    one, none = (1, aligned(payload), exact), (1, 0, 0)
    for collective, expected in {
        "broadcast": [(1, payload // 2, exact // 2), (1, payload, exact), (1, payload // 2, exact // 2)],
        "reduce": [one, none, one],
        "gather": [one, none, one],
        "scatter": [none, (1, 2 * aligned(payload), 2 * exact), none],
    }.items():
        assert ranks(3).run(counted, Call(collective, 9999, config={"bits": 4}, root=1)) == expected, collective


def alone() -> tuple[bool, int, dict[str, int]]:
    fap.reset_stats()
    calls = [Call(collective, 1000, config=CONFIGS[1]) for collective in COLLECTIVES]
    right = all(all(map(same_bits, call.run(), call.simulate(0, 1))) for call in calls)
    counted = fap.stats()
    return right, counted["bytes_sent"] + counted["bytes_full_precision"], counted["full_precision"]


def test_one_rank_stays_in_full_precision(ranks: GetRanks) -> None:
    assert ranks(1).run(alone) == [(True, 0, {"one-rank group": 4})]


def measured(collective: str, how: dict[str, Any]) -> float | None:
    fap.reset_stats()
    for _ in range(3):
        Call(collective, 20_000, config={"bits": 4, "quality_interval": 1, **how}, root=1).run()
    site = fap.stats()["sites"][collective]
    fap.reset_stats()
    return site["sqnr_db"], site["bits"]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_error_is_measured_and_the_width_follows(ranks: GetRanks, collective: str) -> None:
    seen = ranks(2).run(measured, collective, {"quality_measure": "exact"})
    assert seen[0] == seen[1] and 19 < seen[0][0] < 21 and seen[0][1] == 4
    target = ranks(2).run(measured, collective, {"target_sqnr_db": 30})
    assert target[0][1] == target[1][1] == 6


def guarded(collective: str) -> dict[str, int]:
    """Count reasons under a floor of 60 dB, for which 8 bits are not enough."""
    fap.reset_stats()
    config = {"quality_interval": 1, "min_sqnr_db": 60.0}
    for _ in range(6):
        Call(collective, 2000, config=config, root=1).run()
    found = fap.stats()["sites"][collective]["full_precision"]
    fap.reset_stats()
    return found


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_guard_switches_to_full_precision(ranks: GetRanks, collective: str) -> None:
    seen = ranks(2).run(guarded, collective)
    assert seen[0] == seen[1] and seen[0].get("below min_sqnr_db", 0) >= 3


# ---- refused, and failed ----


def refused() -> list[str]:
    group, x, config = dist.new_group([0]), torch.ones(100), fap.FlashConfig(min_bytes=0)
    rank = dist.get_rank()
    calls: dict[str, Callable[[], Any]] = {
        "no root": lambda: fap.broadcast(x),
        "two roots": lambda: fap.reduce(x, 0, group_dst=0),
        "a rank too high": lambda: fap.broadcast(x, 2),
        "a rank of the group too high": lambda: fap.broadcast(x, group_src=-1),
        "not of the group": lambda: fap.broadcast(x, 1, group=group),
        "a list elsewhere": lambda: fap.gather(x, [x, x], 1 - rank),
        "no list": lambda: fap.scatter(x, None, rank),
        "a short list": lambda: fap.gather(x, [x], rank),
        "other sizes": lambda: fap.scatter(x, [x, x[:99]], rank),
        "other dtypes": lambda: fap.gather(x, [x, x.half()], rank),
        "expanded": lambda: fap.broadcast(torch.ones(1).expand(5), 0),
        "a list for a tensor": lambda: fap.reduce([x], 0),
        "int16": lambda: fap.broadcast(x.short(), 0, config=config),
        "what a mask lacks": lambda: fap.reduce(x > 0, 0, dist.ReduceOp.AVG),
    }
    found = []
    for name, call in calls.items():
        try:
            call()
            found.append(f"{name}: no error")
        except (TypeError, ValueError) as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    assert torch.equal(x, torch.ones(100))
    return found


REFUSALS = [
    "no root: ValueError: src is None and group_src None; give one of them.",
    "two roots: ValueError: dst is 0 and group_dst 0; give one of them.",
    "a rank too high: ValueError: src is 2; the group has the ranks 0 to 1.",
    "a rank of the group too high: ValueError: group_src is -1; the group has the ranks 0 to 1.",
    "not of the group: ValueError: ",
    "a list elsewhere: ValueError: gather_list is given on a rank that is not the root; leave it out there.",
    "no list: ValueError: scatter_list is NoneType; expected a list with one for each of 2 ranks, at the root.",
    "a short list: ValueError: gather_list is 1 tensors; expected a list with one for each of 2 ranks, at the root.",
    "other sizes: ValueError: scatter_list[1] has 99 elements of torch.float32 on cpu; expected 100 of",
    "other dtypes: ValueError: gather_list[1] has 100 elements of torch.float16 on cpu; expected 100 of torch.float32",
    "expanded: ValueError: tensor has strides",
    "a list for a tensor: TypeError: tensor is list; expected a dense tensor.",
    "int16: ValueError: broadcast of torch.int16: gloo does not take it",
    "what a mask lacks: ValueError: reduce of torch.bool: gloo does not reduce it by AVG; take SUM.",
]


def test_bad_arguments_are_refused_before_anything_is_sent(ranks: GetRanks) -> None:
    for seen in ranks(2).run(refused):
        for said, expected in zip(seen, REFUSALS, strict=True):
            assert said.startswith(expected), said


TIMEOUT = timedelta(seconds=2)


def disagreeing(what: str) -> tuple[str, float]:
    config = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
    fap.all_reduce(torch.ones(1000), config=config)
    rank, x, start = dist.get_rank(), torch.ones(30_000), time.monotonic()
    try:
        if what == "root":
            fap.broadcast(x, rank, config=config)
        elif what == "size":
            fap.broadcast(x[: 20_000 + 5000 * rank], 0, config=config)
        elif what == "absent" and rank == 0:
            fap.reduce(x, 0, config=config)
        elif what == "configuration":
            fap.broadcast(x, 0, config=fap.FlashConfig(bits=4 + rank, min_bytes=0))
        else:
            time.sleep(TIMEOUT.total_seconds() + 1)
    except (fap.CollectiveError, fap.MismatchError) as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("what", ["root", "size", "absent", "configuration"])
def test_guarantee_7_ranks_that_do_not_agree_get_an_error_in_bounded_time(what: str) -> None:
    with Ranks(2, TIMEOUT) as ranks:
        seen = ranks.run(disagreeing, what, timeout=90)
    for rank, (message, seconds) in enumerate(seen):
        assert seconds < TIMEOUT.total_seconds() + 3
        if what == "configuration":
            assert "bits is 4 on rank 0; 5 on rank 1" in message
        elif what != "absent" or rank == 0:
            name = "reduce" if what == "absent" else "broadcast"
            assert f"{name} at site '{name}', rank {rank} of 2, failed while" in message, message
