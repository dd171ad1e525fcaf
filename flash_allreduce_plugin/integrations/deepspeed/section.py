"""The section "flash_allreduce" of a DeepSpeed configuration, and the settings that exclude it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from flash_allreduce_plugin.config import FlashConfig, refusals, wording
from flash_allreduce_plugin.config.presets import PRESETS
from flash_allreduce_plugin.config.refusals import by_hand, for_differences
from flash_allreduce_plugin.config.wording import printable, shown, variable
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.telemetry import notices

SECTION = "flash_allreduce"
FILE = "config"  # key of the section: a JSON file with more of the configuration, such as `tune` writes

LACKS = BY_NAME["deepspeed"].refused
AUTOTP = "tensor_parallel.autotp_size of 2 or more"
# Keys of the sums of AutoTP alone, and why they have no effect without them.
OF_SUMS = dict.fromkeys(
    ("include", "exclude", "quantize_embedding"), f"where only tensor parallelism uses it ({AUTOTP})"
)
# Keys of Megatron that also apply here: widths of sends and of the exchanges of a model's layers, and the companions of
# the latter.
SENDS = ("pipeline_bits", "pipeline_backward_bits")
EXCHANGES = ("attention_bits", "expert_bits", "expert_combine_bits")
OF_EXCHANGES = ("backward_bits", "backward_rounding", "quantize_evaluation")
_NO_EXCHANGE = dict.fromkeys(
    OF_EXCHANGES, f"where only tensor parallelism ({AUTOTP}), attention_bits and expert_bits use it"
)
_COMPRESSING_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


def parse(raw: Mapping[str, Any]) -> FlashConfig | None:
    """Return the configuration in DeepSpeed's raw dict, or None without the section.

    The section is an object, or the name of a preset. Missing keys come from the file of its key "config", else from
    the environment (FLASH_ALLREDUCE_BITS and so on), else from the preset, else from the defaults.
    Raises ConfigError with every problem, one a line, each naming `flash_allreduce.<key>` or the variable.
    """
    if SECTION not in raw:
        return None
    section = {"preset": raw[SECTION]} if raw[SECTION] in tuple(PRESETS) else raw[SECTION]
    if not isinstance(section, Mapping):
        near = wording.near(section, PRESETS) if isinstance(section, str) else ""
        raise ConfigError(
            f'{SECTION} is {json.dumps(section, default=repr)}; expected keys and values, as in "{SECTION}": '
            f'{{"bits": 4}}, or the name of a preset: {", ".join(map(json.dumps, PRESETS))}{near}. '
            f'To switch it off, write "{SECTION}": {{"enabled": false}}, or leave the section out.'
        )
    config, base = None, FlashConfig.from_env()
    fields = {key: value for key, value in section.items() if key != FILE}
    splits = is_split(raw)
    # The environment may be for Megatron in the same job; patterns of modules are refused nevertheless.
    patterns = {key: OF_SUMS[key] for key in ("include", "exclude") if not splits}
    stray = refusals.refusals(base.given(), "DeepSpeed", {**LACKS, **patterns}, variable)
    lines: list[str] = []
    try:
        if FILE in section:
            base = _from_file(section[FILE], base, splits, lines)
        lacks = lacking({**base.given(), **fields}, splits)
        lines = refusals.refusals(fields, "DeepSpeed", lacks) + lines
        config = FlashConfig.from_dict({**base.given(), **fields})
    except ConfigError as error:
        lines += str(error).splitlines()
    if lines or stray:
        raise ConfigError("\n".join([*(f"{SECTION}.{line}" for line in lines), *stray]))
    return config


def is_split(raw: Mapping[str, Any]) -> bool:
    """True if DeepSpeed's raw dict asks for AutoTP."""
    size = raw["tensor_parallel"].get("autotp_size", 0) if isinstance(raw.get("tensor_parallel"), Mapping) else 0
    return isinstance(size, int) and size > 1


def lacking(given: Mapping[str, Any], splits: bool) -> dict[str, str]:
    """Return the keys that have no effect with `given`, each with its reason. splits: AutoTP splits the model."""
    exchanged = any(given.get(key) not in (None, "full") for key in EXCHANGES)
    needless = {} if splits else {**OF_SUMS, **({} if exchanged else _NO_EXCHANGE)}
    return {**refusals.with_megatrons(LACKS, (*SENDS, *EXCHANGES, *OF_EXCHANGES, *OF_SUMS)), **needless}


def nearly(raw: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each top-level key spelled nearly as ours: DeepSpeed ignores unknown keys."""
    found = (key for key in raw if isinstance(key, str) and key != SECTION)
    return [
        f'the configuration\'s key "{printable(key)}" is not read by anybody; is "{SECTION}" meant?'
        for key in found
        if difflib.get_close_matches(re.sub("[^a-z]", "", key.lower()), [SECTION.replace("_", "")], cutoff=0.85)
    ]


def _from_file(path: Any, base: FlashConfig, splits: bool, lines: list[str]) -> FlashConfig:
    """Return `base` with the settings of the file. lines: receives the keys without an effect."""
    if not isinstance(path, str):
        raise ConfigError(f"{FILE}={path!r} is not valid; expected the name of a JSON file.")
    try:
        config = FlashConfig.from_file(path, base=base)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{FILE}={line}" for line in str(error).splitlines())) from None
    own = {key: value for key, value in config.given().items() if base.given().get(key) != value}
    found = refusals.refusals(own, "DeepSpeed", lacking(config.given(), splits))
    lines += [f"{FILE}={printable(path)}: {line}" for line in found]
    return config


def refuse_incompatible(deepspeed: Any) -> None:
    """Raise ConfigError, one line each, for settings of a DeepSpeedConfig that bypass the quantized reductions."""
    lines = []
    zero = deepspeed.zero_config
    for key in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if getattr(zero, key, False):
            lines.append(
                f"zero_optimization.{key} and {SECTION} exclude each other: ZeRO++ has a quantization of its own; "
                "drop one of the two."
            )
    if getattr(zero, "mics_shard_size", -1) > 0:
        lines.append(
            f"zero_optimization.mics_shard_size and {SECTION} exclude each other: MiCS reduces between its shard "
            "groups by functions of its own; drop one of the two."
        )
    if getattr(deepspeed.compile_config, "deepcompile", False):
        lines.append(
            f"compile.deepcompile and {SECTION} exclude each other: DeepCompile reduces gradients in its own C++ code; "
            "drop one of the two."
        )
    if str(deepspeed.optimizer_name).lower() in _COMPRESSING_OPTIMIZERS:
        lines.append(
            f"optimizer.type {deepspeed.optimizer_name} and {SECTION} exclude each other: the optimizer compresses its "
            "communication itself; take another optimizer, or drop the section."
        )
    if lines:
        raise ConfigError("\n".join(lines))


def of_gathers(deepspeed: Any, config: FlashConfig) -> FlashConfig:
    """Return `config` as an engine of this DeepSpeedConfig gathers parameters: at stages 0 to 2 their differences.

    A preset's width is left out, with a line, if settings of DeepSpeed exclude it. Raises ConfigError, one line each,
    for a given width.
    """
    zero = deepspeed.zero_config
    config = config if zero.stage == 3 else for_differences(config)
    lines = []
    widths = [key for key in ("param_bits", "param_backward_bits") if getattr(config, key) not in (None, "full")]
    key = f"{SECTION}.{widths[0]}" if widths else ""
    if widths and zero.stage < 3 and getattr(zero, "zenflow", None) is not None:
        lines.append(
            f"zero_optimization.zenflow and {key} exclude each other: ZenFlow updates parameters in a "
            "step of its own; drop one of the two."
        )
    if widths and zero.stage == 3 and zero.use_all_reduce_for_fetch_params:
        lines.append(
            f"zero_optimization.stage3_use_all_reduce_for_fetch_params and {key} exclude each other: parameters "
            "are then gathered by all-reduces; drop one of the two."
        )
    if widths and zero.stage == 3 and zero.offload_param is not None and zero.offload_param.device == "nvme":
        lines.append(
            f"zero_optimization.offload_param to nvme and {key} exclude each other: parameters are then read from "
            "disk in between; offload them to cpu, or drop the key."
        )
    if not lines:
        return config
    if by_hand(config, *widths):
        raise ConfigError("\n".join(lines))
    for line in lines:
        notices.say(f"preset {config.preset} without param_bits: {line}")
    return config.model_copy(update={"param_bits": "full"})


def of_preset(config: FlashConfig, useless: Mapping[str, str]) -> tuple[FlashConfig, dict[str, str]]:
    """Return `config` without the useless keys that a preset has set, and those that were given."""
    given = by_hand(config, *useless)
    dropped = {key: getattr(FlashConfig(), key) for key in useless if key not in given}
    rest = {key: why for key, why in useless.items() if key in given}
    return (config.model_copy(update=dropped) if dropped else config), rest


def useless_sums(config: FlashConfig, *, split: bool, why: str, by_environment: bool = False) -> dict[str, str]:
    """Return the given keys that only AutoTP's sums use, if no layer is split: key -> `why`, after "no effect".

    by_environment: those of OF_MEGATRON may be for Megatron in the same job.
    """
    given, defaults = config.given(), FlashConfig()
    exchanged = any(getattr(config, key) not in (None, "full") for key in EXCHANGES)
    keys = () if split else (*OF_SUMS, *(() if exchanged else OF_EXCHANGES))
    return {
        key: why
        for key in keys
        if key in given
        and getattr(config, key) != getattr(defaults, key)
        and not (by_environment and key in refusals.OF_MEGATRON)
    }


def useless_gathers(deepspeed: Any, config: FlashConfig) -> dict[str, str]:
    """Return widths of gathers that an engine of this DeepSpeedConfig lacks: key -> reason, after "no effect"."""
    stage, found = int(deepspeed.zero_config.stage), {}
    bf16 = getattr(deepspeed, "bfloat16_config", None)  # BF16_Optimizer gathers at stage 0 too
    if config.param_bits != "full" and stage == 0 and bf16 is not None and not bf16.enabled:
        found["param_bits"] = " at zero_optimization.stage 0, which gathers no parameters"
    if config.param_backward_bits is not None and stage != 3:
        found["param_backward_bits"] = f" at ZeRO stage {stage}, which gathers no parameters for the backward pass"
    if config.quantize_frozen and stage != 3:
        found["quantize_frozen"] = f" at ZeRO stage {stage}, which gathers no frozen parameters"
    return found


def refuse_useless(config: FlashConfig, useless: Mapping[str, str]) -> None:
    """Raise ConfigError, one line each, for keys without an effect. useless: key -> reason."""
    if useless:
        raise ConfigError(
            "\n".join(
                f"{SECTION}.{key}={shown(getattr(config, key))} has no effect{why}; leave it out."
                for key, why in useless.items()
            )
        )


def leave_out(config: FlashConfig, useless: Mapping[str, str]) -> tuple[FlashConfig, str]:
    """Return `config` with the useless keys at their defaults, and "key=value (reason)" of each.

    With the last key of EXCHANGES its companions are left out too.
    """
    defaults, reasons = FlashConfig(), {key: why.strip(" :") for key, why in useless.items()}
    remaining = [key for key in EXCHANGES if key not in useless and getattr(config, key) not in (None, "full")]
    if not remaining and not reasons.keys().isdisjoint(EXCHANGES):
        given = [key for key in OF_EXCHANGES if key in config.given()]
        reasons.update({key: "no exchange is left" for key in given if getattr(config, key) != getattr(defaults, key)})
    said = [f"{key}={shown(getattr(config, key))} ({why})" for key, why in reasons.items()]
    return config.model_copy(update={key: getattr(defaults, key) for key in reasons}), ", ".join(said)
