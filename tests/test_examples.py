"""The commands of docs/use/torch.md (with fewer steps) and docs/use/collectives.md: DDP, FSDP, pipelining and SUMMA."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = re.findall(r"^torchrun .*", (ROOT / "docs" / "use" / "torch.md").read_text(), flags=re.MULTILINE)
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
    """The loss of the last step, and what else was printed."""
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
    page = (ROOT / "docs" / "use" / "collectives.md").read_text()
    plain, quantized = re.findall(r"^torchrun .*", page, flags=re.MULTILINE)
    [says] = re.findall(r"^The second prints.*?^```\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert printed(quantized) == says
    assert re.findall("relative error (.*)%", printed(plain)) == ["0.00", "0.00"]
