"""target_sqnr_db in the section: the reduction plans for itself, and the ranks' widths are the same all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed_training import train

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
