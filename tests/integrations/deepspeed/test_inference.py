"""deepspeed.init_inference: the sums of split layers are quantized after enable, logits are not."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from autotp_training import BACKWARD, FORWARD, LAYERS, LENGTH, ROWS, WORDS, inference
from deepspeed_training import NEWEST, deepspeed
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.deepspeed import inference as engines_of_inference
from flash_allreduce_plugin.integrations.registry import ATTACHABLE
from tests.distributed import Ranks

pytestmark = NEWEST

BATCHES = 3
CONFIG: dict[str, Any] = {"bits": 8, "backward_bits": 8, "min_bytes": 0}


def losses(engine: Any) -> list[float]:
    def batch(number: int) -> Tensor:
        return torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))

    with torch.no_grad():
        return [float(engine(batch(number))) for number in range(BATCHES)]


def by_environment(config: dict[str, Any]) -> None:
    variables = {f"FLASH_ALLREDUCE_{key.upper()}": str(value) for key, value in config.items()}
    with mock.patch.dict(os.environ, variables):
        engines_of_inference.by_environment()


def served(config: dict[str, Any], environment: bool = False) -> dict[str, Any]:
    deepspeed()
    exact = losses(inference())
    if environment:
        by_environment(config)
    else:
        fap.deepspeed.enable(fap.FlashConfig(**config))
    fap.reset_stats()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        engine = inference()
        quantized = losses(engine)
    report, stats = fap.deepspeed.report(), fap.stats()
    fap.deepspeed.disable()
    fap.reset_stats()
    again = losses(engine)
    left = fap.stats()["calls"]
    deepspeed()
    lines = [line for line in text.getvalue().splitlines() if line.startswith("flash")]
    found = {"exact": exact, "served": quantized, "again": again, "left": left, "lines": lines, "report": report}
    return {**found, **stats}


def test_sums_of_inference_are_quantized_between_enable_and_disable(engines: Callable[[int], Ranks]) -> None:
    first, second = engines(2).run(served, CONFIG)
    for found in (first, second):
        assert found["served"] == pytest.approx(found["exact"], abs=0.01)
        assert found["served"] != found["exact"]
        assert found["again"] == found["exact"] and found["left"] == 0
        counted = found["sites"][FORWARD]
        assert counted["calls"] == counted["quantized"] == 2 * LAYERS * BATCHES and BACKWARD not in found["sites"]
        assert counted["bytes_sent"] < 0.27 * counted["bytes_full_precision"]
        assert found["report"][FORWARD]["in_place"]
    assert second["lines"] == [] and first["lines"] == [
        "flash all-reduce: attached to deepspeed.init_inference: sums of 2 tensor-parallel ranks in 8 bits, groups of "
        "128, buckets from 0 bytes"
    ]


def test_the_environment_attaches_unedited_programs(engines: Callable[[int], Ranks]) -> None:
    assert ATTACHABLE["deepspeed"].attach_module == engines_of_inference.__name__
    for found in engines(2).run(served, CONFIG, True):
        assert found["sites"][FORWARD]["quantized"] == 2 * LAYERS * BATCHES
        assert found["again"] == found["exact"] and found["left"] == 0


def test_fields_act_in_inference(engines: Callable[[int], Ranks]) -> None:
    config = {**CONFIG, "exclude": ["*.down_proj"], "quantize_evaluation": False, "warmup_steps": 5}
    for found in engines(2).run(served, config):
        half = LAYERS * BATCHES
        assert found["sites"][FORWARD]["full_precision"] == {"in exclude": half}
        assert found["sites"][FORWARD]["quantized"] == half


def test_a_preset_has_megatrons_width(engines: Callable[[int], Ranks]) -> None:
    for found in engines(2).run(served, {"preset": "int4", "min_bytes": 0}):
        assert found["sites"][FORWARD]["bits"] == 6
        assert found["served"] == pytest.approx(found["exact"], abs=0.03)
