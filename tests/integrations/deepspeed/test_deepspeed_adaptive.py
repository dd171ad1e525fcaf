"""target_sqnr_db and min_sqnr_db in the section: the reduction plans for itself, and the ranks' widths stay equal.
the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed_training import train

from flash_allreduce_plugin.policy import LOW_SQNR
from tests.distributed import Ranks

SECTION = {"bits": 2, "min_bytes": 0, "quality_interval": 1, "target_sqnr_db": 20.0}


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_reaches_its_target(engines: Callable[[int], Ranks], stage: int) -> None:
    options: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    site = f"deepspeed.stage{stage}.gradients"
    outcomes = engines(2).run(train, options, SECTION)
    (bits,) = {outcome["sites"][site]["bits"] for outcome in outcomes}
    assert 4 <= bits <= 6
    assert all(outcome["full_precision"] == {} for outcome in outcomes)
    assert torch.equal(outcomes[0]["weights"], outcomes[1]["weights"])


@pytest.mark.parametrize("stage", range(4))
def test_a_floor_out_of_reach_ends_in_full_precision(engines: Callable[[int], Ranks], stage: int) -> None:
    options: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    site = f"deepspeed.stage{stage}.gradients"
    section = {"bits": 8, "min_bytes": 0, "quality_interval": 1, "min_sqnr_db": 200.0}
    outcomes = engines(3).run(train, options, section)  # not two: test_monitors logs all that theirs have counted
    for outcome in outcomes:
        seen = outcome["sites"][site]
        assert seen["quantized"] == 2 and set(seen["full_precision"]) == {LOW_SQNR}
        assert seen["guard"] == {"raised": 1}
        assert torch.equal(outcome["weights"], outcomes[0]["weights"])
