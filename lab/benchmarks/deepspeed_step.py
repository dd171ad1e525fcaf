"""A DeepSpeed step between two hosts with a slow link: the time its gradients' reduction takes, quantized and in bf16.

    python -m lab.benchmarks.deepspeed_step --rate 1gbit        needs root: makes hosts with netlab

Wide layers and few rows in bf16, plain SGD, one rank and one core a host: nearly all of a step is communication. Each
variant has its own engine. The steps alternate, so that a drift of the machine affects all variants. A time is the
median over the rounds of the slowest rank's. "gradients" is a step's time minus that of a step without sent gradients:
ZeRO's parameter gathers are in "step" and not in "gradients". "nothing sent" is the step without gathers too. "INT4 +
2" has gradients in 4 bits and parameters in 2: differences at stages 1 and 2, values at stage 3. "wire": bytes of a
step on a host's interfaces, with headers.

ZeRO++ quantizes on GPUs only. "ZeRO++, its bytes" sends the bytes of its gradients (qgZ: 4 bits, and a scale of fp32
for each of max(rows, columns, ranks) groups of a matrix) without computing them. Its parameters are ours in 8 bits, as
many as qwZ's. Its loss cannot be measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.integrations.deepspeed import engine as attachment
from flash_allreduce_plugin.integrations.deepspeed.reduction import Reduction
from lab.benchmarks import command, ranks, steps

NOT_SENT, FULL_PRECISION = "gradients not sent", "bf16"
PRESET, ZERO_PLUS_PLUS = "preset ", "ZeRO++, its bytes"
PIECES = 8  # in flight together: a single exchange of gloo fills half of a link
COLUMNS: steps.Columns = {
    "gradients ms": ("gradients, seconds", 1e3, ".0f"),
    "x, gradients": ("x base, gradients", 1, ".2f"),
    "bits": ("bits sent per element", 1, ".3f"),
}
NOTHING_SENT = "nothing sent"  # no parameters either: the lower bound for every width


class _NothingSent(Reduction):
    """Skips the reductions: the rest of a step alone."""

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        pass

    def reduce_scatter_coalesced(self, tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
        world, rank = dist.get_world_size(), dist.get_rank()
        sizes = [math.ceil(tensor.numel() / world) for tensor in tensors]
        return [t.reshape(-1)[rank * size : (rank + 1) * size] for t, size in zip(tensors, sizes, strict=True)]


def _gather_nothing(input_tensor: Tensor, output_tensor: Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """Take this rank's part for all parts: stage 3 computes with finite values."""
    parts = output_tensor.view(-1, input_tensor.numel())
    parts.copy_(input_tensor.view(1, -1).expand_as(parts).clone())
    return SimpleNamespace(wait=lambda: None)


class _ZeroPlusPlus(_NothingSent):
    """Sends as many bytes as qgZ, without data."""

    def reduce_scatter_coalesced(self, tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
        world = dist.get_world_size()
        size = sum(math.ceil(tensor.numel() / 2) + 4 * max(*tensor.shape[:2], world) for tensor in tensors)
        piece = torch.empty(math.ceil(size / world / PIECES) * world, dtype=torch.uint8)
        handles = [dist.all_to_all_single(torch.empty_like(piece), piece, async_op=True) for _ in range(PIECES)]
        for handle in handles:
            handle.wait()
        return super().reduce_scatter_coalesced(tensors, group)


def build_engine(variant: str, stage: int, arguments: argparse.Namespace) -> Any:
    import deepspeed

    torch.manual_seed(1)
    width = arguments.width
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(arguments.layers)])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.rows,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "communication_data_type": "bf16",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if variant.startswith("INT"):
        bits, _, params = variant.removeprefix("INT").partition(" + ")
        config["flash_allreduce"] = {"bits": int(bits), **({"param_bits": int(params)} if params else {})}
    elif variant.startswith(PRESET):
        config["flash_allreduce"] = {"preset": variant.removeprefix(PRESET)}
    elif variant != FULL_PRECISION:
        config["flash_allreduce"] = {"param_bits": 8} if variant == ZERO_PLUS_PLUS else {}
    reductions = {NOT_SENT: _NothingSent, NOTHING_SENT: _NothingSent, ZERO_PLUS_PLUS: _ZeroPlusPlus}
    attachment.Reduction = reductions.get(variant, Reduction)  # type: ignore[misc]
    built, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), config=config)
    return built


def in_rank(arguments: argparse.Namespace) -> dict[int, Any]:
    """Time every variant's steps at every stage."""
    ranks.start_deepspeed()
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero import partition_parameters

    quantized = [f"INT{bits}" for bits in arguments.bits]
    presets = [PRESET + preset for preset in arguments.presets]
    x = torch.randn(arguments.rows, arguments.width).bfloat16()
    results: dict[int, Any] = {}
    for stage in arguments.stages:
        params = [] if stage == 0 else arguments.values if stage == 3 else arguments.differences
        unsent = [NOT_SENT, NOTHING_SENT] if stage > 0 else [NOT_SENT]
        variants = [*unsent, FULL_PRECISION, *quantized, *presets, *(f"{quantized[-1]} + {bits}" for bits in params)]
        variants += [ZERO_PLUS_PLUS] if stage == 3 else []
        engines = {variant: build_engine(variant, stage, arguments) for variant in variants}

        def step(variant: str, engines: dict[str, Any] = engines) -> None:
            engine = engines[variant]
            engine.backward(engine(x).float().square().mean())
            engine.step()

        def active(variant: str, stage: int = stage) -> Any:
            if variant != NOTHING_SENT:
                return contextlib.nullcontext()
            if stage == 3:
                return mock.patch.object(partition_parameters, "_dist_allgather_fn", _gather_nothing)
            return mock.patch.object(utils, "all_gather_dp_groups", lambda **_: None)

        # The first round allocates, and parameters gathered by differences are sent whole once.
        times = steps.in_turn(variants, arguments.rounds, 2, step, active)
        results[stage] = times.result(optimizer=type(engines[FULL_PRECISION].optimizer).__name__)
        for engine in engines.values():
            engine.destroy()
    return results


def table(rate: str, stage: int, found: dict[str, Any], elements: int) -> dict[str, Any]:
    """Return the table of a stage, with the gradients' part of each step.

    Raises RuntimeError if the step with nothing sent sent something: DeepSpeed may gather in another place then.
    """
    entry = steps.table(rate, found, FULL_PRECISION, stage=stage, optimizer=found["optimizer"])
    rows = entry["variants"]
    rest = rows[NOT_SENT]["step, seconds"]
    sent, most = (rows[name]["wire, bytes"] if name in rows else 0 for name in (NOTHING_SENT, FULL_PRECISION))
    if sent > 0.1 * most:  # some bytes are the benchmark's own
        raise RuntimeError(f"stage {stage}: the step with nothing sent has sent {sent:.0f} bytes")
    for variant, row in rows.items():
        row["gradients, seconds"] = row["step, seconds"] - rest
        full = rows[FULL_PRECISION]["step, seconds"] - rest
        row["x base, gradients"] = None if "sent" in variant else full / row["gradients, seconds"]
        row["bits sent per element"] = 8 * row["bytes sent"] / elements
    return entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="1gbit")
    steps.add_arguments(parser, hosts=2, rates=False)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--presets", nargs="*", default=["int8", "int4", "thin"], help="of the plugin's")
    parser.add_argument("--differences", type=int, nargs="*", default=[4, 2], help="of parameters, at stages 1 and 2")
    parser.add_argument("--values", type=int, nargs="*", default=[8], help="bits of parameters at stage 3")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    found = steps.over_links(in_rank, arguments.rate, arguments)
    elements = arguments.layers * arguments.width**2
    tables = [table(arguments.rate, int(stage), one, elements) for stage, one in found.items()]
    print(f"{elements / 1e6:.1f} M parameters, {arguments.hosts} hosts, links of {arguments.rate}")
    for entry in tables:
        steps.show(entry, FULL_PRECISION, COLUMNS, f"stage {entry['stage']}, {entry['optimizer']}")
    keep({"base": FULL_PRECISION, "tables": tables})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
