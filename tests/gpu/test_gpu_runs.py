"""The all-to-all of runs on CUDA tensors: the bits of the CPU's, over gloo on one GPU and over NCCL on several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flash_allreduce_plugin.runtime import groups
from tests.collectives.test_all_to_all import CONFIGS, DTYPES, Call, uneven
from tests.gpu import device
from tests.gpu.calls import GetRanks, here
from tests.simulation import digest

device.need_device()


def results_of(calls: list[Call]) -> list[str]:
    digests = []
    for call in calls:
        groups.state_of(dist.group.WORLD).draws = 0
        digests.append(digest(call.run(here()).cpu()))
    return digests


def calls_of(world: int) -> list[Call]:
    """Return calls of whole groups, which are one launch, and others; quantized and unquantized runs together."""
    calls = []
    for seed, width in enumerate((128, 256, 33, 1, 100, 512)):
        config = {**CONFIGS[seed], "min_bytes": 8000 * (seed % 2)}
        calls.append(Call(uneven(world, seed, 9000 // width), width, DTYPES[seed % 3], config, seed % 2 == 0))
    return calls


def check(ranks: GetRanks, world: int, backend: str) -> None:
    calls = calls_of(world)
    for rank, results in enumerate(ranks(world, backend).run(results_of, calls)):
        for call, result in zip(calls, results, strict=True):
            assert result == digest(call.simulate(rank)), f"rank {rank}: {call}"


@pytest.mark.parametrize("world", [2, 3])
def test_every_run_has_the_bits_of_the_cpu(gpu_ranks: GetRanks, world: int) -> None:
    check(gpu_ranks, world, "gloo")


@pytest.mark.skipif(device.ON_CPU or torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")
def test_over_nccl_runs_share_one_collective(gpu_ranks: GetRanks) -> None:
    check(gpu_ranks, min(torch.cuda.device_count(), 4), "nccl")
