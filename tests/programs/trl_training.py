"""Trainers of TRL on two ranks, one after the other: a program that knows nothing of the plugin.

    torchrun --nproc-per-node 2 trl_training.py fsdp:dpo-lora ddp:sft zero3:grpo:resumed ...

Each word is a way to train data-parallel and a trainer. "resumed" loads the checkpoint of the third step, which the
same word without "resumed" has written. The folder has the model and the data (test_programs_trl.py). A rank writes a
line of JSON for each training to found-RANK.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

STEPS, SAVED = 5, 3
COMMON = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_steps": STEPS, "logging_steps": 1,
    "learning_rate": 1e-4, "per_device_train_batch_size": 4, "report_to": "none", "disable_tqdm": True, "seed": 1,
}  # fmt: skip
TRAINERS: dict[str, Any] = {
    "sft": (SFTTrainer, SFTConfig, "text", {"max_length": 48}),
    "dpo": (DPOTrainer, DPOConfig, "pairs", {"max_length": 64}),
    "grpo": (GRPOTrainer, GRPOConfig, "prompts", {"max_completion_length": 8, "num_generations": 4, "beta": 0.04}),
}


def configuration(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with the user's section if section.json is there."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if os.path.exists("section.json"):
        with open("section.json") as file:
            made["flash_allreduce"] = json.load(file)
    return made


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Return a reward for each completion."""
    return [float(sum(letter in "aeiou " for letter in text)) for text in completions]


def trainer_of(by: str, name: str) -> Any:
    kind, _, lora = name.partition("-")
    trainer, config, data, options = TRAINERS[kind]
    options = {**COMMON, **options, "output_dir": f"{by}-{name}"}
    if by.startswith("zero"):
        options["deepspeed"] = configuration(int(by[-1]))
    # transformers writes no checkpoint of a model that DistributedConfig has sharded.
    options |= {"save_strategy": "no"} if by == "fsdp" else {"save_strategy": "steps", "save_steps": SAVED}
    arguments = config(**options)
    sharded = {"distributed_config": DistributedConfig(fsdp_size=2)} if by == "fsdp" else {}
    model, *reference = (
        AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32, **sharded)
        for _ in range(2 if (by, name) == ("fsdp", "dpo") else 1)
    )
    given: dict[str, Any] = {
        "args": arguments,
        "train_dataset": load_dataset("json", data_files=f"{data}.jsonl", split="train"),
        "processing_class": AutoTokenizer.from_pretrained("model"),
    }
    if lora:
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if reference:
        given["ref_model"] = reference[0]
    if kind == "grpo":
        given["reward_funcs"] = vowels
    return trainer(model, **given)


def whole(model: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters, gathered if they are sharded."""
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                yield parameter.detach().clone()
        else:
            yield parameter.full_tensor().detach() if hasattr(parameter, "full_tensor") else parameter.detach()


def counted() -> dict[str, Any]:
    """Return what the plugin has counted since the last call; nothing if the program runs without it."""
    plugin = sys.modules.get("flash_allreduce_plugin.telemetry.counters")
    if plugin is None:
        return {}
    sites: dict[str, Any] = plugin.stats()["sites"]
    plugin.reset_stats()
    return sites


for word in sys.argv[1:]:
    by, name, *resumed = word.split(":")
    counted()
    trainer = trainer_of(by, name)
    trainer.train(resume_from_checkpoint=f"{by}-{name}/checkpoint-{SAVED}" if resumed else None)
    digest = hashlib.sha256()
    for weights in whole(trainer.model):
        digest.update(weights.contiguous().numpy().tobytes())
    keys = ("loss", "grad_norm", "entropy", "reward")
    steps = [step for step in trainer.state.log_history if "loss" in step]
    found = {
        "training": word,
        "steps": [{key: step[key] for key in keys if key in step} for step in steps],
        "weights": digest.hexdigest(),
        "sites": counted(),
    }
    with open(f"found-{os.environ['RANK']}.jsonl", "a") as file:
        print(json.dumps(found), file=file)
