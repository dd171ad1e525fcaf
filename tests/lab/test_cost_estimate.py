"""The cost estimate: its formulas by hand on small numbers, and properties that hold for any estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_allreduce_plugin.cli.plan import presets
from flash_allreduce_plugin.cli.plan.cost_model import Shares
from flash_allreduce_plugin.codec.format import Format
from lab.benchmarks import cuda_codec
from lab.planning import cost_estimate
from lab.planning.cost_estimate import MACHINES, Kernels, Machine, flat, two_levels

INT4 = Format(4, 128)  # 68 bytes of 256
NUMEL = 128 * 1000
BOX = Machine(
    "box",
    ranks=4,
    nodes=1,
    copy=1e9,
    link=1e8,
    wire=0.0,
    bus=5e7,
    latency=0.0,
    sources=(),
    shares={4: Shares(0.5, 0.25, 1.0, 0.1)},
)
PAIR = replace(BOX, nodes=2, wire=1e7)
PERFECT = replace(Kernels.assume(1.0), launch=0.0)


def test_a_flat_call_by_hand() -> None:
    e = flat(NUMEL, INT4, BOX, PERFECT)
    tensor, payload = 256_000, 68_000
    assert e.kernels == pytest.approx((2 * tensor + 3 * payload + payload / 4) / 1e9)
    assert e.link == pytest.approx(2 * payload * 3 / 4 / 1e8)
    assert e.nccl == pytest.approx(tensor * 2 * 3 / 4 / 5e7)
    assert e.in_turn == e.kernels + e.link and e.overlapped == max(e.kernels, e.link)


def test_without_a_share_each_kernel_has_that_of_the_model() -> None:
    modelled = flat(NUMEL, INT4, BOX, replace(Kernels.assume(None), launch=0.0))
    both = 256_000 + 68_000
    assert modelled.kernels == pytest.approx((both / 0.5 + both / 0.25 + 68_000 * 5 / 4 / 0.1) / 1e9)
    assert all(machine.shares in [device.shares for device in presets.DEVICES.values()] for machine in MACHINES)


def test_no_call_is_faster_than_the_host_starts_it() -> None:
    """Check one chunk, and eight."""
    fast = replace(BOX, copy=1e15, link=1e15)
    call, chunk = presets.host()
    assert flat(NUMEL, INT4, fast, PERFECT).overlapped == pytest.approx(call)
    assert flat(1 << 28, INT4, fast, PERFECT).in_turn == pytest.approx(call + 7 * chunk)


def test_a_flat_call_between_nodes_waits_for_the_slower_link() -> None:
    """Check each half: a quarter stays, a quarter is sent over the link, half over the wire."""
    assert flat(NUMEL, INT4, PAIR, PERFECT).link == pytest.approx(2 * 68_000 / 2 / 1e7)
    fast = replace(PAIR, wire=1e12)
    assert flat(NUMEL, INT4, fast, PERFECT).link == pytest.approx(2 * 68_000 / 4 / 1e8)


def test_two_levels_send_the_bytes_of_the_formula() -> None:
    """Check both shares, between: 2 (N-1)/N P(inter) / L, and inside: (L-1)/L (P(intra) + P(inter)), in one call."""
    assert two_levels(NUMEL, INT4, PAIR, PERFECT).link == pytest.approx(2 * 1 / 2 * 68_000 / 2 / 1e7)
    fast = replace(PAIR, wire=1e12)
    assert two_levels(NUMEL, INT4, fast, PERFECT).link == pytest.approx(1 / 2 * (132_000 + 68_000) / 1e8)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    machine = MACHINES[0]
    seconds = cost_estimate.nccl_seconds(NUMEL, replace(machine, latency=0.0))
    algorithm = 2 * NUMEL / seconds
    assert algorithm * 2 * 7 / 8 == pytest.approx(machine.bus)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_an_all_reduce_is_never_faster_than_its_bytes(machine: Machine) -> None:
    """Check the speedup over NCCL on the same link: at most the ratio of the bytes; with slower kernels, less."""
    for bits in (8, 4):
        c = Format(bits, 128)
        e = flat(1 << 28, c, replace(machine, nodes=1, bus=machine.link), PERFECT)
        assert e.speedups[0] < e.speedups[1] <= 16 / c.bits_per_element * 1.001
        slower = flat(1 << 28, c, machine, Kernels.assume(0.5))
        assert slower.kernels == pytest.approx(2 * flat(1 << 28, c, machine, PERFECT).kernels)


def test_every_number_of_a_machine_has_a_source() -> None:
    for machine in MACHINES:
        heads = [source.split(":")[0] for source in machine.sources]
        assert heads == ["copy", "link", *(["wire"] if machine.nodes > 1 else []), "NCCL"]


def test_measured_kernels_are_interpolated_and_cost_a_launch_at_least() -> None:
    rows = [
        {"dtype": "bf16", "group_size": 128, "options": "", "bits": 4, "bytes": {"encode": b}, "share": {"encode": s}}
        for b, s in ((3000, 0.9), (1000, 0.5))
    ]
    other = {**rows[0], "group_size": 64, "bytes": {"encode": 2000}, "share": {"encode": 0.1}}
    kernels = Kernels.of_json({"rows": [*rows, other], "launch us": 7.0})
    shares = [kernels.share("encode", 4, b, BOX) for b in (10, 1000, 2000, 3000, 10**9)]
    assert shares == pytest.approx([0.5, 0.5, 0.7, 0.9, 0.9])
    assert kernels.seconds("encode", 4, 10, BOX) == pytest.approx(7e-6)
    assert kernels.seconds("encode", 4, 3e9, BOX) == pytest.approx(3 / 0.9)


def test_the_timed_kernels_have_the_counted_bytes() -> None:
    """Check that the estimate of a shard and its row of the benchmark count the same bytes."""
    n, c = 128 * 800, INT4
    whole = {k: cuda_codec.counted_bytes(k, n, 2, c) for k in ("encode", "decode")}
    of_shard = cuda_codec.counted_bytes("decode_sum_encode", n // 8, 2, c, ranks=8)
    eight = replace(BOX, ranks=8)
    assert flat(n, c, eight, PERFECT).kernels == pytest.approx((sum(whole.values()) + of_shard) / BOX.copy)
    assert cuda_codec.counted_bytes("decode_sum", 128, 4, c, ranks=3) == 3 * 68 + 512
