"""The cost of the guard: measured calls against the same calls without a measurement, alternately.

    python -m lab.benchmarks.guard --json guard.json
    python -m lab.benchmarks.guard --link 1gbit                # as root: hosts of a rate, netlab.py

A measured call has quality_interval 1 and a min_sqnr_db below every measurement: it measures, and gathers the errors of
the call before. "local" and "exact" are the measures. A ratio is the median over the rounds of the time with the
measurement over the time without. The last column is the share that quality_interval 100 adds to a call, measured
locally: a hundredth of the difference. A training step also computes, so its share is smaller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import Any

from flash_allreduce_plugin.cli import ranks
from flash_allreduce_plugin.cli.launch import LOOPBACK
from lab.benchmarks import command

INTERVAL = 100
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {},
    "local": {"quality_interval": 1, "min_sqnr_db": -1000.0},
    "exact": {"quality_interval": 1, "min_sqnr_db": -1000.0, "quality_measure": "exact"},
}


def measure(settings: dict[str, Any], say: Any) -> list[dict[str, Any]]:
    """In every rank: a row for each collective, size and width."""
    import torch
    import torch.distributed as dist

    import flash_allreduce_plugin as fap
    from flash_allreduce_plugin.cli import timing

    torch.set_num_threads(1)
    world, rank, rows = dist.get_world_size(), dist.get_rank(), []
    for mib in settings["mib"]:
        numel = (mib << 20) // 4 // world * world
        x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        whole, shard = x.clone(), torch.empty(numel // world)
        for bits in settings["bits"]:
            for collective in ("all_reduce", "reduce_scatter", "all_gather"):
                variants = {}
                for name, fields in VARIANTS.items():
                    config = fap.FlashConfig(bits=bits, min_bytes=0, **fields)
                    site = fap.Site(f"{name} {collective} {mib} {bits}")
                    variants[name] = {
                        "all_reduce": partial(fap.all_reduce, whole, dist.ReduceOp.AVG, config=config, site=site),
                        "reduce_scatter": partial(fap.reduce_scatter, shard, x, config=config, site=site),
                        "all_gather": partial(fap.all_gather, whole, shard, config=config, site=site),
                    }[collective]
                before = partial(whole.copy_, x)
                seconds = timing.interleaved(variants, settings["rounds"], settings["calls"], before=before, warmup=2)
                ratios = {
                    name: statistics.median(on / off for on, off in zip(seconds[name], seconds["off"], strict=True))
                    for name in ("local", "exact")
                }
                row = {"collective": collective, "mib": mib, "bits": bits, "seconds": statistics.median(seconds["off"])}
                rows.append({**row, **ratios, "overhead": (ratios["local"] - 1) / INTERVAL})
                say(row=rows[-1])
    return rows


def shown(row: dict[str, Any]) -> str:
    return (
        f"{row['collective']:15}{row['mib']:5}{row['bits']:6}{1e3 * row['seconds']:10.2f}{row['local']:9.3f}"
        f"{row['exact']:9.3f}{100 * row['overhead']:12.3f} %"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default=LOOPBACK, help="loopback, or a rate such as 1gbit (root)")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64], help="of the whole tensor, fp32")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=5, help="in a row, in each round")


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    settings = {key: getattr(arguments, key) for key in ("mib", "bits", "rounds", "calls")}
    print(f"{arguments.ranks} ranks over {arguments.link}, one core a rank, fp32")
    print(f"{'collective':15}{'MiB':>5}{'bits':>6}{'off ms':>10}{'local':>9}{'exact':>9}{f'at {INTERVAL}':>14}")
    rows = ranks.run(
        "lab.benchmarks.guard:measure",
        settings,
        world_size=arguments.ranks,
        link=arguments.link,
        on_message=lambda content: print(shown(content["row"]), flush=True),
    )
    if rows:
        keep({"rows": rows})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
