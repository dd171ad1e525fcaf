"""A Llama in plain torch with GGUF's names for its parameters, for lab/benchmarks/smollm2.py's weights.

The two sums of tensor parallelism, after the attention (attn_output) and after the MLP (ffn_down), can be emulated in
one process: RowParallel cuts its weight as `world` ranks would, and hands the ranks' outputs to `sum_up`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.benchmarks.smollm2 import Config, Pretrained

#: Of the outputs of the ranks [..., features], in rank order: their sum.
SumUp = Callable[[list[Tensor]], Tensor]


class RowParallel(nn.Linear):
    """A linear layer without bias. With `sum_up`, rank i of `world` has the i-th part of the columns of its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.world = 1
        self.sum_up: SumUp | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.sum_up is None:
            return super().forward(x)
        columns = self.weight.chunk(self.world, dim=1)
        return self.sum_up([F.linear(part, own) for part, own in zip(x.chunk(self.world, -1), columns, strict=True)])


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        size = config.hidden // config.heads
        self.attn_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.attn_q = nn.Linear(config.hidden, config.hidden, bias=False)
        self.attn_k = nn.Linear(config.hidden, config.kv_heads * size, bias=False)
        self.attn_v = nn.Linear(config.hidden, config.kv_heads * size, bias=False)
        self.attn_output = RowParallel(config.hidden, config.hidden)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.ffn_gate = nn.Linear(config.hidden, config.mlp, bias=False)
        self.ffn_up = nn.Linear(config.hidden, config.mlp, bias=False)
        self.ffn_down = RowParallel(config.mlp, config.hidden)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """[batch, sequence, hidden]; turn: cosines and sines [2, sequence, head / 2]."""
        h = self.attn_norm(x)
        size = self.config.hidden // self.config.heads
        q, k, v = (
            y.unflatten(-1, (-1, size)).transpose(1, 2) for y in (self.attn_q(h), self.attn_k(h), self.attn_v(h))
        )
        repeats = self.config.heads // self.config.kv_heads
        k, v = _turned(k, turn).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(_turned(q, turn), k, v, is_causal=True)
        x = x + self.attn_output(y.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        y = self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return x + y


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs, which is how GGUF orders a Llama's heads."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turn
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).type_as(x)


class Llama(nn.Module):
    """Embedding and output head share one matrix."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocabulary, config.hidden)
        self.blk = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.output_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)

    def logits(self, ids: Tensor) -> Tensor:
        """[batch, sequence] -> [batch, sequence, vocabulary]."""
        size = self.config.hidden // self.config.heads
        frequencies = self.config.rope_base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(ids.shape[1], dtype=torch.float32), frequencies)
        turn = torch.stack([angles.cos(), angles.sin()]).to(ids.device)
        x = self.token_embd(ids)
        for layer in self.blk:
            x = layer(x, turn)
        return F.linear(self.output_norm(x), self.token_embd.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of each token but the first of a sequence."""
        return F.cross_entropy(self.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def sums(self, world: int) -> list[RowParallel]:
        """Return the layers that `world` tensor-parallel ranks can share: heads and columns of the MLP must divide."""
        of_attention = self.config.heads % world == 0 and self.config.kv_heads % world == 0
        of_mlp = self.config.mlp % world == 0
        found = []
        for layer in self.blk:
            assert isinstance(layer, Layer)
            found += [layer.attn_output] * of_attention + [layer.ffn_down] * of_mlp
        return found

    def emulate(self, world: int, sum_up: SumUp | None) -> None:
        """Cut `sums(world)` over `world` ranks. sum_up: sums the ranks' outputs; None: one rank, full precision."""
        for row in self.sums(1):
            row.world, row.sum_up = 1, None
        for row in self.sums(world) if sum_up else []:
            row.world, row.sum_up = world, sum_up


def pretrained(model: Pretrained) -> Llama:
    """Return the Llama with these weights."""
    llama = Llama(model.config)
    llama.load_state_dict(model.weights)
    return llama
