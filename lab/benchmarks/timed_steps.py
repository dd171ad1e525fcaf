"""Training steps of several variants over slow links, in turn, each with its time and its bytes on the wire."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.cli import machine
from lab.benchmarks import netlab
from lab.benchmarks.ranks import on_the_wire, result_of
from lab.benchmarks.results import write_json


class Times:
    """In a rank: of each step the slowest rank's seconds, and the bytes on the interface of this host."""

    def __init__(self, variants: Sequence[str]) -> None:
        self.seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        self.wire: dict[str, list[int]] = {variant: [] for variant in variants}

    def take(self, variant: str, step: Callable[[], None], warm: bool) -> None:
        """Take a step. It counts if it is `warm`."""
        dist.barrier()
        before = on_the_wire()
        begin = time.perf_counter()
        step()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if warm:
            self.seconds[variant].append(float(took))
            self.wire[variant].append(on_the_wire() - before)


def add_arguments(parser: argparse.ArgumentParser, hosts: int, variants: Sequence[str]) -> None:
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--hosts", type=int, default=hosts)
    parser.add_argument("--variants", nargs="+", default=variants, help="ours: fields of FlashConfig, as JSON")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)


def compare(module: str, theirs: Sequence[str], base: str, arguments: argparse.Namespace) -> None:
    """Run a module's ranks at every rate, show their steps against those of `base`, and keep them in --json.

    A rank is told its variants by --rank and ends by `finish` with the attributes of Times and what else it has.
    """
    os.environ["FLASH_ALLREDUCE_AUTOLOAD"] = "0"
    command = [sys.executable, "-m", module, *sys.argv[1:], "--rank", *theirs, *arguments.variants]
    tables = []
    for rate in arguments.rates:
        with netlab.hosts(arguments.hosts, rate) as lab:
            found = result_of(lab.run(command, timeout=arguments.timeout)[0])
        tables.append({"rate": rate, "variants": _rows(found.pop("seconds"), found.pop("wire"), base), **found})
        _show(tables[-1], base)
    if arguments.json:
        kept = {key: value for key, value in vars(arguments).items() if key not in ("json", "rank")}
        about = {**machine.about(), "arguments": kept, "base": base}
        write_json(arguments.json, {"about": about, "tables": tables})


def _rows(seconds: dict[str, list[float]], wire: dict[str, list[int]], base: str) -> dict[str, dict[str, Any]]:
    """Medians."""
    medians = {variant: statistics.median(times) for variant, times in seconds.items()}
    return {
        variant: {
            "step, seconds": took,
            "x base": medians[base] / took,
            "wire, bytes": statistics.median(wire[variant]),
            "each step": seconds[variant],
        }
        for variant, took in medians.items()
    }


def _show(entry: dict[str, Any], base: str) -> None:
    print(f"\nlinks of {entry['rate']}, against {base}\n{'':44}{'step ms':>9}{'x':>9}{'wire MB':>9}")
    for variant, row in entry["variants"].items():
        times = f"{1e3 * row['step, seconds']:9.0f}{row['x base']:9.2f}{row['wire, bytes'] / 1e6:9.2f}"
        print(f"{variant:44}{times}", flush=True)
