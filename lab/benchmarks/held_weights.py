"""How far the weights that all ranks hold are from the optimizer's, when parameters are gathered by differences.

    python -m lab.benchmarks.held_weights

The transformer of examples/deepspeed in bf16 at ZeRO stage 2, two ranks, AdamW. At every 100th step: the distance of
the held weights from the masters, over the norm of the masters; the same for masters rounded to bf16; and whether the
weights have the same bits on all ranks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.cli.demo.data import corpus, split
from lab.benchmarks import deepspeed_training
from lab.benchmarks.ranks import finish, torchrun
from lab.benchmarks.results import write_json


def distances(engine: Any) -> dict[str, Any]:
    """At this step. All ranks call it."""
    optimizer, rank, world = engine.optimizer, dist.get_rank(), dist.get_world_size()
    masters: list[Tensor] = [master.detach() for master in optimizer.single_partition_of_fp32_groups]
    held: list[Tensor] = [ranks[rank] for ranks in optimizer.parallel_partitioned_bit16_groups]
    squares = torch.zeros(3, dtype=torch.float64)
    for master, part in zip(masters, held, strict=True):
        exact = master.double()
        rounded = master.to(part.dtype).double()
        found = (exact.square().sum(), (part.double() - exact).square().sum(), (rounded - exact).square().sum())
        squares += torch.stack(found)
    dist.all_reduce(squares)
    alike = True
    for weights in optimizer.bit16_groups_flat:
        ranks = [torch.empty_like(weights) for _ in range(world)]
        dist.all_gather(ranks, weights)
        alike = alike and all(torch.equal(ranks[0], other) for other in ranks)
    norm, ours, theirs = squares.sqrt().tolist()
    return {"held": ours / norm, "bf16": theirs / norm, "same bits on all ranks": alike}


def in_rank(arguments: argparse.Namespace) -> None:
    """Every width after the other; rank 0 prints one JSON object."""
    import deepspeed

    import flash_allreduce_plugin.integrations.deepspeed.attach  # noqa: F401

    torch.set_num_threads(1)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # a minute's compilation
    deepspeed.utils.logging.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo")
    training, _ = split(corpus(None), arguments.sequence)
    results: dict[int, dict[int, Any]] = {}
    for bits in arguments.bits:
        model = deepspeed_training.build_model(arguments, 1)
        section = {"bits": 8, "param_bits": bits, "group_size": arguments.group_size, "min_bytes": 0}
        config = {**deepspeed_training.configuration(arguments, 2, section), "bf16": {"enabled": True}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        results[bits] = {}
        for step in range(arguments.steps):
            generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
            starts = torch.randint(len(training) - arguments.sequence, (arguments.batch,), generator=generator)
            loss = engine(torch.stack([training[start : start + arguments.sequence + 1] for start in starts]))
            engine.backward(loss)
            engine.step()
            if (step + 1) % arguments.every == 0:
                results[bits][step + 1] = {**distances(engine), "loss": float(loss.detach())}
        engine.destroy()
    finish(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return in_rank(arguments)
    results = torchrun("lab.benchmarks.held_weights", 2, [*sys.argv[1:], "--rank"], {"DS_ACCELERATOR": "cpu"})
    for bits, steps in results.items():
        print(f"{bits} bits: step, distance of the held weights from the masters, that of bf16, same bits on all ranks")
        for step, row in steps.items():
            print(f"{step:>8}{row['held']:12.3e}{row['bf16']:12.3e}  {row['same bits on all ranks']}")
    if arguments.json:
        kept = {key: value for key, value in vars(arguments).items() if key not in ("json", "rank")}
        write_json(arguments.json, {"about": {"arguments": kept}, "bits": results})
    return None


if __name__ == "__main__":
    main()
