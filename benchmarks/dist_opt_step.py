"""A step of Megatron with tensor parallelism, data parallelism and the distributed optimizer, over slow links.

    python -m benchmarks.dist_opt_step              needs root: makes hosts with netlab

benchmarks.pretraining's GPT, TP 2 x DP 2: four hosts of one rank each, which share the machine's cores. Everything that
a step sends goes over the links: sums of tensor parallelism forward and backward, gradients, parameters. Every variant
is a model of its own and takes some steps at a time, in turn with the others; the first of them, in which what the
ranks hold travels whole, is left out. A time is the median of the slowest rank's, "wire" what a step puts on the
interface of a host.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks import netlab, pretraining
from benchmarks.ddp_step import on_the_wire
from benchmarks.pretraining import FULL_PRECISION
from flash_allreduce_plugin.cli.demo.data import corpus, split

VARIANTS = [
    '{"preset": "int8"}',
    '{"preset": "int8", "param_bits": 8}',
    '{"preset": "int4"}',
    '{"preset": "int4", "param_bits": 4}',
    '{"preset": "thin", "param_bits": 4}',
]
WARM_UP_STEPS = 1  # of each turn


def measure(arguments: argparse.Namespace) -> None:
    """In a rank: time every variant's steps; rank 0 prints one JSON object."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    pretraining.start(arguments.tp)
    replica = parallel_state.get_data_parallel_rank()
    text, _ = split(corpus(None), arguments.sequence)
    variants = arguments.rank
    runs = {variant: pretraining.build(arguments, 1) for variant in variants}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    wire: dict[str, list[int]] = {variant: [] for variant in variants}
    for turn in range(arguments.turns):
        at = turn % len(variants)
        for variant in variants[at:] + variants[:at]:
            run = runs[variant]
            if variant.startswith("{"):
                fap.megatron.enable(fap.FlashConfig.from_dict({"min_bytes": 65536, **json.loads(variant)}))
            for step in range(WARM_UP_STEPS + arguments.steps):
                generator = torch.Generator().manual_seed(100 * turn + 10 * step + replica)
                dist.barrier()
                before = on_the_wire()
                begin = time.perf_counter()
                run.model.zero_grad_buffer()
                run.optimizer.zero_grad()
                pretraining.loss_of(run.model, text, generator, arguments.batch, arguments.sequence).backward()
                finalize_model_grads([run.model])
                run.optimizer.step()
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if step >= WARM_UP_STEPS:
                    seconds[variant].append(float(took))
                    wire[variant].append(on_the_wire() - before)
            fap.megatron.disable()
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"seconds": seconds, "wire": wire}), flush=True)
    dist.barrier()
    os._exit(0)  # a thread of gloo's may abort the process while the interpreter ends


def run(rate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.dist_opt_step", *sys.argv[1:]]
    command += ["--rank", FULL_PRECISION, *arguments.variants]
    with netlab.hosts(arguments.hosts, rate) as lab:
        outputs = lab.run(command, timeout=arguments.timeout)
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    medians = {variant: statistics.median(times) for variant, times in found["seconds"].items()}
    rows = {
        variant: {
            "step, seconds": took,
            "x bf16": medians[FULL_PRECISION] / took,
            "wire, bytes": statistics.median(found["wire"][variant]),
            "step by step": found["seconds"][variant],
        }
        for variant, took in medians.items()
    }
    return {"rate": rate, "variants": rows}


def show(entry: dict[str, Any]) -> None:
    print(f"\nlinks of {entry['rate']}\n{'':44}{'step ms':>9}{'x bf16':>9}{'wire MB':>9}")
    for variant, row in entry["variants"].items():
        times = f"{1e3 * row['step, seconds']:9.0f}{row['x bf16']:9.2f}{row['wire, bytes'] / 1e6:9.2f}"
        print(f"{variant:44}{times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help="fields of FlashConfig, as JSON")
    parser.add_argument("--size", choices=pretraining.SIZES, default="10m")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a replica")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed, of each turn")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.vocabulary, arguments.lr = 256, 1e-4
    if arguments.rank:
        return measure(arguments)
    os.environ["FLASH_ALLREDUCE_AUTOLOAD"] = "0"
    tables = []
    for rate in arguments.rates:
        tables.append(run(rate, arguments))
        show(tables[-1])
    if arguments.json:
        kept = {key: value for key, value in vars(arguments).items() if key not in ("json", "rank")}
        about = {"machine": platform.processor(), "torch": torch.__version__, "arguments": kept}
        arguments.json.write_text(json.dumps({"about": about, "tables": tables}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
