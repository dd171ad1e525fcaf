"""What the first quantized call of a process group costs beside a later one: the ranks compare configurations.

    python -m benchmarks.handshake --json handshake.json

Groups of all ranks, each new; a time is that of the slowest rank, from a barrier on. "first" and "later" are medians
over the groups, of the first call and of the median of those after it; "handshake" is the median of their difference in
a group. Without check_ranks nothing is compared: what is left is what the first call costs gloo and the plugin's own
records of the group.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.cli import machine, ranks

LATER = 5  # calls
FIGURE_MS = 2.0


def measure(settings: dict[str, Any], say: ranks.Say) -> list[dict[str, Any]]:
    """In every rank: a row with check_ranks and one without. settings: groups, elements."""
    import torch
    import torch.distributed as dist

    import flash_allreduce_plugin as fap

    torch.set_num_threads(1)
    x = torch.randn(settings["elements"])
    configs = {check: fap.FlashConfig(min_bytes=0, check_ranks=check) for check in (True, False)}
    differences: dict[bool, list[tuple[float, float]]] = {check: [] for check in configs}
    for _ in range(settings["groups"]):
        for check, config in configs.items():
            group = dist.new_group()
            seconds = []
            for _ in range(1 + LATER):
                dist.barrier()
                begin = time.perf_counter()
                fap.all_reduce(x.clone(), group=group, config=config)
                seconds.append(time.perf_counter() - begin)
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            first, *later = slowest.tolist()
            differences[check].append((1e3 * first, 1e3 * statistics.median(later)))
            dist.destroy_process_group(group)
    rows = []
    for check, found in differences.items():
        more = [first - later for first, later in found]
        firsts, laters = zip(*found, strict=True)
        row = {"ranks": dist.get_world_size(), "check_ranks": check, "first ms": statistics.median(firsts)}
        row |= {"later ms": statistics.median(laters), "handshake ms": statistics.median(more), "by group ms": more}
        rows.append(row)
        say(row=row)
    return rows


def shown(row: dict[str, Any]) -> str:
    check = "yes" if row["check_ranks"] else "no"
    return f"{row['ranks']:5}{check:>13}{row['first ms']:10.2f}{row['later ms']:10.2f}{row['handshake ms']:14.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--groups", type=int, default=50)
    parser.add_argument("--elements", type=int, default=4096, help="of each call, fp32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = {"groups": arguments.groups, "elements": arguments.elements}
    print(f"{'ranks':>5}{'check_ranks':>13}{'first ms':>10}{'later ms':>10}{'handshake ms':>14}")
    rows: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        rows += ranks.run(
            "benchmarks.handshake:measure",
            settings,
            world_size=world_size,
            on_message=lambda content: print(shown(content["row"]), flush=True),
        )
    if arguments.json:
        about = {**machine.about(), "command": shlex.join(["python", "-m", "benchmarks.handshake", *sys.argv[1:]])}
        arguments.json.write_text(json.dumps({"about": about, **settings, "rows": rows}, indent=1) + "\n")
    slow = [row["ranks"] for row in rows if row["check_ranks"] and row["handshake ms"] > FIGURE_MS]
    print(f"asked: {FIGURE_MS:g} ms with check_ranks; {f'more with {slow} ranks' if slow else 'met'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
