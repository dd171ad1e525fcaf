"""cli/timing.py: every variant in every round, and the slowest rank's time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from flash_allreduce_plugin.cli.timing import interleaved
from tests.distributed import Ranks


def time_them() -> tuple[list[str], list[int], dict[str, list[float]]]:
    ran: list[str] = []
    done: list[int] = []

    def quick() -> None:
        ran.append("quick")

    def slow_on_rank_1() -> None:
        ran.append("slow")
        time.sleep(0.05 if dist.get_rank() == 1 else 0.0)

    times = interleaved(
        {"quick": quick, "slow": slow_on_rank_1},
        3,
        2,
        warmup=1,
        before=lambda: ran.append("fresh"),
        on_round=done.append,
    )
    return ran, done, times


def test_in_turn_and_the_slowest_rank_counts(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(2).run(time_them)
    quick, slow = ["fresh", "quick", "quick"], ["fresh", "slow", "slow"]
    for ran, done, times in results:
        assert ran == [*quick[:2], *slow[:2], *quick, *slow, *slow, *quick, *quick, *slow]
        assert done == [1, 2, 3]
        assert list(times) == ["quick", "slow"] and all(len(rounds) == 3 for rounds in times.values())
        assert all(0.05 <= seconds < 1 for seconds in times["slow"])
        assert times == results[0][2]
    assert min(results[0][2]["quick"]) < 0.05
