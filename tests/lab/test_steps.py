"""Benchmarks of a step over links: every variant takes its steps, quantizes its sites, and sends fewer bytes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import netlab, ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def available() -> None:
    try:
        with netlab.hosts(1, "1gbit"):
            pass
    except netlab.NetlabError as error:
        pytest.skip(str(error))


def tables(module: str, file: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"lab.benchmarks.{module}", "--rates", "1gbit", f"--json={file}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    content = json.loads(file.read_text())
    (table,) = content["tables"]
    assert table["variants"][content["base"]]["x base"] == 1
    for name, row in table["variants"].items():
        assert name[:30] in done.stdout and row["step, seconds"] > 0
    return table


def test_fsdp(available: None, tmp_path: Path) -> None:
    variants = ['{"preset": "int8"}', '{"preset": "int8"}, parameters 8']
    sizes = ["--width=1024", "--layers=2", "--rounds=1"]
    table = tables("fsdp_step", tmp_path / "fsdp.json", *sizes, "--variants", *variants)
    wire = {name: row["wire, bytes"] for name, row in table["variants"].items()}
    fp32, bf16, both, gradients, everything = wire.values()
    assert 0.6 * fp32 < bf16 < 0.8 * fp32 and 0.4 * fp32 < both < 0.6 * fp32  # gloo reduces twice as much
    assert gradients < 0.85 * both and everything < 0.7 * gradients
    both = {"fsdp.gradients", "fsdp.parameters"}
    assert [set(each) for each in table["quantized"].values()] == [set(), set(), set(), {"fsdp.gradients"}, both]


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_megatrons_distributed_optimizer(available: None, tmp_path: Path) -> None:
    variants = ['{"preset": "int8", "param_bits": "full"}', '{"preset": "int8"}']
    sizes = ["--size=1m", "--turns=1", "--steps=1", "--sequence=64"]
    table = tables("dist_opt_step", tmp_path / "dist_opt.json", *sizes, "--variants", *variants)
    full, int8, everything = (row["wire, bytes"] for row in table["variants"].values())
    assert int8 < 0.7 * full and everything < 0.9 * int8
    sites = [{name for name, calls in each.items() if calls} for each in table["quantized"].values()]
    assert not sites[0] and sites[1] and sites[1] < sites[2]


def test_a_result_that_is_not_there_is_an_error() -> None:
    assert ranks.result_of('RESULT {"a": 1}\n') == {"a": 1}
    with pytest.raises(ValueError, match="expected one result"):
        ranks.result_of("nothing\n")


def test_ranks_that_fail_end_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="exit status 1"):
        ranks.torchrun(ranks.on_the_wire, 1, argparse.Namespace(seed=1))  # takes no settings


def test_auto_takes_part_and_its_clock_is_its_own(available: None, tmp_path: Path) -> None:
    """Train a gradient of 4 MB over a link of 100 Mbit/s: quantized, which is three times as fast."""
    file = tmp_path / "auto.json"
    command = [sys.executable, "-m", "lab.benchmarks.auto_step", "--rates=100mbit", "--frameworks=ddp", "--steps=24"]
    sizes = ["--width=1024", "--layers=1", "--rows=4", f"--json={file}"]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(file.read_text())["rows"]
    assert row["decision"] == {"on": True, "but": []} and row["decided"] < 24, row
    assert row["total"] < 0.9 and row["total, quantized"] < row["total"], "the trial has steps in full precision"
