"""Sends between two hosts: the time of a message, quantized and in full precision.

    python -m lab.benchmarks.sends --link 1gbit        needs root: makes hosts with netlab

One rank and one core a host. "one way": rank 0 sends, rank 1 receives; "both ways": each sends and receives in one
batch. Full precision is torch.distributed's own. The variants alternate, so that a drift of the machine affects all of
them. A time is the median over the rounds of the slower rank's, from a barrier on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from flash_allreduce_plugin.cli import ranks
from lab.benchmarks import command

WARM_UP = 2  # rounds
FIGURES = {"INT8": 1.85, "INT4": 3.5}  # asked for, over bf16 at 1 Gbit/s


def measure(settings: dict[str, Any], say: ranks.Say) -> list[dict[str, Any]]:
    """In every rank: a row a direction and variant. settings: elements, dtype, bits, rounds."""
    import torch
    import torch.distributed as dist

    import flash_allreduce_plugin as fap

    torch.set_num_threads(1)
    rank = dist.get_rank()
    other = 1 - rank
    x = torch.randn(settings["elements"]).to(getattr(torch, settings["dtype"]))
    y = torch.empty_like(x)

    def one_way(module: Any, how: dict[str, Any]) -> None:
        if rank == 0:
            module.send(x, other, **how)
        else:
            module.recv(y, other, **how)

    def both_ways(module: Any, how: dict[str, Any]) -> None:
        operations = [dist.P2POp(dist.irecv, y, other), dist.P2POp(dist.isend, x, other)]
        for work in module.batch_isend_irecv(operations, **how):
            work.wait()

    variants: dict[str, tuple[Any, dict[str, Any]]] = {settings["dtype"]: (dist, {})}
    for bits in settings["bits"]:
        variants[f"INT{bits}"] = fap, {"config": fap.FlashConfig(bits=bits, min_bytes=0)}
    kinds: dict[str, Callable[..., None]] = {"one way": one_way, "both ways": both_ways}
    rows = []
    for kind, call in kinds.items():
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for round_ in range(WARM_UP + settings["rounds"]):
            for variant, (module, how) in variants.items():
                dist.barrier()
                begin = time.perf_counter()
                call(module, how)
                took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if round_ >= WARM_UP:
                    seconds[variant].append(float(took))
        full = statistics.median(seconds[settings["dtype"]])
        for variant, times in seconds.items():
            median = statistics.median(times)
            rows.append({"direction": kind, "variant": variant, "ms": 1e3 * median, "speed-up": full / median})
            say(row=rows[-1])
    return rows


def shown(row: dict[str, Any]) -> str:
    return f"{row['direction']:>10}{row['variant']:>10}{row['ms']:10.1f}{row['speed-up']:10.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", default="loopback", help="a rate such as 1gbit, or loopback (the default)")
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--rounds", type=int, default=15)


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    settings = {name: getattr(arguments, name) for name in ("elements", "dtype", "bits", "rounds")}
    print(f"{'direction':>10}{'':>10}{'ms':>10}{'speed-up':>10}")
    rows = ranks.run(
        "lab.benchmarks.sends:measure",
        settings,
        world_size=2,
        link=arguments.link,
        on_message=lambda content: print(shown(content["row"]), flush=True),
    )
    keep({"link": arguments.link, "rows": rows})
    if (arguments.link, arguments.dtype) == ("1gbit", "bfloat16"):
        missed = [shown(row) for row in rows if row["speed-up"] < FIGURES.get(row["variant"], 0)]
        print(f"asked: {FIGURES} over bf16; " + ("met" if not missed else "missed:\n" + "\n".join(missed)))


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
