"""The section "flash_allreduce" of a DeepSpeed configuration, and what it cannot go together with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError

SECTION = "flash_allreduce"
FILE = "config"  # key of the section: a JSON file with more of the configuration, such as `tune` writes

# Fields for collectives that DeepSpeed does not have: in the section they would do nothing.
_OF_MEGATRON = (
    "backward_bits",
    "sequence_parallel_gather_bits",
    "grad_bits",
    "quantize_embedding",
    "expert_bits",
    "quantize_evaluation",
    "include",
    "exclude",
)
_NO_EFFECT = "{key}={value!r} has no effect in DeepSpeed, whose gradients all travel at `bits`; leave it out."
_COMPRESSING_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


def parse(raw: Mapping[str, Any]) -> FlashConfig | None:
    """The configuration that DeepSpeed's raw dict asks for; None without the section.

    Keys that the section leaves out come from the file that its key "config" names, else from the environment
    (FLASH_ALLREDUCE_BITS and so on), else they are the defaults. Raises ConfigError with every problem, one a line,
    each naming `flash_allreduce.<key>`.
    """
    if SECTION not in raw:
        return None
    section = raw[SECTION]
    if not isinstance(section, Mapping):
        raise ConfigError(f'{SECTION} is {section!r}; expected keys and values, as in "{SECTION}": {{"bits": 4}}.')
    config, base = None, FlashConfig.from_env()
    fields = {key: value for key, value in section.items() if key != FILE}
    lines = [_NO_EFFECT.format(key=key, value=fields[key]) for key in _OF_MEGATRON if key in fields]
    try:
        if FILE in section:
            base = _from_file(section[FILE], base, lines)
        config = FlashConfig.from_dict({**base.to_dict(), **fields})
    except ConfigError as error:
        lines += str(error).splitlines()
    if lines:
        raise ConfigError("\n".join(f"{SECTION}.{line}" for line in lines))
    return config


def nearly(raw: Mapping[str, Any]) -> list[str]:
    """A sentence for each top-level key that is spelled nearly as ours: DeepSpeed ignores unknown keys."""
    found = (key for key in raw if isinstance(key, str) and key != SECTION)
    return [
        f'the configuration\'s key "{key}" is not read by anybody; is "{SECTION}" meant?'
        for key in found
        if difflib.get_close_matches(re.sub("[^a-z]", "", key.lower()), [SECTION.replace("_", "")], cutoff=0.85)
    ]


def _from_file(path: Any, base: FlashConfig, lines: list[str]) -> FlashConfig:
    """What the file sets on top of `base`; lines: is given what would have no effect."""
    if not isinstance(path, str):
        raise ConfigError(f"{FILE}={path!r} is not valid; expected the name of a JSON file.")
    try:
        config = FlashConfig.from_file(path, base=base)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{FILE}={line}" for line in str(error).splitlines())) from None
    for key in _OF_MEGATRON:
        value = getattr(config, key)
        if value != getattr(base, key):
            lines.append(f"{FILE}={path}: " + _NO_EFFECT.format(key=key, value=value))
    return config


def refuse_incompatible(deepspeed: Any) -> None:
    """ConfigError, one line each, for what in a DeepSpeedConfig replaces or bypasses the reductions we quantize."""
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
