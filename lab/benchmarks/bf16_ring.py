"""INT8 in two steps against the bf16 all-reduce that everybody runs: SQNR of the sum by the number of ranks.

    python -m lab.benchmarks.bf16_ring              gloo's own all-reduce on 2 to 64 ranks, simulated up to 1024

A ring adds in bf16 at every hop, so a sum over R ranks is rounded R - 1 times; two steps round twice whatever R is.
"measured": real calls of real processes, each on R ranks, against the exact sum of the same bf16 tensors. "simulated":
the same arithmetic in one process. A tree, as NCCL has between nodes, rounds log2 R times on the way. Gradients are
Gaussian, independent or with a part that all ranks share; correlation: that part's share of the variance.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli import ranks
from lab.benchmarks import command

RING, TREE, FP32_SUM = "bf16 ring", "bf16 tree", "bf16, summed in fp32"
SCATTERED = "INT8 reduce-scatter"
CONFIGS = {"INT8": {"bits": 8}, "INT8, codebook": {"bits": 8, "codebook": True}, "INT6": {"bits": 6}}


def gradient(rank: int, elements: int, correlation: float) -> Tensor:
    """bf16; the same for every process that asks."""
    own = torch.randn(elements, generator=torch.Generator().manual_seed(1 + rank))
    shared = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    return (math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own).bfloat16()


def exact(world: int, elements: int, correlation: float) -> Tensor:
    total = torch.zeros(elements, dtype=torch.float64)
    for rank in range(world):
        total += gradient(rank, elements, correlation)
    return total


def sqnr(result: Tensor, total: Tensor) -> float:
    noise = (result.double() - total).square().sum()
    return float(10 * torch.log10(total.square().sum() / noise))


def measure(settings: dict[str, Any], say: ranks.Say) -> list[dict[str, Any]]:
    """In every rank: torch.distributed's all-reduce and ours; rank 0 compares."""
    torch.set_num_threads(1)
    rank, world, elements = dist.get_rank(), dist.get_world_size(), settings["elements"]
    rows = []
    for correlation in settings["correlations"]:
        mine = gradient(rank, elements, correlation)
        total = exact(world, elements, correlation) if rank == 0 else None
        calls: dict[str, Callable[[Tensor], Any]] = {RING: dist.all_reduce}
        for name, fields in CONFIGS.items():
            config = fap.FlashConfig.from_dict({"min_bytes": 0, **fields})
            calls[name] = partial(fap.all_reduce, config=config)
        found = {}
        for name, call in calls.items():
            result = mine.clone()
            call(result)
            if total is not None:
                found[name] = sqnr(result, total)
        if found:
            rows.append(row("measured", world, correlation, found))
            say(row=rows[-1])
    return rows


def simulate(world: int, elements: int, correlation: float) -> dict[str, float]:
    """SQNR by variant."""
    total = exact(world, elements, correlation)
    gradients = [gradient(rank, elements, correlation) for rank in range(world)]
    ring = gradients[0]
    for x in gradients[1:]:
        ring = ring + x
    tree = gradients
    while len(tree) > 1:
        tree = [a + b for a, b in zip(tree[::2], tree[1::2], strict=False)] + tree[len(tree) // 2 * 2 :]
    results = {RING: ring, TREE: tree[0], FP32_SUM: total.float().bfloat16()}
    for name, fields in CONFIGS.items():
        config = fap.FlashConfig.from_dict(fields)

        def rounded(x: Tensor, config: Any = config) -> Tensor:
            return fap.decode(fap.encode(x, config), x.shape, x.dtype, config)

        added = torch.zeros(elements)
        for x in gradients:
            added += rounded(x.float())
        results[name] = rounded(added).bfloat16()
        if name == "INT8":
            results[SCATTERED] = added.bfloat16()
    return {name: sqnr(result, total) for name, result in results.items()}


def row(how: str, world: int, correlation: float, found: dict[str, float]) -> dict[str, Any]:
    return {"how": how, "ranks": world, "correlation": correlation, "sqnr_db": found}


def shown(one: dict[str, Any]) -> str:
    head = f"{one['ranks']:6}{one['correlation']:13.2f}  {one['how']:10} "
    return "\n".join(f"{head}{name:22}{db:8.1f}" for name, db in one["sqnr_db"].items())


def crossover(rows: list[dict[str, Any]], correlation: float, variant: str = "INT8") -> float | None:
    """The ranks from which `variant` is the more exact than bf16's ring, between those simulated; None: nowhere."""
    simulated = [one for one in rows if (one["how"], one["correlation"]) == ("simulated", correlation)]
    points = sorted((one["ranks"], one["sqnr_db"][variant] - one["sqnr_db"][RING]) for one in simulated)
    for (world, before), (further, after) in itertools.pairwise(points):
        if before <= 0 < after:
            return float(world * (further / world) ** (-before / (after - before)))
    return None


def plot(result: dict[str, Any], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    correlations = sorted({one["correlation"] for one in result["rows"]})
    figure, axes = pyplot.subplots(1, len(correlations), figsize=(5.2 * len(correlations), 4), sharey=True)
    for axis, correlation in zip(figure.axes if len(correlations) > 1 else [axes], correlations, strict=True):
        rows = [one for one in result["rows"] if one["correlation"] == correlation]
        for color, name in enumerate((RING, TREE, FP32_SUM, SCATTERED, *CONFIGS)):
            for how, style in (("simulated", {"linestyle": "-"}), ("measured", {"linestyle": "", "marker": "o"})):
                of_how = [one for one in rows if one["how"] == how and name in one["sqnr_db"]]
                points = [(one["ranks"], one["sqnr_db"][name]) for one in of_how]
                if points:
                    label = name if how == "simulated" else None
                    axis.plot(*zip(*sorted(points), strict=True), color=f"C{color}", label=label, **style)
        for height, name in ((22, "INT8"), (18, SCATTERED)):
            if (at := crossover(result["rows"], correlation, name)) is not None:
                axis.axvline(at, color="gray", linewidth=0.8, linestyle=":")
                axis.annotate(f" {math.ceil(at)} ranks: {name}", (at, height), fontsize=8, color="gray")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("ranks")
        axis.set_title("independent gradients" if not correlation else f"correlation {correlation}")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("SQNR of the sum, dB")
    figure.axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64], help="measured, and simulated too"
    )
    parser.add_argument("--simulated", type=int, nargs="*", default=[12, 24, 48, 128, 256, 512, 1024])
    parser.add_argument("--correlations", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--elements", type=int, default=1 << 18)
    parser.add_argument("--plot", type=Path)


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    settings = {"elements": arguments.elements, "correlations": arguments.correlations}
    rows: list[dict[str, Any]] = []
    for world in arguments.ranks:
        rows += ranks.run(
            "lab.benchmarks.bf16_ring:measure",
            settings,
            world_size=world,
            on_message=lambda content: print(shown(content["row"]), flush=True),
        )
    for correlation in arguments.correlations:
        for world in sorted({*arguments.ranks, *arguments.simulated}):
            rows.append(row("simulated", world, correlation, simulate(world, arguments.elements, correlation)))
            print(shown(rows[-1]), flush=True)
        for name in ("INT8", SCATTERED):
            print(f"correlation {correlation}: {name} overtakes at {crossover(rows, correlation, name)} ranks")
    result = {**settings, "rows": rows}
    keep(result)
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
