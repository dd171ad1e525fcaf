"""Keys that an integration cannot honour: refused at its start in one sentence. What it makes of a preset."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from flash_allreduce_plugin.config import presets
from flash_allreduce_plugin.config.fields import FlashConfig
from flash_allreduce_plugin.config.wording import shown, variable
from flash_allreduce_plugin.errors import ConfigError

#: The reason where an integration names no other.
AT_BITS = "where everything travels at `bits`"
# Fields about collectives that only Megatron has.
OF_MEGATRON = (
    "backward_bits",
    "backward_rounding",
    "grad_bits",
    "sequence_parallel_gather_bits",
    "expert_bits",
    "expert_combine_bits",
    "attention_bits",
    "pipeline_bits",
    "pipeline_backward_bits",
    "quantize_embedding",
    "quantize_layernorm",
    "quantize_evaluation",
)


def serve(
    config: FlashConfig | None, integration: str, lacks: Mapping[str, str], serves: Container[str] = ()
) -> FlashConfig:
    """The configuration that an integration goes by: `config`, or the environment's if it is None.

    lacks: keys that the integration cannot honour, and why: "has no effect in <integration>, <why>". Refused are those
    that were given another value than the default, and with a `config` also the keys of Megatron's, but for those that
    the integration `serves`; the environment may serve Megatron in the same job. A key that only a preset has set is
    left out instead.

    Raises TypeError where config is no FlashConfig, and ConfigError with one line for each key.
    """
    if config is not None and not isinstance(config, FlashConfig):
        raise TypeError(
            f"config is {type(config).__name__}; expected FlashConfig or None (FlashConfig.from_dict reads a dict)."
        )
    if config is None:
        config = FlashConfig.from_env()
        lines = refusals(config.given(), integration, lacks, variable)
    else:
        lines = refusals(config.given(), integration, with_megatrons(lacks, serves))
    if lines:
        raise ConfigError("\n".join(lines))
    return without(config, lacks)


def with_megatrons(lacks: Mapping[str, str], serves: Container[str] = ()) -> dict[str, str]:
    """`lacks`, and the keys of Megatron's but for those that the integration serves as well."""
    others = [key for key in OF_MEGATRON if key not in serves]
    return {**dict.fromkeys(others, AT_BITS), **lacks}


def refusals(
    given: Mapping[str, Any], integration: str, lacks: Mapping[str, str], spelled: Callable[[str], str] = str
) -> list[str]:
    """A line for each key of `lacks` that `given` has another value for than the default.

    spelled: names a key as its user wrote it.
    """
    defaults = FlashConfig()
    return [
        f"{spelled(key)}={shown(given[key])} has no effect in {integration}, {why}; leave it out."
        for key, why in lacks.items()
        if key in given and given[key] not in (getattr(defaults, key), [])
    ]


def for_megatron(config: FlashConfig) -> FlashConfig:
    """`config` with what its preset has for Megatron alone, but for keys that were given."""
    return _instead(config, presets.IN_MEGATRON)


def for_differences(config: FlashConfig) -> FlashConfig:
    """`config` with what its preset has for differences of parameters, but for keys that were given."""
    return _instead(config, presets.OF_DIFFERENCES)


def by_hand(config: FlashConfig, *keys: str) -> list[str]:
    """Return the `keys` that the user gave and that quantize. A key that only the preset sets is no mistake.

    A value that `_instead` may have taken from the preset counts as the preset's.
    """
    filled = [table.get(config.preset or "", {}) for table in (presets.OF_DIFFERENCES, presets.IN_MEGATRON)]
    given = {key: value for key, value in config.given().items() if key in keys and value not in (None, "full")}
    return [key for key, value in given.items() if all(one.get(key) != value for one in filled)]


def _instead(config: FlashConfig, other_presets: Mapping[str, Mapping[str, Any]]) -> FlashConfig:
    given = config.given()
    filled = presets.compatible(other_presets.get(config.preset or "", {}), given)
    other = {key: value for key, value in filled.items() if key not in given}
    return config.model_copy(update=other) if other else config


def without(config: FlashConfig, keys: Iterable[str]) -> FlashConfig:
    """`config` with those of `keys` at their defaults that only its preset has set."""
    defaults, given = FlashConfig(), config.given()
    dropped = {
        key: getattr(defaults, key)
        for key in keys
        if key not in given and getattr(config, key) != getattr(defaults, key)
    }
    return config.model_copy(update=dropped) if dropped else config
