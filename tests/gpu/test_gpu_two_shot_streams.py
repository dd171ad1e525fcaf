"""The fused all-reduce on a GPU: its ranks are streams of one process, their workspaces ordinary tensors.

The kernel gets addresses and no owner of their memory. So the device's side of it, its memory model, graphs
and time-outs included, is tested on one GPU without torch's symmetric memory, and a sanitizer can look on. All blocks
of all ranks must be resident together, which bounds the number of ranks.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_allreduce_plugin.collectives import two_shot
from tests.codecs import DTYPES, gaussian, same_bits
from tests.collectives.test_two_shot import OPTIONS, PLAIN, RANKS, Call, make, small_calls
from tests.gpu import device

device.need_device()
pytestmark = device.needs_cuda

_op: Any = torch.ops.flash_allreduce


class Streams:
    """A group of `world` ranks on the current GPU."""

    def __init__(self, world: int, half: int, timeout_ms: int = 20_000) -> None:
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        #: of a rank: those of all ranks are resident together
        self.blocks = max(1, min(two_shot.MOST_BLOCKS, processors // world))
        self.nbytes = two_shot.HEADER_BYTES + 2 * half
        self.timeout_ms = timeout_ms
        self.workspaces = [torch.zeros(self.nbytes, dtype=torch.uint8, device="cuda") for _ in range(world)]
        self.reports = torch.zeros(world, dtype=torch.int32, pin_memory=True)
        self.report_address = _op.device_address(self.reports)
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        _op.load_two_shot(self.workspaces[0])
        torch.cuda.synchronize()

    def tensors(self, call: Call) -> list[Tensor]:
        """Return tensors of every rank, where the call wants them. Allocating may wait for the GPU: do it first."""
        rows = [torch.empty(row.numel() + call.offset, dtype=row.dtype, device="cuda") for row in call.inputs]
        tensors = [row[call.offset :] for row in rows]
        for tensor, row in zip(tensors, call.inputs, strict=True):
            tensor.copy_(row)
        return tensors

    def launch(self, call: Call, tensors: list[Tensor], rank: int) -> None:
        with torch.cuda.stream(self.streams[rank]):
            _op.two_shot_all_reduce(
                tensors[rank], [w.data_ptr() for w in self.workspaces], self.nbytes, 0,
                self.report_address + 4 * rank, rank, self.blocks, call.staged, call.one_shot, call.factor,
                call.reduce.bits, call.gather.bits, call.reduce.group_size, call.reduce.options,
                *two_shot.draw_keys(call.key, rank), self.timeout_ms,
            )  # fmt: skip

    def check(self, call: Call, tensors: list[Tensor]) -> None:
        for rank, tensor in enumerate(tensors):
            assert same_bits(tensor.cpu(), call.expected[0]), (rank, call.reduce, call.gather, tensor.shape)


def group_for(calls: list[Call], **how: int) -> Streams:
    return Streams(len(calls[0].inputs), max(call.half_bytes for call in calls), **how)


@pytest.mark.parametrize("world", range(2, RANKS + 1))
def test_the_bits_of_the_codec(world: int) -> None:
    lengths = (1, 33, 1023, 1024, 1025, 1024 * world + 1, 9000, 300_000)
    calls = [make(world, n, i) for i, (n, _) in enumerate(itertools.product(lengths, range(len(OPTIONS) // 3)))]
    group = group_for(calls)
    for call in calls:
        tensors = group.tensors(call)
        torch.cuda.synchronize()
        for rank in range(world):
            group.launch(call, tensors, rank)
        torch.cuda.synchronize()
        group.check(call, tensors)
    assert not group.reports.any()


@pytest.mark.parametrize("world", [2, 4])
def test_many_calls_of_changing_sizes(world: int) -> None:
    """Run fifty thousand calls, or ten: in flight together, a rank now and then far ahead of the others."""
    calls = [call for call in small_calls(world) if call.inputs.numel()]
    group, draw = group_for(calls), random.Random(world)
    for _ in range(500 // device.EVERY):
        round_ = draw.choices(calls, k=100)
        tensors = [group.tensors(call) for call in round_]
        torch.cuda.synchronize()
        first = draw.randrange(world)
        for call, of_call in zip(round_[:20], tensors, strict=False):
            group.launch(call, of_call, first)
        for i, (call, of_call) in enumerate(zip(round_, tensors, strict=True)):
            for rank in range(world):
                if rank != first or i >= 20:
                    group.launch(call, of_call, rank)
        torch.cuda.synchronize()
        for call, of_call in zip(round_[::10], tensors[::10], strict=True):
            group.check(call, of_call)
    assert not group.reports.any()


def test_a_graph_is_replayed_between_other_calls() -> None:
    calls = [Call(gaussian(2, n, seed=n), PLAIN, PLAIN, one_shot=n == 3000) for n in (5000, 3000, 70_000)]
    group = group_for(calls)
    tensors = [group.tensors(call) for call in calls]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    torch.cuda.synchronize()
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            group.launch(calls[0], tensors[0], rank)
    for _ in range(3):  # an odd number of calls between two replays, and an even one
        for eager in ([1], [1, 2]):
            for call, of_call in zip(calls, tensors, strict=True):
                for tensor, row in zip(of_call, call.inputs, strict=True):
                    tensor.copy_(row)
            torch.cuda.synchronize()
            for rank, graph in enumerate(graphs):
                with torch.cuda.stream(group.streams[rank]):
                    graph.replay()
                for i in eager:
                    group.launch(calls[i], tensors[i], rank)
            torch.cuda.synchronize()
            for i in (0, *eager):
                group.check(calls[i], tensors[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_peer_that_does_not_come(dtype: torch.dtype) -> None:
    calls = [Call(gaussian(3, 5000).to(dtype), PLAIN, PLAIN, one_shot=one_shot) for one_shot in (False, True)]
    group = group_for(calls, timeout_ms=300)
    for call in calls:
        tensors = group.tensors(call)
        torch.cuda.synchronize()
        for rank in (0, 2):
            group.launch(call, tensors, rank)
        torch.cuda.synchronize()
        assert tensors[0].isnan().all() and tensors[2].isnan().all() and not tensors[1].isnan().any()
    reports = [two_shot.MissingPeer(int(word)) if word else None for word in group.reports]
    assert reports[1] is None
    assert all(report and report.peer == 1 and report.half == "sum" for report in (reports[0], reports[2]))
