"""lab.benchmarks.deepspeed_step: the step that is the lower bound must send nothing."""

from __future__ import annotations

from typing import Any

import pytest

from lab.benchmarks.deepspeed_step import FULL_PRECISION, NOT_SENT, NOTHING_SENT, table


def found(sent: float) -> dict[str, Any]:
    wire = {NOT_SENT: 500.0, NOTHING_SENT: sent, FULL_PRECISION: 1000.0}
    seconds = {NOT_SENT: [1.0], NOTHING_SENT: [0.5], FULL_PRECISION: [2.0]}
    each = {name: [nbytes] for name, nbytes in wire.items()}
    return {"seconds": seconds, "wire": each, "sent": dict.fromkeys(wire, 0.0), "quantized": {}, "optimizer": "SGD"}


def test_a_lower_bound_that_sends_is_refused() -> None:
    with pytest.raises(RuntimeError, match="stage 3: the step with nothing sent has sent 200 bytes"):
        table("1gbit", 3, found(200.0), 100)


def test_bytes_of_the_benchmark_itself_are_allowed() -> None:
    assert table("1gbit", 3, found(50.0), 100)["variants"][NOTHING_SENT]["wire, bytes"] == 50.0
