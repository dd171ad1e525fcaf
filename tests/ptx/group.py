"""A group of ranks that run their fused kernels together on the machine: each rank a stream, warps interleaved.

    stream of rank 0 | call 0    | call 1   | ...        calls of a stream follow each other; a rank may be in its next
    stream of rank 1 |    call 0     | call 1   | ...    call while others are still in this one

The operator is called as flash_allreduce_plugin/collectives/two_shot.py calls it, with workspaces that are CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from flash_allreduce_plugin.collectives import two_shot
from tests.collectives.test_two_shot import Call
from tests.gpu.device import Written
from tests.ptx.operators import machine

FOREVER = 1 << 40  # ms
BLOCKS = 32  # of the largest call
MULTICAST = 1 << 59  # no memory of the machine lies there


class Group:
    def __init__(self, world: int, half: int, count: int = 0, multicast: bool = False) -> None:
        """Create a group. half: bytes of half a workspace; count: earlier meetings; multicast: one address for all."""
        columns = two_shot.HEADER_BYTES + 2 * half
        self.workspaces = [Written.make(1, columns, torch.uint8, offset=(-64 * rank) % 48) for rank in range(world)]
        for workspace in self.workspaces:
            row = workspace.rows[0]
            row[: two_shot.HEADER_BYTES] = 0
            words = row[: 4 * two_shot.MOST_BLOCKS * (two_shot.MOST_RANKS + 1)].view(torch.int32)  # arrived, counts
            words.fill_(count - (1 << 32) if count >= 1 << 31 else count)
        self.reports = torch.zeros(world, dtype=torch.int32)
        self.multicast = MULTICAST if multicast else 0

    def run(
        self, calls: Sequence[Call], seed: int, late: int | None = None, dead: int | None = None, timeout: int = FOREVER
    ) -> list[list[Tensor]]:
        """Return the results of each rank's calls. late: starts after the others wait; dead: no call. timeout: ms."""
        run, world, held = machine(), len(self.workspaces), ExitStack()
        addresses = [workspace.rows.data_ptr() for workspace in self.workspaces]
        results = []
        with held, run.queued(seed):
            if self.multicast:
                held.enter_context(run.multicast(self.multicast, [w.rows for w in self.workspaces]))
            held.enter_context(run.may_touch([(workspace.rows, True) for workspace in self.workspaces]))
            held.enter_context(run.may_touch([(self.reports, True)]))
            for call in calls:
                width = call.inputs.element_size()
                tensors = [Written.of(row.view(1, -1), width * call.offset) for row in call.inputs]
                results.append(tensors)
                held.enter_context(run.may_touch([(tensor.rows, True) for tensor in tensors]))
            for rank in set(range(world)) - {dead}:
                run.set_stream(rank + 1)
                for call, tensors in zip(calls, results, strict=True):
                    torch.ops.flash_allreduce_ptx.two_shot_all_reduce(
                        tensors[rank].rows[0], addresses, self.workspaces[rank].rows.numel(), self.multicast,
                        self.reports[rank:].data_ptr(), rank, BLOCKS, call.staged, call.one_shot, call.factor,
                        call.reduce.bits, call.gather.bits, call.reduce.group_size, call.reduce.options,
                        *two_shot.draw_keys(call.key, rank), timeout,
                    )  # fmt: skip
            if late is not None:
                run.hold(late + 1, 300_000)
            try:
                run.run_streams()
            finally:
                run.check()
        return [[tensor.take()[0] for tensor in tensors] for tensors in results]
