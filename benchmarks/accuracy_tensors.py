"""What accuracy is measured on: made-up distributions, and what the ranks of a training would send."""

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

RANKS = (2, 8)


@dataclass(frozen=True, slots=True)
class Sample:
    """Matrices that a number of ranks would sum up: ranks[n] has n of them, float32.

    All are multiplied by one power of two, to about a root mean square of 1: a format that stores scales as fp16
    would lose to gradients of 1e-6, which is true of it but another matter. `kind` is "made up", "activation",
    "activation gradient" or "weight gradient".
    """

    name: str
    kind: str
    ranks: dict[int, list[Tensor]]

    @property
    def one(self) -> Tensor:
        """The tensor of the first of two ranks."""
        return self.ranks[2][0]


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
    """Records what a linear layer of a running step sees."""

    seen: _Seen = field(default_factory=_Seen)

    def __call__(self, module: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, object]) -> None:
        assert isinstance(module.weight, Tensor)
        self.seen.input, self.seen.weight = inputs[0].detach().clone(), module.weight.detach().clone()
        output[0].register_hook(self._gradient)

    def _gradient(self, gradient: Tensor) -> None:
        self.seen.gradient = gradient.detach().clone()


def captured(size: ModelSize, steps: int, seed: int) -> Iterator[Sample]:
    """Train the demo's GPT in this process for `steps` steps, 3 or more; samples of its middle layer from the
    fifth step, the middle, and the fifth but last (sooner in a training of fewer than 15).

    One rank computes; what each of 2 and 8 tensor-parallel ranks (activations, activation gradients) or
    data-parallel ranks (weight gradients) would have to send is a product of parts of what the layers saw.
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


def _normalized(name: str, kind: str, ranks: dict[int, list[Tensor]]) -> Sample:
    size = math.sqrt(float(ranks[2][0].double().square().mean()))
    factor = 2.0 ** -round(math.log2(size))
    return Sample(name, kind, {n: [(part * factor).contiguous() for part in parts] for n, parts in ranks.items()})
