"""The cost of the first quantized call of a process group, in which the ranks compare configurations.

    python -m lab.benchmarks.handshake --json handshake.json

Groups of all ranks, each new. A time is that of the slowest rank, from a barrier on. "first" and "later" are medians
over the groups: of the first call, and of the median of later calls. "handshake" is the median of their difference in a
group, and "CPU" the same for the processor time of a rank, which other programs change little. Without check_ranks the
ranks compare nothing: the rest is gloo's first call and the plugin's records of the group.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from flash_allreduce_plugin.cli import ranks
from lab.benchmarks import command

LATER = 5  # calls
FIGURE_MS = 2.0


def measure(settings: dict[str, Any], say: ranks.Say) -> list[dict[str, Any]]:
    """In every rank: a row with check_ranks and one without. settings: groups, elements."""
    import torch
    import torch.distributed as dist

    import flash_allreduce_plugin as fap

    torch.set_num_threads(1)
    # As a launcher leaves it: on one core a rank, its threads would wait for each other in every call.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    x = torch.randn(settings["elements"])
    configs = {check: fap.FlashConfig(min_bytes=0, check_ranks=check) for check in (True, False)}
    found: dict[bool, list[list[list[float]]]] = {check: [] for check in configs}
    for _ in range(settings["groups"]):
        for check, config in configs.items():
            group = dist.new_group()
            calls = []
            for _ in range(1 + LATER):
                dist.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                fap.all_reduce(x.clone(), group=group, config=config)
                calls.append([time.perf_counter() - begin, time.process_time() - cpu])
            slowest = 1e3 * torch.tensor(calls, dtype=torch.float64).t()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[check].append(slowest.tolist())
            dist.destroy_process_group(group)
    rows = []
    for check, groups in found.items():
        (first, later, more), (_, _, cpu_more) = (_medians([kinds[kind] for kinds in groups]) for kind in (0, 1))
        row = {"ranks": dist.get_world_size(), "check_ranks": check, "first ms": first, "later ms": later}
        row |= {"handshake ms": more, "handshake CPU ms": cpu_more}
        rows.append(row)
        say(row=row)
    return rows


def _medians(groups: list[list[float]]) -> tuple[float, float, float]:
    """Return the medians over groups of the first call, the later ones and their difference. groups: times of calls."""
    pairs = [(first, statistics.median(later)) for first, *later in groups]
    firsts, laters = zip(*pairs, strict=True)
    return statistics.median(firsts), statistics.median(laters), statistics.median(a - b for a, b in pairs)


def shown(row: dict[str, Any]) -> str:
    check = "yes" if row["check_ranks"] else "no"
    times = f"{row['first ms']:10.2f}{row['later ms']:10.2f}{row['handshake ms']:14.2f}{row['handshake CPU ms']:8.2f}"
    return f"{row['ranks']:5}{check:>13}{times}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--groups", type=int, default=50)
    parser.add_argument("--elements", type=int, default=4096, help="of each call, fp32")


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    settings = {"groups": arguments.groups, "elements": arguments.elements}
    print(f"{'ranks':>5}{'check_ranks':>13}{'first ms':>10}{'later ms':>10}{'handshake ms':>14}{'CPU':>8}")
    rows: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        rows += ranks.run(
            "lab.benchmarks.handshake:measure",
            settings,
            world_size=world_size,
            on_message=lambda content: print(shown(content["row"]), flush=True),
        )
    keep({"rows": rows})
    slow = [row["ranks"] for row in rows if row["check_ranks"] and row["handshake ms"] > FIGURE_MS]
    print(f"asked: {FIGURE_MS:g} ms with check_ranks; {f'more with {slow} ranks' if slow else 'met'}")


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
