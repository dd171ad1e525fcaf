"""transformers' Trainer: its own example run_clm.py, unmodified, and a Trainer with the FSDP2 of transformers.

    TRANSFORMERS_PATH=<a checkout of transformers> nox -s test-programs

Only --do_train: the evaluation of run_clm.py loads its metric from the network (evaluate.load("accuracy")).
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from programs import Run, attached, by_hand, needs, same_bits_for_less, source, text, without

pytestmark = [needs("transformers", "accelerate", "datasets", "evaluate"), pytest.mark.timeout(2400)]

STEPS = 20
GPT2 = {
    "model_type": "gpt2", "vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip
ARGUMENTS = (
    "--config_name model --tokenizer_name model --train_file text.txt --do_train --block_size 64 --use_cpu "
    f"--max_steps {STEPS} --logging_steps 1 --per_device_train_batch_size 4 --learning_rate 1e-3 --report_to none "
    "--save_strategy no --output_dir out"
).split()
DDP_LINE = (
    "flash all-reduce: attached to DistributedDataParallel (GPT2LMHeadModel, 120640 parameters in float32): "
    "gradients in 8 bits"
)


def material(folder: Path) -> Path:
    """Write a text, a configuration of GPT-2 and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "model").mkdir(parents=True)
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 64}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "model" / "config.json").write_text(json.dumps(GPT2))
    (folder / "text.txt").write_text(text(600))
    return folder


def losses(run: Run) -> list[float]:
    """Return the loss of every step, as the Trainer keeps it in the model's folder."""
    logged = json.loads((run.folder / "out" / "trainer_state.json").read_text())["log_history"]
    return [step["loss"] for step in logged if "loss" in step]


def weights(run: Run) -> bytes:
    return (run.folder / "out" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def run_clm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the example of the release that is installed."""
    path = "examples/pytorch/language-modeling/run_clm.py"
    folder = tmp_path_factory.mktemp("source")
    return str(source("huggingface/transformers", f"v{version('transformers')}", "TRANSFORMERS_PATH", path, folder))


@pytest.fixture(scope="module")
def served(run_clm: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return attached(material(tmp_path_factory.mktemp("run") / "served"), "ddp", run_clm, *ARGUMENTS)


def test_run_clm(tmp_path: Path, run_clm: str, served: Run) -> None:
    full = without(material(tmp_path / "full"), run_clm, *ARGUMENTS)
    hand = by_hand(material(tmp_path / "hand"), "ddp", run_clm, *ARGUMENTS)
    [line] = served.attached
    assert line.startswith(DDP_LINE)
    same_bits_for_less(served, hand, "ddp.gradients")
    assert losses(served) == losses(hand) and weights(served) == weights(hand)
    assert weights(served) != weights(full)
    assert len(losses(full)) == STEPS and losses(full)[-1] < 0.8 * losses(full)[0]
    assert losses(served) == pytest.approx(losses(full), rel=1e-3)


def test_run_clm_with_fsdp_on_the_cpu_trains_with_ddp(tmp_path: Path, run_clm: str, served: Run) -> None:
    """Check that --fsdp trains as DDP on the CPU and that the line reports it.

    accelerate enables FSDP for MULTI_GPU and its like, not for MULTI_CPU (AcceleratorState.__init__), silently.
    """
    words = (*ARGUMENTS, "--fsdp", "full_shard", "--fsdp_config", '{"version": 2}')
    run = attached(material(tmp_path / "fsdp"), "ddp,fsdp", run_clm, *words)
    assert run.attached == served.attached
    assert losses(run) == losses(served) and weights(run) == weights(served)


# The settings of transformers' documentation for FSDP2 without accelerate's.
SHARDED = f"""
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.distributed import DistributedConfig

arguments = TrainingArguments(
    "out", use_cpu=True, max_steps={STEPS}, logging_steps=1, per_device_train_batch_size=4, learning_rate=1e-3,
    report_to="none", save_strategy="no",
)
set_seed(1)
model = AutoModelForCausalLM.from_pretrained("model", distributed_config=DistributedConfig(fsdp_size=2))
tokens = torch.randint(0, 16, (64, 32))
data = [{{"input_ids": one, "labels": one}} for one in tokens]
trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=default_data_collator)
trainer.train()
trainer.save_model()
trainer.save_state()
"""


def sharded(folder: Path) -> Path:
    """Write a Llama. Its plan has a group of parameters for each layer, and one for the norm and the head together."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "program.py").write_text(SHARDED)
    return folder


def test_a_trainer_with_fsdp2_of_transformers(tmp_path: Path) -> None:
    full = without(sharded(tmp_path / "full"), "program.py")
    served = attached(sharded(tmp_path / "served"), "fsdp", "program.py")
    hand = by_hand(sharded(tmp_path / "hand"), "fsdp", "program.py")
    [line] = served.attached
    assert line.startswith("flash all-reduce: attached to FSDP2 (LlamaForCausalLM, ")
    same_bits_for_less(served, hand, "fsdp.gradients")
    assert losses(served) == losses(hand) and weights(served) == weights(hand)
    assert weights(served) != weights(full)
    assert len(losses(full)) == STEPS and losses(full)[-1] < 0.8 * losses(full)[0]
    assert losses(served) == pytest.approx(losses(full), rel=1e-3)
