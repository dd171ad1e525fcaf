"""FlashConfig: accepted values survive every round trip, and errors name the refused ones."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import environment
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.fields import GROUPS
from flash_allreduce_plugin.errors import ConfigError, FlashAllReduceError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "use" / "configuration.md"

WIDTHS = st.integers(2, 8)
AVAILABLE = {
    "preset": st.sampled_from([None, "int8", "int4", "thin"]),
    "enabled": st.booleans() | st.just("auto") | st.lists(st.text(max_size=5), max_size=3).map(tuple),
    "auto_interval": st.just(0),  # with another, enabled is not free
    "bits": WIDTHS,
    "reduce_bits": st.none() | WIDTHS,
    "gather_bits": st.none() | WIDTHS,
    "backward_bits": st.just("full") | WIDTHS,
    "group_size": st.sampled_from([32, 64, 128, 256, 512, 1024]),
    "symmetric": st.booleans(),
    "compact": st.just(False),  # with symmetric
    "codebook": st.just(False),  # with symmetric, spike_reserving and small groups
    "chunk_bytes": st.integers(4096, 1 << 40),
    "min_bytes": st.integers(0, 1 << 40),
    "grad_bits": st.just("full") | WIDTHS,
    "param_bits": st.just("full") | WIDTHS,
    "param_backward_bits": st.none() | st.just("full") | WIDTHS,
    "sequence_parallel_gather_bits": st.just("full") | WIDTHS,
    "quantize_embedding": st.booleans(),
    "quantize_layernorm": st.booleans(),
    "expert_bits": st.just("full") | WIDTHS,
    "expert_combine_bits": st.none() | st.just("full") | WIDTHS,
    "attention_bits": st.just("full") | WIDTHS,
    "pipeline_bits": st.just("full") | WIDTHS,
    "pipeline_backward_bits": st.just("full") | WIDTHS,
    "quantize_evaluation": st.booleans(),
    "quantize_frozen": st.booleans(),
    "include": st.lists(st.text(max_size=5), max_size=3).map(tuple),
    "exclude": st.lists(st.text(max_size=5), max_size=3).map(tuple),
    "warmup_steps": st.integers(0, 1 << 40),
    "quality_interval": st.integers(0, 1 << 40),
    "quality_measure": st.sampled_from(["local", "exact"]),
    "target_sqnr_db": st.none(),  # with a target or a floor, quality_interval is not free
    "min_sqnr_db": st.none(),
    "range": st.sampled_from(["min-max", "mse"]),
    "rounding": st.just("nearest"),  # with "stochastic", range is not free
    "backward_rounding": st.none(),  # with another, backward_bits is not free
    "seed": st.integers(0, 1 << 40),
    "spike_reserving": st.booleans(),
    "hadamard": st.booleans(),
    "hierarchical": st.just("off"),  # with error_feedback; "auto" and objects below
    "check_ranks": st.booleans(),
    "error_feedback": st.booleans(),
    "error_feedback_momentum": st.floats(0, 0.99),
    "error_feedback_bits": st.sampled_from([8, 16]),
    "error_feedback_reset_interval": st.integers(0, 1 << 40),
}
WRONG: dict[str, list[Any]] = {
    "preset": ["int5", "INT8", "", True, 8, ["int4"]],
    "enabled": [1, 0, "true", "Auto", "ddp.gradients", None, [1]],
    "auto_interval": ["1", True, 1.0, -1, None],
    "bits": ["8", True, 8.0, 1, 9, None, "full", [8]],
    "reduce_bits": ["4", True, 4.0, 1, 9, "full"],
    "gather_bits": ["4", True, 4.0, 1, 9, "full"],
    "backward_bits": ["8", True, 8.0, 1, 9, None, "Full", "none"],
    "group_size": ["128", True, 128.0, 0, 16, 100, 2048, None],
    "symmetric": [1, "false", None],
    "compact": [1, "false", None],
    "codebook": [1, "false", None],
    "range": ["max", None, 1],
    "seed": ["1", True, 1.0, -1, None],
    "rounding": ["up", None, 1],
    "backward_rounding": ["up", True, 1, "none"],
    "spike_reserving": [1, "true"],
    "hadamard": [0, "false"],
    "error_feedback": [None, 1],
    "error_feedback_momentum": ["0.8", True, 1.0, -0.1, None],
    "error_feedback_bits": [4, "8", True, None],
    "error_feedback_reset_interval": ["1", True, 1.0, -1, None],
    "chunk_bytes": ["524288", True, 524288.0, 0, 4095, -1, None],
    "min_bytes": ["0", False, 0.0, -1, None],
    "hierarchical": [
        "on",
        None,
        True,
        {},
        {"intra_bits": 8, "inter_bits": 4},
        {"intra_bits": 8, "inter_bits": "4", "ranks_per_node": 8},
        {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 0},
        {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 8, "nodes": 2},
    ],
    "sequence_parallel_gather_bits": ["8", True, 1, 9, None],
    "grad_bits": ["8", False, 1, 9, None],
    "param_bits": ["8", False, 1, 9, None],
    "param_backward_bits": ["8", False, 1, 9, "none"],
    "quantize_embedding": [1, "true"],
    "quantize_layernorm": [0, "no"],
    "expert_bits": ["8", True, 1, 9, None],
    "expert_combine_bits": ["8", True, 1, 9, "none"],
    "attention_bits": ["8", True, 1, 9, None],
    "pipeline_bits": ["8", True, 1, 9, None],
    "pipeline_backward_bits": ["8", True, 1, 9, None],
    "quantize_evaluation": [0, "false"],
    "quantize_frozen": [1, "true"],
    "include": ["decoder", [1], None, {"a": 1}],
    "exclude": ["decoder", ["a", None], 3],
    "warmup_steps": ["10", True, 1.0, -1, None],
    "min_sqnr_db": ["20", True, float("nan"), float("inf")],
    "quality_interval": ["1", True, 1.0, -1, None],
    "quality_measure": ["Exact", True, None, 1],
    "target_sqnr_db": ["20", True, float("nan"), float("inf")],
    "check_ranks": [1, "true", None],
}

GARBAGE = st.text("ab18-_ ", max_size=9) | st.floats() | st.binary(max_size=9) | st.lists(st.integers(), max_size=3)

configs = st.fixed_dictionaries({}, optional=AVAILABLE)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a developer's own settings, which must not reach the tests."""
    for variable in os.environ:
        if variable.startswith(environment.PREFIX):
            monkeypatch.delenv(variable)


def problems(call: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Return the lines of the ConfigError that the call must raise."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value).splitlines()


def test_every_field_is_in_exactly_one_table_of_this_file() -> None:
    assert sorted(AVAILABLE) == sorted(FlashConfig.model_fields) == sorted(WRONG)


# ---------------------------------------------------------------------------------------------- round trips


@settings(deadline=None)
@given(configs)
def test_dict_and_json_round_trip(values: dict[str, Any]) -> None:
    config = FlashConfig(**values)
    assert FlashConfig.from_dict(config.to_dict()) == config
    assert FlashConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    for key, value in values.items():
        assert getattr(config, key) == value


@settings(deadline=None)
@given(configs)
def test_environment_round_trip(values: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in values.items():
            patch.setenv(f"FLASH_ALLREDUCE_{key.upper()}", json.dumps(value))
        assert FlashConfig.from_env() == FlashConfig(**values)


@settings(deadline=None)
@given(configs, configs)
def test_equality_hash_and_digest_agree(left: dict[str, Any], right: dict[str, Any]) -> None:
    a, b = FlashConfig(**left), FlashConfig(**right)
    assert (a == b) == (a.digest() == b.digest()) == (a.to_dict() == b.to_dict())
    if a == b:
        assert hash(a) == hash(b)
    assert len(a.digest()) == 32


def test_a_default_given_or_left_out_is_the_same_configuration() -> None:
    every_default = FlashConfig().to_dict()
    config = FlashConfig(**every_default)
    assert config == FlashConfig()
    assert hash(config) == hash(FlashConfig())
    assert config.digest() == FlashConfig().digest()


def test_lists_become_tuples_and_come_back_as_lists() -> None:
    config = FlashConfig.from_dict({"include": [], "exclude": ()})
    assert config.include == () and config.exclude == ()
    assert config.to_dict()["include"] == []


def test_frozen() -> None:
    config = FlashConfig(hierarchical={"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2})
    before = config.to_dict()
    assert problems(setattr, config, "bits", 4) == [
        "bits cannot be set to 4: a configuration is frozen; take config.model_copy(update={'bits': ...})."
    ]
    assert problems(setattr, config, "bitz", 4)[0].startswith("bitz cannot be set to 4: a configuration is frozen")
    assert problems(setattr, config.hierarchical, "intra_bits", 4)[0].startswith("intra_bits cannot be set to 4")
    assert problems(delattr, config, "bits") == ["bits cannot be deleted: a configuration is frozen."]
    assert config.to_dict() == before


def test_the_text_of_a_configuration_names_differences_from_the_defaults() -> None:
    """Check the text that torch.compile keeps in its graphs."""
    config = FlashConfig(bits=4, include=["a"])
    for same in (config, copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config and same.text == '{"bits": 4, "include": ["a"]}'
    assert FlashConfig.from_dict(json.loads(config.text)) == config
    assert FlashConfig().text == "{}" and "text" not in config.to_dict()


def test_model_copy_is_validated() -> None:
    assert FlashConfig(group_size=64).model_copy(update={"bits": 4}) == FlashConfig(bits=4, group_size=64)
    assert problems(FlashConfig().model_copy, update={"bits": 1}) == [
        "bits=1 is not valid; expected a whole number from 2 to 8."
    ]


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("make", [lambda d: FlashConfig(**d), FlashConfig.from_dict])
@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]])
def test_wrong_value_is_named(make: Any, key: str, value: Any) -> None:
    (line,) = problems(make, {key: value})
    assert line.startswith(f"{key}=")
    assert repr(value)[:40] in line
    assert "is not valid; expected " in line


def test_a_rounding_of_unquantized_traffic_is_refused() -> None:
    assert problems(FlashConfig, backward_rounding="stochastic") == [
        "backward_rounding='stochastic' has no effect: backward_bits is \"full\"; set it, or drop backward_rounding."
    ]
    assert FlashConfig(backward_bits=4, backward_rounding="stochastic", codebook=True, range="mse")


def test_an_interval_of_no_measurement_is_refused() -> None:
    assert problems(FlashConfig, auto_interval=100) == [
        'auto_interval=100 has no effect: enabled is not "auto"; set it, or drop auto_interval.'
    ]
    assert FlashConfig(enabled="auto", auto_interval=100)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(FlashConfig.model_fields)), GARBAGE))
def test_no_garbage_escapes_as_another_error(values: dict[str, Any]) -> None:
    try:
        config = FlashConfig.from_dict(values)
    except ConfigError as error:
        assert all(line.endswith(".") for line in str(error).splitlines())
    else:
        assert FlashConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("bit", "bits"),
        ("groupsize", "group_size"),
        ("group-size", "group_size"),
        ("GROUP_SIZE", "group_size"),
        ("symetric", "symmetric"),
        ("chunk_size_bytes", "chunk_bytes"),
        ("backwards_bits", "backward_bits"),
        ("sequence_parallel_bits", "sequence_parallel_gather_bits"),
        ("gradient_bits", "grad_bits"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    assert problems(FlashConfig.from_dict, {key: 4}) == [f"{key}=4 is not a known key; the nearest is {nearest}."]


@pytest.mark.parametrize("key", ["self", "values", "", "model_config"])
def test_unknown_keys_that_collide_with_python_names(key: str) -> None:
    (line,) = problems(FlashConfig.from_dict, {key: 4})
    assert line.startswith(f"{key}=4 is not a known key; the nearest is ")


def test_keys_that_no_terminal_can_print_are_shown_as_escapes(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(r'{"bi\ud800ts": "\ud800", "a\nb": 1, "bits": 99}')
    for source, make in (
        ("", lambda: FlashConfig.from_dict({"bi\ud800ts": "\ud800", "a\nb": 1, "bits": 99})),
        (f"{file}: ", lambda: FlashConfig.from_file(file)),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).splitlines() == [
            rf"{source}bits=99 is not valid; expected a whole number from 2 to 8.",
            rf"{source}bi\ud800ts='\ud800' is not a known key; the nearest is bits.",
            rf"{source}a\nb=1 is not a known key; the nearest is enabled.",
        ]


def test_all_problems_in_one_error() -> None:
    lines = problems(FlashConfig, **{"bits": 9, "bit": 4, "min_sqnr_db": "20", "group_size": "128"})
    assert [re.match(r"\w+", line)[0] for line in lines] == ["bits", "group_size", "min_sqnr_db", "bit"]  # type: ignore[index]


@pytest.mark.parametrize("values", [None, 3, "bits=4", [("bits", 4)]])
def test_from_dict_of_something_else(values: Any) -> None:
    (line,) = problems(FlashConfig.from_dict, values)
    assert line == f"expected keys and values, got {values!r}."


def test_keys_that_are_no_strings() -> None:
    assert problems(FlashConfig.from_dict, {1: 2, "bits": 3}) == ["1=2 is not a known key; keys are strings."]


def test_long_values_are_cut() -> None:
    (line,) = problems(FlashConfig, **{"bits": "8" * 10_000})
    assert len(line) < 200


def test_config_error_is_a_value_error_of_this_package() -> None:
    with pytest.raises(ValueError, match="bits=1"):
        FlashConfig(bits=1)
    with pytest.raises(FlashAllReduceError, match="bits=1"):
        FlashConfig(bits=1)


def test_hierarchical_takes_widths_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 8}
    config = FlashConfig(hierarchical=given)
    assert config.to_dict()["hierarchical"] == given
    assert FlashConfig.from_dict(config.to_dict()) == config == pickle.loads(pickle.dumps(config))
    assert hash(config) == hash(FlashConfig(hierarchical=given))
    monkeypatch.setenv("FLASH_ALLREDUCE_HIERARCHICAL", json.dumps(given))
    assert FlashConfig.from_env() == config
    (line,) = problems(FlashConfig, hierarchical={**given, "ranks_per_node": 0})
    assert line.endswith('"inter_bits": 2 to 8, "ranks_per_node": 1 or more}.')


def test_a_target_needs_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FlashConfig(target_sqnr_db=18, quality_interval=50)
    assert FlashConfig.from_dict(config.to_dict()) == config == pickle.loads(pickle.dumps(config))
    assert config.digest() != FlashConfig(target_sqnr_db=18.5, quality_interval=50).digest()
    monkeypatch.setenv("FLASH_ALLREDUCE_TARGET_SQNR_DB", "18")
    monkeypatch.setenv("FLASH_ALLREDUCE_QUALITY_INTERVAL", "50")
    assert FlashConfig.from_env() == config
    assert problems(FlashConfig, target_sqnr_db=18.0) == [
        "target_sqnr_db=18.0 needs measurements, and quality_interval is 0: never; set it, for example to 100."
    ]
    (line,) = problems(FlashConfig, target_sqnr_db=18.0, quality_interval="50")
    assert line.startswith("quality_interval='50' is not valid")


def test_a_floor_needs_measurements_and_is_below_the_target() -> None:
    config = FlashConfig(min_sqnr_db=12, quality_interval=50)
    assert FlashConfig.from_dict(config.to_dict()) == config == pickle.loads(pickle.dumps(config))
    assert FlashConfig(min_sqnr_db=18.0, target_sqnr_db=18.0, quality_interval=1).min_sqnr_db == 18.0
    assert problems(FlashConfig, min_sqnr_db=12.0) == [
        "min_sqnr_db=12.0 needs measurements, and quality_interval is 0: never; set it, for example to 100."
    ]
    assert problems(FlashConfig, min_sqnr_db=18.5, target_sqnr_db=18.0, quality_interval=50) == [
        "min_sqnr_db=18.5 is above target_sqnr_db=18.0, which would keep every site below the floor; expected the "
        "target or less."
    ]


# ---------------------------------------------------------------------------------------------- files


def test_from_file(tmp_path: Path) -> None:
    path = tmp_path / "flash.json"
    path.write_text('{"bits": 4, "backward_bits": 8, "reduce_bits": null}')
    assert FlashConfig.from_file(path) == FlashConfig(bits=4, backward_bits=8)
    assert FlashConfig.from_file(str(path)) == FlashConfig(bits=4, backward_bits=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"bit": 4}', "bit=4 is not a known key; the nearest is bits."),
        ('{"bits": "4"}', "bits='4' is not valid; expected a whole number from 2 to 8."),
        ("[4]", "expected keys and values, got [4]."),
        ("{bits: 4}", "expected one JSON object (Expecting property name"),
        ("[" * 100_000, "expected one JSON object ("),
        ('{"bits": 4, "bits": 8}', 'the key "bits" stands twice; expected each key once.'),
        (
            '{"hierarchical": {"intra_bits": 8, "inter_bits": 4, "inter_bits": 2}}',
            'the key "inter_bits" stands twice; expected each key once.',
        ),
    ],
)
def test_from_file_names_the_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "flash.json"
    path.write_text(text)
    (line,) = problems(FlashConfig.from_file, path)
    assert line.startswith(f"{path}: {expected}")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "flash.json"
    path.write_text('{"bits": 4}', encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf") and FlashConfig.from_file(path) == FlashConfig(bits=4)


def test_a_key_twice_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"intra_bits": 8, "intra_bits": 4, "inter_bits": 4}'
    monkeypatch.setenv("FLASH_ALLREDUCE_HIERARCHICAL", text)
    (line,) = problems(FlashConfig.from_env)
    assert line == (
        f'FLASH_ALLREDUCE_HIERARCHICAL={text!r}: the key "intra_bits" stands twice; expected each key once.'
    )


def test_from_file_that_is_not_there(tmp_path: Path) -> None:
    (line,) = problems(FlashConfig.from_file, tmp_path / "none.json")
    assert line == f"{tmp_path / 'none.json'}: cannot be read (No such file or directory)."


# ---------------------------------------------------------------------------------------------- environment


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("BITS", "4", 4),
        ("BITS", " 4 ", 4),
        ("REDUCE_BITS", "none", None),
        ("REDUCE_BITS", "null", None),
        ("BACKWARD_BITS", "full", "full"),
        ("BACKWARD_BITS", '"full"', "full"),
        ("BACKWARD_BITS", "6", 6),
        ("ENABLED", "false", False),
        ("ENABLED", "False", False),
        ("ENABLED", "0", False),
        ("ENABLED", "auto", "auto"),
        ("ENABLED", '["ddp.gradients"]', ["ddp.gradients"]),
        ("SYMMETRIC", "true", True),
        ("SYMMETRIC", "1", True),
        ("MIN_BYTES", "0", 0),
    ],
)
def test_env_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any) -> None:
    monkeypatch.setenv(f"FLASH_ALLREDUCE_{name}", text)
    assert FlashConfig.from_env() == FlashConfig(**{name.lower(): value})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("decoder.*", ("decoder.*",)),
        ("decoder.*, *.mlp ,", ("decoder.*", "*.mlp")),
        ("[ab]*,c", ("[ab]*", "c")),
        ('["a,b", "c"]', ("a,b", "c")),
        ("none", ("none",)),
        ("3", ("3",)),
        ("[]", ()),
    ],
)
def test_env_lists(monkeypatch: pytest.MonkeyPatch, text: str, value: tuple[str, ...]) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_INCLUDE", text)
    assert FlashConfig.from_env().include == value


def test_env_on_top_of_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    base = FlashConfig(bits=4, group_size=64, reduce_bits=6)
    assert FlashConfig.from_env(base) == base
    monkeypatch.setenv("FLASH_ALLREDUCE_BITS", "5")
    monkeypatch.setenv("FLASH_ALLREDUCE_REDUCE_BITS", "none")
    assert FlashConfig.from_env(base) == FlashConfig(bits=5, group_size=64)


def test_env_empty_and_switches_are_no_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_BITS", "")
    for variable in environment.VARIABLES:
        monkeypatch.setenv(variable, "" if variable == environment.CONFIG else "1")
    assert FlashConfig.from_env() == FlashConfig()


def test_env_on_top_of_the_file_that_it_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "fap.json"
    file.write_text('{"bits": 5, "group_size": 64}')
    monkeypatch.setenv(environment.CONFIG, str(file))
    monkeypatch.setenv("FLASH_ALLREDUCE_GROUP_SIZE", "32")
    expected = FlashConfig(bits=5, group_size=32, min_bytes=0)
    assert FlashConfig.from_env(FlashConfig(bits=3, min_bytes=0)) == expected
    file.write_text('{"bit": 5}')
    with pytest.raises(ConfigError, match=r"fap.json: bit=5 is not a known key; the nearest is bits"):
        FlashConfig.from_env()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("BIT", "BITS"),
        ("bits", "BITS"),
        ("GROUPSIZE", "GROUP_SIZE"),
        ("DISABLED", "DISABLE"),
        ("AUTO_LOAD", "AUTOLOAD"),
    ],
)
def test_env_unknown_names_the_nearest(monkeypatch: pytest.MonkeyPatch, name: str, nearest: str) -> None:
    monkeypatch.setenv(f"FLASH_ALLREDUCE_{name}", "4")
    assert problems(FlashConfig.from_env) == [
        f"FLASH_ALLREDUCE_{name}='4' is not a known variable; the nearest is FLASH_ALLREDUCE_{nearest}."
    ]


def test_env_problems_are_spelled_as_variables_and_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ALLREDUCE_BITS", "nine")
    monkeypatch.setenv("FLASH_ALLREDUCE_SYMMETRIC", "2")
    monkeypatch.setenv("FLASH_ALLREDUCE_MIN_SQNR_DB", "20.0")  # without measurements
    monkeypatch.setenv("FLASH_ALLREDUCE_BIT", "4")
    assert problems(FlashConfig.from_env) == [
        "FLASH_ALLREDUCE_BIT='4' is not a known variable; the nearest is FLASH_ALLREDUCE_BITS.",
        "FLASH_ALLREDUCE_BITS='nine' is not valid; expected a whole number from 2 to 8.",
        "FLASH_ALLREDUCE_MIN_SQNR_DB=20.0 needs measurements, and quality_interval is 0: never; set it, for example to "
        "100.",
        "FLASH_ALLREDUCE_SYMMETRIC=2 is not valid; expected true or false.",
    ]


# ---------------------------------------------------------------------------------------------- the page


def test_the_page_lists_every_field_in_its_group() -> None:
    sections = re.split(r"^### (\w+)$", DOCS.read_text(), flags=re.MULTILINE)[1:]
    found = {
        name.lower(): re.findall(r"^\| `(\w+)` \|", text.split("\n## ")[0], re.MULTILINE)
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }
    assert tuple(found) == GROUPS
    for name, keys in found.items():
        assert keys == [key for key in FlashConfig.model_fields if FlashConfig.group_of(key) == name]


def test_the_page_lists_every_field_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", DOCS.read_text().partition("## Fields")[2], re.MULTILINE))
    assert list(rows) == list(FlashConfig.model_fields)
    for key, default in {"preset": None, **FlashConfig().to_dict()}.items():
        shown, _meaning = (cell.strip() for cell in rows[key].split(" | "))
        assert json.loads(shown.strip("`")) == default, key


def test_the_example_of_mistakes_on_the_page_is_real() -> None:
    mistakes = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[-1]
    [answer] = re.findall(r"```text\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert problems(exec, mistakes, {"fap": fap}) == answer.splitlines()
