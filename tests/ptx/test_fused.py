"""The fused two-shot as nvcc makes it, all blocks of all ranks interleaved at random: the codec's bits, late and dead
ranks, and the protocol over many calls."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable

import pytest
import torch

from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import two_shot
from tests.codecs import DTYPES, gaussian, same_bits
from tests.collectives.test_two_shot import OPTIONS, PLAIN, Call, make
from tests.gpu import device
from tests.ptx import build
from tests.ptx.group import Group
from tests.ptx.operators import machine
from tests.ptx.test_codec import needs_ptx, without

pytestmark = needs_ptx


def check(calls: list[Call], seed: int, late: int | None = None, count: int = 0, multicast: bool = False) -> None:
    world = len(calls[0].inputs)
    group = Group(world, max(call.half_bytes for call in calls), count, multicast)
    for call, results in zip(calls, group.run(calls, seed, late), strict=True):
        for rank, ours in enumerate(results):
            what = f"rank {rank} of {world}, {call.reduce} to {call.gather}, {tuple(call.inputs.shape)}, seed {seed}"
            assert same_bits(ours, call.expected[0]), what
    assert not group.reports.any()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_world_has_the_codecs_bits(world: int) -> None:
    """Check lengths around a group, a piece and a stripe; kinds, widths, dtypes and misaligned tensors among them."""
    lengths = (1, 33, 1023, 1025, 1024 * world + 1, 0, 9000)[: 7 if world < 8 else 5]
    calls = [make(world, numel, 11 * world + i) for i, numel in enumerate(lengths)]
    check(calls, seed=world)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "seed"), [*itertools.product((2, 3, 4, 8), range(3))])
def test_every_option(world: int, seed: int) -> None:
    check([make(world, 1500, i, seed) for i in range(len(OPTIONS))], seed)


needs_multicast = pytest.mark.skipif(build.ARCHITECTURE < "90", reason="GPUs before sm_90 have no multicast address")


@needs_multicast
@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_store_to_a_multicast_address_reaches_all(world: int) -> None:
    """Store the sums to it; in one shot, the encoded tensors of every rank. No rank's own address is written."""
    calls = [make(world, numel, i) for i, numel in enumerate((1025, 33, 9000, 2048, 700))]
    assert {call.one_shot for call in calls} == {False, True}
    check(calls, seed=world, multicast=True)
    assert machine().opcodes["multimem.st.global.v4.f32"] > 0


@needs_multicast
def test_a_store_outside_of_the_multicast_address_is_detected() -> None:
    def further(_: str, text: str) -> str:
        return re.sub(r"(multimem\.st\S+\s+\[%rd\d+)", r"\1+16", text)

    with machine().mutated(further), pytest.raises((AssertionError, RuntimeError), match="rank"):
        check([make(2, 1025, 0)], seed=2, multicast=True)


@pytest.mark.slow
def test_more_pieces_than_blocks() -> None:
    check([make(2, 1024 * 2 * 33 + 5, i) for i in (0, 1)], seed=3)


@pytest.mark.parametrize(("world", "late"), [(2, 1), (4, 2), (8, 0)])
def test_a_late_rank_is_waited_for(world: int, late: int) -> None:
    check([make(world, numel, world + i) for i, numel in enumerate((2000, 64))], seed=5, late=late)


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_calls_of_changing_sizes_while_the_count_of_meetings_wraps_around(count: int) -> None:
    """Check that a rank may begin its next call while others are in this one: two halves are enough."""
    small = [
        Call(gaussian(3, n, seed=n), PLAIN, Format(8, 128), key=n, one_shot=i % 3 == 1, staged=i % 2 == 0)
        for i, n in enumerate((1, 5000, 64, 0, 1024, 4100))
    ]
    calls = random.Random(count).choices(small, k=count)
    check(calls, seed=count, count=(1 << 32) - 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rank_that_does_not_come_is_reported_and_leaves_nan(dtype: torch.dtype) -> None:
    """Check that the result is NaN throughout, the report names the peer, and later calls do not wait again."""
    calls = [Call(gaussian(3, n).to(dtype), PLAIN, PLAIN, one_shot=n == 3000) for n in (5000, 3000, 1)]
    group = Group(3, max(call.half_bytes for call in calls))
    for call, results in zip(calls, group.run(calls, seed=7, dead=1, timeout=1), strict=True):
        assert results[0].isnan().all() and results[2].isnan().all()
        assert same_bits(results[1], call.inputs[1])  # it was not touched
    for rank in (0, 2):
        report = two_shot.MissingPeer(int(group.reports[rank]))
        assert report.peer == 1 and report.block < 2 and report.half == "sum"
    assert group.reports[1] == 0


def test_a_later_rank_than_the_timeout_is_a_dead_one() -> None:
    calls = [Call(gaussian(2, 3000), PLAIN, PLAIN)]
    group = Group(2, calls[0].half_bytes)
    # The late rank is held for 0.3 ms, the other waits for 0 ms: no result may be half of one.
    for ours in group.run(calls, seed=1, late=1, timeout=0)[0]:
        assert ours.isnan().all() or same_bits(ours, calls[0].expected[0])
    assert group.reports[0] != 0


@pytest.mark.parametrize(
    ("mutate", "seen"),
    [
        (without(r"(st\.release\S+\s+\[%rd\d+)\]", r"\1+4]"), "rank"),
        (without(r"st\.release[^;]*;", "", -1), "rank"),
        (without(r"(warp\.sync(?:.|\n)*?st\.global\.v4\.u32\s+\[%rd\d+)(?:\+\d+)?\]", r"\1+16]"), "rank"),
        (without(r"bar\.warp\.sync\s+-1;"), "race"),
        (without(r"bar\.warp\.sync\s+-1;", "bar.warp.sync 65535;"), "not in the mask"),
        (without(r"bar\.sync\s+0;(?=(?:.|\n)*st\.release)", "", -2), "rank"),
    ],
    ids=[
        "tells another peer", "does not tell", "a record 16 bytes further", "no __syncwarp", "half a __syncwarp",
        "no __syncthreads before it tells",
    ],
)  # fmt: skip
def test_a_mistake_in_the_kernel_is_seen(mutate: Callable[[str, str], str], seen: str) -> None:
    calls = [Call(gaussian(3, 30_000, seed=i), PLAIN, PLAIN, key=i) for i in range(2)]
    with machine().mutated(mutate), pytest.raises((AssertionError, RuntimeError), match=seen):
        for seed in range(5):
            group = Group(3, calls[0].half_bytes)
            for call, results in zip(calls, group.run(calls, seed, timeout=3), strict=True):
                assert all(same_bits(ours, call.expected[0]) for ours in results), "a rank has other bits"


def test_every_kernel_is_loaded_before_the_first_call() -> None:
    names = {name for module in machine().modules for name in module.entries if "two_shot_kernel" in name}
    machine().launched.clear()
    machine().library.ptx_forget_kernels()
    torch.ops.flash_allreduce_ptx.load_two_shot(torch.zeros(1))
    machine().check()
    assert len(names) == 6 and machine().launched == names


def test_arguments_that_are_refused() -> None:
    x = torch.zeros(100)
    run = torch.ops.flash_allreduce_ptx.two_shot_all_reduce
    for arguments, message in (
        ((x, [16], 1 << 20, 0, 0, 0, 1), "workspaces has 1 addresses"),
        ((x, [16, 32], 1 << 20, 0, 0, 2, 1), "rank is 2"),
        ((x, [16, 32], 1 << 20, 0, 0, 0, 0), "blocks is 0; expected 1 to 64"),
        ((x, [16, 32], 1 << 20, 0, 0, 0, 65), "blocks is 65"),
        ((x, [16, 32], 5000, 0, 0, 0, 1), "half a workspace has"),
        ((x, [16, 40], 1 << 20, 0, 0, 0, 1), "16 does not divide"),
        ((x, [16, 32], 1 << 20, 8, 0, 0, 1), "16 does not divide"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(*arguments, False, False, 1.0, 4, 4, 128, 0, 0, 0, 1000)
    assert device.ON_PTX
