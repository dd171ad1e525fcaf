"""A small GPT-2 on Python's own sources, trained by the Trainer of Hugging Face with DeepSpeed; nothing is downloaded.

torchrun --nproc-per-node 2 examples/hf_trainer/train.py --deepspeed examples/hf_trainer/ds_config.json

This program does not use the plugin's API: the JSON has a section "flash_allreduce".
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

SEQUENCE, VOCABULARY = 128, 1024


def samples() -> list[dict[str, torch.Tensor]]:
    """Return Python's own sources, cut in pieces of SEQUENCE tokens."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    tokens = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])
    pieces = tokens[: len(tokens) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", help="DeepSpeed's JSON")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    arguments = parser.parse_args()
    settings = TrainingArguments(
        output_dir="hf_trainer_output",
        deepspeed=arguments.deepspeed,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_steps=arguments.steps,
        logging_steps=25,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # else, without a GPU, every rank runs as a single process
        seed=1,
    )
    torch.set_num_threads(1)
    set_seed(settings.seed)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=128, n_layer=3, n_head=4)
    Trainer(model=GPT2LMHeadModel(config), args=settings, train_dataset=samples()).train()


if __name__ == "__main__":
    main()
