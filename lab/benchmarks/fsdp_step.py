"""A step of FSDP2 between two hosts with a slow link: torch's own reductions and gathers, and ours.

    python -m lab.benchmarks.fsdp_step                  needs root: makes hosts with netlab

Wide linear layers, each a `fully_shard` of its own, few rows, plain SGD, one rank and one core a host: nearly all of a
step is communication. Torch's own: fp32; bf16 parameters with gradients reduced in fp32, and in bf16. Ours, with bf16
parameters: gradients as configured, "parameters B": gathered at B bits too. Every variant is a model of its own; they
take their steps in turn. gloo's reduce-scatter is an all-reduce, ours is not: torch's own sends gradients twice. A
time is the median over the rounds of the slowest rank's, "wire" the bytes of a step on the interface of a host.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import flash_allreduce_plugin as fap
from lab.benchmarks import command, ranks, steps

BASE = "bf16, reduced in fp32"
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    BASE: MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16, reduced in bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}
PARAMETERS = ", parameters "
OURS = [
    '{"preset": "int8"}',
    '{"preset": "int8"}, parameters 8',
    '{"preset": "int4"}',
    '{"preset": "int4"}, parameters 8',
]
WARM_UP_ROUNDS = 2


def build(variant: str, arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)]
    return sharded(variant, torch.nn.Sequential(*layers), layers)


def sharded(variant: str, model: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> torch.nn.Module:
    """The model, each of `layers` a `fully_shard` of its own: torch's by the name of a policy, or ours as JSON."""
    policy = POLICIES.get(variant, POLICIES[BASE])
    for module in (*layers, model):
        fully_shard(module, mp_policy=policy)
    if variant.startswith("{"):
        fields, _, bits = variant.partition(PARAMETERS)
        config = fap.FlashConfig.from_dict(json.loads(fields))
        values = fap.FlashConfig(bits=int(bits), min_bytes=config.min_bytes) if bits else None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(fap.FlashReduceScatter(config))
                if values is not None:
                    module.set_custom_all_gather(fap.FlashAllGather(values))
    return model


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    ranks.start()
    x = torch.randn(arguments.rows, arguments.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {variant: build(variant, arguments) for variant in arguments.variants}
    optimizers = {variant: torch.optim.SGD(model.parameters(), lr=1e-3) for variant, model in models.items()}

    def step(variant: str) -> None:
        models[variant](x).float().square().mean().backward()
        optimizers[variant].step()
        optimizers[variant].zero_grad()

    return steps.in_turn(arguments.variants, arguments.rounds, WARM_UP_ROUNDS, step).result()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_arguments(parser, hosts=2, variants=OURS)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    steps.compare(in_rank, [*POLICIES, *arguments.variants], BASE, arguments, keep)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
