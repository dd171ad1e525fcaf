"""enabled "auto" in trainings of the frameworks: a slow codec is switched off at every site, not so a slow wire."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest import mock

import pytest

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.runtime import auto, stages
from lab.benchmarks import ranks, whole_step
from tests.distributed import MEGATRON, run_ranks
from tests.runtime.test_auto import slow_codec, slowly

SECONDS = 0.05
LAYOUTS = ("DDP", "DeepSpeed stage 2", "Megatron TP 2")
ALONE = "DDP"  # one site: the decision is the first that is made
SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in whole_step.LAYOUTS if one not in LAYOUTS]


def decided(layout: str, on: bool) -> dict[str, Any]:
    """Train in a rank until there is a decision, then one more step: its quantized calls, and its reasons."""
    if layout.startswith("DeepSpeed"):
        ranks.start_deepspeed(attach=False)
    lines: list[str] = []
    config = fap.FlashConfig(preset="int8", min_bytes=0, enabled="auto")
    with mock.patch.object(auto.notices, "say", lines.append):
        step, end = whole_step.LAYOUTS[layout][1](config)
        with slowly(stages, "plainly", SECONDS) if on else slow_codec(SECONDS):
            steps = 0
            while auto.decision() is None and steps < 400:
                step()
                steps += 1
            fap.reset_stats()
            for _ in range(3):  # the first calls by differences send whole values
                step()
    stats = fap.stats()
    end()
    said = [line for line in lines if line.startswith("auto: ")]
    return {"steps": steps, "quantized": stats["quantized"], "why": dict(stats["full_precision"]), "line": said}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", [*LAYOUTS, *SLOW])
def test_slower_sites_are_switched_off(layout: str) -> None:
    package = {"Megatron": "megatron.core", "DeepSpeed": "deepspeed"}.get(layout.split()[0])
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"needs {package}")
    preload = MEGATRON if package == "megatron.core" else ("deepspeed",) if package else ()
    found = run_ranks(whole_step.LAYOUTS[layout][0], decided, layout, False, preload=preload)
    for one in found:
        assert one["why"][policy.SLOWER] > 0, one
        assert len(one["line"]) == 1 and one["line"] == found[0]["line"] and "full precision and " in one["line"][0], (
            one
        )
        if layout == ALONE:  # of several sites one may seem to pay alone where steps vary by as much
            assert one["quantized"] == 0 and one["line"][0].endswith(": off; to pin it: enabled=false"), one


def test_faster_sites_stay_on() -> None:
    for one in run_ranks(2, decided, "DDP", True):
        assert one["quantized"] > 0 and policy.SLOWER not in one["why"], one
        assert one["line"][0].endswith(": on; to pin it: enabled=true"), one
