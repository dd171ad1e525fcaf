"""benchmarks.fine_tuning: a few steps of it, and the parts it is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from benchmarks import fine_tuning

ROOT = Path(fine_tuning.__file__).parent.parent


def test_lora_begins_as_the_matrix_and_trains_little() -> None:
    linear = torch.nn.Linear(24, 40)
    lora, x = fine_tuning.Lora(linear), torch.randn(3, 24)
    assert torch.equal(lora(x), linear(x))
    torch.nn.init.ones_(lora.b)
    assert not torch.allclose(lora(x), linear(x))
    model = fine_tuning.Classifier(fine_tuning.build(1), 4, lora=True)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(name.endswith((".a", ".b")) or name.startswith("head.") for name in names)
    assert len(names) == 2 * 4 * fine_tuning.LAYERS + 2


def test_held_out_text_is_not_trained_on() -> None:
    texts = fine_tuning.packages(3)
    assert len(texts) == 3 and len(set(map(len, texts))) == 1
    border = len(texts[0]) * 9 // 10
    marked = [torch.arange(len(text)) for text in texts]  # each byte its own position
    for held_out in (False, True):
        text, labels = fine_tuning.batch(marked, held_out, 7, 200)
        assert text.shape == (200, fine_tuning.SEQUENCE) and set(labels.tolist()) == {0, 1, 2}
        assert bool((text >= border).all()) if held_out else bool((text < border).all())


@pytest.mark.parametrize("engine", fine_tuning.ENGINES)
def test_two_steps(engine: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ["--steps=4", "--pretraining=2", "--validation=1", "--seeds=1", "--noise", "--methods=full"]
    command = [sys.executable, "-m", "benchmarks.fine_tuning", *sizes, f"--engines={engine}", f"--folder={tmp_path}"]
    done = subprocess.run(
        [*command, f"--json={output}", "--sections", fine_tuning.SECTIONS[0]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    full, int8 = json.loads(output.read_text())[f"{engine}, full"]["1"].values()
    assert full["quantized"] == 0 and int8["quantized"] >= 4
    assert int8["validation loss"] == pytest.approx(full["validation loss"], rel=1e-2)
    assert int8["validation loss"] != full["validation loss"]
    assert int8["trained"] > 600_000 and 0 < full["accuracy"] < 1
