"""all_reduce against gloo's own, over rate-limited hosts or loopback.

    python -m benchmarks.collectives --hosts 2 --rate 1gbit        needs root: makes hosts with netlab
    python -m benchmarks.collectives --hosts 2 --rate loopback

Every variant is timed in turn, round after round, so that a machine that drifts drifts for all of them; a time is
the median over the rounds of the slowest rank's, and what counts is the ratio. "of the line" is the time that the
bytes sent take at the link's rate of payload, divided by the time measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import netlab


def measure(arguments: argparse.Namespace) -> None:
    """In a rank: time every variant; rank 0 prints one JSON object."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.get_world_size()
    tensor = torch.randn(arguments.numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    half = tensor.bfloat16()
    variants: dict[str, tuple[Callable[[], Any], float]] = {}

    def plain(name: str, input: torch.Tensor) -> None:
        sent = 2 * (world - 1) / world * input.numel() * input.element_size()
        variants[name] = (partial(dist.all_reduce, input), sent)

    plain("gloo fp32", tensor.clone())
    plain("gloo bf16", half.clone())
    for bits in arguments.bits:
        for name, input in (("fp32", tensor), ("bf16", half)):
            config = fap.FlashConfig(
                bits=bits, min_bytes=0, chunk_bytes=arguments.chunk_bytes or fap.FlashConfig().chunk_bytes
            )
            fap.reset_stats()
            fap.all_reduce(input.clone(), config=config)
            sent = float(fap.stats()["bytes_sent"])

            variants[f"INT{bits} of {name}"] = (partial(fap.all_reduce, input.clone(), config=config), sent)

    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(arguments.rounds + 1):
        for name, (run_variant, _) in variants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(arguments.calls):
                run_variant()
            took = torch.tensor((time.perf_counter() - start) / arguments.calls)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if round_:  # the first round allocates
                times[name].append(float(took))
    if dist.get_rank() == 0:
        print(json.dumps({name: {"seconds": times[name], "sent": sent} for name, (_, sent) in variants.items()}))
    dist.destroy_process_group()


def launch(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks; rank 0's measurements."""
    command = [sys.executable, "-m", "benchmarks.collectives", "--rank", *sys.argv[1:]]
    if arguments.rate == "loopback":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = command[1:]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        out = subprocess.run(
            [*torchrun, f"--nproc-per-node={arguments.hosts}", *script],
            env=environment, check=True, capture_output=True, text=True, timeout=arguments.timeout,
        ).stdout  # fmt: skip
    else:
        with netlab.hosts(arguments.hosts, arguments.rate) as lab:
            out = lab.run(command, timeout=arguments.timeout)[0]
    results: dict[str, Any] = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    return results


def table(results: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    line = None if arguments.rate == "loopback" else netlab.goodput(arguments.rate) / 8
    rows = []
    medians = {name: statistics.median(r["seconds"]) for name, r in results.items()}
    for name, result in results.items():
        rows.append(
            {
                "variant": name,
                "ms": 1e3 * medians[name],
                "bytes sent": int(result["sent"]),
                "x gloo fp32": medians["gloo fp32"] / medians[name],
                "x gloo bf16": medians["gloo bf16"] / medians[name],
                "of the line": result["sent"] / line / medians[name] if line else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, or loopback (default 1gbit)")
    parser.add_argument("--numel", type=int, default=1 << 23, help="elements (default 8388608)")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1, help="in a row, with nothing that aligns the ranks between")
    parser.add_argument("--chunk-bytes", type=int, default=0, help="default: the configuration's")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return measure(arguments)
    rows = table(launch(arguments), arguments)
    print(f"all_reduce of {arguments.numel} elements, {arguments.hosts} ranks, {arguments.rate}")
    print(f"{'':14}{'ms':>8}{'bytes sent':>12}{'x fp32':>8}{'x bf16':>8}{'of the line':>13}")
    for row in rows:
        share = "" if row["of the line"] is None else f"{row['of the line']:.1%}"
        print(
            f"{row['variant']:14}{row['ms']:8.1f}{row['bytes sent']:12}{row['x gloo fp32']:8.2f}"
            f"{row['x gloo bf16']:8.2f}{share:>13}"
        )
    if arguments.json:
        kept = {key: value for key, value in vars(arguments).items() if key not in ("json", "rank")}
        about = {"machine": platform.processor(), "torch": torch.__version__, "arguments": kept}
        arguments.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2, default=str) + "\n")
    return None


if __name__ == "__main__":
    main()
