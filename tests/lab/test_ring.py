"""lab/benchmarks/ring.py: the ring's bits, its volume, its roundings, and their error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.bench import check as bench_check
from flash_allreduce_plugin.cli.bench.check import Inputs
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Format
from lab.benchmarks.ring import RingAllReduce, sent_bytes
from tests import simulation
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def digests(cases: list[tuple[int, str, Format, int]]) -> list[str]:
    """Return digests of this rank's results, each of a ring's second call."""
    found = []
    for numel, dtype, wire, chunk_bytes in cases:
        ring = RingAllReduce(numel, wire, chunk_bytes, world())
        ring(torch.ones(numel, dtype=getattr(torch, dtype)))
        x = Inputs("all_reduce", numel, getattr(torch, dtype), ring.world).tensor(ring.rank)
        ring(x)
        found.append(simulation.digest(x))
    return found


def simulated(numel: int, dtype: str, wire: Format, world_size: int) -> Tensor:
    """Return the sum, hop after hop in one process, by the codec in plain PyTorch."""
    inputs = Inputs("all_reduce", numel, getattr(torch, dtype), world_size)
    tensors = [inputs.tensor(rank) for rank in range(world_size)]
    size = -(-wire.groups(numel) // world_size) * wire.group_size
    shards = []
    for number in range(world_size):
        shard = slice(number * size, (number + 1) * size)
        total = tensors[number][shard]
        for hop in range(1, world_size):
            payload = simulation.encoded(total, wire)
            total = simulation.decoded(payload, total.float(), wire) + tensors[(number + hop) % world_size][shard]
        shards.append(simulation.decoded(simulation.encoded(total, wire), tensors[0][shard], wire))
    return torch.cat(shards)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_rank_has_the_bits_of_the_simulation(ranks: GetRanks, world_size: int) -> None:
    cases = [
        (numel, dtype, wire, chunk_bytes)
        for numel, chunk_bytes in ((1, 1 << 20), (300, 1 << 20), (40_003, 4096), (40_960, 1 << 20))
        for dtype, wire in (("float32", Format(8, 128)), ("bfloat16", Format(3, 32, hadamard=True)))
    ]
    expected = [simulation.digest(simulated(*case[:3], world_size)) for case in cases]
    for found in ranks(world_size).run(digests, cases):
        assert found == expected


@contextmanager
def counting_encoded_elements() -> Iterator[list[int]]:
    counted, encode = [], rows.encode

    def count(input: Tensor, *rest: Any) -> None:
        counted.append(input.numel())
        encode(input, *rest)

    rows.encode = count
    try:
        yield counted
    finally:
        rows.encode = encode


def measured(numel: int, wire: Format) -> dict[str, Any]:
    """Return, for a ring and for two steps: the share of wrong elements, SQNR, and the bytes that a rank sends."""
    group = world()
    inputs = Inputs("all_reduce", numel, torch.float32, group.size())
    ring = RingAllReduce(numel, wire, 1 << 16, group)
    x, y = inputs.tensor(group.rank()), inputs.tensor(group.rank())
    with counting_encoded_elements() as encoded:
        ring(x)
    fap.reset_stats()
    fap.all_reduce(y, config=fap.FlashConfig(bits=wire.bits, group_size=wire.group_size, min_bytes=0))
    parts = list(bench_check.ring_segments(inputs, ring))

    def compare(result: Tensor, travel: Any) -> list[float]:
        values = torch.tensor(bench_check.compare(result, inputs, iter(parts), wire.group_size, travel))
        values = values.double()
        dist.all_reduce(values)
        return values.tolist()

    wrong, signal, noise = compare(x, lambda groups: bench_check.ring(groups, wire))
    _, _, noise_two_step = compare(y, None)
    total = torch.tensor([sum(encoded)])
    dist.all_reduce(total)
    return {
        "wrong": wrong,
        "differing": bench_check.differing(x),
        "ring dB": 10 * torch.tensor(signal / noise).log10().item(),
        "two-step dB": 10 * torch.tensor(signal / noise_two_step).log10().item(),
        "sent": (ring.bytes_sent, fap.stats()["bytes_sent"]),
        "steps": ring.steps,
        "roundings": total.item() / numel,
    }


def test_the_error_of_a_ring_grows_with_its_ranks_and_the_volume_is_the_same(ranks: GetRanks) -> None:
    numel, wire = 1 << 17, Format(4, 128)
    results = {n: ranks(n).run(measured, numel, wire) for n in (2, 4, 8)}
    for n, found in results.items():
        formula = sent_bytes(numel, wire, n)
        assert formula == 2 * (n - 1) / n * numel * 4.25 / 8
        for rank in found:
            assert rank["wrong"] == rank["differing"] == 0
            assert rank["sent"] == (formula, formula)
            assert rank["steps"] == 2 * (n - 1)
            assert rank["roundings"] == n
    ring, two_step = ([results[n][0][f"{name} dB"] for n in (2, 4, 8)] for name in ("ring", "two-step"))
    # 10 log10((N+1)/2) below one rounding, and 3 dB whatever N is.
    assert ring[0] - ring[1] == pytest.approx(2.2, abs=0.4) and ring[1] - ring[2] == pytest.approx(2.6, abs=0.4)
    assert max(two_step) - min(two_step) < 0.3
    assert ring[0] > two_step[0] + 0.8 and ring[2] < two_step[2] - 3.0


def test_a_ring_that_leaves_its_error_bound_is_found() -> None:
    """Check the bound of the simulation's result, and of the same with one element off, in one process."""
    numel, world_size, wire = 5000, 3, Format(4, 64)
    inputs = Inputs("all_reduce", numel, torch.float32, world_size)
    rings = [_Shape(wire, -(-wire.groups(numel) // world_size), rank, world_size) for rank in range(world_size)]

    def wrong(result: Tensor) -> int:
        return sum(
            bench_check.compare(
                result, inputs, bench_check.ring_segments(inputs, ring), 64, lambda x: bench_check.ring(x, wire)
            )[0]
            for ring in rings
        )

    result = simulated(numel, "float32", wire, world_size)
    assert wrong(result) == 0
    result[[7, 4999]] += 2.5  # a step is 0.4 of the inputs, 0.7 of their sum
    assert wrong(result) == 2


class _Shape(RingAllReduce):
    """A ring's sizes without a group."""

    def __init__(self, wire: Format, shard: int, rank: int, world_size: int) -> None:
        self.wire, self.shard, self.rank, self.world = wire, shard, rank, world_size
