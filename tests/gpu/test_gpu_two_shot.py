"""The two-shot kernel on real ranks that share one GPU: the bits of the other path, thousands of calls, CUDA graphs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import two_shot
from tests.codecs import gaussian
from tests.distributed import Ranks
from tests.gpu import device
from tests.gpu.calls import CONFIGS, GetRanks, digests_of, here
from tests.simulation import Call, digest, expected_of

device.need_device()
pytestmark = device.needs_cuda

LIMIT = 4 << 20  # bytes


def counted() -> dict[str, int]:
    """Count this rank's calls that took the two-shot kernel, and the reasons of the others."""
    return dict(two_shot.counts)


def fused_digests(
    calls: list[Call], fused: str | None = None, one_shot: str = two_shot.AUTO
) -> tuple[list[str], dict[str, int]]:
    """Return digests of this rank's results, and the paths of its calls, with these limits; None: the ranks' limit."""
    before, kept = counted(), os.environ[two_shot.LIMIT]
    os.environ.update({two_shot.LIMIT: kept if fused is None else fused, two_shot.ONE_SHOT: one_shot})
    try:
        digests = digests_of(calls)
    finally:
        os.environ[two_shot.LIMIT] = kept
    return digests, {name: n - before.get(name, 0) for name, n in counted().items() if n > before.get(name, 0)}


def check(ranks: Ranks, calls: list[Call]) -> None:
    """Check that every call took the two-shot kernel, in one shot and in two, and has the bits of the simulation."""
    expected = expected_of(calls, ranks.world_size)
    for one_shot in (two_shot.AUTO, "0", str(LIMIT // 16)):
        for rank, (digests, counts) in enumerate(ranks.run(fused_digests, calls, None, one_shot)):
            assert counts == {"two-shot": len(calls)}, f"rank {rank}: {counts} of {len(calls)} calls"
            for call, ours, theirs in zip(calls, digests, expected[rank], strict=True):
                assert ours == theirs, f"rank {rank} of {ranks.world_size}, one shot up to {one_shot}: {call}"


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_every_world_length_dtype_and_configuration(gpu_ranks: GetRanks, world_size: int) -> None:
    calls = [
        Call("all_reduce", numel, dtype, CONFIGS[(i + j) % 6], "AVG" if (i + j) % 2 else "SUM", async_op=i % 3 == 1)
        for i, numel in enumerate((1, 129, 1023, 1024, 8192, 30_011, 400_003))
        for j, dtype in enumerate(("float32", "bfloat16", "float16"))
    ]
    check(gpu_ranks(world_size, two_shot=LIMIT), calls)


def address_of_all() -> int:
    workspace = next(iter(two_shot._workspaces[dist.group.WORLD].values()))
    assert isinstance(workspace, two_shot.Workspace), workspace
    return workspace.multicast


@pytest.mark.parametrize("nvls", [False, True])
def test_ranks_on_gpus_of_their_own(gpu_ranks: GetRanks, nvls: bool) -> None:
    """Run over NVLink or PCIe, on the streams of NCCL's groups; nvls: with multimem stores."""
    world_size = min(torch.cuda.device_count(), two_shot.MOST_RANKS)
    if world_size < 2 or (nvls and torch.cuda.get_device_capability(0) < (9, 0)):
        pytest.skip("this needs two GPUs" + ", of sm_90 or later" * nvls)
    calls = [
        Call("all_reduce", numel, "bfloat16", CONFIGS[i % 6], async_op=async_op)
        for i, numel in enumerate((1, 1025, 30_011, 400_003))
        for async_op in (False, True)
    ]
    ranks = gpu_ranks(world_size, "nccl", two_shot=LIMIT, nvls=nvls)
    check(ranks, calls)
    addresses = ranks.run(address_of_all)
    if nvls and not all(addresses):
        pytest.skip("these GPUs share no multicast address: copies were used")
    assert nvls or not any(addresses)


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf", "from 1e-30 to 1e30", "constant", "cancelling"])
def test_not_finite_values_and_wide_ranges(gpu_ranks: GetRanks, kind: str) -> None:
    check(gpu_ranks(3, two_shot=LIMIT), [Call("all_reduce", 4099, d, c, kind=kind)
                                         for d in ("float32", "bfloat16") for c in CONFIGS[:3]])  # fmt: skip


def test_the_other_path_has_the_same_bits(gpu_ranks: GetRanks) -> None:
    calls = [replace(Call("all_reduce", 100_003, "bfloat16", {"bits": 4}), async_op=late) for late in (False, True)]
    found = set()
    for fused, one_shot, took in (("0", "0", two_shot.OFF), (None, "0", "two-shot"), (None, str(LIMIT), "two-shot")):
        for digests, counts in gpu_ranks(3, two_shot=LIMIT).run(fused_digests, calls, fused, one_shot):
            assert counts == {took: 2}
            found |= set(digests)
    assert len(found) == 1


def many(count: int) -> tuple[bool, int]:
    """Return True if `count` calls of changing shapes, some too large for the kernel, were right; how many took it."""
    world, before = dist.get_world_size(), counted().get("two-shot", 0)
    configs = [fap.FlashConfig(bits=bits, min_bytes=0) for bits in (8, 4, 3)]
    right = torch.ones((), dtype=torch.bool, device=here())
    numbers = torch.Generator().manual_seed(5)  # the same on every rank
    for i in range(count):
        numel = int(torch.randint(1, 20_000 if i % 50 else 3_000_000, (1,), generator=numbers))
        value = dist.get_rank() + 1.0 + i % 4  # a group of one value is exact at every width
        x = torch.full((numel,), value, dtype=(torch.float32, torch.bfloat16)[i % 2], device=here())
        fap.all_reduce(x, config=configs[i % 3])
        right &= (x == world * (world + 1) / 2 + world * (i % 4)).all()
    return bool(right), counted().get("two-shot", 0) - before


@pytest.mark.parametrize("count", [500, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(1000)])])
def test_calls_of_changing_shapes(gpu_ranks: GetRanks, count: int) -> None:
    for right, fused in gpu_ranks(2, two_shot=LIMIT).run(many, count, timeout=280 if count < 10_000 else 900):
        assert right and fused >= count * 0.95


def replayed(seeds: list[int]) -> list[str]:
    config = fap.FlashConfig(bits=4, min_bytes=0)
    x = torch.zeros(50_021, dtype=torch.bfloat16, device=here())
    fap.all_reduce(x, config=config)  # makes the workspace
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fap.all_reduce(x, config=config)
    digests = []
    for seed in seeds:
        x.copy_(gaussian(50_021, seed=seed + dist.get_rank()).bfloat16())
        eager = x.clone()
        graph.replay()
        torch.cuda.synchronize()
        fap.all_reduce(eager, config=config)
        digests += [digest(x.cpu()), digest(eager.cpu())]
    return digests


def test_a_captured_call_replays_on_new_data(gpu_ranks: GetRanks) -> None:
    for digests in gpu_ranks(2, two_shot=LIMIT).run(replayed, [0, 10, 20]):
        assert digests[::2] == digests[1::2] and len(set(digests)) == 3
