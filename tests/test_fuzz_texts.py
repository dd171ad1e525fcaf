"""Configurations, flags, logs and sizes of any content: an error of ours or a result, nothing else.

FUZZ_EXAMPLES: how many examples of each test.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.cli.plan import layout_file
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.deepspeed import section
from flash_allreduce_plugin.integrations.megatron import arguments
from flash_allreduce_plugin.runtime import groups

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
# The suite runs the same examples each time. `nox -s fuzz`, which sets their number, draws others each time.
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="FUZZ_EXAMPLES" not in os.environ,
)

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 1e308, -0.0, 2**63, 2**64])
WORDS = st.sampled_from(
    ["full", "none", "auto", "off", "true", "false", "mse", "nan", "Infinity", "stochastic", "4", ""]
)
ANY_TEXT = st.text(st.characters(), max_size=8)  # lone surrogates too: JSON has them as escapes
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS | ANY_TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3))
FIELDS = st.sampled_from(list(FlashConfig.model_fields))
GOOD = json.dumps(FlashConfig(bits=4, exclude=["*.head"]).to_dict()).encode()
DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Return good bytes with some of them replaced, removed, or repeated."""
    for _ in range(draw(st.integers(1, 4))):
        begin, end = sorted((draw(st.integers(0, len(good))), draw(st.integers(0, len(good)))))
        end = min(end, begin + 12)
        new = draw(st.sampled_from([b"", b"NaN", b"1e999", b"null", b"{}", b"[]", b'"', b"-1"]) | st.binary(max_size=6))
        good = good[:begin] + new + good[end:]
    return good


@given(values=st.dictionaries(FIELDS | ANY_TEXT | st.integers(), JSON, max_size=4) | JSON)
@example(values={"\ud800": 1, "bits": "\ud800", "include": ["\ud800"], "hierarchical": {"\ud800": 4}})
@fuzz
def test_any_mapping(values: Any) -> None:
    try:
        config = FlashConfig.from_dict(values)
    except ConfigError as error:
        assert str(error).encode()  # a terminal can print it
        return
    assert FlashConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert len(config.digest()) == 32


@given(content=st.binary(max_size=60) | damaged(GOOD) | JSON.map(lambda value: json.dumps(value).encode()))
@example(content=DEEP)
@example(content=b"\xff\xfe")
@example(content=b'{"\\ud800": 1}')
@example(content=b'{"include": ["\\ud800"], "exclude": {"\\ud800": 1}}')
@fuzz
def test_any_file(content: bytes, folder: Path) -> None:
    file = folder / "config.json"
    file.write_bytes(content)
    for read in (
        lambda: FlashConfig.from_file(file),
        lambda: section.parse({"flash_allreduce": {"config": str(file)}}),
        lambda: arguments.config_from(argparse.Namespace(flash_allreduce=True, flash_allreduce_config=str(file))),
    ):
        try:
            read()
        except ConfigError as error:
            assert str(file) in str(error) and str(error).encode()


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@given(variables=st.dictionaries(FIELDS.map(str.upper) | TEXTS, WORDS | TEXTS | JSON.map(json.dumps), max_size=4))
@example(variables={"BITS": "[" * 100_000})
@example(variables={"SEED": "9" * 5000})
@fuzz
def test_any_environment(variables: dict[str, str]) -> None:
    named = {f"FLASH_ALLREDUCE_{name}": text.replace("\0", "") for name, text in variables.items() if "=" not in name}
    with mock.patch.dict(os.environ, named):
        try:
            assert isinstance(FlashConfig.from_env(), FlashConfig)
        except ConfigError as error:
            assert "FLASH_ALLREDUCE_" in str(error)
        for name in named:
            with contextlib.suppress(ConfigError):
                environment.is_on(name)


@given(words=st.dictionaries(FIELDS, TEXTS | WORDS | JSON.map(json.dumps), max_size=3))
@fuzz
def test_any_flag(words: dict[str, str]) -> None:
    parser = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    typed = [f"{arguments.flag(key)}={text}" for key, text in words.items()]
    try:
        assert isinstance(arguments.config_from(parser.parse_args(["--flash-allreduce", *typed])), FlashConfig)
    except ConfigError as error:
        assert "--flash-allreduce-" in str(error)


# Other types of a YAML file: --yaml-cfg passes them on as read.
YAML = JSON | st.dates() | st.datetimes() | st.binary(max_size=3) | st.sets(st.integers(), max_size=2)


@given(values=st.dictionaries(FIELDS | st.just("config"), YAML, max_size=3), on=JSON)
@example(values={"bits": datetime.date(2026, 1, 2)}, on=True)
@example(values={"config": 5}, on=True)
@fuzz
def test_any_argument_of_megatron(values: dict[str, Any], on: Any) -> None:
    args = argparse.Namespace(flash_allreduce=on, **{f"flash_allreduce_{key}": value for key, value in values.items()})
    with contextlib.suppress(ConfigError):
        arguments.config_from(args)


@given(raw=st.dictionaries(FIELDS | st.just("config") | st.text(max_size=5) | st.integers(), JSON, max_size=4) | JSON)
@fuzz
def test_any_section_of_deepspeed(raw: Any) -> None:
    try:
        assert isinstance(section.parse({"flash_allreduce": raw}), FlashConfig)
    except ConfigError as error:
        assert str(error).startswith("flash_allreduce")


@given(
    ranks=st.lists(
        st.binary(max_size=40) | damaged(GOOD) | JSON.map(lambda v: json.dumps(v).encode()), min_size=2, max_size=3
    )
)
@example(ranks=[GOOD, DEEP])
@fuzz
def test_any_configuration_of_a_peer(ranks: list[bytes]) -> None:
    """Compare configurations of another version, or cut off: the error is always the sentence of a mismatch."""
    assert "different configurations" in str(groups.mismatch(ranks))


HEADER = {
    "flash_allreduce_log": 1,
    "kind": "start",
    "time": 1_790_000_000.0,
    "rank": 0,
    "world": 8,
    "host": "node17",
    "pid": 12,
    "versions": {"python": "3.11.7"},
    "wire": 2,
    "environment": {"FLASH_ALLREDUCE_BITS": "4"},
    "configuration": FlashConfig(bits=4).to_dict(),
}
SITE = {
    "calls": 5,
    "quantized": 4,
    "full_precision": {"warm-up": 1},
    "bytes_sent": 500,
    "bytes_full_precision": 4000,
    "bits": 4,
    "measured": 1,
    "signal": 1000.0,
    "noise": 1.0,
    "residuals_dropped": {"reset": 1},
}
LINES = [
    HEADER,
    {"kind": "interval", "seconds": 1.5, "step": 3, "sites": {"megatron.g.forward": SITE}},
    {"kind": "configuration", "configuration": FlashConfig(bits=8).to_dict()},
    {"kind": "end", "seconds": 2.5, "step": 7, "sites": {"megatron.g.forward": SITE, "loop": SITE}},
]


@st.composite
def replaced(draw: st.DrawFn, value: Any) -> Any:
    """Draw a JSON value with one part, at any depth, replaced or removed."""
    if not isinstance(value, dict) or not value or draw(st.integers(0, 5)) == 0:
        return draw(JSON)
    key = draw(st.sampled_from(sorted(value)))
    if draw(st.integers(0, 5)) == 0:
        return {k: v for k, v in value.items() if k != key}
    return {**value, key: draw(replaced(value[key]))}


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        lines[number] = draw(replaced(lines[number]))
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@given(content=logs() | damaged("".join(json.dumps(line) + "\n" for line in LINES).encode()) | st.binary(max_size=80))
@example(content=DEEP)
@example(content="".join(json.dumps(line) + "\n" for line in LINES).encode())
@fuzz
def test_any_log(content: bytes, folder: Path) -> None:
    pytest.importorskip("rich")
    from flash_allreduce_plugin.cli.report.command import run_report
    from flash_allreduce_plugin.cli.report.log import LogError

    log = folder / "run.jsonl"
    log.write_bytes(content)
    try:
        run_report([log], folder / "page.html", folder / "report.json")
    except LogError as error:
        assert str(log) in str(error)
        return
    json.loads((folder / "report.json").read_text())


def test_a_log_cannot_speak_to_the_terminal_nor_break_the_page(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use codes that a terminal obeys, and half a character: os.environ has those where a variable is no UTF-8."""
    pytest.importorskip("rich")
    from flash_allreduce_plugin.cli.report.command import run_report

    hostile = "a\x1b]0;title\x07\x9b31m\udcff\nb"
    header = {**HEADER, "host": hostile, "environment": {"FLASH_ALLREDUCE_LOG": hostile}}
    lines = [header, {"kind": "end", "seconds": 2, "sites": {hostile: {**SITE, "full_precision": {hostile: 1}}}}]
    log, page = folder / "hostile.jsonl", folder / "hostile.html"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_report([log], page, None)
    printed = capsys.readouterr().out
    assert "a\\x1b]0;title\\x07\\x9b31m\\udcff\\nb" in printed
    assert all(c.isprintable() or c == "\n" for c in printed + page.read_text(encoding="utf-8"))
    ElementTree.fromstring(page.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>"))


SIZES = (
    st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,3})?[KMGkmg]?", fullmatch=True)
    | TEXTS
    | st.sampled_from(["9" * 400, "0", "1e9"])
)


@given(texts=st.tuples(SIZES, SIZES), factor=st.integers(2, 1 << 40))
@example(texts=("1", "1000G"), factor=2)
@example(texts=("1", "9" * 400), factor=2)
@fuzz
def test_any_size_of_bench(texts: tuple[str, str], factor: int) -> None:
    pytest.importorskip("rich")
    from flash_allreduce_plugin.cli.bench import command as bench

    minbytes, maxbytes = texts
    try:
        sizes = bench.sizes(minbytes, maxbytes, factor)
    except ValueError as error:
        assert str(error)
        return
    assert sizes == sorted(set(sizes)) and sizes[0] >= 1 and len(sizes) <= 51


@given(options=TEXTS | JSON.map(json.dumps), bits=st.none() | TEXTS | WORDS, others=st.tuples(TEXTS, TEXTS))
@example(options="[" * 100_000, bits=None, others=("", ""))
@example(options="x" * 100_000, bits=None, others=("", ""))
@fuzz
def test_any_option_of_bench_and_tune(options: str, bits: str | None, others: tuple[str, str]) -> None:
    pytest.importorskip("rich")
    from flash_allreduce_plugin.cli.bench import command as bench
    from flash_allreduce_plugin.cli.tune import command as tune

    for parse in (
        lambda: bench.configs(bits, options),
        lambda: tune._configs(bits or "8,4", options),
        lambda: bench.names("--collective", others[0], bench.COLLECTIVES),
        lambda: bench.worlds_of(others[0], others[1], ["all_reduce"]),
        lambda: bench.device_of(others[0], 2),
    ):
        try:
            parse()
        except ValueError as error:
            assert str(error)


PLAN = {
    "--model": ["llama-2-7b", "{file}", "gpt2"],
    "--megatron-args": ["--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32", "--num-layers '"],
    "--cluster": ["h100", "h100-8x16", "cpu", "cpu-1x2", "a100-8x0"],
    "--tp": ["1", "2"], "--dp": ["2"], "--pp": ["2"], "--zero": ["1", "3"], "--framework": ["deepspeed", "torch"],
    "--micro-batch": ["2"], "--global-batch": ["16"], "--bits": ["8,4"], "--scale": ["16,64"],
    "--layout": ["{layout}", "{file}"],
}  # fmt: skip
SHAPE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100, "text_config": {},
    "max_position_embeddings": 64, "intermediate_size": 128, "model_type": "llama", "head_dim": 16,
}  # fmt: skip


LAYOUT = json.loads(layout_file.example())


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    chosen = draw(st.lists(st.sampled_from(sorted(PLAN)), max_size=6, unique=True))
    if draw(st.booleans()):
        chosen = ["--model", "--cluster", *(flag for flag in chosen if flag not in ("--model", "--cluster"))]
    huge = st.sampled_from(["0", "-1", "9" * 30, "9" * 5000, "1e400", "nan"])
    return [word for flag in chosen for word in (flag, draw(mostly_one_of(PLAN[flag], huge | TEXTS)))]


def mostly_one_of(good: list[str], others: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.integers(0, 3).flatmap(lambda i: others if i == 0 else st.sampled_from(good))


@given(
    words=command_lines(),
    shape=replaced(SHAPE) | st.just({k: v for k, v in SHAPE.items() if k != "text_config"}),
    layout=replaced(LAYOUT).flatmap(replaced) | replaced(LAYOUT) | st.just(LAYOUT),
)
@example(words=["--model", "{file}"], shape=[[]], layout={})
@example(words=["--layout", "{layout}"], shape={}, layout={"inter": "1e-300b"})
@settings(fuzz, max_examples=EXAMPLES // 5)
def test_any_command_line_of_plan(words: list[str], shape: Any, layout: Any, folder: Path) -> None:
    """Draw any command line: a good plan, or the usage and a sentence; never a traceback."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from flash_allreduce_plugin.cli.main import app

    file = folder / "model.json"
    file.write_text(json.dumps(shape))
    (folder / "layout.json").write_text(json.dumps(layout))
    names = {"{file}": str(file), "{layout}": str(folder / "layout.json")}
    result = CliRunner().invoke(app, ["plan", *(names.get(word, word) for word in words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 2), result.output
