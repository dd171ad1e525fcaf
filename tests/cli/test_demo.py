"""The demo, small: it trains, checks, writes, and ends its ranks however it ends."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("typer")

from typer.testing import CliRunner

from flash_allreduce_plugin.cli import checkout
from flash_allreduce_plugin.cli.demo import command as demo_command
from flash_allreduce_plugin.cli.demo import report as demo_report
from flash_allreduce_plugin.cli.demo import slow_link
from flash_allreduce_plugin.cli.demo.command import DemoError, run_ranks
from flash_allreduce_plugin.cli.demo.data import corpus, split
from flash_allreduce_plugin.cli.demo.model import ModelSize
from flash_allreduce_plugin.cli.demo.training import Settings, Variant
from flash_allreduce_plugin.cli.main import app

COMMAND = [sys.executable, "-m", "flash_allreduce_plugin", "demo"]
TINY = ["--hidden", "64", "--layers", "1", "--sequence", "32", "--no-link"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 400)
    return str(file)


def run(*arguments, timeout=200):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_short_demo(tmp_path, text, sequence_parallel):
    options = {"hadamard": True} if sequence_parallel else {}
    extra = ["--sequence-parallel", "--bits", "8,4", "--options", json.dumps(options)]
    extra = extra if sequence_parallel else ["--noise-control"]
    done = run(
        "--steps",
        "4",
        *TINY,
        "--data",
        text,
        "--output",
        str(tmp_path),
        "--json",
        str(tmp_path / "x.json"),
        *extra,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "x.json").read_text())
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "demo.json").exists()
    assert all(check["held"] for check in result["checks"])
    assert result["settings"]["options"] == options
    variants = result["variants"]
    noisy = [] if sequence_parallel else [name for name in variants if name.startswith("noise")]
    widths = (("INT8", 8.25, 35), ("INT4", 4.25, 12))
    presets = (("preset int8", 8.375, 35), ("preset int4", 6.5, 25))  # 6.75 bits forward, 6.25 backward
    quantized = widths if sequence_parallel else presets
    assert list(variants) == ["full precision", *(name for name, _, _ in quantized), *noisy]
    assert bool(noisy) != sequence_parallel
    assert all(len(variant["losses"]) == 4 and variant["replicas_equal"] for variant in variants.values())
    for name, least_bits, least_db in quantized:
        fired = {site: counts for site, counts in variants[name]["sites"].items() if counts["quantized"]}
        embedding = [] if name in ("INT8", "INT4") else [4]
        assert sorted(counts["quantized"] for counts in fired.values()) == [*embedding, 2 * 4, 3 * 4]
        assert all(counts["sqnr_db"] > least_db for counts in fired.values())
        bits = demo_report.bits_per_element(variants[name])
        assert least_bits - 0.1 <= bits < least_bits + 0.75
        assert variants[name]["bytes_sent_per_step"] < variants[name]["bytes_full_precision_per_step"]
        assert name in done.stdout
    assert variants["full precision"]["sites"] == {}
    assert result["versions"]["megatron-core"] and result["corpus"]["validation_bytes"] > 0
    assert "step 4/4" in done.stderr and "step" not in done.stdout.split("Held-out loss")[0]
    for link in slow_link.RATES:
        assert re.search(rf"│ {link} +│ +\d+ │ +\d+ │ +\d+ │ +\d+ │", done.stdout)
    assert slow_link.FORMULA in done.stdout
    assert all(line in done.stdout for _, line in demo_report.SWITCH_ON.values())


def test_steps_are_measured_on_a_slow_link_or_it_says_why_not(tmp_path, text):
    tiny = [word for word in TINY if word != "--no-link"]
    done = run("--steps", "2", *tiny, "--data", text, "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    link = json.loads((tmp_path / "demo.json").read_text())["link"]
    if why := slow_link.cannot_measure():
        assert link == {"not measured": why} and f"No step was measured on a slow link: {why}" in done.stdout
        return
    assert list(link["seconds"]) == ["bf16", "preset int8", "preset int4"] and min(link["seconds"].values()) > 0
    assert re.search(r"Measured between hosts with links of 100 Mbit/s, in bf16: bf16 \d+ ms", done.stdout)


def test_the_lines_that_switch_it_on_are_the_readmes():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert all(f"`{line}`" in readme for _, line in demo_report.SWITCH_ON.values())


def test_make_demo_prints_its_four_steps(tmp_path):
    done = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={tmp_path / 'venv'}", "TORCH=torch==2.12.0"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("echo")]
    assert [line[6:11] for line in said if "/4]" in line] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "torch==2.12.0" in said[1]


def refusal(*arguments):
    """Return the one-line error of the command for arguments that it refuses."""
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bits", "9"], "bits=9"),
        (["--presets", "int5"], "preset='int5'"),
        (["--presets", ""], "preset=''"),
        (["--bits", ""], "whole numbers from 2 to 8"),
        (["--bits", "8,four"], "whole numbers from 2 to 8"),
        (["--options", "mse"], "expected a JSON object"),
        (["--options", "[1]"], "expected a JSON object"),
        (["--options", '{"rang": "mse"}'], "the nearest is range"),
        (["--tp", "1"], "at least 2 ranks"),
        (["--tp", "3"], "does not divide heads"),
        (["--hidden", "60"], "not a multiple of the 8 heads"),
        (["--data", "no-such-file"], "does not exist"),
    ],
)
def test_bad_usage_is_answered_before_anything_starts(arguments, says):
    assert says in refusal(*arguments)


def test_a_text_that_is_too_short_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"short")
    assert "the text has 5 bytes; at least 5141 are needed" in refusal("--data", str(tmp_path / "short"))


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_demo(tmp_path, text, sent):
    arguments = [*COMMAND, "--steps", "100000", *TINY, "--data", text, "--output", str(tmp_path)]
    process = subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert any(line.startswith("step 1/") for line in process.stderr)
        ranks = children(process.pid)
        assert len(ranks) >= 2
        process.send_signal(sent)
        assert process.wait(timeout=20) != 0
        end = time.monotonic() + 20
        while not all(map(ended, ranks)) and time.monotonic() < end:
            time.sleep(0.1)
        assert all(map(ended, ranks))
    finally:
        process.kill()
        process.wait()


def test_a_failing_rank_ends_the_demo_with_its_traceback(text):
    indivisible = Settings(
        (Variant("full precision"),), size=ModelSize(hidden=60, layers=1, sequence=32), data=Path(text)
    )
    with pytest.raises(DemoError, match=r"(?s)rank \d failed:.*Traceback.*must match the size"):
        run_ranks(indivisible, lambda step, losses: None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], (60, 192, 3)), (["--long"], (300, 256, 4)), (["--long", "--steps", "7", "--layers", "2"], (7, 256, 2))],
)
def test_the_scale_is_short_unless_asked_and_options_go_before_it(monkeypatch, arguments, expected):
    asked = []
    monkeypatch.setattr(demo_command, "run_demo", lambda **options: asked.append(options) or True)
    assert CliRunner().invoke(app, ["demo", *arguments]).exit_code == 0
    [options] = asked
    assert (options["steps"], options["size"].hidden, options["size"].layers) == expected


def test_the_noise_control_needs_a_checkout_and_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    says = refusal("--noise-control", "--output", str(tmp_path / "output"))
    assert "--noise-control needs lab/benchmarks/noise.py, which is only in a checkout of the plugin" in says
    assert not (tmp_path / "output").exists()


def test_the_demo_does_not_import_benchmarks():
    """Check that the demo does not import benchmarks: they are not in the wheel."""
    program = (
        "import sys; sys.modules['lab'] = None; "
        "import flash_allreduce_plugin.cli.demo.command, flash_allreduce_plugin.cli.demo.training"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def measured(bits, seconds, sent):
    return {
        "quantized": bits is not None,
        "seconds_per_step": seconds,
        "bytes_sent_per_step": sent,
        "bytes_full_precision_per_step": 0 if bits is None else 1_000_000,
    }


def test_the_estimate_for_slow_links_is_its_formula():
    variants = {
        "full precision": measured(None, 0.10, 0),
        "INT8": measured(8, 0.11, 250_000),
        "INT4": measured(4, 0.09, 125_000),
        "noise 0.3": measured(None, 0.20, 0),
    }
    found = slow_link.costs(variants)
    assert found == {
        "full precision": (0.10, 1_000_000),
        "bf16": (0.10, 500_000),
        "INT8": (0.11, 250_000),
        "INT4": (0.09, 125_000),
    }
    assert slow_link.step_seconds(found["full precision"], 1e8) == pytest.approx(0.10 + 0.08)
    assert slow_link.step_seconds(found["INT8"], 1e8) == pytest.approx(0.11 + 0.02)
    rate = slow_link.faster_below(found["INT8"], found["full precision"])
    assert rate == pytest.approx(8 * 750_000 / 0.01)
    both = [slow_link.step_seconds(found[name], rate) for name in ("INT8", "full precision")]
    assert both[0] == pytest.approx(both[1])
    assert slow_link.faster_below(found["INT4"], found["bf16"]) == math.inf
    assert slow_link.faster_below(found["full precision"], found["INT8"]) == 0
    assert (
        slow_link.verdict("INT8", found)
        == "INT8 is faster than full precision below 600 Mbit/s, and than bf16 below 200 Mbit/s."
    )


def test_no_estimate_without_a_timed_step():
    assert slow_link.costs({"full precision": measured(None, None, None), "INT8": measured(8, None, None)}) == {}


SETTINGS = Settings((Variant("full precision"), Variant("INT8", bits=8)), steps=2, size=ModelSize(layers=1))


def good_result():
    def variant(bits, sites):
        return {
            "quantized": bits is not None,
            "preset": None,
            "losses": [5.0, 4.0],
            "validation_loss": 4.0,
            "replicas_equal": True,
            "sites": sites,
        }

    sites = {
        name: {"quantized": 2 * count, "full_precision": {}}
        for name, count in demo_report.expected_quantized(SETTINGS, preset=False).items()
    }
    sites["megatron.embedding.forward"] = {"quantized": 0, "full_precision": {"embedding": 2}}
    return {"variants": {"full precision": variant(None, {}), "INT8": variant(8, sites)}}


def failed(result):
    return [check["check"] for check in demo_report.checks(result, SETTINGS) if not check["held"]]


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (lambda variant: variant.update(replicas_equal=False), "replicated parameters"),
        (lambda variant: variant.update(validation_loss=float("nan")), "finite"),
        (lambda variant: variant["losses"].append(float("inf")), "finite"),
        (lambda variant: variant.update(validation_loss=5.5), "the loss fell"),
        (lambda variant: variant["sites"].pop("megatron.g.forward"), "expected seam"),
        (lambda variant: variant["sites"]["megatron.linear.dgrad"].update(quantized=5), "expected seam"),
        (lambda variant: variant["sites"].pop("megatron.embedding.forward"), "embedding"),
    ],
)
def test_each_check_can_fail(change, fails):
    result = good_result()
    assert failed(result) == []
    broken = copy.deepcopy(result)
    change(broken["variants"]["INT8"])
    assert any(fails in name for name in failed(broken))


def test_the_default_text_is_the_same_every_time_and_is_split_without_overlap():
    text = corpus(None)
    assert text == corpus(None)
    assert len(text) > 1_000_000
    training, validation = split(text, 256)
    assert len(training) + len(validation) == len(text)
    assert bytes(validation[:50].tolist()) == text[len(training) : len(training) + 50]
