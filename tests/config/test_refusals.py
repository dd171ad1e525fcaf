"""Keys that an integration cannot honour. Each integration has a separate test among its other tests."""

from __future__ import annotations

from typing import Any

import pytest

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import OF_MEGATRON, for_megatron, serve, without
from flash_allreduce_plugin.errors import ConfigError

LACKS = {"warmup_steps": "which knows no steps", "exclude": "which knows no names", "error_feedback": "which forgets"}


def test_every_problem_is_a_line() -> None:
    config = FlashConfig(warmup_steps=3, exclude=["a"], grad_bits=4, bits=5)
    with pytest.raises(ConfigError) as caught:
        serve(config, "this", LACKS)
    assert str(caught.value).splitlines() == [
        "grad_bits=4 has no effect in this, where everything is sent at `bits`; leave it out.",
        "warmup_steps=3 has no effect in this, which knows no steps; leave it out.",
        "exclude=['a'] has no effect in this, which knows no names; leave it out.",
    ]


def test_defaults_may_be_written_down() -> None:
    config = FlashConfig.from_dict(FlashConfig(bits=4).to_dict())
    assert serve(config, "this", LACKS) is config


@pytest.mark.parametrize("key", OF_MEGATRON)
def test_keys_of_megatron_are_tolerated_in_the_environment_alone(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    value: Any = 8 if key.endswith("bits") else not FlashConfig.model_fields[key].default
    values = {key: value}
    if key == "backward_rounding":
        values = {"backward_bits": 8, key: "stochastic"}
    with pytest.raises(ConfigError, match=f"(?m)^{key}=.* has no effect in this, where everything is sent at `bits`"):
        serve(FlashConfig(**values), "this", LACKS)
    for name, given in values.items():
        monkeypatch.setenv(f"FLASH_ALLREDUCE_{name.upper()}", str(given))
    assert serve(None, "this", LACKS) == FlashConfig(**values)
    monkeypatch.setenv("FLASH_ALLREDUCE_WARMUP_STEPS", "2")
    with pytest.raises(ConfigError, match=r"^FLASH_ALLREDUCE_WARMUP_STEPS=2 has no effect in this, which knows"):
        serve(None, "this", LACKS)


def test_a_key_of_a_preset_is_left_out() -> None:
    served = serve(FlashConfig(preset="int4", bits=6), "this", LACKS)
    assert served == FlashConfig(preset="int4", bits=6, error_feedback=False) and served.preset == "int4"
    with pytest.raises(ConfigError, match=r"^error_feedback=True has no effect in this, which forgets;"):
        serve(FlashConfig(preset="int4", error_feedback=True), "this", LACKS)
    config = FlashConfig(preset="int8", grad_bits=4)
    assert without(config, ["grad_bits"]) is config, "it was given"


@pytest.mark.parametrize(("name", "gradients"), [("int4", 4), ("thin", 2)])
def test_in_megatron_activations_have_more_bits_than_gradients(name: Any, gradients: int) -> None:
    config = for_megatron(FlashConfig(preset=name))
    assert config == FlashConfig(preset=name, bits=6, param_bits=4)
    assert config.preset == name and config.grad_bits == gradients
    assert for_megatron(config) is config
    assert for_megatron(FlashConfig(preset=name, bits=3)).bits == 3, "it was given"
    assert for_megatron(FlashConfig(bits=3)).preset is None


def test_in_megatron_the_activations_of_int8_have_spikes() -> None:
    config = for_megatron(FlashConfig(preset="int8"))
    assert config.format().bits_per_element == 8.375 and config.spike_reserving and config.preset == "int8"
    given: list[dict[str, Any]] = [{"symmetric": True}, {"group_size": 64}, {"codebook": False}]
    for keys in given:
        assert for_megatron(FlashConfig(preset="int8", **keys)).format().codebook is False


def test_something_else() -> None:
    with pytest.raises(TypeError, match=r"config is dict; expected FlashConfig or None \(FlashConfig.from_dict reads"):
        serve({"bits": 8}, "this", LACKS)  # type: ignore[arg-type]
