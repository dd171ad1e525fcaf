"""Tensors that accuracy is measured on: of a pretrained model, made-up ones, and of a small training here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.cli.demo.data import corpus, split
from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, loss_of, prepare_cpu
from lab.benchmarks.llama import Layer, pretrained
from lab.benchmarks.smollm2 import Pretrained

RANKS = (2, 8)


@dataclass(frozen=True, slots=True)
class Sample:
    """Matrices that a number of ranks would sum up: ranks[n] has n of them, float32.

    All are multiplied by one power of two, to about a root mean square of 1: a format that stores scales as fp16
    would lose to gradients of 1e-6, which is true of it but another matter. `kind` is "made up", "activation",
    "activation gradient", "weight gradient" or "parameter step". A parameter step is gathered, not summed up: ranks[1].

    by_row: every row, a token, weighs the same in the SQNR. Of a pretrained model a few tokens have nearly all of the
    energy, and would hide the others.
    """

    name: str
    kind: str
    ranks: dict[int, list[Tensor]]
    by_row: bool = False

    @property
    def one(self) -> Tensor:
        """Return the tensor of the first rank, of as few as there are."""
        return self.ranks[min(self.ranks)][0]


def made_up(numel: int, seed: int) -> list[Sample]:
    """Matrices of `numel` elements in rows of 256."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian() -> Tensor:
        return torch.randn(numel // 256, 256, generator=generator)

    def laplace() -> Tensor:
        uniform = torch.rand(numel // 256, 256, generator=generator, dtype=torch.float64) - 0.5
        return (-uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.5 - 1e-12))).float()

    def student() -> Tensor:
        """3 degrees of freedom."""
        chi = torch.randn(numel // 256, 256, 3, generator=generator).square().sum(-1)
        return gaussian() / (chi / 3).sqrt()

    outliers = torch.ones(256)
    outliers[torch.randperm(256, generator=generator)[:3]] = 50.0  # 1 % of the channels

    draws = {
        "Gaussian": gaussian,
        "Laplace": laplace,
        "Student t, 3 degrees": student,
        "outlier channels": lambda: gaussian() * outliers,
    }
    return [
        _normalized(name, "made up", {ranks: [draw() for _ in range(ranks)] for ranks in RANKS})
        for name, draw in draws.items()
    ]


@dataclass(slots=True)
class _Seen:
    """A linear layer's input [sequence, batch, in], weight [out, in] and output gradient [sequence, batch, out]."""

    input: Tensor | None = None
    weight: Tensor | None = None
    gradient: Tensor | None = None

    def activations(self, ranks: int) -> list[Tensor]:
        """A row-parallel layer's output before g's sum: each rank has a part of the columns of input and weight."""
        assert self.input is not None and self.weight is not None
        parts = zip(self.input.chunk(ranks, -1), self.weight.chunk(ranks, -1), strict=True)
        return [(x @ weight.T).flatten(0, 1) for x, weight in parts]

    def input_gradients(self, ranks: int) -> list[Tensor]:
        """A column-parallel layer's input gradient before f's sum: each rank has a part of the rows of the weight."""
        assert self.gradient is not None and self.weight is not None
        parts = zip(self.gradient.chunk(ranks, -1), self.weight.chunk(ranks, 0), strict=True)
        return [(gradient @ weight).flatten(0, 1) for gradient, weight in parts]

    def weight_gradients(self, ranks: int) -> list[Tensor]:
        """The weight's gradient on data-parallel ranks: each has a part of the batch."""
        assert self.gradient is not None and self.input is not None
        parts = zip(self.gradient.chunk(ranks, 1), self.input.chunk(ranks, 1), strict=True)
        return [gradient.flatten(0, 1).T @ x.flatten(0, 1) for gradient, x in parts]


@dataclass(slots=True)
class _Watch:
    """Records the tensors of a linear layer in a step. batch_first: they are [batch, sequence, features]."""

    seen: _Seen = field(default_factory=_Seen)
    batch_first: bool = False

    def __call__(
        self, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, object]
    ) -> None:
        assert isinstance(module.weight, Tensor)
        self.seen.input, self.seen.weight = self._kept(inputs[0]), module.weight.detach().clone()
        (output if isinstance(output, Tensor) else output[0]).register_hook(self._gradient)

    def _gradient(self, gradient: Tensor) -> None:
        self.seen.gradient = self._kept(gradient)

    def _kept(self, x: Tensor) -> Tensor:
        return (x.detach().transpose(0, 1) if self.batch_first else x.detach()).clone()


def captured(size: ModelSize, steps: int, seed: int) -> Iterator[Sample]:
    """Train the demo's GPT in this process for `steps` steps, 3 or more; samples of its middle layer from the
    fifth step, the middle, and the fifth but last (sooner in a training of fewer than 15).

    One rank computes. The tensors of 2 and 8 tensor-parallel ranks (activations, activation gradients) or data-parallel
    ranks (weight gradients) are products of parts of the recorded tensors.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    prepare_cpu()
    try:
        model = build_model(size, tensor_parallel=1, sequence_parallel=False, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        data, _ = split(corpus(None), size.sequence)
        decoder: Any = model.decoder
        layer = decoder.layers[size.layers // 2]
        watched = {
            "attention": (layer.self_attention.linear_proj, layer.self_attention.linear_qkv),
            "MLP": (layer.mlp.linear_fc2, layer.mlp.linear_fc1),
        }
        times = {min(4, (steps - 1) // 3): "early", steps // 2: "middle", max(steps - 6, steps // 2 + 1): "late"}
        starts = torch.Generator().manual_seed(seed)
        for step in range(steps):
            optimizer.zero_grad()
            watches = {block: [_Watch() for _ in layers] for block, layers in watched.items()}
            hooks = [
                module.register_forward_hook(watch)
                for block, layers in watched.items()
                for module, watch in zip(layers, watches[block], strict=True)
                if step in times
            ]
            rows = torch.randint(len(data) - size.sequence, (size.batch,), generator=starts)
            loss_of(model, data, rows, size.sequence).backward()
            for hook in hooks:
                hook.remove()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / min(50, steps))
            optimizer.step()
            if step in times:
                yield from _samples({name: (w[0].seen, w[1].seen) for name, w in watches.items()}, times[step])
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _samples(seen: dict[str, tuple[_Seen, _Seen]], time: str) -> Iterator[Sample]:
    for block, (row, column) in seen.items():
        for kind, of_ranks in (
            ("activation", row.activations),
            ("activation gradient", column.input_gradients),
            ("weight gradient", row.weight_gradients),
        ):
            yield _normalized(f"{kind}, {block}, {time}", kind, {ranks: of_ranks(ranks) for ranks in RANKS})


def _normalized(name: str, kind: str, ranks: dict[int, list[Tensor]], by_row: bool = False) -> Sample:
    squares = ranks[min(ranks)][0].double().square()
    size = math.sqrt(float(squares.mean(-1).median() if by_row else squares.mean()))
    factor = 2.0 ** -round(math.log2(size))
    scaled = {n: [(part * factor).contiguous() for part in parts] for n, parts in ranks.items()}
    return Sample(name, kind, scaled, by_row)


#: Of a pretrained model: sequences of a step, tokens of each, and which of the tokens and rows of weights are kept.
_BATCH, _SEQUENCE, _EVERY_TOKEN, _EVERY_ROW = 8, 128, 4, 3


def of_pretrained(weights: Pretrained, text: str, steps: int) -> Iterator[Sample]:
    """Tune a pretrained model for `steps` steps of AdamW in this process, and sample three of its layers: all sums of
    the first step, and the difference that the last step makes to the parameters.

    The first steps of Adam are little more than the signs of the gradient, so that `steps` should be 20 or more.
    The ranks are emulated as in `captured`. A rank has a part of the columns also where the heads would not divide.
    """
    model = pretrained(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.95), weight_decay=0.0)
    length = _SEQUENCE + 1  # with the token after the last
    ids = weights.tokenizer(text)[: steps * _BATCH * length].view(steps, _BATCH, length)
    last_layer = model.config.layers - 1
    numbers = {"early": min(1, last_layer), "middle": last_layer // 2, "late": max(0, last_layer - 1)}
    layers = {place: model.blk[number] for place, number in numbers.items()}
    for step in range(steps):
        optimizer.zero_grad()
        first, last = step == 0, step == steps - 1
        watched = {place: _watched(layer) for place, layer in layers.items()} if first else {}
        hooks = [
            module.register_forward_hook(watch)
            for blocks in watched.values()
            for modules in blocks.values()
            for module, watch in modules
        ]
        model(ids[step]).backward()
        for hook in hooks:
            hook.remove()
        for place, blocks in watched.items():
            for block, modules in blocks.items():
                row, *columns = (watch.seen for _, watch in modules)
                yield from _of_block(f"{block}, {place}", row, columns)
        before = {place: _rows(layer) for place, layer in layers.items()} if last else {}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for place, blocks_before in before.items():
            for block, after in _rows(layers[place]).items():
                difference = (after - blocks_before[block])[::_EVERY_ROW]
                yield _normalized(f"parameter step, {block}, {place}", "parameter step", {1: [difference]})


def _watched(layer: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, _Watch]]]:
    """By block of a layer: the row-parallel matrix, then the column-parallel ones."""
    assert isinstance(layer, Layer)
    blocks = {
        "attention": [layer.attn_output, layer.attn_q, layer.attn_k, layer.attn_v],
        "MLP": [layer.ffn_down, layer.ffn_gate, layer.ffn_up],
    }
    return {name: [(module, _Watch(batch_first=True)) for module in modules] for name, modules in blocks.items()}


def _rows(layer: torch.nn.Module) -> dict[str, Tensor]:
    assert isinstance(layer, Layer)
    return {"attention": layer.attn_output.weight.detach().clone(), "MLP": layer.ffn_down.weight.detach().clone()}


def _of_block(name: str, row: _Seen, columns: list[_Seen]) -> Iterator[Sample]:
    """The sums of a block: forward, backward (of all column-parallel matrices of the block), and between replicas."""
    forward = {n: [part[::_EVERY_TOKEN] for part in row.activations(n)] for n in RANKS}
    backward = {}
    for n in RANKS:
        of_matrices = [seen.input_gradients(n) for seen in columns]
        backward[n] = [torch.stack(parts).sum(0)[::_EVERY_TOKEN] for parts in zip(*of_matrices, strict=True)]
    replicas = {n: [part[::_EVERY_ROW] for part in row.weight_gradients(n)] for n in RANKS}
    yield _normalized(f"activation, {name}", "activation", forward, by_row=True)
    yield _normalized(f"activation gradient, {name}", "activation gradient", backward, by_row=True)
    yield _normalized(f"weight gradient, {name}", "weight gradient", replicas)
