"""Trainings of several variants, compared with full precision: the common part of the frameworks' benchmarks.

1. `by_seed` starts a run for every seed: full precision, the variants, and on the first seed full precision with noise.
   If the large noise made no difference, the comparison could not show one.
2. Of one seed all variants see the same weights and batches (`batch`). The held-out batches are the same for all seeds.
3. `outcome` averages the losses over the ranks. `show` prints each variant's difference in %.
4. `products` makes trainings in bf16 possible on processors without instructions for it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.benchmarks.results import LOSSES, smooth

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FULL_PRECISION, NOISE = "full precision", "noise "
WARM_UP_STEPS, VALIDATION_BATCHES = 50, 64
#: The results of `outcome`, by seed and variant.
Seeds = dict[int, dict[str, dict[str, Any]]]


def add_arguments(
    parser: Any, seeds: Sequence[int] = (1, 2, 3), noise: Sequence[str] = ("1e-6", "1"), steps: int = 400
) -> None:
    """Add the options of all trainings, with these defaults."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[*seeds])
    parser.add_argument("--noise", nargs="*", default=[*noise], help="sizes, on the first seed; none: no control")
    parser.add_argument("--steps", type=int, default=steps)


def by_seed(
    arguments: argparse.Namespace,
    variants: Sequence[str],
    run: Callable[[int, list[str]], dict[str, Any]],
    keep: Callable[[Seeds], None],
) -> Seeds:
    """Run the variants, with the noise on the first seed, and keep the results after each seed."""
    seeds: Seeds = {}
    for index, seed in enumerate(arguments.seeds):
        control = [NOISE + size for size in arguments.noise] if index == 0 else []
        seeds[seed] = run(seed, [*variants, *control])
        keep(seeds)
    return seeds


def show(seeds: Seeds, detail: Callable[[list[dict[str, Any]]], str] = lambda _: "") -> None:
    """Print a row a variant: loss, difference to the first variant in %, and `detail` of its results, seed by seed."""
    base, *_ = next(iter(seeds.values()))
    for variant in next(iter(seeds.values())):
        found = {seed: (one[variant], one[base]) for seed, one in seeds.items() if variant in one}
        each = {seed: difference(one, full) for seed, (one, full) in found.items()}
        loss = statistics.fmean(one["validation loss"] for one, _ in found.values())
        by_seed = "  ".join(f"{seed}: {value:+.3f}" for seed, value in each.items())
        more = detail([one for one, _ in found.values()])
        mean = statistics.fmean(each.values())
        print(f"  {variant:44}{loss:8.4f}{mean:+8.3f} %{more}  by seed {by_seed}", flush=True)


def difference(one: dict[str, Any], full: dict[str, Any]) -> float:
    """Return the difference of two validation losses in %."""
    return 100 * float(one["validation loss"] / full["validation loss"] - 1)


def outcome(held_out: Sequence[float], losses: Sequence[float], **more: Any) -> dict[str, Any]:
    """In every rank: return the validation loss and the training's losses, both means over the ranks."""
    mean = torch.tensor([statistics.fmean(held_out), *losses], dtype=torch.float64)
    dist.all_reduce(mean)
    validation, *training = (mean / dist.get_world_size()).tolist()
    return {"validation loss": validation, LOSSES: smooth(training), **more}


def example(folder: str) -> Any:
    """Return the program examples/<folder>/train.py as a module of its own."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / folder / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(data: Tensor, number: int, seed: int, arguments: argparse.Namespace, rank: int) -> Tensor:
    """Return a rank's sequences of a step, each with the token after it."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) * dist.get_world_size() + rank)
    return windows(data, arguments.batch, arguments.sequence, generator)


def windows(data: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `rows` sequences of the data, each with the token after it."""
    starts = torch.randint(len(data) - length, (rows,), generator=generator)
    return torch.stack([data[start : start + length + 1] for start in starts.tolist()])


def add_noise(model: torch.nn.Module, size: float, seed: int, replicas: bool = True) -> None:
    """Add noise to every gradient: Gaussian, `size` times the gradient's root mean square.

    replicas: each rank draws its own; False: all draw the same, and copies stay equal.
    """
    generator = torch.Generator().manual_seed(10_000 * seed + replicas * dist.get_rank())

    def noisy(gradient: Tensor) -> Tensor:
        noise = torch.randn(gradient.shape, generator=generator)
        return gradient + size * gradient.square().mean().sqrt() * noise

    for parameter in model.parameters():
        parameter.register_hook(noisy)


def products() -> contextlib.AbstractContextManager[object]:
    """Return Float32Products where torch has no instructions for bf16 matrices, and is 10 to 40 times slower."""
    has_instructions = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return contextlib.nullcontext() if has_instructions else Float32Products()


class Float32Products(TorchDispatchMode):
    """Products of bf16 matrices, computed in float32 and rounded once, as bf16 instructions do."""

    OPERATORS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.OPERATORS and all(matrix.dtype is torch.bfloat16 for matrix in args):
            return func(*(matrix.float() for matrix in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))
