"""The demo over several seeds: validation loss of INT8 and INT4 against full precision, with a noise control.

    python -m lab.benchmarks.training --seeds 1234 2 3
    python -m lab.benchmarks.training --hidden 288 --layers 5 --steps 400 --bits 8,6      5 M parameters

The first seed is also trained with noise on g's output, tiny and large: if the large one made no difference, the
comparison could not tell anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.cli.demo.report import difference_percent
from lab.benchmarks import command


def demo(seed: int, arguments: argparse.Namespace, noise: bool, folder: Path) -> dict[str, Any]:
    output = folder / f"seed-{seed}"
    line = [sys.executable, "-m", "flash_allreduce_plugin", "demo", "--output", str(output)]
    line += [f"--seed={seed}", f"--steps={arguments.steps}", f"--bits={arguments.bits}", f"--tp={arguments.tp}"]
    line += [f"--hidden={arguments.hidden}", f"--layers={arguments.layers}", f"--options={arguments.options}"]
    line += ["--sequence-parallel"] * arguments.sequence_parallel + ["--noise-control"] * noise
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL if arguments.quiet else None)
    variants: dict[str, Any] = json.loads((output / "demo.json").read_text())["variants"]
    return variants


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bits", default="8,4")
    parser.add_argument("--options", default="{}", help="more fields of their configuration, as JSON")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--noise-control", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="leave out each demo's results")


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    with tempfile.TemporaryDirectory() as folder:
        seeds = {
            seed: demo(seed, arguments, noise=arguments.noise_control and i == 0, folder=Path(folder))
            for i, seed in enumerate(arguments.seeds)
        }
    rows: list[dict[str, Any]] = []
    for name in next(iter(seeds.values())):
        losses = {seed: variants[name]["validation_loss"] for seed, variants in seeds.items() if name in variants}
        differences = {seed: difference_percent(seeds[seed][name], seeds[seed]["full precision"]) for seed in losses}
        times = [
            seeds[seed][name]["seconds_per_step"] / seeds[seed]["full precision"]["seconds_per_step"] for seed in losses
        ]
        rows.append(
            {
                "variant": name,
                "validation loss": losses,
                "difference %": differences,
                "mean difference %": statistics.fmean(differences.values()),
                "time / full precision": statistics.fmean(times),
            }
        )
    print(f"\n{'':16}{'mean':>9}  {'time':>6}  difference to full precision by seed")
    for row in rows:
        each = "  ".join(f"{seed}: {value:+.3f} %" for seed, value in row["difference %"].items())
        print(f"{row['variant']:16}{row['mean difference %']:+8.3f}%  {row['time / full precision']:5.2f}x  {each}")
    keep(rows)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
