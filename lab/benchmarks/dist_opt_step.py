"""A step of Megatron with tensor parallelism, data parallelism and the distributed optimizer, over slow links.

    python -m lab.benchmarks.dist_opt_step              needs root: makes hosts with netlab

The GPT of lab.benchmarks.pretraining, TP 2 x DP 2: four hosts of one rank, which share the machine's cores. All traffic
of a step uses the links: sums of tensor parallelism forward and backward, gradients, parameters. Each variant has its
own model and runs some steps at a time, alternately with the others. The first of these steps, which sends whole
parameters, does not count. gloo's reduce-scatter is an all-reduce: full precision sends its gradients, in fp32, twice.
A time is the median of the slowest rank's, "wire" the bytes of a step on the interface of a host.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import torch

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.demo.data import corpus, split
from lab.benchmarks import command, pretraining, steps

BASE = pretraining.FULL_PRECISION
VARIANTS = [
    '{"preset": "int8", "param_bits": "full"}',
    '{"preset": "int8"}',
    '{"preset": "int4", "param_bits": "full"}',
    '{"preset": "int4"}',
    '{"preset": "thin"}',
]
WARM_UP_STEPS = 1  # of each turn


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    pretraining.start(arguments.tp)
    replica = parallel_state.get_data_parallel_rank()
    text, _ = split(corpus(None), arguments.sequence)
    runs = {variant: pretraining.build(arguments, 1) for variant in arguments.variants}
    times = steps.Times(arguments.variants)

    def step(number: int, variant: str) -> None:
        run = runs[variant]
        generator = torch.Generator().manual_seed(number * 1000 + replica)
        run.model.zero_grad_buffer()
        run.optimizer.zero_grad()
        pretraining.loss_of(run.model, text, generator, arguments.batch, arguments.sequence).backward()
        finalize_model_grads([run.model])
        run.optimizer.step()

    for turn in range(arguments.turns):
        for variant in steps.rotated(arguments.variants, turn):
            if variant.startswith("{"):
                fap.megatron.enable(fap.FlashConfig.from_dict({"min_bytes": 65536, **json.loads(variant)}))
            for number in range(turn * 100, turn * 100 + WARM_UP_STEPS + arguments.steps):
                times.take(variant, partial(step, number), number % 100 >= WARM_UP_STEPS)
            fap.megatron.disable()
    return times.result()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, hosts=4, variants=VARIANTS)
    parser.add_argument("--size", choices=pretraining.SIZES, default="10m")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a replica")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed, of each turn")
    parser.set_defaults(vocabulary=256, lr=1e-4)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    steps.compare(in_rank, [BASE, *arguments.variants], BASE, arguments, keep)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
