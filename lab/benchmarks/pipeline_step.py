"""Time of a training step over two pipeline stages on two hosts: what quantized sends gain.

    python -m lab.benchmarks.pipeline_step --shares 0.5        needs root: makes hosts with netlab

A GPT in bf16 with Megatron's 1F1B schedule, one stage and one core a host. A first run without a limit measures the
step where sending costs nearly nothing, a second one, with a limit, what a byte adds to it; the link's rate for each
share of communication follows. Then the variants take their steps in turn, so that a machine that drifts drifts for
all of them. A time is the median over the rounds of the slower rank's; "share" is one minus the time without a limit
over that of the bf16 step. "wire" is what a step puts on the interfaces of both hosts.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.cli import machine
from flash_allreduce_plugin.cli.demo.model import VOCABULARY, prepare_cpu
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.telemetry import counters
from lab.benchmarks import netlab, pipeline_training
from lab.benchmarks.ranks import finish, on_the_wire, result_of
from lab.benchmarks.results import write_json

STAGES = 2
FULL_PRECISION, PRESET = "bf16", "preset "
ASKED = {"INT8": 1.3}  # over bf16 where communication is half of its step


def measure(arguments: argparse.Namespace) -> None:
    """In a rank: time every variant's steps; rank 0 prints one JSON object."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    prepare_cpu()
    model = pipeline_training.build_model(arguments, seed=1, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    text = torch.randint(VOCABULARY, (1 << 16,), generator=torch.Generator().manual_seed(1))
    seconds: dict[str, list[float]] = {variant: [] for variant in arguments.variants}
    wire: dict[str, list[float]] = {variant: [] for variant in arguments.variants}
    sent: dict[str, float] = {}
    for round_ in range(arguments.rounds + 1):
        for variant in arguments.variants[round_ % len(seconds) :] + arguments.variants[: round_ % len(seconds)]:
            # In full precision too: it counts, and Megatron's own functions send.
            megatron.enable(_config(variant))
            counters.reset_stats()
            batches = pipeline_training.batches(text, 0, 1, arguments)
            dist.barrier()
            before = on_the_wire()
            begin = time.perf_counter()
            optimizer.zero_grad()
            pipeline_training.run_step(model, batches, arguments, forward_only=False)
            optimizer.step()
            took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            nbytes = torch.tensor([_sent(), on_the_wire() - before], dtype=torch.float64)
            dist.all_reduce(nbytes)
            megatron.disable()
            sent[variant] = float(nbytes[0])
            wire[variant].append(float(nbytes[1]))
            if round_:  # the first round allocates
                seconds[variant].append(float(took))
    finish({"seconds": seconds, "sent": sent, "wire": wire})


def _config(variant: str) -> FlashConfig:
    fields: dict[str, Any] = {"min_bytes": 0}
    if variant.startswith(PRESET):
        fields["preset"] = variant.removeprefix(PRESET)
    elif variant != FULL_PRECISION:
        fields |= dict.fromkeys(("pipeline_bits", "pipeline_backward_bits"), int(variant.removeprefix("INT")))
    return FlashConfig.from_dict(fields)


def _sent() -> int:
    sites = counters.stats()["sites"]
    return sum(one["bytes_sent"] for name, one in sites.items() if name.startswith("megatron.pipeline."))


def run(rate: str, variants: list[str], rounds: int, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "lab.benchmarks.pipeline_step", *sys.argv[1:], "--rounds", str(rounds)]
    command += ["--rank", "--variants", *variants]
    with netlab.hosts(STAGES, rate) as lab:
        out = lab.run(command, timeout=arguments.timeout)[0]
    result: dict[str, Any] = result_of(out)
    return result


def _median(result: dict[str, Any]) -> float:
    return statistics.median(result["seconds"][FULL_PRECISION])


def table(rate: str, free: float, result: dict[str, Any]) -> dict[str, Any]:
    """free: seconds of a step without a limit."""
    full = result["seconds"][FULL_PRECISION]
    rows = {
        variant: {
            "seconds": statistics.median(times),
            "megabytes sent": result["sent"][variant] / 1e6,
            "wire, bytes": statistics.median(result["wire"][variant]),
            "x bf16": _median(result) / statistics.median(times),
            "x bf16 by round": [round(plain / took, 3) for plain, took in zip(full, times, strict=True)],
        }
        for variant, times in result["seconds"].items()
    }
    return {"rate": rate, "free": free, "share": 1 - free / _median(result), "variants": rows}


def show(entry: dict[str, Any]) -> None:
    print(f"\nlink {entry['rate']}: communication is {entry['share']:.0%} of the bf16 step")
    print(f"{'':12}{'ms':>8}{'MB sent':>9}{'wire MB':>9}{'x bf16':>8}  over the rounds")
    for variant, row in entry["variants"].items():
        low, high = min(row["x bf16 by round"]), max(row["x bf16 by round"])
        line = f"{variant:12}{1e3 * row['seconds']:8.0f}{row['megabytes sent']:9.1f}{row['wire, bytes'] / 1e6:9.2f}"
        print(f"{line}{row['x bf16']:8.2f}  {low:.2f} to {high:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--presets", nargs="*", default=["int4"], help="of the plugin's; thin is int4 here")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--variants", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.stages = STAGES
    if arguments.rank:
        return measure(arguments)
    variants = [FULL_PRECISION, *(f"INT{bits}" for bits in arguments.bits)]
    variants += [PRESET + name for name in arguments.presets]
    unlimited = run("none", variants, arguments.rounds, arguments)
    free = _median(unlimited)
    tables = [table("none", free, unlimited)]
    show(tables[0])
    # As if what is sent added all of its time to the step, then as it does.
    guess = 8 * unlimited["sent"][FULL_PRECISION] / free / netlab.PAYLOAD_SHARE
    added = _median(run(f"{guess / 1e6:.2f}mbit", [FULL_PRECISION], 3, arguments)) - free
    for share in arguments.shares:
        rate = f"{guess * added / (free * share / (1 - share)) / 1e6:.2f}mbit"
        tables.append(table(rate, free, run(rate, variants, arguments.rounds, arguments)))
        show(tables[-1])
        for variant, asked in ASKED.items() if share == 0.5 else ():
            reached = tables[-1]["variants"].get(variant, {}).get("x bf16", 0.0)
            print(f"asked: {variant} {asked} x bf16; {'met' if reached >= asked else 'missed'}")
    if arguments.json:
        about = {
            **machine.about(),
            "command": shlex.join(["python", "-m", "lab.benchmarks.pipeline_step", *sys.argv[1:]]),
        }
        write_json(arguments.json, {"about": about, "tables": tables})
    return None


if __name__ == "__main__":
    main()
