"""examples/deepspeed and examples/hf_trainer: the commands of their READMEs, as printed, with fewer steps."""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from unmodified import ROOT, launch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(600),
]
needs_transformers = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
    reason="transformers and accelerate are not installed: nox -s test-hf",
)


def commands(example: str) -> list[str]:
    """Return every command in the README's ```sh blocks, without its comment."""
    text = (ROOT / "examples" / example / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line.split("  #")[0].strip() for line in "".join(blocks).splitlines() if line.strip()]


def command(example: str, *has: str) -> str:
    """Return the one command of the README with every string of `has`."""
    found = [line for line in commands(example) if all(part in line for part in has)]
    assert len(found) == 1, f"the README has {len(found)} commands with {has}"
    return found[0]


def train(folder: Path, line: str, steps: int, edit: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """Return the output and the counts of a training command with its JSON made by `edit`; /tmp is `folder`."""
    if edit is not None:
        subprocess.run(edit.replace("/tmp/", f"{folder}/"), shell=True, check=True, cwd=ROOT)
    words = shlex.split(line.replace("/tmp/", f"{folder}/"))
    assert words[0] == "torchrun"
    torchrun = ("torch.distributed.run", "--local-addr", "127.0.0.1")
    printed, counted = launch(folder, *torchrun, *words[1:], "--steps", str(steps))
    assert len(counted) == int(words[words.index("--nproc-per-node") + 1])
    return printed, counted


def loss_and_counts(printed: str, steps: int, stage: int) -> tuple[float, int, int, float]:
    """Return the loss of the last step; calls quantized, calls, and the sent share of full precision's bytes."""
    [loss] = re.findall(rf"^step {steps}: loss (\S+)", printed, flags=re.MULTILINE)
    line = r"gradients: (\d+) of (\d+) calls quantized, (\S+) of (\S+) MB sent"
    [(quantized, calls, sent, full)] = re.findall(rf"^deepspeed\.stage{stage}\.{line}", printed, flags=re.MULTILINE)
    return float(loss), int(quantized), int(calls), float(sent) / float(full)


def start_line(example: str) -> str:
    """Return the first such line that the README shows."""
    text = (ROOT / "examples" / example / "README.md").read_text()
    return re.findall(r"^flash all-reduce: attached .*", text, flags=re.MULTILINE)[0]


FIRST_LOSS = math.log(256)  # of a model that knows nothing


def test_the_deepspeed_example(tmp_path: Path) -> None:
    """Train at 4 bits as printed, and with the two JSON files that the README makes of it."""
    printed, _ = train(tmp_path, command("deepspeed", "per-node 2", "ds_config.json"), 10)
    assert start_line("deepspeed") in printed.splitlines()
    four, *counts = loss_and_counts(printed, 10, stage=2)
    assert counts == [10, 10, pytest.approx(4.25 / 64, rel=0.01)]  # DeepSpeed's own is an all-reduce
    # The same command with the other file.
    line = command("deepspeed", "per-node 2", "ds_config.json").replace("examples/deepspeed/ds_config", "/tmp/ds")
    printed, _ = train(tmp_path, line, 10, edit=command("deepspeed", "sed", '"bits": 8'))
    eight, *counts = loss_and_counts(printed, 10, stage=3)
    assert counts == [counts[0], counts[0], pytest.approx(8.25 / 32, rel=0.01)]
    printed, _ = train(tmp_path, line, 10, edit=command("deepspeed", "sed", '"enabled": false'))
    full, *counts = loss_and_counts(printed, 10, stage=3)
    assert counts == [0, counts[1], 1.0]
    line = command("deepspeed", "per-node 2", "/tmp/ds.json")
    printed, _ = train(tmp_path, line, 10, edit=command("deepspeed", "sed", "param_bits"))
    both, *counts = loss_and_counts(printed, 10, stage=2)
    assert counts[:2] == [10, 10] and "deepspeed.stage2.parameters: 9 of 10 calls quantized" in printed
    assert both == pytest.approx(full, rel=5e-3)
    assert full < FIRST_LOSS - 1
    assert eight == pytest.approx(full, rel=2e-3) and four == pytest.approx(full, rel=5e-3)


@pytest.mark.slow
def test_the_deepspeed_example_on_four_ranks(tmp_path: Path) -> None:
    printed, counted = train(tmp_path, command("deepspeed", "per-node 4"), 10)
    loss, *counts = loss_and_counts(printed, 10, stage=2)
    assert loss < FIRST_LOSS - 1
    assert counts == [10, 10, pytest.approx(4.25 / 64, rel=0.01)]  # DeepSpeed's own is an all-reduce
    assert [rank["quantized"] for rank in counted] == [10] * 4


def losses(printed: str) -> list[float]:
    """Return the losses that the Trainer logs, and at its end the mean over all steps."""
    return [float(loss) for loss in re.findall(r"'(?:train_)?loss': '?([0-9.]+)", printed)]


@needs_transformers
def test_the_trainer_example(tmp_path: Path) -> None:
    printed, counted = train(tmp_path, command("hf_trainer", "per-node 2", "ds_config.json"), 50)
    assert start_line("hf_trainer") in printed.splitlines()
    gradients = [rank["sites"]["deepspeed.stage2.gradients"] for rank in counted]
    assert [(one["quantized"], one["calls"]) for one in gradients] == [(50, 50)] * 2
    first, second, _ = four = losses(printed)
    assert second < first < math.log(1024)  # a vocabulary of 1024
    line = command("hf_trainer", "per-node 2", "/tmp/ds.json")
    printed, counted = train(tmp_path, line, 50, edit=command("hf_trainer", "sed", "/flash_allreduce/d"))
    assert "flash" not in printed and [rank["calls"] for rank in counted] == [0, 0]
    assert four == pytest.approx(losses(printed), rel=2e-3)


@needs_transformers
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_trainer_at_the_other_stages(tmp_path: Path, stage: int) -> None:
    """Check a run with a different JSON. Nothing else differs."""
    edit = command("hf_trainer", "sed", '"stage": 3').replace('"stage": 3', f'"stage": {stage}')
    line = command("hf_trainer", "per-node 2", "/tmp/ds.json")
    printed, counted = train(tmp_path, line, 10, edit=edit)
    assert f"ZeRO stage {stage}: gradients in 4 bits" in printed
    for rank in counted:
        quantized = {name: one for name, one in rank["sites"].items() if one["quantized"]}
        assert list(quantized) == [f"deepspeed.stage{stage}.gradients"]
        assert rank["quantized"] == quantized[f"deepspeed.stage{stage}.gradients"]["calls"] >= 10
    assert losses(printed)[-1] < math.log(1024)
