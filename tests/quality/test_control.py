"""The calls that are measured, and the ranks' common decision from the measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.collectives.test_meter import all_measures
from tests.distributed import Ranks
from tests.quality.test_guard import reduces

GetRanks = Callable[[int], Ranks]


def test_the_interval_decides_when(ranks: GetRanks) -> None:
    for outcome in ranks(2).run(reduces, [(20, 100.0)], {"quality_interval": 4}):
        assert outcome["result"] == [4] * 8 + [5] * 8 + [6] * 4


@pytest.mark.parametrize(
    ("world", "changes", "tolerance"),
    [
        (2, {}, 0.3),
        # Sums of a node are not available: assume the error of their terms.
        (3, {"hierarchical": {"intra_bits": 8, "inter_bits": 8, "ranks_per_node": 2}}, 1.2),
    ],
    ids=["flat", "two levels"],
)
def test_full_precision_is_measured_as_if_at_8_bits(
    ranks: GetRanks, world: int, changes: dict[str, Any], tolerance: float
) -> None:
    for outcome in ranks(world).run(all_measures, ["correlated", "channels"], {"bits": 8, **changes}, 90.0):
        off = {call: found for call, found in outcome.items() if abs(found[0] - found[1]) > tolerance}
        assert not off
