"""Presets: the fields they stand for, that given keys override them from every source, and that fields are compared."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.presets import PRESETS
from flash_allreduce_plugin.config.refusals import for_differences, for_megatron
from flash_allreduce_plugin.policy import Role, bits_of
from tests.distributed import Ranks

DOCS = Path(__file__).resolve().parents[2] / "docs" / "use" / "configuration.md"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_fields_that_it_stands_for(name: Any) -> None:
    config, spelled_out = FlashConfig(preset=name), FlashConfig(**PRESETS[name])
    assert config == spelled_out and hash(config) == hash(spelled_out)
    assert config.digest() == spelled_out.digest() and config.to_dict() == spelled_out.to_dict()
    assert config.text == spelled_out.text and config != FlashConfig(min_bytes=0)
    for same in (config, copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config and same.preset == name and same.given() == {"preset": name}
    assert FlashConfig.from_dict(config.to_dict()) == config
    assert FlashConfig.from_dict({"preset": name, **config.to_dict()}) == config


def test_given_keys_override_it_and_the_rest_stays() -> None:
    config = FlashConfig(preset="int4", bits=6, range="min-max")
    assert config == FlashConfig(**{**PRESETS["int4"], "bits": 6})
    assert config.given() == {"preset": "int4", "bits": 6, "range": "min-max"}
    assert FlashConfig(preset="int4", bits=8).bits == 8, "a default that is given is given"
    assert FlashConfig(preset=None) == FlashConfig()


def test_from_every_source_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the order: environment, file, flags; the last preset is below every key that any of them gives."""
    monkeypatch.setenv("FLASH_ALLREDUCE_PRESET", "thin")
    monkeypatch.setenv("FLASH_ALLREDUCE_GROUP_SIZE", "64")
    assert FlashConfig.from_env() == FlashConfig(preset="thin", group_size=64)
    file = tmp_path / "flash.json"
    file.write_text(json.dumps({"preset": "int4", "range": "min-max"}))
    config = FlashConfig.from_file(file, base=FlashConfig.from_env())
    assert config == FlashConfig(preset="int4", range="min-max", group_size=64)
    config = FlashConfig.from_texts({"bits": "5"}, base=config)
    assert config == FlashConfig(preset="int4", range="min-max", group_size=64, bits=5)
    assert FlashConfig.from_texts({"preset": "none"}, base=config) == FlashConfig(
        range="min-max", group_size=64, bits=5
    )


def test_a_copy_may_take_another_preset() -> None:
    config = FlashConfig(preset="int4", bits=6)
    assert config.model_copy(update={"preset": "thin"}) == FlashConfig(preset="thin", bits=6)
    assert config.model_copy(update={"bits": 8}).preset == "int4"
    assert FlashConfig(min_bytes=0).model_copy(update={"preset": "int8"}) == FlashConfig(preset="int8", min_bytes=0)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"symmetric": True}, {"codebook": False, "spike_reserving": False}),
        ({"compact": True}, {"codebook": False, "spike_reserving": False}),
        ({"rounding": "stochastic"}, {"codebook": False, "spike_reserving": False}),
        ({"group_size": 64}, {"codebook": False, "spike_reserving": False}),
        ({"hierarchical": "auto"}, {"error_feedback": False}),
        ({"backward_bits": "full"}, {"backward_rounding": None}),
    ],
)
def test_fields_that_a_given_key_excludes_are_left_out_of_the_preset(
    given: dict[str, Any], left: dict[str, Any]
) -> None:
    config = FlashConfig(preset="int4", **given)
    assert config == FlashConfig(**{**PRESETS["int4"], **left, **given})
    for key, value in left.items():
        if key == "spike_reserving":  # bf16 spikes, without the codebook, are allowed with any of these
            assert FlashConfig(preset="int4", **given, spike_reserving=True).spike_reserving
            continue
        with pytest.raises(fap.ConfigError, match=r"excludes|has no effect"):
            FlashConfig(preset="int4", **given, **{key: PRESETS["int4"][key]})
        assert getattr(config, key) == value


def summed(name: str) -> list[torch.Tensor]:
    """Sum with the preset on one rank and its fields on the other, which are the same configuration."""
    rank = torch.distributed.get_rank()
    config = FlashConfig(preset=name) if rank else FlashConfig(**PRESETS[name])  # type: ignore[arg-type]
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    exact = x.clone()
    torch.distributed.all_reduce(exact)
    fap.all_reduce(x, config=config.model_copy(update={"min_bytes": 0}))
    return [x, exact]


@pytest.mark.parametrize(("name", "error"), [("int8", 0.01), ("int4", 0.12), ("thin", 0.5)])
def test_ranks_compare_the_fields_and_not_the_name(ranks: Callable[[int], Ranks], name: str, error: float) -> None:
    (first, exact), (second, _) = ranks(2).run(summed, name)
    assert torch.equal(first, second)
    assert 0 < (first - exact).norm() / exact.norm() < error


def test_the_page_has_every_preset_with_its_fields() -> None:
    table = DOCS.read_text().partition("## Presets")[2].partition("\n\n")[2].partition("\n\n")[0]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert header[1:] == [f'`"{name}"`' for name in PRESETS]
    for number, name in enumerate(PRESETS):
        config = FlashConfig(preset=name)
        # A cell is a value, or a value and an exception: "4 (Megatron: 6)".
        cells = {row[0]: row[1 + number].rstrip(")").partition(" (") for row in rows}
        stated = {key: value for first, (value, _, _) in cells.items() for key in re.findall(r"`(\w+)`", first)}
        assert stated.keys() == set().union(*PRESETS.values())
        assert {key: json.loads(value) for key, value in stated.items()} == {
            key: config.to_dict()[key] for key in stated
        }
        assert config.format().bits_per_element == float(cells["bits a gradient element, with scales"][0])
        in_megatron, differences = for_megatron(config), for_differences(config).param_bits
        exceptions = {
            "`bits`": f"Megatron: {in_megatron.bits}" if in_megatron.bits != config.bits else "",
            "`param_bits`": f"differences: {differences}" if differences != config.param_bits else "",
        }
        assert {first: exception for first, (_, _, exception) in cells.items() if exception} == {
            first: exception for first, exception in exceptions.items() if exception
        }
        assert in_megatron.param_bits == differences


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_width_for_everything(name: str) -> None:
    """Check that every role of a tensor is quantized, and that every preset has the same fields for it."""
    assert {**PRESETS["int4"], **PRESETS[name]}.keys() == PRESETS["int4"].keys()
    for config in (FlashConfig(preset=name), for_megatron(FlashConfig(preset=name))):
        assert all(isinstance(bits_of(role, config), int) for role in Role)


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [("preset", "INT4", "int4"), ("preset", "int-8", "int8"), ("rounding", "Nearest", "nearest")],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(
    key: str, value: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flash.json"
    file.write_text(json.dumps({key: value}))
    monkeypatch.setenv(f"FLASH_ALLREDUCE_{key.upper()}", value)
    for read in (lambda: FlashConfig(**{key: value}), lambda: FlashConfig.from_file(file), FlashConfig.from_env):
        with pytest.raises(
            fap.ConfigError, match=rf"(?i){key}={value!r} is not valid; .*; the nearest is \"{meant}\"\.$"
        ):
            read()
    with pytest.raises(fap.ConfigError) as refused:
        FlashConfig.from_dict({"preset": "off"})
    assert "nearest" not in str(refused.value)
