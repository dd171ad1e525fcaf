"""A preset alone quantizes nearly every byte of a step, in each layout."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import flash_allreduce_plugin as fap
from lab.benchmarks import ranks, whole_step
from tests.distributed import MEGATRON, run_ranks

#: At most this share of a step's bytes, in %. FSDP1 has no hook for its gathers of parameters: half of its bytes.
GOAL, ASKED = 1.5, {"FSDP1": 50.1}
WIDEST = 8.5  # bits an element: parameters by their values


def bytes_of(layout: str) -> dict[str, Any]:
    """Return the step's bytes in a rank."""
    if layout.startswith("DeepSpeed"):
        ranks.start_deepspeed(attach=False)
    return whole_step.measured(layout, fap.FlashConfig(preset="int4", min_bytes=0))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", whole_step.LAYOUTS)
def test_little_is_left_in_full_precision(layout: str) -> None:
    package = {"Megatron": "megatron.core", "DeepSpeed": "deepspeed"}.get(layout.split()[0])
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"needs {package}")
    preload = MEGATRON if package == "megatron.core" else ("deepspeed",) if package else ()
    # int8 has the same fields, with other widths (tests/config/test_presets.py).
    for found in run_ranks(whole_step.LAYOUTS[layout][0], bytes_of, layout, preload=preload):
        left, plain = sum(found["left"].values()), found["plain"]
        assert plain > 0 and 100 * left / plain <= ASKED.get(layout, GOAL), found
        assert found["sent"] - left <= 1.02 * WIDEST / 16 * (plain - left), found
