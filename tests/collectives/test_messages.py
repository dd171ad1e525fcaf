"""Small messages between ranks: gathered in rank order, added up to the same bits, of any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.collectives import messages
from flash_allreduce_plugin.collectives.transport import Label
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]
CPU = torch.device("cpu")


def label() -> Label:
    group = dist.group.WORLD
    assert group is not None
    return Label("all_gather", "test", group)


def gathered() -> list[bytes]:
    return messages.gather(bytes([dist.get_rank(), 7]), label(), CPU)


def test_bytes_are_gathered_in_rank_order(ranks: GetRanks) -> None:
    assert ranks(3).run(gathered) == [[b"\0\7", b"\1\7", b"\2\7"]] * 3


def added(numbers: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(messages.add_up(torch.tensor(numbers[dist.get_rank()], dtype=torch.float64), label(), CPU).tolist())


def test_sums_are_taken_in_rank_order(ranks: GetRanks) -> None:
    numbers = [(1e16, 0.5), (1.0, 0.25), (-1e16, math.inf)]  # (1e16 + 1) - 1e16 is 0; another order gives 1
    assert ranks(3).run(added, numbers) == [(0.0, math.inf)] * 3


def test_one_number_that_is_not_finite_is_seen_on_every_rank(ranks: GetRanks) -> None:
    for (total,) in ranks(2).run(added, [(1.0,), (math.nan,)]):
        assert math.isnan(total)


def told(device: torch.device | None) -> list[dict[str, Any]]:
    rank = dist.get_rank()
    return messages.gather_json({"rank": rank, "text": "x" * 1000 * rank}, label(), "telling", device)


def test_objects_may_differ_in_length(ranks: GetRanks) -> None:
    expected = [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(3)]
    for device in (None, CPU):
        assert ranks(3).run(told, device) == [expected] * 3
