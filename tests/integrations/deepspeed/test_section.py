"""The section of the JSON configuration: read strictly, refused before anything is built."""

from __future__ import annotations

import argparse
import contextlib
import gc
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
import torch.distributed as dist
from deepspeed_training import EIGHT, configuration, deepspeed, engine, model, step, weights
from torch import nn

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.integrations.deepspeed import section
from flash_allreduce_plugin.telemetry import counters
from tests.distributed import Ranks


def refusal(options: dict[str, Any], flash: Any) -> str:
    """Return the answer of deepspeed.initialize. The engine's own constructor is not reached."""
    # The engine of the last refusal. When it is freed, 0.17.6 recurses without end, which Python stops once, but not in
    # another one's: it ends the process.
    gc.collect()
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
    ({}, None, ["flash_allreduce is null; expected keys and values"]),
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
    """Return the parts of DeepSpeed's parsed configuration that the plugin reads."""
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
def test_settings_that_exclude_each_other(given: dict[str, Any], named: str) -> None:
    with pytest.raises(fap.ConfigError, match=f"^{re.escape(named)} and flash_allreduce exclude each other"):
        section.refuse_incompatible(settled(**given))
    section.refuse_incompatible(settled("adam", zero_quantized_gradients=False, mics_shard_size=-1))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 8) for key in ("backward_bits", "sequence_parallel_gather_bits", "grad_bits")),
        *(("quantize_embedding", True), ("quantize_evaluation", False), ("include", ["a"]), ("exclude", ["a"])),
    ],
)
def test_a_key_of_megatron_has_no_effect_here(key: str, value: Any) -> None:
    with pytest.raises(fap.ConfigError, match=rf"^flash_allreduce\.{key}=.* has no effect in DeepSpeed, where "):
        section.parse({"flash_allreduce": {key: value}})
    assert section.parse({"flash_allreduce": {key: fap.FlashConfig().to_dict()[key]}}) == fap.FlashConfig()


def test_the_environment_may_be_megatrons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_GRAD_BITS", "4")
    assert section.parse({"flash_allreduce": {"bits": 6}}) == fap.FlashConfig(bits=6, grad_bits=4)
    monkeypatch.setenv("FLASH_ALLREDUCE_EXCLUDE", "*.norm")
    with pytest.raises(fap.ConfigError, match=r"^FLASH_ALLREDUCE_EXCLUDE=\['\*\.norm'\] has no effect in DeepSpeed, "):
        section.parse({"flash_allreduce": {"bits": 6}})


def test_a_preset_in_the_section_or_instead_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four = fap.FlashConfig(preset="int4")
    for written in ("int4", {"preset": "int4"}):
        config = section.parse({"flash_allreduce": written})
        assert config == four and config.preset == "int4" and config.grad_bits == 4, "Megatron's keys of it do no harm"
    assert section.parse({"flash_allreduce": {"preset": "int4", "bits": 6}}) == fap.FlashConfig(preset="int4", bits=6)
    monkeypatch.setenv("FLASH_ALLREDUCE_GROUP_SIZE", "64")
    (tmp_path / "flash.json").write_text('{"preset": "thin", "range": "min-max"}')
    both = {"config": str(tmp_path / "flash.json"), "preset": "int4"}
    expected = fap.FlashConfig(preset="int4", range="min-max", group_size=64)
    assert section.parse({"flash_allreduce": both}) == expected


@pytest.mark.parametrize("written", ["off", True, False, None, 4, ["int4"], "INT4", "int-8", "Thin "], ids=str)
def test_a_section_that_is_none_names_the_switch_and_the_nearest_preset(written: Any) -> None:
    meant = {"INT4": "int4", "int-8": "int8", "Thin ": "thin"}.get(str(written))
    with pytest.raises(fap.ConfigError) as refused:
        section.parse({"flash_allreduce": written})
    near = f'; the nearest is "{meant}"' if meant else ""
    assert str(refused.value) == (
        f'flash_allreduce is {json.dumps(written)}; expected keys and values, as in "flash_allreduce": {{"bits": 4}}, '
        f'or the name of a preset: "int8", "int4", "thin"{near}. To switch it off, write "flash_allreduce": '
        '{"enabled": false}, or leave the section out.'
    )
    with pytest.raises(fap.ConfigError, match=r"^flash_allreduce\.preset='INT4' is not valid; .*nearest is \"int4\""):
        section.parse({"flash_allreduce": {"preset": "INT4"}})


def from_file(folder: str) -> list[str]:
    """Read the section from a JSON file, with a key from the environment; return our lines on standard output."""
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


def test_a_presets_name_is_the_whole_section(engines: Callable[[int], Ranks], tmp_path: Path) -> None:
    (tmp_path / "deepspeed.json").write_text(json.dumps(configuration({"zero_optimization": {"stage": 2}}, "int4")))
    first, _ = engines(2).run(from_file, str(tmp_path))
    assert first == [
        "flash all-reduce: attached to DeepSpeedEngine with DeepSpeedZeroOptimizer, ZeRO stage 2: preset int4, "
        "gradients in 4 bits, differences of parameters in 4, groups of 128, buckets from 0 bytes, codebook=true, "
        "error_feedback=true, spike_reserving=true"
    ]


def mpu(tensor: int, sequence: int) -> SimpleNamespace:
    """Return megatron.core.parallel_state for DeepSpeed as in Megatron-DeepSpeed: 4 ranks, adjacent inner groups."""
    rank, world, inner = dist.get_rank(), dist.get_world_size(), tensor * sequence
    blocks = [list(range(first, first + inner)) for first in range(0, world, inner)]
    across = [list(range(first, world, inner)) for first in range(inner)]
    alone, everybody = [[r] for r in range(world)], [list(range(world))]
    kinds = {
        "model": blocks if tensor > 1 else alone,
        "tensor_model": blocks if tensor > 1 else alone,
        "pipeline_model": alone,
        "sequence": blocks if sequence > 1 else alone,
        "data": across,
        "sequence_data": everybody if sequence > 1 else across,
    }
    functions: dict[str, Callable[[], Any]] = {}
    for kind, lists in kinds.items():
        [mine] = [ranks for ranks in lists if rank in ranks]
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in lists}
        answers = {"group": groups[tuple(mine)], "world_size": len(mine), "rank": mine.index(rank)}
        for question, answer in answers.items():
            functions[f"get_{kind}_parallel_{question}"] = lambda answer=answer: answer
    return SimpleNamespace(**functions)


def arguments(path: Path) -> argparse.Namespace:
    """Return Megatron-DeepSpeed's megatron/arguments.py, as far as DeepSpeed reads it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=None)
    parser = deepspeed().add_config_arguments(parser)
    return parser.parse_args(["--deepspeed", "--deepspeed_config", str(path), "--local_rank", os.environ["LOCAL_RANK"]])


def as_megatron_deepspeed(form: str, folder: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """Call deepspeed.initialize as megatron/training.py does ("dict", "pipeline"), and as its converter does ("args").

    https://github.com/deepspeedai/Megatron-DeepSpeed, commit 4efb479. The same twice from one file each: plain.json,
    then section.json.
    """
    package = deepspeed()
    from deepspeed.utils import groups

    units = None if form == "pipeline" else mpu(*sizes)
    result: dict[str, Any] = {}
    for name in ("plain", "section"):
        fap.reset_stats()
        args = arguments(Path(folder) / f"{name}.json")
        net: nn.Module = model()
        if form == "pipeline":
            net = package.pipe.PipelineModule(
                layers=list(net), num_stages=2, loss_fn=lambda out, target: (out - target).square().mean()
            )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        given: dict[str, Any] = {"model": net, "optimizer": optimizer, "args": args, "lr_scheduler": None, "mpu": units}
        if form != "args":
            with open(args.deepspeed_config, encoding="utf-8") as file:
                args.deepspeed_config_dict = json.load(file)
            args.deepspeed_config = None
            given["config"] = args.deepspeed_config_dict
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                built, *_ = package.initialize(**given)
            before = weights(built)
            for number in range(2):
                if form == "pipeline":
                    generator = torch.Generator().manual_seed(10 * number + built.grid.get_data_parallel_rank())
                    x = torch.randn(8, 48, generator=generator)
                    built.train_batch(iter([(x, x.flip(1))]))
                else:
                    step(built, number)
            result[name] = {
                "moved": weights(built) - before,
                "kind": type(built).__name__,
                "said": [line for line in text.getvalue().splitlines() if line.startswith("flash")],
                **fap.stats(),
            }
            built.destroy()
        finally:
            groups.mpu = None
    return result


@pytest.mark.parametrize(
    ("form", "stage", "sizes", "averaged"),
    [
        ("dict", 2, (2, 1), [(0, 2), (1, 3)]),
        ("dict", 1, (1, 2), [(0, 1, 2, 3)]),
        ("args", 0, (2, 1), [(0, 2), (1, 3)]),
        ("pipeline", 1, (1, 1), [(0, 1), (2, 3)]),
    ],
    ids=["dict-tensor-parallel", "dict-sequence-parallel", "file-in-args", "pipeline"],
)
def test_as_megatron_deepspeed_calls_it(
    engines: Callable[[int], Ranks], tmp_path: Path, form: str, stage: int, sizes: tuple[int, int],
    averaged: list[tuple[int, ...]],
) -> None:  # fmt: skip
    """averaged: only the ranks that share gradients."""
    for name, flash in (("plain", None), ("section", EIGHT)):
        options = configuration({"zero_optimization": {"stage": stage}}, flash)
        (tmp_path / f"{name}.json").write_text(json.dumps(options))
    outcomes = engines(4).run(as_megatron_deepspeed, form, str(tmp_path), sizes)
    for rank, outcome in enumerate(outcomes):
        plain, eight = outcome["plain"], outcome["section"]
        assert eight["kind"] == ("PipelineEngine" if form == "pipeline" else "DeepSpeedEngine")
        assert plain["said"] == [] and plain["calls"] == 0
        assert len(eight["said"]) == (rank == 0)
        quantized = {name: one for name, one in eight["sites"].items() if one["quantized"]}
        assert list(quantized) == [f"deepspeed.stage{stage}.gradients"]
        counted = quantized[f"deepspeed.stage{stage}.gradients"]
        # No parameter is marked as split: under tensor parallelism all are copies, the small ones in full precision.
        assert counted["quantized"] >= 2 and set(counted["full_precision"]) <= {replicated_params.REASON}
        error = (eight["moved"] - plain["moved"]).norm() / plain["moved"].norm()
        assert 0 < error < 0.01, error
        [mine] = [ranks for ranks in averaged if rank in ranks]
        for other, theirs in enumerate(outcomes):
            if theirs["section"]["moved"].shape == eight["moved"].shape:  # not another stage of the pipeline
                assert torch.equal(theirs["section"]["moved"], eight["moved"]) is (other in mine)


def test_keys_before_environment_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_BITS", "3")
    monkeypatch.setenv("FLASH_ALLREDUCE_MIN_BYTES", "7")
    assert section.parse({"flash_allreduce": {"bits": 4}}) == fap.FlashConfig(bits=4, min_bytes=7)
    assert section.parse({"flash_allreduce": {}}) == fap.FlashConfig(bits=3, min_bytes=7)
    assert section.parse({"zero_optimization": {}}) is None


def test_a_file_named_in_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a file of `flash-allreduce tune`: it ranks below the section's own keys and above the environment."""
    file = tmp_path / "tuned.json"
    file.write_text('{"bits": 4, "min_bytes": 4096}')
    monkeypatch.setenv("FLASH_ALLREDUCE_MIN_BYTES", "1")
    monkeypatch.setenv("FLASH_ALLREDUCE_GROUP_SIZE", "64")
    config = section.parse({"flash_allreduce": {"config": str(file), "bits": 6}})
    assert config == fap.FlashConfig(bits=6, min_bytes=4096, group_size=64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"flash_allreduce\.config=.*tuned\.json: cannot be read"),
        ("[1]", r"flash_allreduce\.config=.*tuned\.json: expected keys and values"),
        ('{"bits": 4, "bits": 8}', r'flash_allreduce\.config=.*tuned\.json: the key "bits" stands twice; expected'),
        ('{"bts": 4}', r"flash_allreduce\.config=.*tuned\.json: bts=4 is not a known key; the nearest is bits"),
        ('{"grad_bits": 4}', r"flash_allreduce\.config=.*tuned\.json: grad_bits=4 has no effect in DeepSpeed"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "tuned.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(fap.ConfigError, match=said):
        section.parse({"flash_allreduce": {"config": str(file)}})


def test_a_file_that_is_none() -> None:
    with pytest.raises(fap.ConfigError, match=r"flash_allreduce\.config=4 is not valid; expected the name of a JSON"):
        section.parse({"flash_allreduce": {"config": 4}})


@pytest.mark.parametrize(
    "key", ["flashallreduce", "flash-allreduce", "flash_all_reduce", "Flash_AllReduce", "flash_allreduc"]
)
def test_a_key_that_is_nearly_ours_is_named(key: str) -> None:
    (line,) = section.nearly({"train_batch_size": 8, "zero_optimization": {}, key: {"bits": 4}})
    assert line == f'the configuration\'s key "{key}" is not read by anybody; is "flash_allreduce" meant?'


def test_keys_of_deepspeed_are_not_nearly_ours() -> None:
    theirs = ("fp16", "bf16", "flops_profiler", "prescale_gradients", "sparse_gradients", "communication_data_type")
    assert section.nearly(dict.fromkeys((*theirs, "flash_allreduce", "allreduce_bucket_size", "flash_attention"))) == []


def printed(options: dict[str, Any], flash: Any, steps: int) -> tuple[list[str], str, dict[str, Any]]:
    """Return our lines on standard output while an engine is built and trains, its report, and the counters."""
    fap.reset_stats()
    counters._forgotten.clear()  # of other tests on these ranks: a site that has ever quantized is not named
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        built = engine(options, flash)
        for number in range(steps):
            step(built, number)
    report, stats = str(fap.deepspeed.report()), fap.stats()
    built.destroy()
    return [line for line in text.getvalue().splitlines() if "flash all-reduce" in line], report, stats


def test_a_program_without_calls_gets_one_line_and_other_traffic_is_counted(engines: Callable[[int], Ranks]) -> None:
    options = {"zero_optimization": {"stage": 1}, "flash-allreduce": {"bits": 2}}
    outcomes = engines(2).run(printed, options, {"bits": 8, "min_bytes": 1 << 30}, 5)
    assert outcomes[1][0] == []
    near, attached, small, parameters = outcomes[0][0]
    assert '"flash-allreduce" is not read by anybody' in near
    assert "ZeRO stage 1: gradients in 8 bits" in attached
    assert "deepspeed.stage1.gradients has quantized none of its" in small
    assert 'min_bytes 1024 MiB; set "min_bytes" in the section "flash_allreduce")' in small
    assert "deepspeed.stage1.parameters has quantized none of its" in parameters
    assert '"min_bytes" in the section "flash_allreduce" and "param_bits" in the section' in parameters
    for _, report, stats in outcomes:
        assert stats["sites"]["deepspeed.stage1.parameters"]["bytes_sent"] > 0, "a field would quantize them"
        assert not any(name.startswith(("reduce", "all_gather")) for name in stats["beside"])
        assert any(name.startswith("all_reduce, ") for name in stats["beside"]), "such as norms, which no field serves"
        assert "0.0 % were quantized" in report and "% outside the plugin" in report


def test_a_disabled_plugin_prints_no_width(engines: Callable[[int], Ranks]) -> None:
    lines, _, _ = engines(2).run(printed, {"zero_optimization": {"stage": 2}}, {"enabled": False}, 1)[0]
    assert len(lines) == 1 and "but switched off (enabled is false)" in lines[0] and "bits" not in lines[0]
