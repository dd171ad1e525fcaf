"""A small transformer in torch's parallel styles, its training, and the counts of its sites."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import flash_allreduce_plugin as fap

WIDTH, HEADS, WORDS, TOKENS = 64, 4, 128, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        parts = (one(x).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.o(attended.transpose(1, 2).reshape(batch, tokens, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.attention, self.n2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def parallel(model: Transformer, mesh: DeviceMesh, sequence: bool = False, loss: bool = False) -> Transformer:
    """Split the model; sequence: with sequence parallelism; loss: logits stay split, for loss_parallel."""
    split, whole = Shard(1), Replicate()
    head = {"output_layouts": Shard(-1) if loss else whole, "use_local_output": not loss}
    layer: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "mlp.up": ColwiseParallel(),
    }
    if sequence:
        outer: dict[str, Any] = {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=split),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=split, **head),
        }
        rows = RowwiseParallel(output_layouts=split)
        layer |= {"n1": SequenceParallel(), "n2": SequenceParallel(), "attention.o": rows, "mlp.down": rows}
        for name in ("attention", "mlp"):
            layer[name] = PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,))
    else:
        outer = {"embedding": RowwiseParallel(input_layouts=whole), "head": ColwiseParallel(**head)}
        layer |= {"attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    parallelize_module(model, mesh, outer)
    for each in model.layers:
        parallelize_module(each, mesh, layer)
    return model


def mesh_of(ranks: int | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks or dist.get_world_size(),), mesh_dim_names=("tp",))


def copies(model: nn.Module) -> Tensor:
    """Return the parameters that every tensor-parallel rank keeps, one after another."""
    found = []
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            found.append(parameter.detach().flatten())
        elif parameter.placements[-1].is_replicate():
            found.append(parameter.to_local().detach().flatten())
    return torch.cat(found)


def equal_on(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    others = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(others, tensor.contiguous(), group=group)
    return all(torch.equal(other, others[0]) for other in others)


def train(
    model: nn.Module,
    group: dist.ProcessGroup,
    steps: int = 6,
    *,
    loss_is_parallel: bool = False,
    clip: bool = False,
    forward: Callable[[Tensor], Tensor] | None = None,
    data_rank: int = 0,
) -> dict[str, Any]:
    """Train and return the losses, and True for each step after which the copies were equal.

    group: tensor-parallel. forward: instead of the model.
    """
    generator = torch.Generator().manual_seed(1 + data_rank)
    text = torch.randint(WORDS // 4, (64, TOKENS + 1), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses, equal = [], []
    for _ in range(steps):
        ids = text[torch.randint(64, (4,), generator=generator)]
        with loss_parallel() if loss_is_parallel else contextlib.nullcontext():
            logits = (model if forward is None else forward)(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()))
        equal.append(equal_on(group, copies(model)))
    return {"losses": losses, "copies are equal": equal}


EIGHT = fap.FlashConfig(bits=8, backward_bits=8, sequence_parallel_gather_bits=8, min_bytes=0)
SITES = ("reduce.forward", "reduce.backward", "gather.forward", "gather.backward", "embedding.forward", "other")


def counts() -> dict[str, tuple[int, int, dict[str, int]]]:
    """Return site: (calls, quantized, full-precision calls by reason) since reset_stats; sites without the prefix."""
    sites = fap.stats()["sites"]
    return {
        site: (found["calls"], found["quantized"], dict(found["full_precision"]))
        for site in SITES
        if (found := sites.get(f"tensor_parallel.{site}")) is not None
    }


def served(config: fap.FlashConfig, case: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    fap.reset_stats()
    fap.tensor_parallel.enable(config)
    try:
        return case(*arguments, **keywords)
    finally:
        fap.tensor_parallel.disable()


def new_model(sequence: bool = False, layers: int = 2, **how: Any) -> Transformer:
    torch.manual_seed(0)
    return parallel(Transformer(layers), mesh_of(), sequence, **how)
