"""The section "flash_allreduce" of a DeepSpeed configuration, and what it cannot go together with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError

SECTION = "flash_allreduce"

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
_COMPRESSING_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


def parse(raw: Mapping[str, Any]) -> FlashConfig | None:
    """The configuration that DeepSpeed's raw dict asks for; None without the section.

    Keys that the section leaves out come from the environment (FLASH_ALLREDUCE_BITS and so on), else they are the
    defaults. Raises ConfigError with every problem, one a line, each naming `flash_allreduce.<key>`.
    """
    if SECTION not in raw:
        return None
    section = raw[SECTION]
    if not isinstance(section, Mapping):
        raise ConfigError(f'{SECTION} is {section!r}; expected keys and values, as in "{SECTION}": {{"bits": 4}}.')
    lines = [
        f"{key}={section[key]!r} has no effect in DeepSpeed, whose gradients all travel at `bits`; leave it out."
        for key in _OF_MEGATRON
        if key in section
    ]
    config, environment = None, FlashConfig.from_env().to_dict()
    try:
        config = FlashConfig.from_dict({**environment, **section})
    except ConfigError as error:
        lines += str(error).splitlines()
    if lines:
        raise ConfigError("\n".join(f"{SECTION}.{line}" for line in lines))
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
