"""Rank 0's lines about an engine's first steps: every field that would have quantized a traffic of a step."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import test_attention
import test_experts
import torch
import torch.distributed as dist
from deepspeed_training import EIGHT, NEWEST, batch, engine, step

import flash_allreduce_plugin as fap
from tests.distributed import Ranks

STEPS = 4


def section(*keys: str) -> str:
    return "set " + " and ".join(f'"{key}" in the section "flash_allreduce"' for key in keys)


def noticed(train: Callable[[], Any]) -> dict[str, Any]:
    """Return the lines about sites while `train` runs and returns its engine; its report; traffic that is not ours."""
    fap.reset_stats()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        built = train()
    lines = [line.removeprefix("flash all-reduce: ") for line in text.getvalue().splitlines() if "has quan" in line]
    seen = {"lines": lines, "report": str(fap.deepspeed.report()), "beside": sorted(fap.stats()["beside"])}
    if built is not None:
        built.destroy()
    return seen


def of_stage(options: dict[str, Any], flash: dict[str, Any]) -> dict[str, Any]:
    def train() -> Any:
        built = engine(options, flash)
        fap.reset_stats()
        for number in range(STEPS):
            step(built, number)
        return built

    return noticed(train)


@NEWEST
@pytest.mark.parametrize(
    ("stage", "bf16"), [(0, True), (1, False), (2, False), (3, False)], ids=["bf16", "1", "2", "3"]
)
def test_parameters_that_are_gathered_in_full_precision_have_a_field(
    engines: Callable[[int], Ranks], stage: int, bf16: bool
) -> None:
    options: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if bf16:
        stage = 1
        options = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
        options["data_types"] = {"grad_accum_dtype": "fp32"}
    site = f"deepspeed.stage{stage}.parameters"
    first, second = engines(2).run(of_stage, options, EIGHT)
    [line] = first["lines"]
    assert line.startswith(f"{site} has quantized none of its ")
    assert line.endswith(f"calls: param_bits is full ({section('param_bits')})")
    assert second["lines"] == []
    assert f"{site}: " in first["report"] and "param_bits is full\n" in first["report"]
    assert not any("all_gather" in name for name in first["beside"]), first["beside"]
    for report in (first["report"], second["report"]):
        assert "deepspeed.pipeline" not in report.split("not in place: ")[0]


def of_experts(flash: dict[str, Any]) -> dict[str, Any]:
    def train() -> Any:
        made = test_experts.built(flash, {"zero_optimization": {"stage": 0}})
        for number in range(STEPS):
            x = torch.randn(24, 64, generator=torch.Generator().manual_seed(number))
            made.backward(made(x).float().square().mean())
            made.step()
        return made

    return noticed(train)


@NEWEST
def test_experts_exchange_in_full_precision_by_a_field(engines: Callable[[int], Ranks]) -> None:
    first, _ = engines(2).run(of_experts, EIGHT)
    assert first["lines"] == [
        *(
            f"deepspeed.experts.{way}.forward has quantized none of its 3 calls: expert_bits is full "
            f"({section('expert_bits')})"
            for way in ("dispatch", "combine")
        ),
        *(
            f"deepspeed.experts.{way}.backward has quantized none of its 3 calls: backward_bits is full "
            f"({section('backward_bits', 'expert_bits')})"
            for way in ("combine", "dispatch")
        ),
    ]
    assert not any("all_to_all" in name for name in first["beside"])


def of_attention(flash: dict[str, Any]) -> dict[str, Any]:
    def train() -> Any:
        made = engine({}, flash, test_attention.Block(4, 4), lr=0.1)
        for number in range(STEPS):
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
            x = torch.randn(test_attention.BATCH, test_attention.LOCAL, 64, generator=generator)
            made.backward(made(x).float().square().mean())
            made.step()
        return made

    return noticed(train)


@NEWEST
def test_attention_exchanges_in_full_precision_by_a_field(engines: Callable[[int], Ranks]) -> None:
    first, _ = engines(2).run(of_attention, EIGHT)
    assert first["lines"] == [
        f"deepspeed.attention.forward has quantized none of its 12 calls: attention_bits is full "
        f"({section('attention_bits')})",
        f"deepspeed.attention.backward has quantized none of its 12 calls: backward_bits is full "
        f"({section('backward_bits', 'attention_bits')})",
    ]
    assert not any("all_to_all" in name for name in first["beside"])
    assert "deepspeed.pipeline" not in first["report"].split("not in place: ")[0]


def without_an_optimizer(flash: dict[str, Any]) -> dict[str, Any]:
    """Run forward passes alone at stage 3: one gather each."""

    def infer() -> Any:
        from deepspeed_training import configuration, deepspeed, model

        config = configuration({"zero_optimization": {"stage": 3}}, flash)
        built = deepspeed().initialize(model=model(), config=config)[0]
        built.eval()
        with torch.no_grad():
            for number in range(1001):
                built(batch(built, number % 7))
        return built

    return noticed(infer)


@NEWEST
def test_an_engine_that_only_infers_gets_the_notice(engines: Callable[[int], Ranks]) -> None:
    first, second = engines(2).run(without_an_optimizer, EIGHT)
    why = f"param_bits is full ({section('param_bits')})"
    assert first["lines"] == [f"deepspeed.stage3.parameters has quantized none of its 1000 calls: {why}"]
    assert second["lines"] == []


def two_engines() -> list[str]:
    """Interleave two engines: the first quantizes gradients, the second's are too small, or it has no section."""

    def train() -> None:
        options = {"zero_optimization": {"stage": 0}}
        loud = engine(options, EIGHT)
        silent = engine(options, {"bits": 8, "min_bytes": 1 << 20})
        for number in range(STEPS):
            step(loud, number)
            step(silent, number)
            step(loud, number)
        loud.destroy()
        silent.destroy()

    return noticed(train)["lines"]  # type: ignore[no-any-return]


@NEWEST
def test_the_second_engine_gets_its_own_numbers(engines: Callable[[int], Ranks]) -> None:
    first, second = engines(2).run(two_engines)
    assert first == [
        "deepspeed.stage0.gradients has quantized none of its 2 calls: message below min_bytes (largest 55.57 KiB, "
        f"min_bytes 1 MiB; {section('min_bytes')})"
    ]
    assert second == []
