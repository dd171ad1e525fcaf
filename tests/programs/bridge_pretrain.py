"""Megatron-Bridge's recipe gpt3_175b_pretrain_config on a small model. Knows nothing of the plugin.

    torchrun --nproc-per-node 2 bridge_pretrain.py '{"model.tensor_model_parallel_size": 2}' --iterations 10

The first word is a JSON object of fields that differ from the recipe. At the end rank r writes the losses of its stage
and the digests of its parameters to rank-r.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import local_layer_spec
from megatron.bridge.recipes.gpt.gpt3_175b import gpt3_175b_pretrain_config
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

SEQUENCE = 128
# The recipe on a CPU: no fused kernels, and another size.
ON_CPU: dict[str, Any] = {
    "model.num_layers": 4,
    "model.hidden_size": 128,
    "model.ffn_hidden_size": 512,
    "model.num_attention_heads": 4,
    "model.seq_length": SEQUENCE,
    "model.vocab_size": 512,
    "model.transformer_layer_spec": local_layer_spec,
    "model.transformer_impl": "local",
    "model.position_embedding_type": "rope",
    "model.gradient_accumulation_fusion": False,
    "model.masked_softmax_fusion": False,
    "model.bias_activation_fusion": False,
    "model.bias_dropout_fusion": False,
    "model.bias_dropout_add_fusion": False,
    "model.apply_rope_fusion": False,
    "model.persist_layer_norm": False,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "comm_overlap": None,  # tp_comm_overlap of the recipe: Transformer Engine's
    "dist.distributed_backend": "gloo",
    "dist.disable_jit_fuser": True,
    "dataset.seq_length": SEQUENCE,
    "dataset.num_workers": 0,
    "dataset.pin_memory": False,
    "dataset.skip_getting_attention_mask_from_dataset": False,
    "dataset.create_attention_mask": True,
    "tokenizer.vocab_size": 510,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "train.eval_iters": 0,
    "optimizer.lr": 1e-3,
    "optimizer.min_lr": 1e-4,
    "scheduler.lr_warmup_iters": 2,
    "ddp.average_in_collective": False,  # gloo has no AVG
    "logger.tensorboard_dir": None,
    "checkpoint.save": None,
    "checkpoint.load": None,
    "checkpoint.fully_parallel_save": False,
    # The recipe's 4 x 8 stages of 6: a test says its own.
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.virtual_pipeline_model_parallel_size": None,
    "model.sequence_parallel": False,
}


def recipe(changes: dict[str, Any]) -> ConfigContainer:
    config = gpt3_175b_pretrain_config()
    for name, value in {**ON_CPU, **changes}.items():
        owner: Any = config
        *path, field = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        if not hasattr(owner, field):
            raise AttributeError(f"the recipe has no {name}")
        setattr(owner, field, value)
    return config


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class Watch(Callback):
    """Losses, and at the end the parameters. split: of tensor parallelism; expert: of expert parallelism."""

    def __init__(self, iterations: int) -> None:
        self.losses: list[float] = []
        self.iterations = iterations

    def on_train_step_end(self, context: Any) -> None:
        for name, value in (context.loss_dict or {}).items():
            if name == "lm loss":
                self.losses.append(float(value[0] / value[1] if value.numel() == 2 else value))
        if context.state.train_state.step + 1 == self.iterations:
            self.tell(context)

    def tell(self, context: Any) -> None:
        for chunk in context.model:
            if chunk.ddp_config.overlap_param_gather:  # else the next forward pass would gather
                chunk.start_param_sync(force_sync=True)
        parameters = {
            f"{number}.{name}": [
                digest(parameter),
                bool(getattr(parameter, "tensor_model_parallel", False)),
                not getattr(parameter, "allreduce", True),
            ]
            for number, chunk in enumerate(context.model)
            for name, parameter in chunk.named_parameters()
        }
        groups = None
        chunk = context.model[0]
        while groups is None:
            groups, chunk = getattr(chunk, "pg_collection", None), getattr(chunk, "module", None)
        ranks = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in ("tp", "dp")}
        told = {"losses": self.losses, "parameters": parameters, **ranks}
        Path(f"rank-{dist.get_rank()}.json").write_text(json.dumps(told))


def convert() -> None:
    """Enter the groups of one rank in which Bridge reads Hugging Face's weights, as AutoBridge.import_ckpt does."""
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    kept = {key: os.environ.pop(key) for key in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")}
    with temporary_distributed_context("gloo"):
        assert dist.get_world_size() == 1
    os.environ.update(kept)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("changes", type=json.loads)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--convert", action="store_true")
    given = parser.parse_args()
    if given.convert:
        convert()
    config = recipe({"train.train_iters": given.iterations, **given.changes})
    if config.model.pipeline_model_parallel_size == 1:
        config.model.pipeline_dtype = None
    pretrain(config, forward_step, callbacks=[Watch(given.iterations)])


if __name__ == "__main__":  # helpers of torch_dist checkpoints import this file
    main()
