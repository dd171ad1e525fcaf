"""The fused two-shot all-reduce: its time against that of its memory traffic, and the latency of small calls.

    python -m lab.benchmarks.cuda_two_shot --ranks 2 --json cuda_two_shot.json

With as many GPUs as ranks each rank has one. With fewer the ranks share the first one, take turns on it, and wait for
each other across those turns: such a time is not that of a machine with several GPUs. "traffic us" is the time of all
bytes read and written by the ranks of a GPU, at the speed of a device-to-device copy in the same run: a rank reads the
tensor and writes its payload, reads a payload and writes one, reads a payload and writes the tensor. Other rows: the
same kernel in one shot, up to 1 MiB, and the other path over the same group. Times are medians over the rounds of the
slowest rank's times, for bf16 in groups of 128.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from lab.benchmarks import command

KIB = 1 << 10
ELEMENT = 2
LIMIT = "FLASH_ALLREDUCE_TWO_SHOT_BYTES"
ONE_SHOT = "FLASH_ALLREDUCE_ONE_SHOT_BYTES"
MIB = KIB * KIB
# Name -> the two limits. The first sets the size of the workspace.
WAYS = {"one shot": (16 * MIB, MIB), "fused": (16 * MIB, 0), "other": (0, 0)}


def traffic_bytes(numel: int, c: Format) -> int:
    """Return the bytes that one rank reads and writes, in its memory and in its peers'."""
    return 2 * ELEMENT * numel + 4 * c.payload_bytes(numel)


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 256 MiB."""
    source = torch.zeros(256 * KIB * KIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = statistics.median(timed(lambda: target.copy_(source), 1) for _ in range(10))
    return 2 * source.numel() / seconds


def timed(call: Any, count: int) -> float:
    """Seconds of one of `count` calls in a row."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3 / count


def slowest(seconds: float) -> float:
    value = torch.tensor(seconds)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def measure(rank: int, world: int, store: str, quick: bool, out: str) -> None:
    """In a rank; rank 0 writes the results."""
    several = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank if several else 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    symmetric: Any = importlib.import_module("flash_allreduce_plugin.collectives.two_shot")
    speed = 0.0
    for turn in range(world):  # one rank at a time: they may share the memory
        if turn == rank:
            speed = copy_speed(device)
        dist.barrier()
    rounds, calls = (5, 5) if quick else (10, 10)
    rows = []
    for kib in (64, 1024) if quick else (4, 64, 256, 1024, 4096, 16384):
        for bits in (8, 4):
            c, config = Format(bits, 128), fap.FlashConfig(bits=bits, min_bytes=0)
            x = torch.randn(kib * KIB // ELEMENT, device=device).bfloat16()
            times: dict[str, list[float]] = {name: [] for name in WAYS if name != "one shot" or kib <= KIB}
            taken = symmetric.counts[symmetric.TWO_SHOT]
            for round_ in range(rounds + 1):
                for name in times:
                    os.environ[LIMIT], os.environ[ONE_SHOT] = map(str, WAYS[name])
                    dist.barrier()
                    took = slowest(timed(lambda x=x, config=config: fap.all_reduce(x, config=config), calls))
                    if round_:
                        times[name].append(took)
                    x.normal_()
            taken = symmetric.counts[symmetric.TWO_SHOT] - taken
            traffic = traffic_bytes(x.numel(), c) * (1 if several else world)
            fused = statistics.median(times["fused"])
            rows.append(
                {
                    "KiB": kib,
                    "bits": bits,
                    "us": 1e6 * fused,
                    "one shot us": 1e6 * statistics.median(times["one shot"]) if "one shot" in times else None,
                    "other path us": 1e6 * statistics.median(times["other"]),
                    "traffic us": 1e6 * traffic / speed,
                    "share": traffic / speed / fused,
                    "took the kernel": taken == (rounds + 1) * calls * (len(times) - 1),
                }
            )
    if rank == 0:
        about = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "ranks": world,
            "a GPU each": several,
            "copy GB/s": 1e-9 * speed,
            "calls": dict(symmetric.counts),
        }
        Path(out).write_text(json.dumps({"about": about, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true")


def run(arguments: argparse.Namespace, keep: command.Keep) -> int:
    if not torch.cuda.is_available() or importlib.util.find_spec("flash_allreduce_plugin.collectives.two_shot") is None:
        print("torch finds no CUDA device, or this package has no two-shot kernel")
        return 2
    if torch.cuda.device_count() < arguments.ranks:  # where it is set torch maps no multicast address (NVLS)
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out.json")
        spawned = (arguments.ranks, str(Path(folder) / "store"), arguments.quick, out)
        torch.multiprocessing.spawn(measure, spawned, nprocs=arguments.ranks)
        results: dict[str, Any] = json.loads(Path(out).read_text())
    print(", ".join(f"{key} {value}" for key, value in results["about"].items()))
    print(f"{'KiB':>7}{'bits':>6}{'us':>10}{'one shot us':>13}{'other path us':>15}{'traffic us':>12}{'share':>7}")
    for row in results["rows"]:
        print(
            f"{row['KiB']:7}{row['bits']:6}{row['us']:10.1f}"
            + (" " * 13 if row["one shot us"] is None else f"{row['one shot us']:13.1f}")
            + f"{row['other path us']:15.1f}{row['traffic us']:12.2f}{row['share']:7.2f}"
            + ("" if row["took the kernel"] else "  NOT the kernel")
        )
    keep(results)
    return 0 if all(row["took the kernel"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
