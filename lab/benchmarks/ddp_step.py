"""A step of DistributedDataParallel between two hosts with a slow link: torch's communication hooks and ours.

    python -m lab.benchmarks.ddp_step                  needs root: makes hosts with netlab

Wide linear layers and few rows in fp32, plain SGD, one rank and one core a host: nearly all of a step is communication.
Every variant is a model of its own; they take their steps in turn, so that a machine that drifts drifts for all of
them. A time is the median over the rounds of the slowest rank's. "wire" is what a step puts on the interface of a
host, headers and all, and "bits" the same for each element. A variant that raises, whose step does not return within
--limit, or that leaves the ranks with different weights is a row that says so, and the others begin again without it.

PowerSGD is in the table twice: with DDP's buckets, and with all gradients in one bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from lab.benchmarks import ddp_hooks, netlab
from lab.benchmarks.ddp_hooks import FULL_PRECISION, NOT_SENT, ONE_BUCKET, POWERSGD, QUANTIZATION
from lab.benchmarks.ranks import finish, on_the_wire, result_of
from lab.benchmarks.results import write_json

VARIANTS = [
    NOT_SENT,
    FULL_PRECISION,
    "fp16_compress_hook",
    *POWERSGD,
    *(name + ONE_BUCKET for name in POWERSGD),
    *QUANTIZATION,
]
WARM_UP_ROUNDS = 1 + ddp_hooks.POWERSGD_FIRST_STEP  # the first step of each way to reduce allocates


def measure(arguments: argparse.Namespace) -> None:
    """In a rank: time every variant's steps; rank 0 prints one JSON object."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width = arguments.width
    x = torch.randn(arguments.rows, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {}
    for variant in arguments.rank:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(width, width) for _ in range(arguments.layers)]
        with ddp_hooks.watched(variant, arguments.limit):
            models[variant] = ddp_hooks.wrapped(variant, torch.nn.Sequential(*layers))
    optimizers = {variant: torch.optim.SGD(model.parameters(), lr=1e-3) for variant, model in models.items()}
    variants = list(models)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    wire: dict[str, list[int]] = {variant: [] for variant in variants}
    sent: dict[str, int] = {}
    for round_ in range(arguments.rounds + WARM_UP_ROUNDS):
        turn = round_ % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            model, optimizer = models[variant], optimizers[variant]
            fap.reset_stats()
            dist.barrier()
            before = on_the_wire()
            with ddp_hooks.watched(variant, arguments.limit):
                begin = time.perf_counter()
                with model.no_sync() if variant == NOT_SENT else contextlib.nullcontext():
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            sent[variant] = fap.stats()["bytes_sent"]
            if round_ >= WARM_UP_ROUNDS:
                seconds[variant].append(float(took))
                wire[variant].append(on_the_wire() - before)
    for variant, model in models.items():
        if variant != NOT_SENT:
            with ddp_hooks.watched(variant, arguments.limit):
                ddp_hooks.check_same_weights(model)
    elements = sum(parameter.numel() for parameter in models[FULL_PRECISION].parameters())
    finish({"elements": elements, "seconds": seconds, "wire": wire, "sent": sent})


def run(rate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The table of a rate: all variants, in a run without those that failed in the runs before."""
    failed: dict[str, str] = {}
    variants = [*VARIANTS, *arguments.configs]
    with netlab.hosts(arguments.hosts, rate) as lab:
        while True:
            running = [variant for variant in variants if variant not in failed]
            command = [sys.executable, "-m", "lab.benchmarks.ddp_step", *sys.argv[1:], "--rank", *running]
            outputs, failure = ddp_hooks.run(lab, command, arguments.timeout)
            if failure is None:
                break
            variant, why = failure
            if variant in (NOT_SENT, FULL_PRECISION):
                raise SystemExit(f"{variant}: {why}")
            print(f"{rate}: {variant} {why}; again without it", flush=True)
            failed[variant] = why
    rows = table(result_of(outputs[0]))
    return {"rate": rate, "variants": {name: rows.get(name) or {"cannot run": failed[name]} for name in variants}}


def table(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Medians, and every variant against fp32."""
    medians = {variant: statistics.median(times) for variant, times in result["seconds"].items()}
    wire = {variant: statistics.median(sizes) for variant, sizes in result["wire"].items()}
    return {
        variant: {
            "step, seconds": seconds,
            "x fp32": medians[FULL_PRECISION] / seconds,
            "wire, bytes": wire[variant],
            "bits on the wire per element": 8 * wire[variant] / result["elements"],
            "bits sent per element": 8 * result["sent"][variant] / result["elements"] or None,  # ours are counted
            "step by round": result["seconds"][variant],
        }
        for variant, seconds in medians.items()
    }


def show(entry: dict[str, Any]) -> None:
    print(f"\nlinks of {entry['rate']}\n{'':34}{'step ms':>9}{'x fp32':>9}{'wire MB':>9}{'bits':>9}{'counted':>9}")
    for variant, row in entry["variants"].items():
        if "cannot run" in row:
            print(f"{variant:34}  {row['cannot run']}")
            continue
        counted = row["bits sent per element"]
        print(
            f"{variant:34}{1e3 * row['step, seconds']:9.0f}{row['x fp32']:9.2f}{row['wire, bytes'] / 1e6:9.2f}"
            f"{row['bits on the wire per element']:9.3f}{f'{counted:.3f}' if counted else '':>9}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--configs", nargs="+", default=ddp_hooks.OURS, help="ours: a FlashConfig each, as JSON")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=60, help="seconds that a step may take")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return measure(arguments)
    os.environ["FLASH_ALLREDUCE_AUTOLOAD"] = "0"
    parameters = arguments.layers * (arguments.width + 1) * arguments.width
    print(f"{parameters / 1e6:.1f} M parameters, {arguments.hosts} hosts", flush=True)
    tables = []
    for rate in arguments.rates:
        tables.append(run(rate, arguments))
        show(tables[-1])
    if arguments.json:
        kept = {key: value for key, value in vars(arguments).items() if key not in ("json", "rank")}
        about = {"machine": platform.processor(), "torch": torch.__version__, "arguments": kept}
        write_json(arguments.json, {"about": about, "tables": tables})
    return None


if __name__ == "__main__":
    main()
