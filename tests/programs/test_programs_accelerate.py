"""Accelerate's own training examples, unmodified: complete_nlp_example.py, and the one that has a hook of its own.

    ACCELERATE_PATH=<a checkout of accelerate> nox -s test-programs

They fetch "bert-base-cased", "nyu-mll/glue" and the metric "glue" by these names. Folders of these names, in the folder
where they run, are found before the network: a small BERT, pairs of sentences that are the same or not, a metric.
"""

from __future__ import annotations

import csv
import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from programs import Run, attached, by_hand, needs, same_bits_for_less, source, without

pytestmark = [needs("accelerate", "transformers", "datasets", "evaluate"), pytest.mark.timeout(2400)]

SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]
WORDS = ["red", "green", "old", "small", "cat", "dog", "bird", "sees"]
README = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.csv
  - split: validation
    path: validation.csv
---
"""
METRIC = """
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        numbers = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(numbers))

    def _compute(self, predictions, references):
        return {"accuracy": sum(int(a == b) for a, b in zip(predictions, references)) / len(predictions)}
"""
DDP_LINE = (
    "flash all-reduce: attached to DistributedDataParallel (BertForSequenceClassification, 92162 parameters in "
    "float32): gradients in 8 bits"
)


def material(folder: Path) -> Path:
    """Write the folders that the examples ask for by name."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification

    bert, glue, metric = (folder / name for name in ("bert-base-cased", "nyu-mll/glue", "glue"))
    for each in (bert, glue, metric):
        each.mkdir(parents=True)
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(bert / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": 64}
    (bert / "tokenizer_config.json").write_text(json.dumps(about))
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(alphabet), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(bert)
    chance = random.Random(1)
    for split, rows in (("train", 1280), ("validation", 64)):
        with (glue / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sentence1", "sentence2", "label", "idx"])
            for number in range(rows):
                first, same = chance.choices(WORDS, k=3), chance.random() < 0.5
                second = first if same else chance.choices(WORDS, k=3)
                writer.writerow([" ".join(first), " ".join(second), int(same), number])
    (glue / "README.md").write_text(README)
    (metric / "glue.py").write_text(METRIC)
    return folder


def example(folder: Path, name: str) -> str:
    """Return a file of accelerate's examples, of the release that is installed."""
    return str(
        source("huggingface/accelerate", f"v{version('accelerate')}", "ACCELERATE_PATH", f"examples/{name}", folder)
    )


def weights(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def trained(run: Run) -> dict[str, Any]:
    return weights(run.folder / "out" / "epoch_2" / "model.safetensors")


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return sum((one[name] - other[name]).square().sum().item() for name in one) ** 0.5


def loss(run: Run) -> float:
    """Return the loss over the training data: the example itself prints none."""
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    bert = run.folder / "bert-base-cased"
    model = BertForSequenceClassification.from_pretrained(bert).eval()
    model.load_state_dict(trained(run))
    with (run.folder / "nyu-mll" / "glue" / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tokenizer = AutoTokenizer.from_pretrained(bert)
    pairs = [[row["sentence1"] for row in rows], [row["sentence2"] for row in rows]]
    with torch.no_grad():
        out = model(
            **tokenizer(*pairs, padding=True, return_tensors="pt"),
            labels=torch.tensor([int(row["label"]) for row in rows]),
        )
    return out.loss.item()


def test_the_nlp_example(tmp_path: Path) -> None:
    words = (example(tmp_path, "complete_nlp_example.py"), "--cpu", "--checkpointing_steps=epoch", "--output_dir=out")
    full = without(material(tmp_path / "full"), *words)
    served = attached(material(tmp_path / "served"), "ddp", *words)
    hand = by_hand(material(tmp_path / "hand"), "ddp", *words)
    [line] = served.attached
    assert line.startswith(DDP_LINE)
    same_bits_for_less(served, hand, "ddp.gradients")
    assert distance(trained(served), trained(hand)) == 0
    # The example's learning rate moves a model of this size little, so this compares the distance of the two models.
    moved = distance(trained(full), weights(full.folder / "bert-base-cased" / "model.safetensors"))
    assert 0 < distance(trained(served), trained(full)) < 0.1 * moved
    assert loss(served) == pytest.approx(loss(full), rel=1e-4)


def test_an_example_with_a_hook_of_its_own(tmp_path: Path) -> None:
    """Check DistributedDataParallelKwargs(comm_hook=...): it is used, ours is not, and a line reports this."""
    words = (example(tmp_path, "by_feature/ddp_comm_hook.py"), "--cpu", "--ddp_comm_hook=fp16")
    run = attached(material(tmp_path / "run"), "ddp", *words)
    assert run.attached == []
    [line] = run.lines
    assert line == (
        "flash all-reduce: DistributedDataParallel (BertForSequenceClassification): the program's own hook "
        "fp16_compress_hook replaces ours"
    )
    assert run.sites == {}
