"""Guarantees 1 to 7 through the public functions on CUDA tensors, against the simulation of simulation.py.

Several ranks share one GPU: gloo carries CUDA tensors. NCCL refuses two ranks on one GPU: it gets one rank, and as
many as there are GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import flat
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.collectives.work import StreamWork
from flash_allreduce_plugin.policy import Plan
from flash_allreduce_plugin.runtime import groups
from tests import simulation
from tests.codecs import gaussian, same_bits
from tests.gpu import device
from tests.gpu.calls import CONFIGS, GetRanks, check, here
from tests.simulation import Call, digest

device.need_device()

BACKEND_OF_ONE = "gloo" if device.ON_CPU else "nccl"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def many_calls() -> list[Call]:
    calls = []
    for k, collective in enumerate(COLLECTIVES):
        for i, numel in enumerate((0, 1, 129, 997, 8192, 30_011)):
            for j, dtype in enumerate(("float32", "bfloat16", "float16")):
                op = "SUM" if (i + j) % 2 or collective == "all_gather" else "AVG"
                calls.append(Call(collective, numel, dtype, CONFIGS[(i + j + k) % 6], op, async_op=bool((i + k) % 2)))
    return calls


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_guarantees_1_4_and_5_any_world_length_and_dtype(gpu_ranks: GetRanks, world_size: int) -> None:
    """Compare with the CPU, bit for bit, on every rank."""
    check(gpu_ranks(world_size, "gloo"), many_calls())


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf"])
def test_guarantee_2_not_finite_values(gpu_ranks: GetRanks, kind: str) -> None:
    calls = [Call(c, 4099, dtype, {"bits": 4}, kind=kind) for c in COLLECTIVES for dtype in ("float32", "bfloat16")]
    check(gpu_ranks(3, "gloo"), calls)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_guarantee_3_neither_the_chunk_size_nor_async_matters(gpu_ranks: GetRanks, collective: str) -> None:
    calls = [
        Call(collective, 50_021, "bfloat16", {"bits": 4, "chunk_bytes": chunk_bytes}, async_op=async_op)
        for chunk_bytes in (4096, 5000, 1 << 20)
        for async_op in (False, True)
    ]
    check(gpu_ranks(3, "gloo"), calls)


def part_of_longer_tensors() -> list[str]:
    config = fap.FlashConfig(bits=5, min_bytes=0, chunk_bytes=4096)
    rank = dist.get_rank()
    digests = []
    for before, after in ((0, 0), (128, 0), (0, 1), (1280, 7777), (128 * 100, 50_000)):
        parts = [gaussian(before, seed=50 + rank), gaussian(2048, seed=rank), gaussian(after, seed=90 + rank) * 1e6]
        x = torch.cat(parts).to(here())
        fap.all_reduce(x, config=config)
        digests.append(digest(x[before : before + 2048].cpu()))
    return digests


def test_guarantee_3_a_group_does_not_depend_on_the_rest_of_the_tensor(gpu_ranks: GetRanks) -> None:
    results = gpu_ranks(3, "gloo").run(part_of_longer_tensors)
    assert len({d for rank in results for d in rank}) == 1


@pytest.mark.parametrize("kind", ["tiny", "huge", "from 1e-30 to 1e30", "constant", "zero", "offset", "cancelling"])
def test_guarantee_6_wide_ranges_constants_and_offsets(gpu_ranks: GetRanks, kind: str) -> None:
    calls = [Call(c, 5003, dtype, config, "AVG" if c != "all_gather" else "SUM", kind)
             for c in COLLECTIVES for dtype in ("float32", "bfloat16") for config in CONFIGS[:2]]  # fmt: skip
    check(gpu_ranks(3, "gloo"), calls)


def disagree() -> str:
    config = fap.FlashConfig(bits=4 + dist.get_rank() % 2, min_bytes=0)
    try:
        fap.all_reduce(torch.ones(1000, device=here()), group=dist.new_group(), config=config)
    except fap.MismatchError as error:
        return str(error)
    return "no error"


def test_guarantee_7_ranks_that_disagree(gpu_ranks: GetRanks) -> None:
    for message in gpu_ranks(3, "gloo").run(disagree):
        assert "bits" in message, message


def strided() -> list[bool]:
    """Compare views with contiguous copies of them; the memory between their elements stays."""
    config = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
    same = []
    for view in (lambda x: x.t(), lambda x: x[:, 3:50], lambda x: x[::3, ::2]):
        base = gaussian(60, 101, seed=dist.get_rank()).to(here())
        frame = base.clone()
        expected = view(base).contiguous().clone()
        fap.all_reduce(expected, config=config)
        fap.all_reduce(view(base), config=config)
        same.append(same_bits(view(base).contiguous().cpu(), expected.cpu()))
        view(frame).copy_(expected)
        same.append(torch.equal(base, frame))
    return same


def test_guarantee_5_any_stride(gpu_ranks: GetRanks) -> None:
    for rank in gpu_ranks(2, "gloo").run(strided):
        assert rank == [True] * 6


def uneven_shards() -> list[bool]:
    """Gather a list of parts of any sizes. Compare with the same call on the CPU."""
    config = fap.FlashConfig(bits=4, min_bytes=0)
    sizes, rank = (1000, 0, 777)[: dist.get_world_size()], dist.get_rank()
    parts = [gaussian(size, seed=10 * rank + i) for i, size in enumerate(sizes)]
    results = []
    for on in (torch.device("cpu"), here()):
        output = torch.empty(sizes[rank], device=on)
        fap.reduce_scatter(output, [part.to(on) for part in parts], config=config)
        results.append(output.cpu())
    return [same_bits(*results)]


def test_uneven_parts_of_a_reduce_scatter(gpu_ranks: GetRanks) -> None:
    assert gpu_ranks(3, "gloo").run(uneven_shards) == [[True]] * 3


def test_the_error_is_measured(gpu_ranks: GetRanks) -> None:
    """Set quality_interval: the exact sum is computed too, on the device; the result does not change."""
    check(
        gpu_ranks(2, "gloo"),
        [Call("all_reduce", 5003, "bfloat16", {"bits": 4, "quality_interval": 1, "quality_measure": "exact"})],
    )


def integers_and_small_messages() -> list[bool]:
    world = dist.get_world_size()
    whole = torch.arange(1000, device=here())
    fap.all_reduce(whole)
    small = torch.ones(8, device=here())
    fap.all_reduce(small)
    return [torch.equal(whole.cpu(), world * torch.arange(1000)), bool((small == world).all())]


def test_calls_in_full_precision(gpu_ranks: GetRanks) -> None:
    assert gpu_ranks(2, "gloo").run(integers_and_small_messages) == [[True, True]] * 2


def repeated(count: int) -> int:
    """Make calls of changing shapes, two in flight at a time. Return how many different results each shape had."""
    config = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=1 << 14)
    seen: dict[int, set[str]] = {}
    works: list[tuple[int, Tensor, Any]] = []
    for i in range(count):
        numel = (1000, 70_001, 4096, 20_011)[i % 4]
        x = gaussian(numel, seed=dist.get_rank()).to(here())
        works.append((numel, x, fap.all_reduce(x, config=config, async_op=True)))
        if len(works) == 2:
            numel, x, work = works.pop(0)
            work.wait()
            seen.setdefault(numel, set()).add(digest(x.cpu()))
    for _, _, work in works:
        work.wait()
    return max(map(len, seen.values()))


def test_guarantee_4_the_same_bits_on_every_run(gpu_ranks: GetRanks) -> None:
    assert gpu_ranks(3, "gloo").run(repeated, 40) == [1, 1, 1]


def one_rank() -> list[str]:
    """Run the public function, which leaves a single rank's tensor alone, and the quantized exchange itself."""
    x = gaussian(70_001).bfloat16().to(here())
    alone, exchanged = x.clone(), x.clone()
    fap.all_reduce(alone, config=fap.FlashConfig(bits=4, min_bytes=0))
    plan = Plan(Format(4, 128), Format(4, 128), 4096)
    label = Label("all_reduce", "test", dist.group.WORLD)
    pool = groups.state_of(dist.group.WORLD).pool(here())
    for _ in flat.all_reduce(exchanged, 1.0, plan, label, pool):
        pass
    return [digest(alone.cpu()), digest(exchanged.cpu())]


def test_nccl_with_one_rank(gpu_ranks: GetRanks) -> None:
    x = gaussian(70_001).bfloat16()
    expected = simulation.all_reduce([x], 1.0, Format(4, 128), Format(4, 128))
    assert gpu_ranks(1, BACKEND_OF_ONE).run(one_rank) == [[digest(x), digest(expected)]]


def one_rank_in_the_background() -> tuple[bool, str]:
    """Run the quantized exchange on the stream of asynchronous calls, before the current stream has made its input.
    Return True if the call returned before that, and the result."""
    plan = Plan(Format(4, 128), Format(4, 128), 4096)
    label = Label("all_reduce", "test", dist.group.WORLD)
    values = gaussian(70_001).bfloat16().to(here())
    x = torch.zeros_like(values)

    def steps() -> Iterator[None]:
        pool = groups.state_of(dist.group.WORLD).pool(here())
        yield from flat.all_reduce(x, 1.0, plan, label, pool)

    on = groups.state_of(dist.group.WORLD).stream(here()), here()
    StreamWork(steps(), "test", (x,), (x,), *on).wait()  # loads the kernels, starts NCCL
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # a fifth of a second
    x.copy_(values)
    work = StreamWork(steps(), "test", (x,), (x,), *on)
    returned = not work.is_completed()
    work.wait()
    result = x.clone()  # behind it, on the current stream
    return returned, digest(result.cpu())


@device.needs_cuda
def test_nccl_in_the_background(gpu_ranks: GetRanks) -> None:
    x = gaussian(70_001).bfloat16()
    expected = simulation.all_reduce([x], 1.0, Format(4, 128), Format(4, 128))
    assert gpu_ranks(1, "nccl").run(one_rank_in_the_background) == [(True, digest(expected))]


@device.needs_cuda
def test_nccl_with_a_rank_on_each_gpu(gpu_ranks: GetRanks) -> None:
    count = min(torch.cuda.device_count(), 8)
    if count < 2:
        pytest.skip("there is one GPU, and NCCL refuses two ranks on it")
    check(gpu_ranks(count, "nccl"), many_calls())
