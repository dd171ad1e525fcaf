"""Long runs. They check that memory does not grow, nothing hangs, results are right, and replicas stay equal.

    python -m lab.soak collectives --calls 100000 --ranks 4 --json collectives.json
    python -m lab.soak megatron --steps 5000
    python -m lab.soak deepspeed --steps 5000          and ddp, fsdp

collectives: random collectives and sends, sizes, dtypes, widths and options on several groups from three threads,
synchronous and asynchronous, with waits in random order (collectives.py). Every result is within the bound of guarantee
6 (docs/trust/numerics.md). Results that are equal on all ranks have equal bits. Inputs stay unchanged.

megatron, deepspeed, ddp, fsdp: a small model in the real framework with the plugin on (training.py). Replicas are
compared bit for bit. The loss is finite and falls.

Memory is VmRSS of every rank after a garbage collection. Its growth is from the first to the last fifth of the samples
after a warm-up of a tenth. Exit status 1: a check failed, memory grew by more than --most-growth, or nothing advanced
for --patience seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import metadata
from typing import Any

from flash_allreduce_plugin.cli import ranks
from lab.benchmarks import command
from lab.soak.watch import MIB, growth

MEASURES = {
    "collectives": "lab.soak.collectives:measure",
    "megatron": "lab.soak.training:megatron",
    "deepspeed": "lab.soak.training:deepspeed",
    "ddp": "lab.soak.training:ddp",
    "fsdp": "lab.soak.training:fsdp",
}
RANKS = {"collectives": 4, "megatron": 4, "deepspeed": 2, "ddp": 2, "fsdp": 2}
NEEDS = {"megatron": "megatron-core", "deepspeed": "deepspeed"}


class Progress:
    """Prints a line every twentieth of the run."""

    def __init__(self, of: int) -> None:
        self._of, self._shown, self._begin = of, 0, time.monotonic()

    def __call__(self, content: dict[str, Any]) -> None:
        twentieth = 20 * content["done"] // self._of
        if twentieth > self._shown:
            self._shown = twentieth
            rss = " ".join(f"{bytes_ / MIB:.0f}" for bytes_ in content["rss"])
            loss = "".join(f", {name} {value:.4f}" for name, value in content.get("losses", {}).items())
            seconds = time.monotonic() - self._begin
            print(f"{content['done']:>8} of {self._of}, {seconds:.0f} s, VmRSS {rss} MiB{loss}", flush=True)


def grown(samples: list[dict[str, Any]], of: int) -> list[dict[str, dict[str, float]]]:
    """Return the growth of all memory in watch.sample, for every rank."""
    done, kinds = [sample["done"] for sample in samples], [kind for kind in samples[0] if kind != "done"]
    return [
        {kind: growth(done, [sample[kind][rank] for sample in samples], of) for kind in kinds}
        for rank in range(len(samples[0]["rss"]))
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--calls", type=int, default=100_000, help="collectives, of all lanes together")
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--largest", type=int, default=1 << 20, help="elements of a tensor of collectives")
    parser.add_argument("--ranks", type=int, help="4; deepspeed, ddp, fsdp 2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without advance that end the run")
    parser.add_argument("--most-growth", type=float, default=8.0, help="MiB a rank that are let pass")


def run(arguments: argparse.Namespace, keep: command.Keep) -> int:
    count = arguments.calls if arguments.what == "collectives" else arguments.steps
    settings = {key: getattr(arguments, key) for key in ("calls", "steps", "seed", "largest", "patience")}
    os.environ.update(DS_ACCELERATOR="cpu", FLASH_ALLREDUCE_AUTOLOAD="0")
    # glibc would keep as much in reserve, in every thread, as the largest tensors took: more than the growth to find.
    os.environ.update(MALLOC_MMAP_THRESHOLD_=str(MIB), MALLOC_TRIM_THRESHOLD_=str(MIB))
    world_size, begin = arguments.ranks or RANKS[arguments.what], time.monotonic()
    try:
        result = ranks.run(
            MEASURES[arguments.what],
            settings,
            world_size=world_size,
            on_message=Progress(count),
            timeout=7 * 86400.0,
        )
    except ranks.RanksError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    if result is None:  # another rank of a launcher
        return 0
    rows, unit = grown(result["samples"], count), "call" if arguments.what == "collectives" else "step"
    print(f"\n{arguments.what}, {world_size} ranks, {time.monotonic() - begin:.0f} s: every result right")
    for key, value in result.items():
        if key != "samples":
            print(f"  {key}: {value}")
    print(
        f"{'rank':>4}{'VmRSS MiB':>12}{'at the end':>12}{'growth':>9}{'in use, growth':>16}{f'bytes a {unit}':>15}"
        f"{f'blocks a {unit}':>16}"
    )
    for rank, row in enumerate(rows):
        rss, in_use = row["rss"], row.get("malloc", {}).get("growth")
        mib = f"{rss['before'] / MIB:12.1f}{rss['end'] / MIB:12.1f}{rss['growth'] / MIB:9.2f}"
        told = "unknown" if in_use is None else f"{in_use / MIB:.2f}"
        print(f"{rank:4}{mib}{told:>16}{rss['per call']:15.1f}{row['blocks']['per call']:16.3f}")
    too_much = [rank for rank, row in enumerate(rows) if row["rss"]["growth"] > arguments.most_growth * MIB]
    about = command.about(arguments)
    if arguments.what in NEEDS:
        about[NEEDS[arguments.what]] = metadata.version(NEEDS[arguments.what])
    about["ranks"] = world_size
    keep({"about": about, "growth": rows, **result})
    if too_much:
        print(f"soak: {groups_shown(too_much)} grew by more than {arguments.most_growth:g} MiB", file=sys.stderr)
        return 1
    print(f"no rank grew by more than {arguments.most_growth:g} MiB")
    return 0


def groups_shown(ranks_: list[int]) -> str:
    return f"rank{'s' * (len(ranks_) > 1)} " + ", ".join(map(str, ranks_))


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
