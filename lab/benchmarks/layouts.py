"""The two layouts of as many bytes in turn: plain groups of 128, and compact ones of 64.

    python -m lab.benchmarks.layouts --json layouts.json

64 MiB in fp32 and half as much in bf16, at 8 and 4 bits: the codec on one core, and a whole all_reduce of two ranks on
loopback. A number is the median over the rounds of the compact layout's speed over the plain one's in the same round;
below 1 the compact layout is slower. "plain again" is the plain layout against itself: the noise of a number.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli import ranks
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Format
from lab.benchmarks import command
from lab.benchmarks.codec import time_in_turn

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"group_size": 128, "compact": False},
    "plain again": {"group_size": 128, "compact": False},
    "compact": {"group_size": 64, "compact": True},
}
DTYPES = (torch.float32, torch.bfloat16)
BITS = (8, 4)


def speeds(times: dict[str, list[float]], what: dict[str, Any]) -> dict[str, Any]:
    """Return `what` with the speed of each layout over the plain one's. times: of each layout, round by round."""
    return what | {
        name: statistics.median(a / b for a, b in zip(times["plain"], times[name], strict=True))
        for name in LAYOUTS
        if name != "plain"
    }


def codec(numel: int, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    found = []
    for dtype in DTYPES:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
        y = torch.empty_like(x)
        for bits in BITS:
            parts: dict[str, dict[str, Any]] = {"encode": {}, "decode": {}, "sum of 2, encode": {}}
            for name, layout in LAYOUTS.items():
                c = Format(bits, **layout)
                payloads = torch.empty(2, c.payload_bytes(numel), dtype=torch.uint8)
                rows.encode(x.expand(2, -1), payloads, c)
                spare = torch.empty_like(payloads[:1])
                parts["encode"][name] = partial(rows.encode, x.view(1, -1), spare, c)
                parts["decode"][name] = partial(rows.decode, payloads[:1], y.view(1, -1), c)
                parts["sum of 2, encode"][name] = partial(rows.decode_sum_encode, payloads, spare[0], c, c, 1.0)
            for part, runs in parts.items():
                found.append(speeds(time_in_turn(runs, rounds), {"dtype": str(dtype)[6:], "bits": bits, "what": part}))
    return found


def calls(settings: dict[str, Any], say: ranks.Say) -> list[dict[str, Any]]:
    """In every rank: times of whole calls; a round's is that of the slower rank."""
    torch.set_num_threads(1)
    found = []
    for dtype in DTYPES:
        x = torch.randn(settings["numel"]).to(dtype)
        for bits in BITS:
            configs = {name: fap.FlashConfig.from_dict({"bits": bits, **layout}) for name, layout in LAYOUTS.items()}
            times: dict[str, list[float]] = {name: [] for name in LAYOUTS}
            for round_ in range(settings["rounds"] + 2):
                for name, config in configs.items():
                    work = x.clone()
                    dist.barrier()
                    begin = time.perf_counter()
                    fap.all_reduce(work, config=config)
                    took = torch.tensor(time.perf_counter() - begin)
                    dist.all_reduce(took, dist.ReduceOp.MAX)
                    if round_ > 1:
                        times[name].append(took.item())
            found.append(speeds(times, {"dtype": str(dtype)[6:], "bits": bits, "what": "all_reduce"}))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements (default 16777216)")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only-calls", action="store_true", help="leave the codec on one core out")


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    settings = {"numel": arguments.numel, "rounds": arguments.rounds}
    found = [] if arguments.only_calls else codec(**settings)
    found += ranks.run("lab.benchmarks.layouts:calls", settings, world_size=2)
    print(f"{'':10}{'bits':>5}  {'speed over plain, 128':24}{'plain again':>12}{'compact, 64':>12}")
    for row in found:
        print(f"{row['dtype']:10}{row['bits']:5}  {row['what']:24}{row['plain again']:12.3f}{row['compact']:12.3f}")
    keep({"rows": found})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
