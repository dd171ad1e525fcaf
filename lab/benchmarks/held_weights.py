"""How far the weights that all ranks hold are from the optimizer's, when parameters are gathered by differences.

    python -m lab.benchmarks.held_weights

The transformer of examples/deepspeed in bf16 at ZeRO stage 2, two ranks, AdamW. At every 100th step: the distance of
the held weights from the masters, over the norm of the masters; the same for masters rounded to bf16; and whether the
weights have the same bits on all ranks.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.cli.demo.data import corpus, split
from lab.benchmarks import command, deepspeed_training, ranks
from lab.benchmarks.trainings import batch


def distances(engine: Any) -> dict[str, Any]:
    """At this step. All ranks call it."""
    optimizer, rank, world = engine.optimizer, dist.get_rank(), dist.get_world_size()
    masters: list[Tensor] = [master.detach() for master in optimizer.single_partition_of_fp32_groups]
    held: list[Tensor] = [parts[rank] for parts in optimizer.parallel_partitioned_bit16_groups]
    squares = torch.zeros(3, dtype=torch.float64)
    for master, part in zip(masters, held, strict=True):
        exact = master.double()
        rounded = master.to(part.dtype).double()
        found = (exact.square().sum(), (part.double() - exact).square().sum(), (rounded - exact).square().sum())
        squares += torch.stack(found)
    dist.all_reduce(squares)
    alike = True
    for weights in optimizer.bit16_groups_flat:
        every = [torch.empty_like(weights) for _ in range(world)]
        dist.all_gather(every, weights)
        alike = alike and all(torch.equal(every[0], other) for other in every)
    norm, ours, theirs = squares.sqrt().tolist()
    return {"held": ours / norm, "bf16": theirs / norm, "same bits on all ranks": alike}


def in_rank(arguments: argparse.Namespace) -> dict[int, dict[int, Any]]:
    """Train with every width, one after the other."""
    ranks.start_deepspeed()
    import deepspeed

    training, _ = split(corpus(None), arguments.sequence)
    results: dict[int, dict[int, Any]] = {}
    for bits in arguments.bits:
        model = deepspeed_training.build_model(arguments, 1)
        section = {"bits": 8, "param_bits": bits, "group_size": arguments.group_size, "min_bytes": 0}
        config = {**deepspeed_training.configuration(arguments, 2, section), "bf16": {"enabled": True}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        results[bits] = {}
        for step in range(arguments.steps):
            loss = engine(batch(training, step, 0, arguments, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            if (step + 1) % arguments.every == 0:
                results[bits][step + 1] = {**distances(engine), "loss": float(loss.detach())}
        engine.destroy()
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    results = ranks.torchrun(in_rank, 2, arguments)
    for bits, steps in results.items():
        print(f"{bits} bits: step, distance of the held weights from the masters, that of bf16, same bits on all ranks")
        for step, row in steps.items():
            print(f"{step:>8}{row['held']:12.3e}{row['bf16']:12.3e}  {row['same bits on all ranks']}")
    keep({"bits": results})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
