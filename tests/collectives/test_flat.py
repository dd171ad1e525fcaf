"""Guarantees 1 to 6 and 8 on real ranks, against the simulation in simulation.py, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import flat, transport
from flash_allreduce_plugin.policy import Plan
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.telemetry import counters
from tests import simulation
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks
from tests.simulation import Call, digest, expected_of, lost_zeros, result_of, results_of

GetRanks = Callable[[int], Ranks]

WORLDS = [1, 2, 3, 4, 5, 8]
LENGTHS = [0, 1, 31, 127, 128, 129, 997, 7919]
INT4 = {"bits": 4}
CONFIGS = [
    {"bits": 8},
    INT4,
    {"bits": 3, "group_size": 32},
    {"bits": 6, "group_size": 256, "symmetric": True},
    {"bits": 4, "group_size": 64, "compact": True},
    {"reduce_bits": 3, "gather_bits": 4, "group_size": 256, "codebook": True, "range": "mse"},
    {"reduce_bits": 6, "gather_bits": 4, "codebook": True, "spike_reserving": True, "hadamard": True},
    {"bits": 2, "group_size": 256, "codebook": True, "spike_reserving": True},
    {"reduce_bits": 5, "gather_bits": 8, "group_size": 64},
    {"bits": 2, "group_size": 64, "spike_reserving": True, "range": "mse"},
    {"bits": 4, "hadamard": True},
    {"reduce_bits": 3, "gather_bits": 4, "group_size": 32, "rounding": "stochastic", "hadamard": True},
    {"bits": 3, "group_size": 512, "symmetric": True, "spike_reserving": True, "rounding": "stochastic"},
]


def check(ranks: GetRanks, world_size: int, calls: list[Call]) -> None:
    results, expected = ranks(world_size).run(results_of, calls), expected_of(calls, world_size)
    for rank in range(world_size):
        for call, ours, theirs in zip(calls, results[rank], expected[rank], strict=True):
            assert ours == theirs, f"rank {rank}: {call}"


def without_messages(calls: list[Call]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "by_messages", lambda group, device: False)
        return results_of(calls)


def test_over_gloos_own_collectives(ranks: GetRanks) -> None:
    """Use gloo's own collectives, which carry CUDA tensors, instead of messages."""
    calls = [
        Call(collective, numel, "bfloat16", INT4, async_op=async_op)
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
        for numel in (1, 997, 30_011)
        for async_op in (False, True)
    ]
    results, expected = ranks(3).run(without_messages, calls), expected_of(calls, 3)
    assert results == expected


@pytest.mark.parametrize("world_size", WORLDS)
def test_guarantee_5_any_world_length_and_dtype(ranks: GetRanks, world_size: int) -> None:
    """Check that every call equals the simulation; the result is the same on all ranks (guarantee 1)."""
    calls = []
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        for i, numel in enumerate(LENGTHS):
            for j, dtype in enumerate(("float32", "bfloat16", "float16")):
                op = "SUM" if (i + j) % 2 or collective == "all_gather" else "AVG"
                calls.append(Call(collective, numel, dtype, CONFIGS[(i + j) % len(CONFIGS)], op))
    check(ranks, world_size, calls)


@pytest.mark.parametrize("world_size", [2, 5])
def test_guarantee_5_many_chunks(ranks: GetRanks, world_size: int) -> None:
    calls = [
        Call(collective, 100_003, dtype, config, async_op=async_op)
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
        for dtype, config, async_op in (("float32", CONFIGS[4], False), ("bfloat16", CONFIGS[0], True))
    ]
    check(ranks, world_size, calls)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["tiny", "huge", "from 1e-30 to 1e30", "constant", "zero", "offset"])
def test_guarantee_6_wide_ranges_constants_and_offsets(ranks: GetRanks, world_size: int, kind: str) -> None:
    check(
        ranks,
        world_size,
        [
            Call(collective, 5003, dtype, config, "AVG", kind)
            for collective in ("all_reduce", "reduce_scatter", "all_gather")
            for dtype in ("float32", "bfloat16")
            for config in (CONFIGS[0], CONFIGS[2])
        ],
    )


@pytest.mark.parametrize("kind", ["gaussian", "tiny", "huge", "from 1e-30 to 1e30", "constant", "offset"])
def test_guarantee_6_the_error_of_two_roundings(kind: str) -> None:
    """Check the simulation, which the ranks equal: half a step a rank, and half a step of the sum."""
    world = 4
    call = Call("all_reduce", 5003, kind=kind)
    inputs = [call.input(rank, world) for rank in range(world)]

    def step(x: torch.Tensor) -> torch.Tensor:
        groups_ = torch.nn.functional.pad(x.double().view(1, -1), (0, -x.numel() % 128), "replicate").view(-1, 128)
        low, high = groups_.amin(1), groups_.amax(1)
        outwards = (high - low + low.abs() * 2.0**-7) / 255 * (1 + 2.0**-7)
        return outwards.clamp(min=2.0**-126).repeat_interleave(128)[: x.numel()]

    exact = sum(x.double() for x in inputs)
    total = call.simulate(world)[0].double()
    assert isinstance(exact, torch.Tensor)
    allowed = sum(step(x) for x in inputs) / 2
    # The sum spreads as far as its own values do, and as far as the error of its parts.
    allowed = allowed + step(exact) / 2 + allowed.max() / 127 * (kind != "from 1e-30 to 1e30")
    rounding = 2.0**-22 * sum(x.double().abs() for x in inputs)
    if kind == "from 1e-30 to 1e30":
        allowed = allowed * 1.05
    assert ((total - exact).abs() <= allowed * 1.001 + rounding).all()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_guarantee_8_zeros_of_all_ranks_are_zero_in_the_result(ranks: GetRanks, world_size: int) -> None:
    """Check every width and layout with each option but the rotation, some of them bit for bit as simulated."""
    options = [
        *({}, {"compact": True}, {"symmetric": True}),
        *({"range": "mse"}, {"compact": True, "range": "mse"}, {"rounding": "stochastic"}),
        {"compact": True, "rounding": "stochastic"},
        *({"codebook": True}, {"codebook": True, "range": "mse"}),
        *({"codebook": True, "spike_reserving": True, "range": range_} for range_ in ("min-max", "mse")),
        *({"spike_reserving": True}, {"spike_reserving": True, "compact": True, "rounding": "stochastic"}),
    ]
    calls = []
    for i, (bits, chosen) in enumerate((b, o) for b in range(2, 9) for o in options):
        sizes = (128, 256, 512, 1024) if "codebook" in chosen else (32, 64, 128, 256, 512, 1024)
        group_size, dtype = sizes[i % len(sizes)], ("float32", "bfloat16", "float16")[i % 3]
        config = {"bits": bits, "gather_bits": 10 - bits, "group_size": group_size, **chosen}
        for collective in ("all_reduce", "reduce_scatter", "all_gather"):
            op = "AVG" if i % 2 and collective != "all_gather" else "SUM"
            calls.append(Call(collective, 2999, dtype, config, op, "embedding", async_op=bool(i % 2)))
    assert ranks(world_size).run(lost_zeros, calls) == [[]] * world_size
    check(ranks, world_size, calls[::11])


def equal_on_all_ranks(calls: list[Call]) -> bool:
    """Compare the results through torch.distributed, not with our own expectation."""
    for call in calls:
        x = call.input(dist.get_rank(), dist.get_world_size())
        result = call.run(x).view(torch.uint8).clone()
        first = result.clone()
        dist.broadcast(first, src=0)
        if not torch.equal(first, result):
            return False
    return True


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_guarantee_1_every_rank_ends_with_the_same_bits(ranks: GetRanks, world_size: int) -> None:
    calls = [
        Call(collective, numel, dtype, config, kind=kind)
        for collective in ("all_reduce", "all_gather")
        for numel, kind in ((129, "gaussian"), (4099, "from 1e-30 to 1e30"), (4099, "nan"))
        for dtype in ("float32", "bfloat16")
        for config in CONFIGS
    ]
    assert all(ranks(world_size).run(equal_on_all_ranks, calls))


@pytest.mark.parametrize("world_size", [3, 5])
def test_guarantee_3_sums_are_taken_in_rank_order(ranks: GetRanks, world_size: int) -> None:
    calls = [Call(c, 5003, kind="cancelling") for c in ("all_reduce", "reduce_scatter")]
    check(ranks, world_size, calls)
    for call in calls:
        inputs = [call.input(rank, world_size)[:5003] for rank in range(world_size)]
        both_ways = [simulation.reduce_shard(order, 1.0, Format(8, 128)) for order in (inputs, inputs[::-1])]
        assert not torch.equal(*both_ways)  # the order changes these sums


def values_of(call: Call) -> torch.Tensor:
    return call.run(call.input(dist.get_rank(), dist.get_world_size()))


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_guarantee_2_non_finite_values_stay_and_take_their_group_only(
    ranks: GetRanks, world_size: int, kind: str
) -> None:
    bad = torch.arange(4099) % 1000 == 5
    lost = torch.zeros(4224, dtype=torch.bool)
    lost[:4099] = bad
    lost = lost.view(-1, 128).any(1).repeat_interleave(128)[:4099]
    for dtype in ("float32", "bfloat16", "float16"):
        call = Call("all_reduce", 4099, dtype, INT4, kind=kind)
        clean = replace(call, kind="gaussian").simulate(world_size)[0]
        for result in ranks(world_size).run(values_of, call):
            assert not result[bad].isfinite().any()
            assert result[lost].isnan().all()
            assert same_bits(result[~lost], clean[~lost])


def test_guarantee_2_in_the_other_collectives(ranks: GetRanks) -> None:
    check(ranks, 3, [Call(c, 4099, "bfloat16", kind=kind) for c in ("reduce_scatter", "all_gather")
                     for kind in ("nan", "inf", "-inf")])  # fmt: skip
    for result in ranks(3).run(values_of, Call("all_gather", 4099, kind="inf")):
        assert not result.view(3, -1)[1, 5::1000].isfinite().any()
        assert result.view(3, -1)[[0, 2]].isfinite().all()


def part_of_longer_tensors() -> list[str]:
    """Reduce the same 2048 elements alone, and at a group's boundary in other tensors."""
    config = fap.FlashConfig(bits=5, min_bytes=0, chunk_bytes=4096)
    rank = dist.get_rank()
    mine = gaussian(2048, seed=rank)
    digests = []
    for before, after in ((0, 0), (128, 0), (0, 1), (1280, 7777), (128 * 77, 3), (128 * 1000, 50_000)):
        x = torch.cat([gaussian(before, seed=50 + rank), mine, gaussian(after, seed=90 + rank) * 1e6])
        fap.all_reduce(x, config=config)
        digests.append(digest(x[before : before + 2048]))
    return digests


@pytest.mark.parametrize("world_size", [2, 3])
def test_guarantee_3_a_group_does_not_depend_on_the_rest_of_the_tensor(ranks: GetRanks, world_size: int) -> None:
    results = ranks(world_size).run(part_of_longer_tensors)
    assert len({d for rank in results for d in rank}) == 1


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_guarantee_3_nor_on_the_chunk_size_nor_on_async(ranks: GetRanks, world_size: int, collective: str) -> None:
    calls = [
        Call(collective, 50_021, "bfloat16", {**INT4, "chunk_bytes": chunk_bytes}, async_op=async_op)
        for chunk_bytes in (4096, 5000, 16384, 1 << 20)
        for async_op in (False, True)
    ]
    results = ranks(world_size).run(results_of, calls)
    assert all(len(set(rank)) == 1 for rank in results)


def repeated(call: Call) -> list[str]:
    digests = []
    for threads in (1, 1, 2):
        torch.set_num_threads(threads)
        digests.append(result_of(call))
    torch.set_num_threads(1)
    return digests


def test_guarantee_4_same_input_same_bits_on_every_run(ranks: GetRanks) -> None:
    for collective in ("all_reduce", "reduce_scatter"):
        for rank in ranks(3).run(repeated, Call(collective, 70_001, config={"chunk_bytes": 1 << 17})):
            assert len(set(rank)) == 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp16_sums_above_65504_become_inf_as_in_a_plain_all_reduce(ranks: GetRanks, world_size: int) -> None:
    call = Call("all_reduce", 3001, "float16", kind="large fp16")
    exact = torch.stack([call.input(rank, world_size) for rank in range(world_size)]).double().sum(0)
    for result in ranks(world_size).run(values_of, call):
        over = exact.abs() > 65504
        assert over.any()
        assert torch.equal(result[over].double(), exact[over].sign() * float("inf"))
        assert result[~over].isfinite().all()
    average = replace(call, op="AVG")
    for result in ranks(world_size).run(values_of, average):
        assert result.isfinite().all()  # the sum is averaged before it is narrowed


def strided() -> list[bool]:
    """Compare transposed, sliced and flipped tensors with contiguous copies of them."""
    config = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
    rank, world = dist.get_rank(), dist.get_world_size()
    same = []
    for view in (lambda x: x.t(), lambda x: x[:, 3:50], lambda x: x[::3, ::2], lambda x: x.t()[1:]):
        base = gaussian(60, 101, seed=rank)
        frame, x = base.clone(), base
        x = view(base)
        expected = x.contiguous().clone()
        fap.all_reduce(expected, config=config)
        fap.all_reduce(x, config=config)
        same.append(same_bits(x, expected))
        untouched = torch.ones_like(frame, dtype=torch.bool)
        view(untouched).zero_()
        same.append(torch.equal(base[untouched], frame[untouched]))
    wide = gaussian(world * 50, 40, seed=rank).t()  # an input of reduce_scatter, an output of all_gather
    shard, flat = torch.empty(wide.numel() // world * 2)[::2], torch.empty(wide.numel() // world)
    fap.reduce_scatter(shard, wide, config=config)
    fap.reduce_scatter(flat, wide.contiguous(), config=config)
    same.append(same_bits(shard, flat))
    whole, straight = torch.empty(50, 40 * world).t(), torch.empty(40 * world, 50)
    fap.all_gather(whole, flat.view(50, 40).t().contiguous().t(), config=config)
    fap.all_gather(straight, flat, config=config)
    same.append(same_bits(whole.contiguous().view(-1), straight.view(-1)))
    return same


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_guarantee_5_any_stride(ranks: GetRanks, world_size: int) -> None:
    for rank in ranks(world_size).run(strided):
        assert rank == [True] * len(rank)


def measured_bytes(calls: list[Call]) -> list[tuple[int, int]]:
    """Return (bytes in stats(), bytes handed to the process group for other ranks) of each call."""
    world = dist.get_world_size()
    results_of(calls)  # the configurations are agreed on
    sent = 0
    all_to_all, all_gather = transport.all_to_all, transport.all_gather

    def counting_all_to_all(output, input, *rest):  # type: ignore[no-untyped-def]
        nonlocal sent
        assert input.numel() % world == 0 and input.dtype == torch.uint8
        sent += input.numel() // world * (world - 1)
        return all_to_all(output, input, *rest)

    def counting_all_gather(output, input, *rest):  # type: ignore[no-untyped-def]
        nonlocal sent
        sent += input.numel() * input.element_size() * (world - 1)
        return all_gather(output, input, *rest)

    transport.all_to_all, transport.all_gather = counting_all_to_all, counting_all_gather
    counted = []
    try:
        for call in calls:
            counters.reset_stats()
            sent = 0
            result_of(call)
            counted.append((counters.stats()["bytes_sent"], sent))
    finally:
        transport.all_to_all, transport.all_gather = all_to_all, all_gather
        counters.reset_stats()
    return counted


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_counted_bytes_equal_sent_bytes(ranks: GetRanks, world_size: int) -> None:
    calls = [
        Call(collective, numel, "bfloat16", config)
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
        for numel in (1, 129, 5003, 60_013)
        for config in (CONFIGS[1], CONFIGS[4])
    ]
    for rank in ranks(world_size).run(measured_bytes, calls):
        for call, (counted, sent) in zip(calls, rank, strict=True):
            assert counted == sent > 0, call


def buffers(calls: list[Call]) -> list[tuple[int, int, bool]]:
    """Return the bytes of a first call, those in the pool after 20 more, and True if the buffers are the same."""
    held = []
    taken: list[int] = []
    take = transport.BufferPool._take

    def counting_take(pool: transport.BufferPool, nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return take(pool, nbytes)

    pool = groups.state_of(dist.group.WORLD).pool(torch.device("cpu"))
    transport.BufferPool._take = counting_take
    try:
        for call in calls:
            result_of(call)  # the configuration is agreed on
            pool._free.clear()
            taken.clear()
            result_of(call)
            first, before = sum(taken), list(pool._free)
            for _ in range(20):
                result_of(call)
            same = {id(b) for b in pool._free} == {id(b) for b in before}
            held.append((first, pool.free_bytes(), same))
    finally:
        transport.BufferPool._take = take
    return held


@pytest.mark.parametrize("world_size", [2, 3])
def test_buffers_do_not_grow_and_are_at_most_one_and_a_half_payloads(ranks: GetRanks, world_size: int) -> None:
    calls = [
        Call(collective, numel, config={"bits": bits, "chunk_bytes": 1 << 14})
        for collective in ("all_reduce", "reduce_scatter", "all_gather")
        for numel, bits in ((10_007, 8), (40_009, 4), (200_003, 4))
    ]
    for rank in ranks(world_size).run(buffers, calls):
        for call, (first, later, same) in zip(calls, rank, strict=True):
            assert first == later and same, call
            codec = Format(call.flash_config.bits, 128)
            payload = codec.payload_bytes(call.numel * (1 if call.collective == "all_reduce" else world_size))
            chunks = -(-payload // call.flash_config.chunk_bytes)
            # A chunk is a multiple of world_size times 4 groups, all chunks are as large as the first.
            padding = (chunks + 1) * world_size * 4 * codec.record_bytes
            output = 4 * call.numel if call.collective == "reduce_scatter" else 0  # sums are put in place at the end
            assert first <= (1.5 if chunks >= 4 else 2) * (payload + padding) + output, call


def inference_then_training() -> list[bool]:
    """Use buffers made in inference mode outside of it, and the other way round."""
    config = fap.FlashConfig(min_bytes=0, chunk_bytes=4096)
    group = dist.new_group()  # with a pool of its own
    same = []
    for numel in (20_000, 40_000):
        with torch.inference_mode():
            x = gaussian(numel)
            fap.all_reduce(x, group=group, config=config)
        y = gaussian(numel)
        fap.all_reduce(y, group=group, config=config)
        same.append(same_bits(x, y))
    with torch.inference_mode():
        x = gaussian(1000)
        work = fap.all_reduce(x, group=group, config=config, async_op=True)
    work.wait()
    y = gaussian(40_000)
    fap.all_reduce(y, group=group, config=config)
    pool = groups.state_of(group).pool(torch.device("cpu"))
    same.append(len(pool._free) == 2)
    dist.destroy_process_group(group)
    return same


def test_buffers_outlive_inference_mode(ranks: GetRanks) -> None:
    assert ranks(2).run(inference_then_training) == [[True, True, True]] * 2


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_sent_bytes_grow_with_the_payload_and_not_faster(collective: str, world_size: int) -> None:
    """Check that the padding of shards vanishes for large tensors: 2 (N-1)/N payloads, or (N-1)/N."""
    plan = Plan(Format(4, 128), Format(4, 128), 1 << 19)
    numel = world_size * 10_000_000
    ideal = plan.reduce.payload_bytes(numel) * (world_size - 1) / world_size * (1 + (collective == "all_reduce"))
    assert 1 <= flat.sent_bytes(collective, numel, plan, world_size) / ideal < 1.01
