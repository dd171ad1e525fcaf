"""The ranks that tests keep: leftovers of a test are reported, not found by the next test by chance."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed import POOLS, Pool, RankFailure


def sums(fails: bool = False) -> float:
    if fails:
        raise ValueError("on purpose")
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def test_ranks_are_kept_replaced_after_a_failure_and_missed_when_they_end_by_themselves() -> None:
    pool = Pool()
    try:
        kept = pool(2)
        assert kept.run(sums) == [2.0, 2.0] and pool(2) is kept
        with pytest.raises(RankFailure, match="on purpose"):
            kept.run(sums, True)
        replaced = pool(2)
        assert replaced is not kept and replaced.run(sums) == [2.0, 2.0]
        pid = replaced.processes[1].pid
        assert pid is not None
        os.kill(pid, 9)
        replaced.processes[1].join(10)
        with pytest.raises(RankFailure, match=r"the 2 ranks have ended, with exit codes \[None, -9\]"):
            pool(2)
        assert pool(2).run(sums) == [2.0, 2.0]
    finally:
        pool.close()
        POOLS.remove(pool)
