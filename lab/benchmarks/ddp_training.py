"""Training with torch's data parallelism: its own reductions and ours against full precision, validation loss by seed.

    python -m lab.benchmarks.ddp_training                          DistributedDataParallel, 0.7 M parameters
    python -m lab.benchmarks.ddp_training --configs '{"bits": 4, "min_bytes": 0}' --seeds 1
    python -m lab.benchmarks.ddp_training --fsdp                   FSDP2: the variants of lab.benchmarks.fsdp_step

The transformer of examples/ddp, two ranks, on Python's own sources, AdamW. Of one seed all variants see the same
weights and batches, and the held-out batches are the same for all. On the first seed fp32 is also trained with noise on
every gradient, tiny and large: if the large one made no difference, the comparison could not tell anything. Of ours
every bucket is quantized from the first step on. PowerSGD has all gradients in one bucket and begins after a tenth of
the steps, as torch advises. A variant that raises, whose step does not return within --limit, or that leaves the ranks
with different weights is a row that says so.

With FSDP2 the comparison is with bf16 parameters whose gradients are reduced in fp32. There is no noise, which would
have to be on the gradients before FSDP's own hooks; how far bf16 is from fp32 is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flash_allreduce_plugin.cli import launch
from flash_allreduce_plugin.cli.demo.data import corpus, split
from lab.benchmarks import ddp_hooks, fsdp_step
from lab.benchmarks.ddp_hooks import FULL_PRECISION, NOISE, ONE_BUCKET, POWERSGD, QUANTIZATION
from lab.benchmarks.deepspeed_training import VALIDATION_BATCHES, WARM_UP_STEPS, add_noise, batch, example
from lab.benchmarks.results import LOSSES, smooth, write_json

THEIRS = ["fp16_compress_hook", *(name + ONE_BUCKET for name in POWERSGD), *QUANTIZATION]
OURS = [json.dumps({**json.loads(config), "min_bytes": 0}) for config in ddp_hooks.OURS]  # the buckets are small
THEIRS_WITH_FSDP = [policy for policy in fsdp_step.POLICIES if policy != fsdp_step.BASE]
OURS_WITH_FSDP = [variant.replace("}", ', "min_bytes": 0}') for variant in fsdp_step.OURS]


def train(variant: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """In a rank: train a variant and validate it."""
    module = example("ddp")
    module.WIDTH, module.SEQUENCE = arguments.width, arguments.sequence
    torch.manual_seed(seed)
    model = module.Model()
    if variant.startswith(NOISE):
        add_noise(model, float(variant.removeprefix(NOISE)), seed)
    powersgd_first_step = max(ddp_hooks.POWERSGD_FIRST_STEP, arguments.steps // 10)
    with ddp_hooks.watched(variant, arguments.limit):
        if arguments.fsdp:
            parallel = fsdp_step.sharded(variant, model, model.layers.layers)
        else:
            parallel = ddp_hooks.wrapped(variant, model, powersgd_first_step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95))
    warm_up = min(WARM_UP_STEPS, arguments.steps // 4)

    def rate(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (arguments.steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    training, validation = split(corpus(None), arguments.sequence)
    losses = []
    for step in range(arguments.steps):
        with ddp_hooks.watched(variant, arguments.limit):
            loss = parallel(batch(training, step, seed, arguments, dist.get_rank()))
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    if not arguments.fsdp:
        with ddp_hooks.watched(variant, arguments.limit):
            ddp_hooks.check_same_weights(model)
    with torch.no_grad():
        numbers = range(arguments.steps, arguments.steps + VALIDATION_BATCHES)
        held_out = [float(model(batch(validation, number, seed, arguments, dist.get_rank()))) for number in numbers]
    mean = torch.tensor([statistics.fmean(held_out), *losses], dtype=torch.float64)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"validation loss": float(mean[0]), LOSSES: smooth(mean[1:].tolist()), "parameters": parameters}


def in_rank(arguments: argparse.Namespace) -> None:
    """Every variant after the other; rank 0 prints one JSON object each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout))  # it may be stopped for a while
    for variant in arguments.variants:
        result = train(variant, arguments.rank, arguments)
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps({variant: result}), flush=True)
    dist.barrier()
    os._exit(0)  # a thread of gloo's that lets go of a tensor while the interpreter ends aborts the process: seen once


def run(seed: int, variants: list[str], failed: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of a seed; `failed` are the variants left out, by now and from now on."""
    results: dict[str, Any] = {}
    with launch.on_this_machine(arguments.ranks) as ranks:
        while left := [variant for variant in variants if variant not in {**results, **failed}]:
            command = [sys.executable, "-m", "lab.benchmarks.ddp_training", *sys.argv[1:]]
            outputs, failure = ddp_hooks.run(
                ranks, [*command, "--rank", str(seed), "--variants", *left], arguments.timeout
            )
            for line in outputs[0].splitlines() if outputs else []:
                if line.startswith("RESULT "):
                    results |= json.loads(line.removeprefix("RESULT "))
            if failure is not None:
                variant, why = failure
                print(f"{variant}: {why}", flush=True)
                failed[variant] = why
    if variants[0] not in results:
        raise SystemExit(f"{variants[0]} failed: {failed[variants[0]]}")
    return results


def difference(result: dict[str, Any], variant: str) -> float:
    """Per cent of the first variant's validation loss."""
    full = next(iter(result.values()))
    return 100 * float(result[variant]["validation loss"] / full["validation loss"] - 1)


def show(seeds: dict[int, dict[str, Any]], failed: dict[str, str]) -> None:
    first = next(iter(seeds.values()))
    print(f"\n{next(iter(first.values()))['parameters'] / 1e6:.2f} M parameters")
    for variant in first:
        each = {seed: difference(result, variant) for seed, result in seeds.items() if variant in result}
        by_seed = "  ".join(f"{seed}: {value:+.3f}" for seed, value in each.items())
        loss = statistics.fmean(result[variant]["validation loss"] for result in seeds.values() if variant in result)
        print(f"  {variant:44}{loss:8.4f}{statistics.fmean(each.values()):+8.3f} %  by seed {by_seed}", flush=True)
    for variant, why in failed.items():
        print(f"  {variant:44}  {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead")
    parser.add_argument("--configs", nargs="+", help="ours: a FlashConfig each, as JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--noise", nargs="*", default=["1e-6", "1"], help="sizes, on the first seed; none: no control")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--limit", type=float, default=300, help="seconds that a step may take")
    parser.add_argument("--timeout", type=float, default=14400, help="seconds that a seed may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--variants", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return in_rank(arguments)
    os.environ["FLASH_ALLREDUCE_AUTOLOAD"] = "0"
    theirs, ours = [FULL_PRECISION, *THEIRS], OURS
    if arguments.fsdp:
        theirs, ours = [fsdp_step.BASE, *THEIRS_WITH_FSDP], OURS_WITH_FSDP
    seeds: dict[int, Any] = {}
    failed: dict[str, str] = {}
    for index, seed in enumerate(arguments.seeds):
        control = [NOISE + size for size in arguments.noise] if index == 0 and not arguments.fsdp else []
        seeds[seed] = run(seed, [*theirs, *(arguments.configs or ours), *control], failed, arguments)
        if arguments.json:
            kept = {key: value for key, value in vars(arguments).items() if key not in ("json", "rank", "variants")}
            about = {"machine": platform.processor(), "torch": torch.__version__, "arguments": kept}
            result = {"about": about, "seeds": seeds, "cannot run": failed}
            write_json(arguments.json, result)
    show(seeds, failed)
    return None


if __name__ == "__main__":
    main()
