"""Asynchronous redistributions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.distributed import run_ranks
from tests.integrations.tensor_parallel.model import (
    EIGHT,
    mesh_of,
    served,
)


def in_flight() -> dict[str, Any]:
    mesh = mesh_of()
    torch.manual_seed(dist.get_rank())

    class Sums(nn.Module):
        def forward(self, x: Tensor, later: bool) -> DTensor:
            partial = DTensor.from_local(x * 1.0, mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[Replicate()], async_op=later)

    found: dict[str, Any] = {}
    x = torch.randn(64, 128)

    def look() -> None:
        sums = Sums()
        now = sums(x, False).to_local()
        one, two = sums(x, True).to_local(), sums(2 * x, True).to_local()
        found["types"] = type(one).__name__, type(now).__name__
        found["views wait for nothing"] = type(one.view(-1)).__name__, type(one[3:5]).__name__
        found["equal"] = torch.equal(one.view(-1) + 0, now.view(-1)), torch.equal(one[3:5] + 0, now[3:5])
        found["in any order"] = torch.equal(two + 0, sums(2 * x, False).to_local()), torch.equal(one + 0, now)

    served(EIGHT, look)
    return found


def test_asynchronous_redistributions_are_waited_for_at_the_first_use() -> None:
    for found in run_ranks(2, in_flight):
        assert found["types"] == ("InFlight", "Tensor")
        assert found["views wait for nothing"] == ("InFlight", "InFlight")
        assert found["equal"] == (True, True) and found["in any order"] == (True, True)
