"""SmolLM2 as a GPT of megatron-core with tensor parallelism: every rank holds its part of the pretrained weights.

The model is called as Llama is: token ids in, mean cross entropy out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flash_allreduce_plugin.cli.demo.model import finish_gradients, forward, gpt, prepare_cpu
from lab.benchmarks.fine_tuning import adam
from lab.benchmarks.smollm2 import Config, Pretrained

#: GGUF's name -> Megatron's, and the dimension that the ranks cut; None: every rank has all of it.
_WHOLE = {
    "token_embd.weight": ("embedding.word_embeddings.weight", 0),
    "output_norm.weight": ("decoder.final_layernorm.weight", None),
}
_LAYER = {
    "attn_norm": ("input_layernorm", None),
    "attn_output": ("self_attention.linear_proj", 1),
    "ffn_norm": ("pre_mlp_layernorm", None),
    "ffn_down": ("mlp.linear_fc2", 1),
}


def build(config: Config, sequence: int) -> nn.Module:
    """Return this rank's part of the model, untrained; all ranks of the default group share it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    prepare_cpu()
    transformer_block.LayerNormImpl = WrappedTorchNorm  # the final norm: of RMS here
    parallel_state.initialize_model_parallel(dist.get_world_size())
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = WrappedTorchNorm
    settings = {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_query_groups": config.kv_heads,
        "ffn_hidden_size": config.mlp,
        "tensor_model_parallel_size": dist.get_world_size(),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "rotary_interleaved": True,
    }
    base = int(config.rope_base)
    return gpt(settings, spec, vocab_size=config.vocabulary, max_sequence_length=sequence, rotary_base=base)


def load(model: nn.Module, pretrained: Pretrained) -> None:
    """Copy this rank's part of the weights. Raises KeyError if one is missing on either side."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def cut(name: str, dim: int | None = 0) -> Tensor:
        weight = pretrained.weights[name]
        return weight if dim is None else weight.chunk(world, dim)[rank]

    mine = {theirs: cut(name, dim) for name, (theirs, dim) in _WHOLE.items()}
    for number in range(pretrained.config.layers):
        here, there = f"blk.{number}", f"decoder.layers.{number}"
        for name, (theirs, dim) in _LAYER.items():
            mine[f"{there}.{theirs}.weight"] = cut(f"{here}.{name}.weight", dim)
        # Megatron stores the queries of a group of heads next to the group's key and value.
        groups = pretrained.config.kv_heads // world
        parts = [cut(f"{here}.attn_{name}.weight").unflatten(0, (groups, -1)) for name in "qkv"]
        mine[f"{there}.self_attention.linear_qkv.weight"] = torch.cat(parts, 1).flatten(0, 1)
        gate_up = [cut(f"{here}.ffn_{name}.weight") for name in ("gate", "up")]
        mine[f"{there}.mlp.linear_fc1.weight"] = torch.cat(gate_up)
    parameters = dict(model.named_parameters())
    if parameters.keys() != mine.keys():
        raise KeyError(f"weights of one side only: {sorted(parameters.keys() ^ mine.keys())}")
    with torch.no_grad():
        for name, weight in mine.items():
            parameters[name].copy_(weight)


class MegatronLlama(nn.Module):
    """The model of megatron-core, called with ids [batch, sequence + 1] for their mean cross entropy."""

    def __init__(self, pretrained: Pretrained, sequence: int) -> None:
        super().__init__()
        self.gpt = build(pretrained.config, sequence)
        load(self.gpt, pretrained)

    def forward(self, ids: Tensor) -> Tensor:
        return forward(self.gpt, ids).mean()


def steps(model: nn.Module, arguments: argparse.Namespace) -> Callable[[Any], None]:
    """Return a step of tensor parallelism: every rank gives it the same batch."""
    optimizer, schedule = adam(list(model.parameters()), arguments)
    group = dist.distributed_c10d._get_default_group()

    def step(inputs: Any) -> None:
        optimizer.zero_grad()
        model(*inputs).backward()
        finish_gradients(model, group, 1.0)
        optimizer.step()
        schedule.step()

    return step
