"""A step of DistributedDataParallel between two hosts with a slow link: torch's communication hooks and ours.

    python -m lab.benchmarks.ddp_step                  needs root: makes hosts with netlab

Wide linear layers and few rows in fp32, plain SGD, one rank and one core a host: nearly all of a step is communication.
Each variant has its own model. The steps alternate, so that a drift of the machine affects all variants. A time is the
median over the rounds of the slowest rank's. "wire": bytes of a step on a host's interface, with headers; "bits": the
same for each element. A variant that raises, has a step longer than --limit, or leaves the ranks with different weights
is a row with the reason, and the others start again without it.

PowerSGD is in the table twice: with DDP's buckets, and with all gradients in one bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from lab.benchmarks import command, ddp_hooks, netlab, ranks, steps
from lab.benchmarks.ddp_hooks import FULL_PRECISION, NOT_SENT, ONE_BUCKET, POWERSGD, QUANTIZATION

VARIANTS = [
    NOT_SENT,
    FULL_PRECISION,
    "fp16_compress_hook",
    *POWERSGD,
    *(name + ONE_BUCKET for name in POWERSGD),
    *QUANTIZATION,
]
BITS: steps.Columns = {
    "bits": ("bits on the wire per element", 1, ".3f"),
    "counted": ("bits sent per element", 1, ".3f"),
}
WARM_UP_ROUNDS = 1 + ddp_hooks.POWERSGD_FIRST_STEP  # the first step of each way to reduce allocates


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    ranks.start()
    width = arguments.width
    x = torch.randn(arguments.rows, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {}
    for variant in arguments.variants:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(width, width) for _ in range(arguments.layers)]
        with ddp_hooks.watched(variant, arguments.limit):
            models[variant] = ddp_hooks.wrapped(variant, torch.nn.Sequential(*layers))
    optimizers = {variant: torch.optim.SGD(model.parameters(), lr=1e-3) for variant, model in models.items()}

    def step(variant: str) -> None:
        model = models[variant]
        with ddp_hooks.watched(variant, arguments.limit):
            with model.no_sync() if variant == NOT_SENT else contextlib.nullcontext():
                model(x).square().mean().backward()
            optimizers[variant].step()
            optimizers[variant].zero_grad()

    times = steps.in_turn(arguments.variants, arguments.rounds, WARM_UP_ROUNDS, step)
    for variant, model in models.items():
        if variant != NOT_SENT:
            with ddp_hooks.watched(variant, arguments.limit):
                ddp_hooks.check_same_weights(model)
    return times.result()


def run(rate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The table of a rate: all variants, in a run without those that failed in the runs before."""
    failed: dict[str, str] = {}
    variants = [*VARIANTS, *arguments.configs]
    with netlab.hosts(arguments.hosts, rate) as lab:
        while True:
            running = [variant for variant in variants if variant not in failed]
            line = [sys.executable, *ranks.command(in_rank, arguments, variants=running)]
            outputs, failure = ddp_hooks.run(lab, line, arguments.timeout)
            if failure is None:
                break
            variant, why = failure
            if variant in (NOT_SENT, FULL_PRECISION):
                raise SystemExit(f"{variant}: {why}")
            print(f"{rate}: {variant} {why}; again without it", flush=True)
            failed[variant] = why
    entry = steps.table(rate, ranks.result_of(outputs[0]), FULL_PRECISION)
    rows, elements = entry["variants"], parameters(arguments)
    for row in rows.values():
        row["bits on the wire per element"] = 8 * row["wire, bytes"] / elements
        row["bits sent per element"] = 8 * row["bytes sent"] / elements or None  # ours are counted
    entry["variants"] = {name: rows.get(name) or {"cannot run": failed[name]} for name in variants}
    return entry


def parameters(arguments: argparse.Namespace) -> int:
    """Return the elements of a model."""
    return int(arguments.layers * (arguments.width + 1) * arguments.width)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, hosts=2)
    parser.add_argument("--configs", nargs="+", default=ddp_hooks.OURS, help="ours: a FlashConfig each, as JSON")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=60, help="seconds that a step may take")


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    os.environ["FLASH_ALLREDUCE_AUTOLOAD"] = "0"
    print(f"{parameters(arguments) / 1e6:.1f} M parameters, {arguments.hosts} hosts", flush=True)
    tables = []
    for rate in arguments.rates:
        tables.append(run(rate, arguments))
        steps.show(tables[-1], FULL_PRECISION, BITS)
    keep({"base": FULL_PRECISION, "tables": tables})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
