"""Refusals, at the start of an integration and in one sentence, of keys without an effect there; and its presets."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from flash_allreduce_plugin.config import presets
from flash_allreduce_plugin.config.fields import FlashConfig
from flash_allreduce_plugin.config.wording import shown, variable
from flash_allreduce_plugin.errors import ConfigError

#: The reason if an integration has no other.
AT_BITS = "where everything is sent at `bits`"
# Fields of collectives that only Megatron has.
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
    """Return the configuration of an integration: `config`, or the environment's if it is None.

    lacks: keys without an effect in the integration, with the reason: "has no effect in <integration>, <reason>". Such
    a key with another value than the default is refused. With a `config` the keys of Megatron are refused too, except
    those that the integration `serves`; the environment may be for Megatron in the same job. A key that only a preset
    has set is left out instead.

    Raises TypeError if config is no FlashConfig, and ConfigError with one line a key.
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
    """Return `lacks` with the keys of Megatron, except those that the integration serves too."""
    others = [key for key in OF_MEGATRON if key not in serves]
    return {**dict.fromkeys(others, AT_BITS), **lacks}


def refusals(
    given: Mapping[str, Any], integration: str, lacks: Mapping[str, str], spelled: Callable[[str], str] = str
) -> list[str]:
    """Return a line for each key of `lacks` with another value than the default in `given`.

    spelled: returns a key as its user wrote it.
    """
    defaults = FlashConfig()
    return [
        f"{spelled(key)}={shown(given[key])} has no effect in {integration}, {why}; leave it out."
        for key, why in lacks.items()
        if key in given and given[key] not in (getattr(defaults, key), [])
    ]


def for_megatron(config: FlashConfig) -> FlashConfig:
    """Return `config` with its preset's values for Megatron, except for keys that were given."""
    return _instead(config, presets.IN_MEGATRON)


def for_differences(config: FlashConfig) -> FlashConfig:
    """Return `config` with its preset's values for differences of parameters, except for keys that were given."""
    return _instead(config, presets.OF_DIFFERENCES)


def by_hand(config: FlashConfig, *keys: str) -> list[str]:
    """Return the `keys` that the user gave and that quantize. A key that only the preset sets is no mistake."""
    return [key for key, value in config.by_hand().items() if key in keys and value not in (None, "full")]


def _instead(config: FlashConfig, other_presets: Mapping[str, Mapping[str, Any]]) -> FlashConfig:
    given = config.given()
    filled = presets.compatible(other_presets.get(config.preset or "", {}), given)
    other = {key: value for key, value in filled.items() if key not in given}
    return config.for_integration(other) if other else config


def without(config: FlashConfig, keys: Iterable[str]) -> FlashConfig:
    """Return `config` with the `keys` that only its preset has set at their defaults."""
    defaults, given = FlashConfig(), config.given()
    dropped = {
        key: getattr(defaults, key)
        for key in keys
        if key not in given and getattr(config, key) != getattr(defaults, key)
    }
    return config.model_copy(update=dropped) if dropped else config
