"""The all-to-all of runs on real ranks, against the reference codec run by run, bit for bit."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives import all_to_all as exchanges
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.chunks import aligned
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.runtime import groups
from tests.codecs import as_bytes, gaussian, same_bits
from tests.distributed import Ranks
from tests.simulation import decoded, digest, encoded

GetRanks = Callable[[int], Ranks]

WORLDS = [1, 2, 3, 4, 5, 8]
DTYPES = ("float32", "bfloat16", "float16")
CONFIGS = [
    {"bits": 8},
    {"bits": 4},
    {"bits": 3, "group_size": 32},
    {"bits": 6, "group_size": 256, "symmetric": True},
    {"bits": 4, "group_size": 64, "compact": True},
    {"bits": 2, "group_size": 64, "spike_reserving": True, "range": "mse"},
    {"bits": 4, "hadamard": True},
    {"bits": 3, "group_size": 32, "rounding": "stochastic"},
]


@dataclass(frozen=True)
class Call:
    """One exchange with inputs that every process can make again.

    rows: [from][to], of `width` elements each.
    """

    rows: tuple[tuple[int, ...], ...]
    width: int = 1
    dtype: str = "float32"
    config: dict[str, Any] = field(default_factory=dict)
    async_op: bool = False
    site: str = "all_to_all"

    @property
    def flash_config(self) -> fap.FlashConfig:
        return fap.FlashConfig(**{"min_bytes": 0, "chunk_bytes": 4096, **self.config})

    def input(self, rank: int) -> Tensor:
        x = gaussian(sum(self.rows[rank]), self.width, seed=rank)
        return x.to(getattr(torch, self.dtype))

    def start(self, device: str | torch.device = "cpu") -> tuple[Tensor, Any]:
        """Start the exchange. Return the output and the handle, if there is one."""
        rank = dist.get_rank()
        received = [row[rank] for row in self.rows]
        output = torch.full((sum(received), self.width), 7.0, device=device).to(getattr(torch, self.dtype))
        how = {"config": self.flash_config, "site": fap.Site(self.site), "async_op": self.async_op}
        return output, fap.all_to_all(output, self.input(rank).to(device), received, list(self.rows[rank]), **how)

    def run(self, device: str | torch.device = "cpu") -> Tensor:
        output, work = self.start(device)
        if work is not None:
            work.wait()
        return output

    def simulate(self, rank: int) -> Tensor:
        """Return the result of a rank, as the first call of its group."""
        arrived = [self.arrives(source, rank) for source in range(len(self.rows))]
        return torch.cat(arrived).view(-1, self.width)

    def arrives(self, source: int, rank: int) -> Tensor:
        config, world, row = self.flash_config, len(self.rows), self.rows[source]
        codec, x = config.format(config.gather_bits or config.bits), self.input(source).view(-1)
        run = x.split([count * self.width for count in row])[rank]
        if world == 1 or run.numel() * run.element_size() * world < config.min_bytes or not run.numel():
            return run
        before = sum(codec.groups(count * self.width) for count in row[:rank])
        key = rows.draw_key(rows.draw_key(config.seed, 0), source)
        return decoded(encoded(run, codec, Draw(key, before)), run, codec)


def result_of(call: Call) -> str:
    groups.state_of(dist.group.WORLD).draws = 0
    return digest(call.run())


def results_of(calls: list[Call]) -> list[str]:
    return [result_of(call) for call in calls]


def check(ranks: GetRanks, world: int, calls: list[Call], case: Callable[..., Any] = results_of) -> None:
    for rank, results in enumerate(ranks(world).run(case, calls)):
        for call, result in zip(calls, results, strict=True):
            assert result == digest(call.simulate(rank)), f"rank {rank}: {call}"


def uneven(world: int, seed: int, most: int, empty: float = 0.3) -> tuple[tuple[int, ...], ...]:
    """Return numbers of rows [from][to]: some 0, and for every third seed one rank sends none and one receives none."""
    chance = random.Random(1000 * world + seed)
    table = [[0 if chance.random() < empty else chance.randint(1, most) for _ in range(world)] for _ in range(world)]
    if seed % 3 == 2:
        table[0] = [0] * world
        for row in table:
            row[-1] = 0
    return tuple(map(tuple, table))


# ---- bit for bit ----


@pytest.mark.parametrize("world", WORLDS)
def test_every_run_is_a_tensor_of_its_own(ranks: GetRanks, world: int) -> None:
    """Check any lengths, none, whole groups or not, all dtypes; a result does not depend on the other runs."""
    calls = []
    for seed in range(12):
        width = (1, 33, 64, 128)[seed % 4]
        rows_ = uneven(world, seed, 5000 // width)
        calls.append(Call(rows_, width, DTYPES[seed % 3], CONFIGS[seed % len(CONFIGS)], async_op=seed % 2 == 1))
    check(ranks, world, calls)


def test_no_rank_sends_a_byte(ranks: GetRanks) -> None:
    empty = ((0,) * 3,) * 3
    check(ranks, 3, [Call(empty), Call(empty, 64, async_op=True), Call(empty, config={"min_bytes": 1 << 20})])


@pytest.mark.parametrize("world", [2, 4, 5])
def test_runs_of_many_pieces_have_the_bits_of_one(ranks: GetRanks, world: int) -> None:
    """Use chunks of 4096 bytes, so that the longest runs are cut, and short ones are not."""
    calls = [
        Call(uneven(world, seed, 120_000 // width), width, DTYPES[seed], CONFIGS[config], async_op)
        for seed, (width, config, async_op) in enumerate(((1, 1, False), (128, 0, True), (96, 7, True)))
    ]
    assert max(map(max, calls[0].rows)) * 4 // 8 * world // 4096 > exchanges.EXCHANGES
    check(ranks, world, calls)


def evenly(dtype: torch.dtype) -> bool:
    """Exchange without sizes, with equal ones, an empty list, and sizes as Megatron has them: numpy's, tensors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = fap.FlashConfig(bits=4, min_bytes=0)
    x = gaussian(3 * world, 128, seed=rank).to(dtype)
    results = []
    for splits in (None, [3] * world, [], torch.full((world,), 3), torch.full((world,), 3).numpy()):
        output = torch.empty_like(x)
        fap.all_to_all(output, x, splits, splits, config=config)
        results.append(output)
    exact = torch.empty_like(x)
    dist.all_to_all_single(exact, x)
    error = (exact.float() - results[0].float()).abs().max()
    return all(same_bits(results[0], other) for other in results) and 0 < error < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_sizes_every_rank_gets_the_same(ranks: GetRanks, dtype: torch.dtype) -> None:
    assert ranks(3).run(evenly, dtype) == [True] * 3


def strided() -> list[bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = gaussian(4 * world, 64, seed=rank)
    found = []
    for config in (fap.FlashConfig(bits=4, min_bytes=0), fap.FlashConfig(enabled=False)):
        expected, transposed = torch.empty_like(x), torch.empty(64, 4 * world).t()
        fap.all_to_all(expected, x, config=config)
        fap.all_to_all(transposed, x.t().contiguous().t(), config=config)
        found.append(torch.equal(expected, transposed))
        theirs = torch.empty(64, 4 * world).t()
        fap.all_to_all(theirs, x, config=config, plain=lambda theirs=theirs, expected=expected: theirs.copy_(expected))
        found.append(torch.equal(expected, theirs))
    return found


def test_any_stride(ranks: GetRanks) -> None:
    assert ranks(2).run(strided) == [[True] * 4] * 2


# ---- min_bytes: which runs are quantized ----


def test_a_run_below_min_bytes_is_exact(ranks: GetRanks) -> None:
    """Compare a run of 1000 elements x 4 bytes x 3 ranks = 12000 bytes with one of 999: its two ends agree alone."""
    table = ((1000, 999, 0), (999, 999, 1), (5000, 1000, 998))
    calls = [
        Call(table, config={"bits": 2, "min_bytes": 12_000}),
        Call(table, 33, "bfloat16", {"bits": 2, "min_bytes": 12_000 * 33 // 2}, async_op=True),
        Call(table, 33, "float16", {"bits": 2, "min_bytes": 12_000 * 33 // 2, "chunk_bytes": 4096}),
    ]
    for call in calls:
        for rank in range(3):
            for source in range(3):
                start = sum(table[source][:rank]) * call.width
                run = call.input(source).view(-1)[start : start + table[source][rank] * call.width]
                assert same_bits(call.arrives(source, rank), run) == (table[source][rank] < 1000)
    check(ranks, 3, calls)


def counted(call: Call) -> dict[str, Any]:
    call.run()  # agreed on
    fap.reset_stats()
    call.run()
    return fap.stats()["sites"]["all_to_all"]


def test_bytes_count_messages_to_other_ranks(ranks: GetRanks) -> None:
    table = ((1000, 999, 0), (999, 999, 1), (5000, 1000, 998))
    seen = ranks(3).run(counted, Call(table, config={"bits": 4, "min_bytes": 12_000}))
    codec = Format(4, 128)
    assert [one["bytes_full_precision"] for one in seen] == [4 * 999, 4 * 1000, 4 * 6000]
    assert [one["bytes_sent"] for one in seen] == [
        aligned(4 * 999),
        4 * 1000,
        aligned(codec.payload_bytes(5000)) + aligned(codec.payload_bytes(1000)),
    ]
    assert [one["bytes_plain"] for one in seen] == [aligned(4 * 999), 4 * 1000, 0]
    # Rank 0's own run is quantized, and rank 1 sends nothing that is.
    assert [one["quantized"] for one in seen] == [1, 0, 1]
    assert [one["full_precision"] for one in seen] == [{}, {"message below min_bytes": 1}, {}]


def test_a_rank_that_sends_nothing_is_counted_as_that(ranks: GetRanks) -> None:
    table = ((5000, 5000), (0, 0))
    first, second = ranks(2).run(counted, Call(table, config={"min_bytes": 1000}))
    assert first["quantized"] == 1 and second["full_precision"] == {"empty message": 1}
    assert second["bytes_sent"] == second["bytes_full_precision"] == 0


# ---- launches, exchanges, buffers ----


def launches(call: Call, by_messages: bool) -> dict[str, int]:
    """Return how often the codec and the wire are called, and in `same` the digest of the result."""
    calls = {"encode": 0, "decode": 0, "exchange": 0}
    originals = (rows.encode, rows.decode, transport.all_to_all, transport.by_messages)

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return original(*arguments)

        return counted

    rows.encode, rows.decode = counting("encode", rows.encode), counting("decode", rows.decode)
    transport.all_to_all = counting("exchange", transport.all_to_all)
    if not by_messages:
        transport.by_messages = lambda group, device: False
    try:
        result = result_of(call)
    finally:
        rows.encode, rows.decode, transport.all_to_all, transport.by_messages = originals
    return {**calls, "result": result}


@pytest.mark.parametrize("by_messages", [True, False], ids=["messages", "one collective"])
def test_runs_of_whole_groups_are_one_launch(ranks: GetRanks, by_messages: bool) -> None:
    """Count one launch, or one a peer if a run ends inside a group or not at a multiple of 16 bytes.

    Over messages a rank's own run, which is not sent, is a separate launch, between the runs before and after it. Over
    collectives there is one exchange in any case.
    """
    table = ((3, 4, 1, 2), (0, 0, 5, 6), (7, 8, 9, 1), (0, 2, 0, 0))
    whole, ragged = Call(table, 512, config={"chunk_bytes": 1 << 20}), Call(table, 100, config={"chunk_bytes": 1 << 20})

    def rows_of(counts: Sequence[int], rank: int) -> int:
        cut = by_messages and counts[rank]
        return sum(map(any, (counts[:rank], counts[rank : rank + 1], counts[rank + 1 :]))) if cut else 1

    for rank, seen in enumerate(ranks(4).run(launches, whole, by_messages)):
        assert (seen["encode"], seen["decode"]) == (
            rows_of(table[rank], rank),
            rows_of([row[rank] for row in table], rank),
        )
        assert seen["exchange"] == 1
        assert seen["result"] == digest(whole.simulate(rank))
    for rank, seen in enumerate(ranks(4).run(launches, ragged, by_messages)):
        assert seen["encode"] == sum(count > 0 for count in table[rank])
        assert seen["decode"] == sum(row[rank] > 0 for row in table)
        assert seen["exchange"] == 1 and seen["result"] == digest(ragged.simulate(rank))


def test_runs_are_cut_over_messages_and_not_otherwise(ranks: GetRanks) -> None:
    call = Call(((9000, 40_000), (0, 100)), config={"bits": 8})
    for rank, seen in enumerate(ranks(2).run(launches, call, True)):
        assert seen["exchange"] == (exchanges.EXCHANGES, exchanges.EXCHANGES)[rank]
        assert seen["encode"] == (1 + exchanges.EXCHANGES if rank == 0 else 1)
        assert seen["result"] == digest(call.simulate(rank))
    for rank, seen in enumerate(ranks(2).run(launches, call, False)):
        assert seen["exchange"] == 1 and seen["result"] == digest(call.simulate(rank))


def through_collectives(calls: list[Call]) -> list[str]:
    by_messages = transport.by_messages
    transport.by_messages = lambda group, device: False
    try:
        return results_of(calls)
    finally:
        transport.by_messages = by_messages


@pytest.mark.parametrize("world", [2, 3, 5])
def test_as_over_nccl_runs_and_exact_runs_share_one_collective(ranks: GetRanks, world: int) -> None:
    """Exchange over torch's all_to_all_single of uneven byte sizes, at any alignment."""
    calls = [
        Call(uneven(world, seed, 3000), 1, DTYPES[seed % 3], {**CONFIGS[seed % 8], "min_bytes": 4000 * (seed % 2)})
        for seed in range(8)
    ]
    check(ranks, world, calls, through_collectives)


def buffers(call: Call) -> tuple[bool, int]:
    """Return True if 20 more calls use the buffers of the first, and the number of buffers."""
    group = dist.new_group()
    rank, config = dist.get_rank(), call.flash_config
    received, sent = [row[rank] for row in call.rows], list(call.rows[rank])
    output = torch.empty(sum(received), call.width)
    held = []
    for _ in range(21):
        fap.all_to_all(output, call.input(rank), received, sent, group, config=config)
        pool = groups.state_of(group).pool(torch.device("cpu"))
        held.append({id(buffer) for buffer in pool._free})
    dist.destroy_process_group(group)
    return held[0] == held[-1], len(held[0])


def test_buffers_are_used_again(ranks: GetRanks) -> None:
    assert ranks(3).run(buffers, Call(uneven(3, 4, 20_000, 0))) == [(True, 2)] * 3


# ---- stochastic rounding ----


def two_calls() -> list[Tensor]:
    """Send the same elements to every rank, twice."""
    config = fap.FlashConfig(bits=2, min_bytes=0, rounding="stochastic", group_size=32)
    x = gaussian(320, seed=1).repeat(dist.get_world_size())
    found = []
    for _ in range(2):
        output = torch.empty_like(x)
        fap.all_to_all(output, x, config=config)
        found.append(output)
    return found


def test_every_run_and_every_call_has_random_numbers_of_its_own(ranks: GetRanks) -> None:
    """Check that calls have different random numbers, which the seed makes repeatable: see Call.simulate."""
    seen = ranks(2).run(two_calls)
    everything = [part for rank in seen for output in rank for part in output.split(320)]
    assert all(not torch.equal(a, b) for i, a in enumerate(everything) for b in everything[:i])


# ---- asynchronous ----


def in_flight(calls: list[Call], seed: int) -> list[bool]:
    """Start all calls, then wait for them in another order on each rank."""
    expected = [call.run() for call in calls]
    started = [call.start() for call in calls]
    order = list(range(len(calls)))
    random.Random(100 * seed + dist.get_rank()).shuffle(order)
    for i in order:
        assert started[i][1].wait() is True and started[i][1].is_completed()
    return [same_bits(result, output) for result, (output, _) in zip(expected, started, strict=True)]


@pytest.mark.parametrize("world", [2, 3])
def test_calls_in_flight_do_not_take_each_others_bytes(ranks: GetRanks, world: int) -> None:
    """Send the same sizes at one site with other elements; longer and shorter ones between them."""
    same = uneven(world, 1, 6000, 0)
    calls = [Call(same, async_op=True), Call(same, dtype="float32", config={"bits": 4}, async_op=True)]
    calls += [Call(uneven(world, seed, 20_000), async_op=True) for seed in range(3)]
    for seed in range(3):
        for rank in ranks(world).run(in_flight, calls, seed):
            assert all(rank)


def without_a_wait() -> tuple[bool, bool]:
    """Make a call and drop its handle, then an all_reduce and a barrier."""
    world = dist.get_world_size()
    call = Call(((40_000,) * world,) * world, async_op=True)
    expected = call.run()
    output, work = call.start()
    x = torch.ones(50_000)
    fap.all_reduce(x, config=call.flash_config)
    dist.barrier()
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    return same_bits(output, expected), bool((x - world).abs().max() < 0.1) and work.get_future().value()[0] is output


def test_a_call_progresses_without_a_wait(ranks: GetRanks) -> None:
    assert ranks(2).run(without_a_wait) == [(True, True)] * 2


# ---- measured ----


def measured(how: dict[str, Any], table: tuple[tuple[int, ...], ...], calls: int) -> dict[str, Any]:
    fap.reset_stats()
    call = Call(table, 64, config={"group_size": 64, **how}, site=f"measured {how}")
    for _ in range(calls):
        call.run()
    seen = fap.stats()["sites"][call.site]
    fap.reset_stats()
    return seen


def sqnr_db(table: tuple[tuple[int, ...], ...], config: dict[str, Any]) -> float:
    """Return the simulated SQNR of all runs that are quantized."""
    call, signal, noise = Call(table, 64, config=config), 0.0, 0.0
    for source, row in enumerate(table):
        parts = call.input(source).view(-1).split([count * 64 for count in row])
        for rank, part in enumerate(parts):
            error = (call.arrives(source, rank) - part).double().square().sum()
            if error:
                signal, noise = signal + float(part.double().square().sum()), noise + float(error)
    return float(10 * torch.tensor(signal / noise).log10())


@pytest.mark.parametrize("how", ["local", "exact"])
def test_the_error_is_measured_over_all_ranks(ranks: GetRanks, how: str) -> None:
    """Check that a rank that sends nothing takes part in adding up; runs that are not quantized are left out."""
    table = ((40, 90, 5), (0, 0, 0), (50, 3, 60))
    config = {"bits": 4, "min_bytes": 40 * 64 * 4 * 3, "group_size": 64}
    expected = sqnr_db(table, config)
    for seen in ranks(3).run(measured, {**config, "quality_interval": 1, "quality_measure": how}, table, 3):
        assert seen["sqnr_db"] == pytest.approx(expected, abs=0.05)  # runs weigh the same


def test_the_guard_raises_the_width_of_all_ranks(ranks: GetRanks) -> None:
    """Check ranks with different runs, a rank with none, and a rank with unquantized runs only."""
    table = ((40, 90, 5), (0, 0, 0), (3, 3, 3))
    how = {"bits": 2, "min_sqnr_db": 30.0, "quality_interval": 1, "min_bytes": 20 * 64 * 4 * 3}
    seen = ranks(3).run(measured, how, table, 30)
    assert {(one["guard"]["raised"], one["bits"]) for one in seen[:1]} == {(4, 6)}
    assert [one["guard"] for one in seen] == [{"raised": 4}] * 3
    assert [one["quantized"] for one in seen] == [30, 0, 0]


def test_the_guard_comes_back_from_full_precision(ranks: GetRanks) -> None:
    """Make 8 bits too few at first and enough later, which is measured while rank 1 sends nothing."""
    seen = ranks(2).run(guarded_by_values)
    assert seen == [seen[0]] * 2
    assert seen[0]["full_precision"]["below min_sqnr_db"] > 0 and seen[0]["guard"]["lowered"] == 1


def guarded_by_values() -> dict[str, Any]:
    config = fap.FlashConfig(bits=8, min_bytes=0, min_sqnr_db=60.0, quality_interval=1)
    rank, site = dist.get_rank(), fap.Site("guarded runs")
    fap.reset_stats()
    for i in range(12):
        x = gaussian(3 * 128, seed=i) if rank == 0 else torch.empty(0)
        if i >= 4:
            x = x.sign()  # two values: no error at any width
        output = torch.empty(128 if rank == 0 else 256)
        received, sent = ([128, 0], [128, 256]) if rank == 0 else ([256, 0], [0, 0])
        fap.all_to_all(output, x, received, sent, config=config, site=site)
    seen = fap.stats()["sites"][site.name]
    fap.reset_stats()
    return {key: seen[key] for key in ("full_precision", "guard")}


def test_a_target_finds_the_width_of_all_ranks(ranks: GetRanks) -> None:
    table = ((40, 90, 5), (0, 0, 0), (3, 30, 3))
    how = {"bits": 8, "target_sqnr_db": 15.0, "quality_interval": 1}
    seen = ranks(3).run(measured, how, table, 20)
    assert [one["bits"] for one in seen] == [4, 4, 4]


# ---- faults ----


TIMEOUT = timedelta(seconds=3)


def other_sizes(here: int, there: int) -> tuple[str, float]:
    """Send `here` elements from rank 0 to rank 1, which expects `there`."""
    rank, config = dist.get_rank(), fap.FlashConfig(min_bytes=0, chunk_bytes=4096)
    fap.all_reduce(torch.ones(1000), config=config)  # agreed on
    x, output = torch.ones(here), torch.empty(there)
    start = time.monotonic()
    try:
        if rank == 0:
            fap.all_to_all(torch.empty(0), x, [0, 0], [0, here], config=config, site=fap.Site("layer 7"))
        else:
            fap.all_to_all(output, torch.empty(0), [there, 0], [0, 0], config=config, site=fap.Site("layer 7"))
    except fap.CollectiveError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


@pytest.mark.parametrize(
    ("here", "there", "who"),
    [
        (1000, 1200, [0, 1]),
        pytest.param(1200, 1000, [0, 1], marks=pytest.mark.slow),
        (1000, 0, [0]),
        pytest.param(1000, 2000, [1], marks=pytest.mark.slow),  # in two pieces; the sender has the first
    ],
)
def test_ranks_that_disagree_about_a_run_get_an_error(here: int, there: int, who: list[int]) -> None:
    with Ranks(2, TIMEOUT) as both:
        outcomes = both.outcomes(other_sizes, here, there, timeout=30)
    failed = []
    for rank, (kind, value) in enumerate(outcomes):
        assert kind == "value", value
        message, seconds = value
        assert seconds < TIMEOUT.total_seconds() + 3
        if message != "no error":
            failed.append(rank)
            assert message.startswith(f"all_to_all at site 'layer 7', rank {rank} of 2, failed while "), message
    assert failed == who


def killed(victim: int) -> tuple[str, float]:
    call = Call(((40_000,) * 3,) * 3, site="layer 7", async_op=True)
    call.run()
    if dist.get_rank() == victim:
        issued, pending = 0, transport.Pending

        def dying(*arguments: Any) -> transport.Pending:
            nonlocal issued
            issued += 1
            if issued > 1:
                os._exit(17)
            return pending(*arguments)

        transport.Pending = dying  # type: ignore[assignment, misc]
    start = time.monotonic()
    try:
        call.run()
    except fap.CollectiveError as error:
        return str(error), time.monotonic() - start
    return "no error", 0


def test_guarantee_7_a_rank_that_is_killed() -> None:
    with Ranks(3, TIMEOUT) as three:
        outcomes = three.outcomes(killed, 1, timeout=30)
    assert outcomes[1] == ("died", 17)
    for rank in (0, 2):
        kind, (message, seconds) = outcomes[rank]
        assert kind == "value"
        assert message.startswith(f"all_to_all at site 'layer 7', rank {rank} of 3, failed while "), message
        assert seconds < TIMEOUT.total_seconds() + 3


def sizes_that_do_not_meet() -> int:
    """Match, of two messages with one number, the one of the expected size."""
    group, rank = dist.group.WORLD, dist.get_rank()
    if rank == 0:
        label, other = Label("all_to_all", "a", group), Label("all_to_all", "a", group)
        label.reserve(1)
        other._next, other._reserved = label._next, label._reserved
        late = transport.all_to_all(torch.empty(0), torch.full((7,), 7.0), other, "sending", [0, 0], [0, 7])
        transport.all_to_all(torch.empty(0), torch.full((5,), 5.0), label, "sending", [0, 0], [0, 5]).wait()
        dist.barrier()
        transport.all_to_all(torch.empty(0), torch.empty(0), label, "nothing", [0, 0], [0, 0]).wait()
        late.wait()
        return 0
    label, other = Label("all_to_all", "a", group), Label("all_to_all", "a", group)
    label.reserve(1)
    other._next, other._reserved = label._next, label._reserved
    output = torch.empty(5)
    transport.all_to_all(output, torch.empty(0), label, "getting", [5, 0], [0, 0]).wait()
    dist.barrier()
    transport.all_to_all(torch.empty(0), torch.empty(0), label, "nothing", [0, 0], [0, 0]).wait()
    transport.all_to_all(torch.empty(7), torch.empty(0), other, "getting", [7, 0], [0, 0]).wait()
    return int(as_bytes(output).numel() // 4 * output[0])


def test_a_message_is_matched_by_its_size_too(ranks: GetRanks) -> None:
    assert ranks(2).run(sizes_that_do_not_meet) == [0, 25]
