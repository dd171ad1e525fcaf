"""Time of a training step over two pipeline stages on two hosts, with quantized sends and without.

    python -m lab.benchmarks.pipeline_step --shares 0.5        needs root: makes hosts with netlab

A GPT in bf16 with Megatron's 1F1B schedule, one stage and one core a host. A first run without a limit measures a step
with nearly free sends. A second run, with a limit, measures the time that a byte adds. Both give the link's rate for
each share of communication. Then the steps of the variants alternate, so that a drift of the machine affects all of
them. A time is the median over the rounds of the slower rank's; "share" is one minus the time without a limit over that
of the bf16 step. "wire": bytes of a step on the interfaces of both hosts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from flash_allreduce_plugin.cli.demo.model import VOCABULARY, prepare_cpu
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from lab.benchmarks import command, netlab, pipeline_training, ranks, steps

STAGES = 2
FULL_PRECISION, PRESET = "bf16", "preset "
ASKED = {"INT8": 1.3}  # over bf16 where communication is half of its step


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    from megatron.core import parallel_state

    ranks.start()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    prepare_cpu()
    model = pipeline_training.build_model(arguments, seed=1, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    text = torch.randint(VOCABULARY, (1 << 16,), generator=torch.Generator().manual_seed(1))

    def step(_variant: str) -> None:
        batches = pipeline_training.batches(text, 0, 1, arguments)
        optimizer.zero_grad()
        pipeline_training.run_step(model, batches, arguments, forward_only=False)
        optimizer.step()

    return steps.in_turn(arguments.variants, arguments.rounds, 1, step, _active, summed=True).result()


def _active(variant: str) -> AbstractContextManager[None]:
    """The variant in place. In full precision the plugin counts, and Megatron's own functions send."""
    fields: dict[str, Any] = {"min_bytes": 0}
    if variant.startswith(PRESET):
        fields["preset"] = variant.removeprefix(PRESET)
    elif variant != FULL_PRECISION:
        fields |= dict.fromkeys(("pipeline_bits", "pipeline_backward_bits"), int(variant.removeprefix("INT")))
    return steps.enabled(megatron, FlashConfig.from_dict(fields))


def _median(result: dict[str, Any]) -> float:
    return statistics.median(result["seconds"][FULL_PRECISION])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--presets", nargs="*", default=["int4"], help="of the plugin's; thin is int4 here")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    steps.add_arguments(parser, hosts=0, rates=False)
    parser.set_defaults(hosts=STAGES, stages=STAGES)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    variants = [FULL_PRECISION, *(f"INT{bits}" for bits in arguments.bits)]
    variants += [PRESET + name for name in arguments.presets]
    unlimited = steps.over_links(in_rank, "none", arguments, variants=variants)
    free = _median(unlimited)
    tables = []

    def add(rate: str, found: dict[str, Any]) -> dict[str, Any]:
        share = 1 - free / _median(found)
        tables.append(steps.table(rate, found, FULL_PRECISION, free=free, share=share))
        steps.show(tables[-1], FULL_PRECISION, steps.SENT)
        rows: dict[str, Any] = tables[-1]["variants"]
        return rows

    add("none", unlimited)
    # First assume that sends never overlap, then use the measured step.
    guess = 8 * unlimited["sent"][FULL_PRECISION] / free / netlab.PAYLOAD_SHARE
    guessed = steps.over_links(in_rank, f"{guess / 1e6:.2f}mbit", arguments, variants=[FULL_PRECISION], rounds=3)
    added = _median(guessed) - free
    for share in arguments.shares:
        rate = f"{guess * added / (free * share / (1 - share)) / 1e6:.2f}mbit"
        rows = add(rate, steps.over_links(in_rank, rate, arguments, variants=variants))
        for variant, asked in ASKED.items() if share == 0.5 else ():
            reached = rows.get(variant, {}).get("x base", 0.0)
            print(f"asked: {variant} {asked} x bf16; {'met' if reached >= asked else 'missed'}")
    keep({"base": FULL_PRECISION, "tables": tables})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
