"""A small language model that AutoTP splits, for the tests of tensor parallelism; training runs inside a rank."""

from __future__ import annotations

import contextlib
import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed_training import configuration, deepspeed
from torch import Tensor, nn
from torch.nn import functional as F

import flash_allreduce_plugin as fap

WORDS, WIDTH, HEADS, LAYERS, ROWS, LENGTH = 64, 64, 4, 2, 4, 16
EIGHT = {"bits": 8, "backward_bits": 8, "min_bytes": 0}
FORWARD, BACKWARD, EMBEDDING = (f"deepspeed.tensor.{name}" for name in ("forward", "backward", "embedding"))

SPLIT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
    ],
}
HEAD = {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True}
ROW_HEAD = {"patterns": [r"lm_head\.weight$"], "partition_type": "row"}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = Norm(), Norm()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        heads = [
            one(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        normed = self.other_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class Language(nn.Module):
    """A language model; tied: the head has the embedding's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.loss_function = cross_entropy

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.loss_function(self.lm_head(self.norm(x)), labels=words)


def options(stage: int = 0, ranks: int = 2, head: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return options of DeepSpeed; more: options of tensor_parallel."""
    specs = [*SPLIT["layer_specs"], *([head] if head else [])]  # type: ignore[misc]
    split = {"autotp_size": ranks, "partition_config": {**SPLIT, "layer_specs": specs}, **more}
    return {"tensor_parallel": split, "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": ROWS}


BF16 = {"bf16": {"enabled": True}}


def built(given: dict[str, Any], flash: Any, net: nn.Module | None = None) -> Any:
    package = deepspeed()
    from deepspeed.module_inject import layers

    layers.TensorParallel_Layer.tp_overlap_comm = False  # of an earlier engine: it belongs to the process
    net = Language() if net is None else net
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    return package.initialize(model=net, optimizer=optimizer, config=configuration(given, flash))[0]


def words(number: int) -> Tensor:
    """Return words that are equal on all ranks of a tensor-parallel group."""
    from deepspeed.utils import groups

    generator = torch.Generator().manual_seed(100 * number + groups.get_data_parallel_rank())
    return torch.randint(8, (ROWS, LENGTH), generator=generator)


def copies_are_equal(engine: Any) -> bool:
    """Return True if every replicated parameter has the same bits on all ranks."""
    copies = [p for p in engine.module.parameters() if not getattr(p, "tensor_model_parallel", False)]
    mine = torch.cat([p.detach().float().flatten() for p in copies])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return len(copies) > 3 and all(torch.equal(one, mine) for one in every)


def step(engine: Any, number: int) -> float:
    loss = engine(words(number))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def train(given: dict[str, Any], flash: Any, steps: int = 6, tied: bool = False) -> dict[str, Any]:
    """Train and evaluate; our lines, and the counters of both."""
    fap.reset_stats()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        engine = built(given, flash, Language(tied))
        losses, equal = [], []
        for number in range(steps):
            losses.append(step(engine, number))
            equal.append(copies_are_equal(engine))
    stats, report = fap.stats(), fap.deepspeed.report()
    fap.reset_stats()
    engine.eval()
    with torch.no_grad():
        evaluated = float(engine(words(99)))
    lines = [line for line in text.getvalue().splitlines() if line.startswith("flash")]
    result = {
        "losses": losses,
        "equal": equal,
        "evaluated": evaluated,
        "evaluation": fap.stats()["sites"],
        "sites": stats["sites"],
        "lines": lines,
        "in_place": {name for name in report if report[name]["in_place"]},
        "beside": stats["beside"],
    }
    engine.destroy()
    return result


def inference(net: nn.Module | None = None, ranks: int = 2) -> Any:
    """Return an engine of init_inference with blocks that AutoTP has split."""
    package = deepspeed()
    from deepspeed.module_inject import layers

    layers.set_autotp_mode(training=False)  # of the process: an engine that trained has set both
    layers.TensorParallel_Layer.tp_overlap_comm = False
    # DeepSpeed imports transformers, to compare the class of a block with that of GPT-2's.
    theirs: Any = ModuleType("transformers")
    theirs.models = SimpleNamespace(gpt2=SimpleNamespace(modeling_gpt2=SimpleNamespace(GPT2Block=None)))
    given: dict[str, Any] = {"tensor_parallel": {"tp_size": ranks, "tp_grain_size": 1}, "dtype": torch.float32}
    with mock.patch.dict(sys.modules, {"transformers": theirs}):
        return package.init_inference(
            Language() if net is None else net, injection_policy={Block: (".o_proj", ".down_proj")}, **given
        ).eval()
