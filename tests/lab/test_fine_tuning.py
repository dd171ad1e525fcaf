"""lab.benchmarks.fine_tuning: a few steps of it, and the parts it is made of."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab.benchmarks import fine_tuning

# Not imported here: tests of the autoload in the same process need it to be missing yet.
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

ROOT = Path(__file__).resolve().parents[2]


def test_lora_begins_as_the_matrix() -> None:
    linear = torch.nn.Linear(24, 40)
    lora, x = fine_tuning.Lora(linear), torch.randn(3, 24)
    assert torch.equal(lora(x), linear(x))
    torch.nn.init.ones_(lora.b)
    assert not torch.allclose(lora(x), linear(x))


def test_held_out_text_is_not_trained_on() -> None:
    texts = fine_tuning.packages(3)
    assert len(texts) == 3 and len(set(map(len, texts))) == 1
    border = len(texts[0]) * 9 // 10
    marked = [torch.arange(len(text)) for text in texts]  # each byte its own position
    for held_out in (False, True):
        text, labels = fine_tuning.batch(marked, held_out, 7, 200)
        assert text.shape == (200, fine_tuning.SEQUENCE) and set(labels.tolist()) == {0, 1, 2}
        assert bool((text >= border).all()) if held_out else bool((text < border).all())


@needs_deepspeed
@pytest.mark.parametrize(
    ("engine", "method", "trained"),
    [("zero2", "lora", 50_184), pytest.param("ddp", "full", 645_000, marks=pytest.mark.slow)],
)
def test_two_steps(engine: str, method: str, trained: int, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ["--steps=4", "--pretraining=2", "--validation=1", "--seeds=1", "--noise", f"--methods={method}"]
    command = [
        sys.executable,
        "-m",
        "lab.benchmarks.fine_tuning",
        *sizes,
        f"--engines={engine}",
        f"--folder={tmp_path}",
    ]
    done = subprocess.run(
        [*command, f"--json={output}", "--sections", fine_tuning.SECTIONS[0]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    full, int8 = json.loads(output.read_text())["runs"][f"{engine}, {method}"]["1"].values()
    assert full["quantized"] == 0 and int8["quantized"] >= 4
    assert int8["validation loss"] == pytest.approx(full["validation loss"], rel=1e-2)
    assert int8["validation loss"] != full["validation loss"]
    assert int8["trained"] == trained and 0 < full["accuracy"] < 1
