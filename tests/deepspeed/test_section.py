"""The section of the JSON configuration: read strictly, refused before anything is built."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed_training import configuration, deepspeed, engine, model

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.deepspeed import section
from tests.distributed import Ranks


def refusal(options: dict[str, Any], flash: Any) -> str:
    """What deepspeed.initialize answers; the engine's own constructor is not reached."""
    package = deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfigError

    reached: list[bool] = []
    theirs = package.DeepSpeedEngine._do_args_sanity_check  # the first that the constructor calls
    package.DeepSpeedEngine._do_args_sanity_check = lambda self, args: reached.append(True)
    try:
        with pytest.raises(DeepSpeedConfigError) as refused:
            engine(options, flash)
    finally:
        package.DeepSpeedEngine._do_args_sanity_check = theirs
    assert not reached
    assert isinstance(refused.value.__cause__, fap.ConfigError)
    return str(refused.value)


REFUSED: list[tuple[dict[str, Any], Any, list[str]]] = [
    ({}, {"bts": 4}, ["flash_allreduce.bts=4 is not a known key; the nearest is bits."]),
    ({}, {"bits": 9}, ["flash_allreduce.bits=9 is not valid; expected a whole number from 2 to 8."]),
    (
        {},
        {"bits": "auto", "group_size": 100},
        ["flash_allreduce.bits='auto' is not valid", "\nflash_allreduce.group_size=100 is not valid"],
    ),
    ({}, {"grad_bits": 4}, ["flash_allreduce.grad_bits=4 has no effect in DeepSpeed"]),
    ({}, 4, ["flash_allreduce is 4; expected keys and values"]),
    ({}, None, ["flash_allreduce is None; expected keys and values"]),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        {"bits": 4},
        ["zero_optimization.zero_quantized_gradients and flash_allreduce exclude each other"],
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        {"bits": 4},
        ["zero_optimization.zero_quantized_weights and flash_allreduce exclude each other"],
    ),
    ({"compile": {"deepcompile": True}}, {"bits": 4}, ["compile.deepcompile and flash_allreduce exclude each other"]),
    (
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}},
        {"bits": 4},
        ["and flash_allreduce exclude each other: the optimizer compresses its communication"],
    ),
]


@pytest.mark.parametrize(("options", "flash", "said"), REFUSED, ids=[case[2][0][:60] for case in REFUSED])
def test_is_refused_at_initialize(
    engines: Callable[[int], Ranks], options: dict[str, Any], flash: Any, said: list[str]
) -> None:
    if flash is None:
        options = {**options, "flash_allreduce": None}
    for message in engines(2).run(refusal, options, flash):
        for part in said:
            assert part in message


def settled(optimizer: str | None = None, deepcompile: bool = False, **zero: Any) -> SimpleNamespace:
    """What DeepSpeed has made of its configuration, as far as it is looked at."""
    return SimpleNamespace(
        zero_config=SimpleNamespace(**zero),
        compile_config=SimpleNamespace(deepcompile=deepcompile),
        optimizer_name=optimizer,
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"zero_quantized_gradients": True}, "zero_optimization.zero_quantized_gradients"),
        ({"zero_quantized_weights": True}, "zero_optimization.zero_quantized_weights"),
        ({"zero_quantized_nontrainable_weights": True}, "zero_optimization.zero_quantized_nontrainable_weights"),
        ({"mics_shard_size": 2}, "zero_optimization.mics_shard_size"),  # from 0.19 on DeepSpeed refuses it itself
        ({"deepcompile": True}, "compile.deepcompile"),
        *[({"optimizer": name}, f"optimizer.type {name}") for name in ("OneBitAdam", "onebitlamb", "ZeroOneAdam")],
    ],
    ids=str,
)
def test_what_cannot_go_together(given: dict[str, Any], named: str) -> None:
    with pytest.raises(fap.ConfigError, match=f"^{re.escape(named)} and flash_allreduce exclude each other"):
        section.refuse_incompatible(settled(**given))
    section.refuse_incompatible(settled("adam", zero_quantized_gradients=False, mics_shard_size=-1))


@pytest.mark.parametrize(
    "key",
    [
        *("backward_bits", "sequence_parallel_gather_bits", "grad_bits", "quantize_embedding", "expert_bits"),
        *("quantize_evaluation", "include", "exclude"),
    ],
)
def test_a_key_of_megatron_has_no_effect_here(key: str) -> None:
    value = fap.FlashConfig().to_dict()[key]
    with pytest.raises(fap.ConfigError, match=f"^flash_allreduce.{key}=.* has no effect in DeepSpeed"):
        section.parse({"flash_allreduce": {key: value}})


def from_file(folder: str) -> list[str]:
    """From a JSON file, with a key from the environment; our lines on standard output."""
    path = Path(folder) / "deepspeed.json"
    os.environ["FLASH_ALLREDUCE_MIN_BYTES"] = "0"
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            built, *_ = deepspeed().initialize(model=net, optimizer=optimizer, config=str(path))
    finally:
        del os.environ["FLASH_ALLREDUCE_MIN_BYTES"]
    built.destroy()
    return [line for line in text.getvalue().splitlines() if "flash" in line]


def test_from_a_file_and_a_loud_line_on_rank_0(engines: Callable[[int], Ranks], tmp_path: Path) -> None:
    flash = {"bits": 4, "group_size": 64, "gather_bits": 8}
    (tmp_path / "deepspeed.json").write_text(json.dumps(configuration({"zero_optimization": {"stage": 2}}, flash)))
    first, second = engines(2).run(from_file, str(tmp_path))
    assert second == []
    assert first == [
        "flash all-reduce: attached to DeepSpeedEngine with DeepSpeedZeroOptimizer, ZeRO stage 2: gradients in 4 bits, "
        "groups of 64, buckets from 0 bytes, gather_bits=8"
    ]


def test_keys_before_environment_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_BITS", "3")
    monkeypatch.setenv("FLASH_ALLREDUCE_MIN_BYTES", "7")
    assert section.parse({"flash_allreduce": {"bits": 4}}) == fap.FlashConfig(bits=4, min_bytes=7)
    assert section.parse({"flash_allreduce": {}}) == fap.FlashConfig(bits=3, min_bytes=7)
    assert section.parse({"zero_optimization": {}}) is None
