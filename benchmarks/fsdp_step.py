"""A step of FSDP2 between two hosts with a slow link: torch's own reductions and gathers, and ours.

    python -m benchmarks.fsdp_step                  needs root: makes hosts with netlab

Wide linear layers, each a `fully_shard` of its own, few rows, plain SGD, one rank and one core a host: nearly all of a
step is communication. Torch's own: fp32; bf16 parameters with gradients reduced in fp32, and in bf16. Ours, with bf16
parameters: gradients as configured, "parameters B": gathered at B bits too. Every variant is a model of its own; they
take their steps in turn. A time is the median over the rounds of the slowest rank's, "wire" what a step puts on the
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import flash_allreduce_plugin as fap
from benchmarks import netlab
from benchmarks.ddp_step import on_the_wire

FULL_PRECISION = "bf16, reduced in fp32"
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    FULL_PRECISION: MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16, reduced in bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}
PARAMETERS = ", parameters "
OURS = [
    '{"preset": "int8"}',
    '{"preset": "int8"}, parameters 8',
    '{"preset": "int4"}',
    '{"preset": "int4"}, parameters 8',
    '{"preset": "thin"}',
    '{"preset": "thin"}, parameters 8',
]
WARM_UP_ROUNDS = 2


def build(variant: str, arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)]
    model = torch.nn.Sequential(*layers)
    policy = POLICIES.get(variant, POLICIES[FULL_PRECISION])
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if variant.startswith("{"):
        fields, _, bits = variant.partition(PARAMETERS)
        gradients = fap.FlashReduceScatter(fap.FlashConfig.from_dict(json.loads(fields)))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(gradients)
                if bits:
                    module.set_custom_all_gather(fap.FlashAllGather(fap.FlashConfig(bits=int(bits))))
    return model


def measure(arguments: argparse.Namespace) -> None:
    """In a rank: time every variant's steps; rank 0 prints one JSON object."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(arguments.rows, arguments.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {variant: build(variant, arguments) for variant in arguments.rank}
    optimizers = {variant: torch.optim.SGD(model.parameters(), lr=1e-3) for variant, model in models.items()}
    variants = list(models)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    wire: dict[str, list[int]] = {variant: [] for variant in variants}
    for round_ in range(arguments.rounds + WARM_UP_ROUNDS):
        turn = round_ % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            dist.barrier()
            before = on_the_wire()
            begin = time.perf_counter()
            models[variant](x).float().square().mean().backward()
            optimizers[variant].step()
            optimizers[variant].zero_grad()
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if round_ >= WARM_UP_ROUNDS:
                seconds[variant].append(float(took))
                wire[variant].append(on_the_wire() - before)
    if dist.get_rank() == 0:
        sites = {name: site["quantized"] for name, site in fap.stats()["sites"].items()}
        print("RESULT " + json.dumps({"seconds": seconds, "wire": wire, "quantized": sites}), flush=True)
    dist.barrier()
    os._exit(0)  # a thread of gloo's may abort the process while the interpreter ends


def run(rate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.fsdp_step", *sys.argv[1:], "--rank", *POLICIES, *arguments.variants]
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
            "step by round": found["seconds"][variant],
        }
        for variant, took in medians.items()
    }
    return {"rate": rate, "variants": rows, "quantized": found["quantized"]}


def show(entry: dict[str, Any]) -> None:
    print(f"\nlinks of {entry['rate']}\n{'':40}{'step ms':>9}{'x bf16':>9}{'wire MB':>9}")
    for variant, row in entry["variants"].items():
        print(
            f"{variant:40}{1e3 * row['step, seconds']:9.0f}{row['x bf16']:9.2f}{row['wire, bytes'] / 1e6:9.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=OURS, help="ours: a FlashConfig as JSON, or that and widths")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
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
