"""The commands of docs/use/torch.md (with fewer steps) and docs/use/collectives.md: each example as printed there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
COMMANDS = re.findall(r"^torchrun .*", (ROOT / "docs" / "use" / "torch.md").read_text(), flags=re.MULTILINE)
COLLECTIVES = (ROOT / "docs" / "use" / "collectives.md").read_text()
STEPS = 20


def printed(command: str, *more: str) -> str:
    words = shlex.split(command)[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*torchrun, *words, *more], cwd=ROOT, capture_output=True, text=True, timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def loss_and_report(command: str) -> tuple[float, str]:
    """Return the loss of the last step, and the other output."""
    report = printed(command, "--steps", str(STEPS))
    [loss] = re.findall(rf"^step {STEPS}: loss (\S+)", report, flags=re.MULTILINE)
    return float(loss), report


def all_are_quantized(example: str, report: str, site: str = "gradients") -> bool:
    [counts] = re.findall(rf"^{example}\.{site}: (\d+) of (\d+) calls quantized", report, flags=re.MULTILINE)
    return counts[0] == counts[1] != "0"


@pytest.mark.parametrize("example", ["ddp", "fsdp"])
def test_quantized_gradients_train_as_full_ones(example: str) -> None:
    mine = [command for command in COMMANDS if f"--nproc-per-node 2 examples/{example}/" in command]
    plain = next(command for command in mine if "--bits" not in command)
    eight = next(command for command in mine if command.endswith("--bits 8"))
    loss, report = loss_and_report(plain)
    assert loss < 4 and "gradients" not in report  # log(256) = 5.5 at the start
    quantized, report = loss_and_report(eight)
    assert quantized == pytest.approx(loss, rel=2e-3)
    assert all_are_quantized(example, report)


def test_quantized_sends_between_stages_train_as_full_ones() -> None:
    plain, eight = (command for command in COMMANDS if "examples/pipelining/" in command)
    loss, report = loss_and_report(plain)
    assert loss < 4 and "pipelining" not in report
    quantized, report = loss_and_report(eight)
    assert quantized == pytest.approx(loss, rel=2e-3)
    assert all_are_quantized("pipelining", report, "backward")


def test_quantized_sums_of_activations_train_as_full_ones() -> None:
    plain, preset = (command for command in COMMANDS if "examples/tensor_parallel/" in command)
    loss, report = loss_and_report(plain)
    assert loss < 4 and "tensor_parallel" not in report
    quantized, report = loss_and_report(preset)
    assert quantized == pytest.approx(loss, rel=2e-3)
    assert all_are_quantized("tensor_parallel", report, "reduce.forward")
    assert all_are_quantized("tensor_parallel", report, "reduce.backward")


@pytest.mark.slow
@pytest.mark.parametrize("example", ["ddp", "fsdp"])
def test_four_ranks(example: str) -> None:
    mine = [command for command in COMMANDS if f"--nproc-per-node 4 examples/{example}/" in command]
    [command] = [command for command in mine if "--replicas" not in command]
    loss, report = loss_and_report(command)
    assert loss < 4 and all_are_quantized(example, report)


@pytest.mark.slow
def test_two_replicas_of_two_shards() -> None:
    [command] = [command for command in COMMANDS if "--replicas 2" in command]
    loss, report = loss_and_report(command)
    plain, full = loss_and_report(command.replace("--bits 8 ", ""))
    assert loss == pytest.approx(plain, rel=2e-3) and plain < 4
    assert all_are_quantized("fsdp", report) and all_are_quantized("fsdp", report, "replicas")
    assert re.search(r"^fsdp\.replicas: 0 of \d+ calls quantized", full, flags=re.MULTILINE)


def test_a_matrix_product_by_broadcasts_and_reduces() -> None:
    plain, quantized = re.findall(r"^torchrun .* examples/summa/.*", COLLECTIVES, flags=re.MULTILINE)
    [says] = re.findall(r"^The second prints.*?^```\n(.*?)^```", COLLECTIVES, flags=re.MULTILINE | re.DOTALL)
    assert printed(quantized) == says
    assert re.findall("relative error (.*)%", printed(plain)) == ["0.00", "0.00"]


def rounds_of(report: str) -> list[tuple[str, float]]:
    return [(number, float(loss)) for number, loss in re.findall(r"^round (\d+): loss (\S+)", report, re.MULTILINE)]


def test_quantized_differences_train_as_full_ones_and_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain, quantized = re.findall(r"^torchrun .* examples/local_sgd/.*", COLLECTIVES, flags=re.MULTILINE)
    quantized = re.sub(r" --checkpoint \S+", "", quantized)
    fewer = ("--steps", "5", "--rounds", "6", "--checkpoint")
    [_, (_, full)] = rounds_of(printed(plain, *fewer[:-1]))
    report = printed(quantized, *fewer, str(tmp_path / "whole"))
    [_, (number, loss)] = rounds_of(report)
    assert number == "6" and loss == pytest.approx(full, rel=0.05) and full < 4  # log(256) = 5.5 at the start
    assert "local_sgd: 6 of 6 calls quantized" in report
    cut = printed(quantized, *fewer, str(tmp_path / "cut"), "--rounds", "3")
    assert [number for number, _ in rounds_of(cut)] == ["3"]
    resumed = printed(quantized, *fewer, str(tmp_path / "cut"))
    assert rounds_of(resumed) == rounds_of(report) and "local_sgd: 3 of 3 calls quantized" in resumed
    for rank in range(2):
        one, other = (torch.load(tmp_path / name / f"rank_{rank}.pt", weights_only=True) for name in ("whole", "cut"))
        assert one["outer"]["feedback"]["residuals"]["difference"]["before"].any()
        assert same(one, other)
    (tmp_path / "cut" / "rank_1.pt").unlink()
    with pytest.raises(AssertionError, match=r"are of rounds \[6, 0\]; delete the folder"):
        printed(quantized, *fewer, str(tmp_path / "cut"))


def same(one: Any, other: Any) -> bool:
    """Return True if two states are the same, their tensors bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
