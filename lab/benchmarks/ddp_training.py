"""Training with torch's data parallelism: its own reductions and ours against full precision, validation loss by seed.

    python -m lab.benchmarks.ddp_training                          DistributedDataParallel, 0.7 M parameters
    python -m lab.benchmarks.ddp_training --configs '{"bits": 4, "min_bytes": 0}' --seeds 1
    python -m lab.benchmarks.ddp_training --fsdp                   FSDP2: the variants of lab.benchmarks.fsdp_step

The transformer of examples/ddp, two ranks, on Python's own sources, AdamW. Of one seed all variants see the same
weights and batches, and the held-out batches are the same for all. On the first seed fp32 is also trained with noise on
every gradient, tiny and large: the large noise shows that the comparison can find a difference. Our variants quantize
every bucket from the first step on. PowerSGD has all gradients in one bucket and starts after a tenth of the steps, as
torch advises. A variant that raises, has a step longer than --limit, or leaves the ranks with different weights is a
row with the reason.

With FSDP2 the comparison is with bf16 parameters and gradients reduced in fp32, and the fp32 masters are validated: a
loss in bf16 is rounded by more than the differences to be found. There is no noise, which would have to be on the
gradients before FSDP's hooks: that a difference can be found shows the noise of the same training with DDP.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from flash_allreduce_plugin.cli import launch
from flash_allreduce_plugin.cli.demo.data import corpus, split
from lab.benchmarks import command, ddp_hooks, fsdp_step, ranks, trainings
from lab.benchmarks.ddp_hooks import FULL_PRECISION, NOISE, ONE_BUCKET, POWERSGD, QUANTIZATION
from lab.benchmarks.trainings import VALIDATION_BATCHES, WARM_UP_STEPS, add_noise, batch, example, outcome

_DONE = "DONE "
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
    if arguments.fsdp:
        masters = {name: cast(DTensor, value).full_tensor() for name, value in model.state_dict().items()}
        model = module.Model()
        model.load_state_dict(masters)
    else:
        with ddp_hooks.watched(variant, arguments.limit):
            ddp_hooks.check_same_weights(model)
    with torch.no_grad():
        numbers = range(arguments.steps, arguments.steps + VALIDATION_BATCHES)
        held_out = [float(model(batch(validation, number, seed, arguments, dist.get_rank()))) for number in numbers]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return outcome(held_out, losses, parameters=parameters)


def in_rank(arguments: argparse.Namespace) -> None:
    """Train every variant, one after the other. Rank 0 prints each result, for a later variant may end the process."""
    ranks.start(timeout=timedelta(seconds=arguments.timeout))  # it may be stopped for a while
    for variant in arguments.variants:
        with trainings.products():
            result = train(variant, arguments.seed, arguments)
        if dist.get_rank() == 0:
            print(_DONE + json.dumps({variant: result}), flush=True)


def run(seed: int, variants: list[str], failed: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of a seed; `failed` are the variants left out, by now and from now on."""
    results: dict[str, Any] = {}
    with launch.on_this_machine(arguments.ranks) as machine:
        while left := [variant for variant in variants if variant not in {**results, **failed}]:
            line = [sys.executable, *ranks.command(in_rank, arguments, seed=seed, variants=left)]
            outputs, failure = ddp_hooks.run(machine, line, arguments.timeout)
            for text in outputs[0].splitlines() if outputs else []:
                if text.startswith(_DONE):
                    results |= json.loads(text.removeprefix(_DONE))
            if failure is not None:
                variant, why = failure
                print(f"{variant}: {why}", flush=True)
                failed[variant] = why
    if variants[0] not in results:
        raise SystemExit(f"{variants[0]} failed: {failed[variants[0]]}")
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead")
    parser.add_argument("--configs", nargs="+", help="ours: a FlashConfig each, as JSON")
    trainings.add_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--limit", type=float, default=300, help="seconds that a step may take")
    parser.add_argument("--timeout", type=float, default=14400, help="seconds that a seed may take")


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    os.environ["FLASH_ALLREDUCE_AUTOLOAD"] = "0"
    variants = [FULL_PRECISION, *THEIRS, *(arguments.configs or OURS)]
    if arguments.fsdp:
        variants = [fsdp_step.BASE, *THEIRS_WITH_FSDP, *(arguments.configs or OURS_WITH_FSDP)]
        arguments.noise = []
    failed: dict[str, str] = {}
    seeds = trainings.by_seed(
        arguments,
        variants,
        lambda seed, chosen: run(seed, chosen, failed, arguments),
        lambda found: keep({"seeds": found, "cannot run": failed}),
    )
    print(f"\n{seeds[arguments.seeds[0]][variants[0]]['parameters'] / 1e6:.2f} M parameters")
    trainings.show(seeds)
    for variant, why in failed.items():
        print(f"  {variant:44}  {why}")


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
