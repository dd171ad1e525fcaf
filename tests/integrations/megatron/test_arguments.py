"""The launch flags: one for each field, precedence, refusals, the start line and the summary.

Megatron-LM's training package is a stub here, with functions of the same names and real argparse;
test_launch.py takes the real one.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations.megatron import arguments, tensor_parallel
from flash_allreduce_plugin.telemetry import counters

MEGATRON = arguments.megatron


def parse(*words: str, **others: Any) -> argparse.Namespace:
    parser = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return argparse.Namespace(**{**vars(parser.parse_args(words)), **others})


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in FlashConfig.model_fields:
        monkeypatch.delenv(f"FLASH_ALLREDUCE_{key.upper()}", raising=False)


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[FlashConfig]:
    """Record the configurations that `start` enables, without megatron-core."""
    configs: list[FlashConfig] = []
    monkeypatch.setattr(MEGATRON, "enable_from", lambda config, source: configs.append(config))
    monkeypatch.setattr(arguments.atexit, "register", lambda function: None)
    return configs


def test_every_field_has_its_flag_with_meaning_values_and_default() -> None:
    parser = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    groups = {group.title or "": group for group in parser._action_groups}
    flags = {
        flag: action for group in groups.values() for action in group._group_actions for flag in action.option_strings
    }
    flags = {flag: action for flag, action in flags.items() if flag.startswith("--flash-allreduce")}
    expected = {"--flash-allreduce-" + key.replace("_", "-"): key for key in FlashConfig.model_fields}
    assert set(flags) == {"--flash-allreduce", "--flash-allreduce-config", *expected}
    for flag, key in expected.items():
        field = FlashConfig.model_fields[key]
        assert flags[flag] in groups[f"flash all-reduce: {FlashConfig.group_of(key)}"]._group_actions
        text = flags[flag].help or ""
        assert (field.description or "?") in text
        assert field.json_schema_extra["expected"] in text  # type: ignore[index, operator]
        assert f"(default: {'none' if field.default is None else json.dumps(field.default)})" in text
    assert "flash all-reduce" in parser.format_help()


def test_flags_reach_the_configuration() -> None:
    given = parse(
        *("--flash-allreduce", "--flash-allreduce-bits", "4", "--flash-allreduce-backward-bits=full"),
        *("--flash-allreduce-symmetric", "--flash-allreduce-check-ranks", "false", "--flash-allreduce-min-bytes", "0"),
        *("--flash-allreduce-reduce-bits", "none", "--flash-allreduce-enabled", "auto"),
    )
    expected = FlashConfig(bits=4, symmetric=True, check_ranks=False, min_bytes=0, enabled="auto")
    assert arguments.config_from(given) == expected


def test_a_preset_and_its_lines(enabled: list[FlashConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flash.json"
    file.write_text('{"preset": "int4", "bits": 6}')
    words = ("--flash-allreduce", "--flash-allreduce-config", str(file), "--flash-allreduce-backward-bits", "8")
    arguments.start(parse(*words, rank=0, tensor_model_parallel_size=2))
    line, *_ = capsys.readouterr().out.splitlines()
    assert enabled == [FlashConfig(preset="int4", bits=6, backward_bits=8, param_bits=4)]
    other = "backward_bits=8, param_bits=4"
    assert f"attached, preset int4 but bits=6, {other}, forward 6 bits, backward 8 bits, groups of 128," in line
    assert "grad_bits=4, param_bits=4, sequence_parallel_gather_bits=6, expert_bits=6, attention_bits=6" in line
    arguments.start(parse("--flash-allreduce", "--flash-allreduce-preset", "thin", rank=1))
    assert enabled[1:] == [FlashConfig(preset="thin", bits=6, param_bits=4)], (
        "activations need more bits than gradients"
    )
    other = arguments.config_from(parse(*words, "--flash-allreduce-preset", "thin"))
    assert other == FlashConfig(preset="thin", bits=6, backward_bits=8)


@pytest.mark.parametrize("name", ["use_torch_fsdp2", "use_custom_fsdp"])
def test_grad_bits_of_a_preset_are_left_out_where_gradients_pass_other_buffers(
    enabled: list[FlashConfig], name: str
) -> None:
    arguments.start(parse("--flash-allreduce", "--flash-allreduce-preset", "int4", rank=1, **{name: True}))
    left_out = {"grad_bits": "full", "param_bits": "full", "quantize_layernorm": False, "error_feedback": False}
    assert enabled == [FlashConfig(preset="int4", bits=6, **left_out)]


def test_without_the_switch_nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_BITS", "4")
    assert arguments.config_from(parse()) is None
    assert arguments.config_from(argparse.Namespace()) is None


def test_environment_then_file_then_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_BITS", "3")
    monkeypatch.setenv("FLASH_ALLREDUCE_GROUP_SIZE", "32")
    monkeypatch.setenv("FLASH_ALLREDUCE_MIN_BYTES", "7")
    file = tmp_path / "settings.json"
    file.write_text('{"bits": 5, "group_size": 64}')
    from_environment = parse("--flash-allreduce")
    assert arguments.config_from(from_environment) == FlashConfig(bits=3, group_size=32, min_bytes=7)
    with_file = ("--flash-allreduce", "--flash-allreduce-config", str(file))
    assert arguments.config_from(parse(*with_file)) == FlashConfig(bits=5, group_size=64, min_bytes=7)
    with_flag = parse(*with_file, "--flash-allreduce-bits", "6")
    assert arguments.config_from(with_flag) == FlashConfig(bits=6, group_size=64, min_bytes=7)


def test_every_bad_value_is_named_by_its_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        arguments.config_from(
            parse("--flash-allreduce", "--flash-allreduce-bits", "9", "--flash-allreduce-group-size", "big")
        )
    assert str(caught.value).splitlines() == [
        "--flash-allreduce-bits=9 is not valid; expected a whole number from 2 to 8.",
        "--flash-allreduce-group-size='big' is not valid; expected one of 32, 64, 128, 256, 512, 1024.",
    ]


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"bitz": 8}')
    with pytest.raises(ConfigError, match=r"settings\.json: bitz=8 is not a known key; the nearest is bits"):
        arguments.config_from(parse("--flash-allreduce", "--flash-allreduce-config", str(file)))
    file.write_text('{"bits": 8, "bits": 4}')
    with pytest.raises(ConfigError, match=r'settings\.json: the key "bits" stands twice; expected each key once\.'):
        arguments.config_from(parse("--flash-allreduce", "--flash-allreduce-config", str(file)))
    with pytest.raises(ConfigError, match="cannot be read"):
        arguments.config_from(parse("--flash-allreduce", "--flash-allreduce-config", str(tmp_path / "none")))


def test_settings_without_the_switch_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        arguments.config_from(parse("--flash-allreduce-bits", "8", "--flash-allreduce-config", "x.json"))
    assert str(caught.value) == (
        "--flash-allreduce-config, --flash-allreduce-bits without --flash-allreduce: add --flash-allreduce, or leave "
        "the rest out."
    )


def test_yaml_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check --yaml-cfg: it replaces the parsed arguments, its settings are read, and flags are not dropped silently."""
    given = argparse.Namespace(yaml_cfg="x.yaml", flash_allreduce=True, flash_allreduce_bits=4)
    assert arguments.config_from(given) == FlashConfig(bits=4)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", "x.yaml", "--flash-allreduce"])
    with pytest.raises(ConfigError, match="--yaml-cfg replaces"):
        arguments.config_from(argparse.Namespace(yaml_cfg="x.yaml"))


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"symmetric_ar_type": "two_shot"}, "--symmetric-ar-type two_shot"),
        ({"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser"),
        ({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
    ],
)
def test_options_that_bypass_our_collectives_are_refused(
    others: dict[str, Any], named: str, enabled: list[FlashConfig]
) -> None:
    with pytest.raises(ConfigError, match=named):
        arguments.start(parse("--flash-allreduce", rank=1, **others))
    assert enabled == []
    arguments.start(parse(rank=1, **others))  # not our business without the switch
    assert enabled == []
    arguments.start(parse("--flash-allreduce", rank=1, tensor_model_parallel_size=1, **others))
    assert enabled == [FlashConfig()], "one tensor-parallel rank: there is nothing to bypass"


@pytest.mark.parametrize("name", ["use_torch_fsdp2", "use_custom_fsdp"])
def test_gradients_that_pass_other_buffers_are_refused(name: str) -> None:
    gradients = FlashConfig.model_construct(**{**dict(FlashConfig()), "grad_bits": 8})
    with pytest.raises(ConfigError, match="--flash-allreduce-grad-bits exclude each other"):
        arguments.refuse_incompatible(argparse.Namespace(**{name: True}), gradients)
    arguments.refuse_incompatible(argparse.Namespace(**{name: True}), FlashConfig())


def test_megatron_fsdp_is_served_and_the_strategy_without_gathers_refused(
    enabled: list[FlashConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEGATRON, "serves_fsdp", lambda: True)
    words = ("--flash-allreduce", "--flash-allreduce-grad-bits", "8", "--flash-allreduce-param-bits", "8")
    sharded: dict[str, Any] = {"rank": 1, "use_megatron_fsdp": True, "use_custom_fsdp": True}
    sharded |= {"data_parallel_sharding_strategy": "optim_grads"}
    arguments.start(parse(*words, **sharded))
    assert enabled == [FlashConfig(grad_bits=8, param_bits=8)]
    with pytest.raises(ConfigError, match=r"^--flash-allreduce-param-bits has no effect with data_parallel_sharding"):
        arguments.start(parse(*words, **{**sharded, "data_parallel_sharding_strategy": "no_shard"}))


def test_pipeline_widths_without_a_pipeline_are_refused(enabled: list[FlashConfig]) -> None:
    words = ("--flash-allreduce", "--flash-allreduce-pipeline-bits", "8")
    said = "^--flash-allreduce-pipeline-bits=8 has no effect: there is no pipeline here; leave it out.$"
    with pytest.raises(ConfigError, match=said):
        arguments.start(parse(*words, pipeline_model_parallel_size=1))
    with pytest.raises(ConfigError, match="-p2p and --flash-allreduce-pipeline-bits exclude each other"):
        arguments.start(parse(*words, pipeline_model_parallel_size=2, use_ring_exchange_p2p=True))
    arguments.start(parse("--flash-allreduce", rank=1, pipeline_model_parallel_size=1, use_ring_exchange_p2p=True))
    arguments.start(parse(*words, rank=1, pipeline_model_parallel_size=2))
    assert enabled == [FlashConfig(), FlashConfig(pipeline_bits=8)]


def test_fields_of_zero_3_alone_are_refused() -> None:
    config = FlashConfig(param_backward_bits=4)
    said = "=4 has no effect in Megatron, which gathers no parameters for the backward pass alone; leave it out."
    with pytest.raises(ConfigError, match=f"^--flash-allreduce-param-backward-bits{said}$"):
        arguments.refuse_incompatible(argparse.Namespace(), config)
    with pytest.raises(ConfigError, match=f"^param_backward_bits{said}$"):
        MEGATRON.enable(config)
    assert not MEGATRON.is_enabled()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"use_custom_fsdp": True},
            "--use-custom-fsdp and --flash-allreduce-param-bits exclude each other: the para",
        ),
        (
            {"use_torch_fsdp2": True, "use_distributed_optimizer": False},
            "--use-torch-fsdp2 and --flash-allreduce-param-b",
        ),
        (
            {"fp8_param_gather": True},
            "--fp8-param-gather and --flash-allreduce-param-bits exclude each other: it is no",
        ),
        (
            {"use_precision_aware_optimizer": True},
            "--use-precision-aware-optimizer and --flash-allreduce-param-bits ex",
        ),
        (
            {"use_distributed_optimizer": False},
            "--flash-allreduce-param-bits has no effect without the distributed opt",
        ),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_parameters_that_cannot_be_served_are_refused(
    enabled: list[FlashConfig], given: dict[str, bool], said: str
) -> None:
    words = ("--flash-allreduce", "--flash-allreduce-param-bits", "4")
    with pytest.raises(ConfigError) as caught:
        arguments.start(parse(*words, rank=1, **{"use_distributed_optimizer": True, **given}))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    arguments.start(parse(*words[:1], rank=1, **given))
    arguments.start(parse(*words, rank=1, use_distributed_optimizer=True))
    assert enabled == [FlashConfig(), FlashConfig(param_bits=4)]


@pytest.mark.parametrize("option", ["use_torch_fsdp2", "use_custom_fsdp"])
def test_a_presets_width_of_gradients_that_cannot_be_served_is_named(
    enabled: list[FlashConfig], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    given = {"tensor_model_parallel_size": 2, "transformer_impl": "local", option: True}
    arguments.start(parse("--flash-allreduce", "--flash-allreduce-preset", "int8", rank=0, **given))
    start, line = capsys.readouterr().out.splitlines()
    assert line == (
        f"flash all-reduce: --{option.replace('_', '-')}: gradients and parameters do not pass through Megatron's "
        "own data-parallel buffers, and stay in full precision whatever the preset says."
    )
    assert "int8" in start and enabled[0].grad_bits == "full"
    arguments.start(parse("--flash-allreduce", rank=0, **given))
    assert len(capsys.readouterr().out.splitlines()) == 1, "without a preset no width of gradients was asked for"


def test_rank_0_prints_the_attached_models(enabled: list[FlashConfig], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--flash-allreduce", "--flash-allreduce-bits", "8", "--flash-allreduce-backward-bits", "6")
    arguments.start(parse(*words, rank=1))
    assert capsys.readouterr().out == ""
    words = (*words, "--flash-allreduce-gather-bits", "4")
    arguments.start(parse(*words, rank=0, tensor_model_parallel_size=2, transformer_impl="local"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("flash all-reduce: ") and "forward 8 bits, backward 6 bits, groups of 128" in line
    assert line.endswith(", gather_bits=4"), "what is not at its default is said"
    assert enabled == [FlashConfig(bits=8, backward_bits=6), FlashConfig(bits=8, backward_bits=6, gather_bits=4)]


def test_rank_0_says_when_little_or_nothing_will_be_quantized(
    enabled: list[FlashConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEGATRON, "report", dict)
    monkeypatch.setenv("FLASH_ALLREDUCE_DISABLE", "1")
    given = parse("--flash-allreduce", rank=0, tensor_model_parallel_size=1, transformer_impl="transformer_engine")
    arguments.start(given)
    start, one_rank, engine = capsys.readouterr().out.splitlines()
    assert "switched off" in start
    assert "--tensor-model-parallel-size is 1" in one_rank
    assert "--transformer-impl is transformer_engine" in engine

    target = "transformer_engine.pytorch.module.base.gather_along_first_dim"
    monkeypatch.setattr(MEGATRON, "report", lambda: {"x": {"target": target, "in_place": True}})
    arguments.start(argparse.Namespace(**{**vars(given), "tensor_model_parallel_size": 2}))
    assert len(capsys.readouterr().out.splitlines()) == 1, "its layers are reached"


def test_the_summary_counts_calls_reasons_and_bytes() -> None:
    counters.reset_stats()
    counters.record_quantized(tensor_parallel.G_FORWARD, 1_000_000, 4_000_000)
    counters.record_quantized(tensor_parallel.G_FORWARD, 1_000_000, 4_000_000)
    counters.record_full_precision(tensor_parallel.G_FORWARD, "message below min_bytes", 500_000)
    counters.record_full_precision(tensor_parallel.EMBEDDING, "embedding", 500_000)
    text = arguments.summary()
    counters.reset_stats()
    lines = text.splitlines()
    assert lines[0] == "flash all-reduce, rank 0, whole run: 6.00 MB saved of 9.00 MB (66.7 %)"
    assert (
        "  megatron.g.forward: 3 calls, 2 quantized, 2.50 MB of 8.50 MB sent; "
        "in full precision: 1 message below min_bytes" in lines
    )
    assert (
        "  megatron.embedding.forward: 1 calls, 0 quantized, 0.50 MB of 0.50 MB sent; in full precision: 1 embedding"
    ) in lines
    assert lines[-1].startswith("  nothing sent: ") and "megatron.linear.dgrad" in lines[-1]


def test_the_summary_of_a_run_without_calls() -> None:
    counters.reset_stats()
    assert arguments.summary().splitlines()[0] == "flash all-reduce, rank 0, whole run: 0.00 MB saved of 0.00 MB"


def test_a_disabled_plugin_prints_no_width(enabled: list[FlashConfig], capsys: pytest.CaptureFixture[str]) -> None:
    arguments.start(parse("--flash-allreduce", "--flash-allreduce-enabled", "false", rank=0, transformer_impl="local"))
    start = capsys.readouterr().out.splitlines()[0]
    assert start.endswith("seams attached, but switched off: every call runs in full precision")
    assert "bits" not in start


@pytest.mark.parametrize(("cp", "message"), [(1, "64 KiB"), (2, "32 KiB")])
def test_a_layer_below_min_bytes_is_reported_at_the_start(
    cp: int, message: str, enabled: list[FlashConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"seq_length": 128, "micro_batch_size": 2, "hidden_size": 128, "params_dtype": torch.bfloat16}
    shape |= {"tensor_model_parallel_size": 2, "context_parallel_size": cp, "transformer_impl": "local"}
    arguments.start(parse("--flash-allreduce", "--flash-allreduce-min-bytes", "65537", rank=0, **shape))
    (_, small) = capsys.readouterr().out.splitlines()
    assert small.startswith(
        f"flash all-reduce: a layer's collective carries {message} (--seq-length 128 x --micro-batch-size 2 x "
        "--hidden-size 128 x 2 bytes"
    )
    assert small.endswith("none will be quantized; set --flash-allreduce-min-bytes.")
    arguments.start(parse("--flash-allreduce", "--flash-allreduce-min-bytes", "32768", rank=0, **shape))
    assert len(capsys.readouterr().out.splitlines()) == 1


NEAREST_BITS = "is not a known flag; the nearest is --flash-allreduce-bits."


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--flash-allreduce-bitz", "8"],
            f"--flash-allreduce-bitz {NEAREST_BITS}",
        ),
        (
            ["--flash_allreduce_bits=8"],
            f"--flash_allreduce_bits {NEAREST_BITS}",
        ),
        (["--flash-allreduce-bits"], "argument --flash-allreduce-bits: expected one argument"),
        (["--flash-allreduc"], None),
        (["--seq-len"], None),
    ],
)
def test_a_mistyped_flag_gets_the_nearest_in_one_line(
    words: list[str], line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser("pretrain_gpt.py", allow_abbrev=False)
    arguments.with_nearest(arguments.add_arguments(parser))
    with pytest.raises(SystemExit) as refused:
        parser.parse_args(["--flash-allreduce", *words])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    if line is None:  # none of our business: Megatron's own answer
        assert said.startswith("usage: ") and "unrecognized arguments" in said
    else:
        assert said == f"pretrain_gpt.py: error: {line}\n"


def test_a_mistyped_flag_is_not_ignored_with_the_unknown_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--flash-allreduce", "--flash-allreduce-bitz", "4"])
    with pytest.raises(ConfigError, match="the nearest is --flash-allreduce-bits"):
        arguments.start(parse("--flash-allreduce", ignore_unknown_args=True))


def test_the_summary_is_about_all_that_was_sent() -> None:
    counters.reset_stats()
    counters.record_quantized(tensor_parallel.G_FORWARD, 1_000_000, 4_000_000)
    counters.record_beside("all_gather, DATA_PARALLEL_GROUP of 2 ranks", 2_000_000)
    lines = arguments.summary().splitlines()
    counters.reset_stats()
    assert lines[0] == "flash all-reduce, rank 0, whole run: 3.00 MB saved of 6.00 MB (50.0 %)"
    assert lines[-2:] == [
        "  outside the plugin: all_gather, DATA_PARALLEL_GROUP of 2 ranks: 1 calls, 2.00 MB sent",
        "  of 3.00 MB that this rank sent, 33.3 % were quantized, 0.0 % left in full precision by the plugin, "
        "66.7 % outside the plugin",
    ]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[types.ModuleType, types.ModuleType]]:
    """Stub megatron.training.arguments and .global_vars."""
    names = ("megatron.training.arguments", "megatron.training.global_vars")
    parsing, variables = map(types.ModuleType, names)
    exec("def add_megatron_arguments(parser):\n    return parser\n", vars(parsing))
    exec("seen = []\ndef set_args(args):\n    seen.append(args)\n", vars(variables))
    package = types.ModuleType("megatron.training")
    package.__path__ = []
    for name, module in zip(("megatron.training", *names), (package, parsing, variables), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    yield parsing, variables
    arguments._patchset.cache_clear()


def test_attach_and_detach(
    training: tuple[types.ModuleType, types.ModuleType], enabled: list[FlashConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing, variables = training
    own = parsing.add_megatron_arguments, variables.set_args
    arguments.attach()
    arguments.attach()
    parser = parsing.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--flash-allreduce", "--flash-allreduce-bits", "5"])
    args.rank = 1
    variables.set_args(args)
    assert enabled == [FlashConfig(bits=5)] and variables.seen == [args]
    args.flash_allreduce_bits = "1"
    with pytest.raises(ConfigError, match="--flash-allreduce-bits=1"):
        variables.set_args(args)
    assert variables.seen == [args], "Megatron-LM never sees arguments that are refused"
    arguments.detach()
    assert (parsing.add_megatron_arguments, variables.set_args) == own


def test_another_megatron_lm_is_not_patched(training: tuple[types.ModuleType, types.ModuleType]) -> None:
    parsing, variables = training
    exec("def set_args(args, more):\n    pass\n", vars(variables))
    own = parsing.add_megatron_arguments
    with pytest.raises(PatchError, match=r"set_args: expected the parameters \(args\), found \(args, more\)"):
        arguments.attach()
    assert parsing.add_megatron_arguments is own
