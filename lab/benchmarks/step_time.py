"""Time of a training step with TP over hosts with slow links: the gain of quantizing by the share of communication.

    python -m lab.benchmarks.step_time --shares 0.25 0.5 0.75 0.9        needs root: makes hosts with netlab

A GPT of megatron-core in bf16, one rank and one core a host. A first run without any limit measures the step without
its tensor-parallel collectives; the link's rate for each share follows from that and from the bytes of a step. Then
every variant takes its steps in turn, so that a machine that drifts drifts for all of them. A time is the
median over the rounds of the slowest rank's; "share" is measured in the same run: one minus the time without
collectives over that of the bf16 step. "wire": bytes of a step on the interface of a host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.demo.model import (
    VOCABULARY,
    ModelSize,
    build_model,
    finish_gradients,
    loss_of,
    prepare_cpu,
)
from flash_allreduce_plugin.integrations.megatron.scopes import LAYERS, MAPPINGS
from flash_allreduce_plugin.integrations.patching import Patchset, Seam, rebound
from lab.benchmarks import command, ranks, steps

NO_COLLECTIVES, FULL_PRECISION = "no collectives", "bf16"
PRESET = "preset "


class _Done:
    """The handle of a collective that is over."""

    def wait(self) -> bool:
        return True


def without_collectives() -> Patchset:
    """Megatron's layers with their tensor-parallel reductions left out: the arithmetic of a step alone."""
    g = Seam(
        "benchmark.g",
        MAPPINGS,
        "_ReduceFromModelParallelRegion.forward",
        ("ctx", "input_", "group"),
        lambda original: rebound(original, "_reduce", lambda input_, group: input_.contiguous()),
        "nothing is sent",
    )
    dgrad = Seam(
        "benchmark.dgrad",
        LAYERS,
        "LinearWithGradAccumulationAndAsyncCommunication.backward",
        ("ctx", "grad_output"),
        lambda original: rebound(original, "torch.distributed.all_reduce", lambda *_, **__: _Done()),
        "nothing is sent",
    )
    return Patchset("no collectives", [g, dgrad])


def _active(variant: str) -> AbstractContextManager[None]:
    """The variant in place: "bf16", "INT<bits>", "preset <name>", a FlashConfig as JSON, or "no collectives"."""
    if variant == NO_COLLECTIVES:
        return steps.patched(without_collectives())
    return contextlib.nullcontext() if variant == FULL_PRECISION else steps.enabled(fap.megatron, _config(variant))


def _config(name: str) -> fap.FlashConfig:
    if name.startswith("{"):
        return fap.FlashConfig(**json.loads(name))
    if name.startswith(PRESET):
        return fap.FlashConfig.from_dict({"preset": name.removeprefix(PRESET)})
    bits = int(name.removeprefix("INT"))
    return fap.FlashConfig(bits=bits, backward_bits=bits)


def training_step(size: ModelSize, group: dist.ProcessGroup) -> Callable[[], None]:
    """A step of a GPT in bf16, optimizer included; every call does the same."""
    model = build_model(size, tensor_parallel=group.size(), sequence_parallel=False, seed=1).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    data = torch.randint(VOCABULARY, (1 << 16,), generator=torch.Generator().manual_seed(1))
    starts = torch.arange(size.batch) * size.sequence

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, data, starts, size.sequence).backward()
        finish_gradients(model, group, clip=1.0)
        optimizer.step()

    return step


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    from megatron.core import parallel_state

    ranks.start()
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    group = parallel_state.get_tensor_model_parallel_group()
    prepare_cpu()
    size = ModelSize(arguments.hidden, arguments.layers, arguments.heads, arguments.sequence, arguments.batch)
    step = training_step(size, group)
    times = steps.in_turn(arguments.variants, arguments.rounds, 1, lambda _: step(), _active)
    for variant in arguments.variants:
        if not variant.startswith(("INT", PRESET, "{")):
            times.sent[variant] = 0 if variant == NO_COLLECTIVES else times.full_precision
    return times.result()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shares", type=float, nargs="*", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--rates", nargs="*", default=[], help="links of these rates too, such as 1gbit")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 6, 4])
    parser.add_argument("--presets", nargs="*", default=["int4"], help="of the plugin's; thin is int4 here")
    steps.add_arguments(parser, hosts=2, rates=False)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    quantized = [*(f"INT{bits}" for bits in arguments.bits), *(PRESET + name for name in arguments.presets)]
    variants = [NO_COLLECTIVES, FULL_PRECISION, *quantized]
    tables = steps.at_shares(in_rank, variants, FULL_PRECISION, arguments)
    keep({"base": FULL_PRECISION, "tables": tables})


def plot(results: list[dict[str, Any]], picture: Path) -> None:
    """Draw the speed-up of a step against the speed of the link, both ways quantized."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables = [table for table in results[0]["tables"] if table["rate"] != "none"]
    links = [float(table["rate"].removesuffix("mbit")) for table in tables]
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, label in (("INT4", "4 bits"), (f"{PRESET}int4", "preset int4 (6 bits here)"), ("INT8", "8 bits")):
        if name in tables[0]["variants"]:
            axis.plot(links, [table["variants"][name]["x base"] for table in tables], "o-", label=label)
    axis.axhline(1, color="gray", linewidth=0.8)
    for table, link in zip(tables, links, strict=True):
        axis.annotate(f"{table['share']:.0%}", (link, 1), (0, -11), textcoords="offset points", fontsize=8, ha="center")
    axis.set_xscale("log")
    axis.set_xticks(links, [f"{link:.0f}" for link in links], minor=False)
    axis.minorticks_off()
    axis.set(
        xlabel="link, Mbit/s each way (%: communication's share of the bf16 step)",
        ylabel="speed-up of a step over bf16",
    )
    axis.set_ylim(bottom=0.8)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
