"""TRL's trainers: SFT, DPO with a reference model and with LoRA, and GRPO, by DDP, FSDP2, ZeRO 2 and ZeRO 3.

Two starts of the same program (trl_training.py) make all trainings: one with the plugin switched off, and one with it
at 8 bits, by FLASH_ALLREDUCE_ATTACH and DeepSpeed's section.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from programs import MOST_SENT, SETTINGS, Run, needs, text, torchrun, without

pytestmark = [needs("trl", "peft", "transformers", "accelerate", "datasets", "deepspeed"), pytest.mark.timeout(2400)]

STEPS, SAVED = 5, 3
# FSDP2 with LoRA comes first: nothing that is served was built before. DeepSpeed comes last: transformers uses it in
# all later trainings of a process.
ADAPTERS = "fsdp:dpo-lora"
TRAININGS = [
    *("ddp:sft", "ddp:dpo", "ddp:dpo-lora", "ddp:grpo"),
    *("fsdp:sft", "fsdp:dpo", "fsdp:grpo"),
    *("zero2:sft", "zero2:dpo", "zero2:dpo-lora", "zero2:grpo"),
    *("zero3:sft", "zero3:dpo", "zero3:dpo-lora", "zero3:grpo"),
]
RESUMED = ["ddp:sft", "ddp:grpo", "zero2:dpo-lora", "zero3:dpo", "zero3:grpo"]
WORDS = [ADAPTERS, *(f"{one}{end}" for one in TRAININGS for end in ("", ":resumed") if not end or one in RESUMED)]
SITES = {
    "ddp": "ddp.gradients",
    "fsdp": "fsdp.gradients",
    "zero2": "deepspeed.stage2.gradients",
    "zero3": "deepspeed.stage3.gradients",
}
LINES = {
    "ddp": "DistributedDataParallel (",
    "fsdp": "FSDP2 (LlamaForCausalLM, ",
    "zero2": "DeepSpeedEngine with DeepSpeedZeroOptimizer, ZeRO stage 2: gradients in 8 bits",
    "zero3": "DeepSpeedEngine with DeepSpeedZeroOptimizer_Stage3, ZeRO stage 3: gradients in 8 bits",
}


class Trained(NamedTuple):
    run: Run
    ranks: list[dict[str, Any]]  # what each rank has found, by training


def material(folder: Path) -> Path:
    """A Llama, a tokenizer of bytes, and data for each trainer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    special = ["<pad>", "<s>", "</s>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(alphabet), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({**about, "model_max_length": 64}))
    lines = [line.split() for line in text(64).splitlines()]
    parts = [[" ".join(line[start : start + 4]) for start in (0, 4, 8)] for line in lines]
    data = {
        "text": [{"text": " ".join(line[:8])} for line in lines],
        "pairs": [{"prompt": one, "chosen": f" {two}", "rejected": f" {three}"} for one, two, three in parts],
        "prompts": [{"prompt": one} for one, _, _ in parts],
    }
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shutil.copy(Path(__file__).with_name("trl_training.py"), folder)
    return folder


def read(run: Run) -> Trained:
    files = [(run.folder / f"found-{rank}.jsonl").read_text() for rank in range(2)]
    ranks = [{one["training"]: one for one in map(json.loads, file.splitlines())} for file in files]
    return Trained(run, ranks)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return read(without(material(tmp_path_factory.mktemp("full")), "trl_training.py", ADAPTERS, *TRAININGS))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = material(tmp_path_factory.mktemp("served"))
    (folder / "section.json").write_text('{"bits": 8, "min_bytes": 0}')
    return read(torchrun(folder, ("trl_training.py", *WORDS), {"FLASH_ALLREDUCE_ATTACH": "ddp,fsdp", **SETTINGS}))


@pytest.mark.parametrize("training", TRAININGS)
def test_a_trainer_of_trl(full: Trained, served: Trained, training: str) -> None:
    by, _, kind = training.partition(":")
    assert served.ranks[0][training]["weights"] == served.ranks[1][training]["weights"], "copies differ"
    ours, stock = (one.ranks[0][training] for one in (served, full))
    assert ours["weights"] != stock["weights"]
    assert len(ours["steps"]) == len(stock["steps"]) == STEPS
    for step, expected in zip(ours["steps"], stock["steps"], strict=True):
        if kind == "grpo":  # its loss begins at zero, and the advantages of a group cancel
            assert step["reward"] == expected["reward"], "other completions were sampled"
            assert step["entropy"] == pytest.approx(expected["entropy"], rel=1e-4)
        else:
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    for rank in served.ranks:
        counts = rank[training]["sites"][SITES[by]]
        assert counts["quantized"] == counts["calls"] >= STEPS
        assert counts["bytes_sent"] < MOST_SENT * counts["bytes_full_precision"]
    assert any(line.startswith(f"flash all-reduce: attached to {LINES[by]}") for line in served.run.lines)


@pytest.mark.parametrize("training", RESUMED)
def test_resumes_bit_for_bit(served: Trained, training: str) -> None:
    for rank in served.ranks:
        resumed = rank[f"{training}:resumed"]
        assert resumed["weights"] == rank[training]["weights"]
        assert resumed["steps"][SAVED:] == rank[training]["steps"][SAVED:]
        assert resumed["sites"][SITES[training.partition(":")[0]]]["quantized"] == STEPS - SAVED


def test_adapters_of_fsdp2_are_not_reduced_by_it(full: Trained, served: Trained) -> None:
    """transformers averages the gradients of adapters itself, in full precision. Rank 0 has a line about them."""
    assert served.ranks[0][ADAPTERS]["weights"] == full.ranks[0][ADAPTERS]["weights"]
    assert set(served.ranks[0][ADAPTERS]["sites"]) == {"fsdp.parameters"}
    [line] = [line for line in served.run.lines if "no gradient was reduced by a model that it serves" in line]
    assert line.startswith("flash all-reduce: FLASH_ALLREDUCE_ATTACH=ddp,fsdp, and in 3 steps of its optimizer ")
    assert line == served.run.lines[0]
