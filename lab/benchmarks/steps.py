"""Time training steps of several variants over slow links: one runner, and an adapter for each framework.

1. `over_links` creates hosts with links of one rate, and starts a rank on each.
2. There the adapter builds its variants and calls `in_turn`: in every round each variant takes one step, so that a
   machine that drifts drifts for all of them. The next round begins with the next variant.
3. The time of a step is the slowest rank's, "wire" the bytes that a host has sent on its interface.
4. `table` has the median of each variant, against the base's.

The adapters are step_time, pipeline_step, ddp_step, fsdp_step, deepspeed_step and dist_opt_step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.patching import Patchset
from lab.benchmarks import netlab
from lab.benchmarks.command import Keep
from lab.benchmarks.ranks import InRank, command, on_the_wire, result_of

#: A column of `show`: the key of a row, the factor of its value and the format.
Columns = Mapping[str, tuple[str, float, str]]
COLUMNS: Columns = {
    "step ms": ("step, seconds", 1e3, ".0f"),
    "x": ("x base", 1, ".2f"),
    "wire MB": ("wire, bytes", 1e-6, ".2f"),
}


SENT: Columns = {"MB sent": ("bytes sent", 1e-6, ".1f")}


class Times:
    """In a rank: of each step the slowest rank's seconds, and the bytes on the interface of this host.

    summed: the bytes are those of all hosts. Of the last step the plugin's counts are kept.
    """

    def __init__(self, variants: Sequence[str], summed: bool = False) -> None:
        self.seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        self.wire: dict[str, list[float]] = {variant: [] for variant in variants}
        self.sent: dict[str, float] = {}
        self.quantized: dict[str, dict[str, int]] = {}
        self.full_precision = 0  # bytes of a step
        self._summed = summed

    def take(self, variant: str, step: Callable[[str], None], warm: bool) -> None:
        """Take a step. The time counts if the step is `warm`."""
        fap.reset_stats()
        dist.barrier()
        before = on_the_wire()
        begin = time.perf_counter()
        step(variant)
        took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        stats = fap.stats()
        nbytes = torch.tensor([on_the_wire() - before, stats["bytes_sent"]], dtype=torch.float64)
        if self._summed:
            dist.all_reduce(nbytes)
        wire, self.sent[variant] = nbytes.tolist()
        self.full_precision = max(self.full_precision, stats["bytes_full_precision"])
        self.quantized[variant] = {name: site["quantized"] for name, site in stats["sites"].items()}
        if warm:
            self.seconds[variant].append(float(took))
            self.wire[variant].append(wire)

    def result(self, **more: Any) -> dict[str, Any]:
        """Return the measurements, for `table`."""
        kept = ("seconds", "wire", "sent", "quantized", "full_precision")
        return {**{name: getattr(self, name) for name in kept}, **more}


def in_turn(
    variants: Sequence[str],
    rounds: int,
    warm_up: int,
    step: Callable[[str], None],
    active: Callable[[str], AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
    summed: bool = False,
) -> Times:
    """In a rank: `rounds` in which each variant takes a step, after `warm_up` rounds that do not count.

    active: the variant in place, around each of its steps and outside of the time.
    """
    times = Times(variants, summed)
    for number in range(rounds + warm_up):
        for variant in rotated(variants, number):
            with active(variant):
                times.take(variant, step, warm=number >= warm_up)
    return times


@contextlib.contextmanager
def patched(patchset: Patchset) -> Iterator[None]:
    """Apply a patchset, and restore it."""
    patchset.apply()
    try:
        yield
    finally:
        patchset.restore()


@contextlib.contextmanager
def enabled(integration: Any, config: fap.FlashConfig) -> Iterator[None]:
    """Enable an integration, such as fap.megatron, and disable it."""
    integration.enable(config)
    try:
        yield
    finally:
        integration.disable()


def rotated(variants: Sequence[str], number: int) -> list[str]:
    """Return the variants from the `number`-th on."""
    at = number % len(variants)
    return [*variants[at:], *variants[:at]]


def add_arguments(
    parser: argparse.ArgumentParser, hosts: int, variants: Sequence[str] = (), rates: bool = True
) -> None:
    """Add the options of all step benchmarks.

    Args:
        hosts: how many hosts there are, without the option; 0: no option.
        rates: the option of the rates of the links.
        variants: ours, without the option; none: no option.
    """
    if rates:
        parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    if hosts:
        parser.add_argument("--hosts", type=int, default=hosts)
    if variants:
        parser.add_argument("--variants", nargs="+", default=variants, help="ours: fields of FlashConfig, as JSON")
    parser.add_argument("--timeout", type=float, default=1800)


def over_links(in_rank: InRank, rate: str, arguments: argparse.Namespace, **more: Any) -> Any:
    """Call a function in a rank on each of `hosts` hosts with links of that rate. Return rank 0's result."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "FLASH_ALLREDUCE_AUTOLOAD": "0"}
    line = [sys.executable, *command(in_rank, arguments, **more)]
    with netlab.hosts(arguments.hosts, rate) as lab:
        return result_of(lab.run(line, timeout=arguments.timeout)[0])


def compare(in_rank: InRank, variants: Sequence[str], base: str, arguments: argparse.Namespace, keep: Keep) -> None:
    """Time the variants at every rate of the options, show them against the base, and keep the tables."""
    tables = []
    for rate in arguments.rates:
        found = over_links(in_rank, rate, arguments, variants=[*variants])
        tables.append(table(rate, found, base))
        show(tables[-1], base)
    keep({"base": base, "tables": tables})


def at_shares(
    in_rank: InRank, variants: Sequence[str], exact: str, arguments: argparse.Namespace, **more: Any
) -> list[dict[str, Any]]:
    """Time and show the variants without a limit, and on links where communication has each of the shares.

    variants: the first sends nothing. exact: the variant that defines the shares. arguments: `shares`, and `rates` for
    links of these rates too. The rate follows from the bytes of a step and the time of the step that sends nothing.
    """
    tables = []

    def add(rate: str, found: dict[str, Any]) -> None:
        medians = {name: statistics.median(found["seconds"][name]) for name in (variants[0], exact)}
        share = 1 - medians[variants[0]] / medians[exact]
        tables.append(table(rate, found, exact, share=share, **more))
        show(tables[-1], exact, SENT)

    free = over_links(in_rank, "none", arguments, variants=[*variants], **more)
    add("none", free)
    arithmetic = statistics.median(free["seconds"][variants[0]])
    rates = list(arguments.rates)
    for share in arguments.shares:
        bits = 8 * free["full_precision"] / (arithmetic * share / (1 - share)) / netlab.PAYLOAD_SHARE
        rates.append(f"{bits / 1e6:.1f}mbit")
    for rate in rates:
        add(rate, over_links(in_rank, rate, arguments, variants=[*variants], **more))
    return tables


def table(rate: str, found: dict[str, Any], base: str, **more: Any) -> dict[str, Any]:
    """Return the medians of a run, and each variant against the base."""
    medians = {variant: statistics.median(times) for variant, times in found["seconds"].items()}
    rows = {
        variant: {
            "step, seconds": took,
            "x base": medians[base] / took,
            "x base, least and most": _range(found["seconds"][base], found["seconds"][variant]),
            "wire, bytes": statistics.median(found["wire"][variant]),
            "bytes sent": found["sent"][variant],
            "each step": [round(seconds, 6) for seconds in found["seconds"][variant]],
        }
        for variant, took in medians.items()
    }
    return {"rate": rate, **more, "variants": rows, "quantized": found["quantized"]}


def _range(base: Sequence[float], variant: Sequence[float]) -> list[float]:
    """Return the least and the largest speed-up of a round."""
    ratios = [full / took for full, took in zip(base, variant, strict=True)]
    return [round(min(ratios), 3), round(max(ratios), 3)]


def show(entry: dict[str, Any], base: str, more: Columns | None = None, title: str = "") -> None:
    """Print a table, a row a variant. A row of a variant that does not run says why."""
    columns = {**COLUMNS, **(more or {})}
    share = f", communication is {entry['share']:.0%} of its step" if "share" in entry else ""
    print(f"\n{title or 'links of ' + entry['rate']}, against {base}{share}")
    print(f"{'':44}" + "".join(f"{head:>{max(9, len(head) + 2)}}" for head in columns) + "  over the rounds")
    for variant, row in entry["variants"].items():
        line = f"{variant:44}"
        if "cannot run" in row:
            print(f"{line}  {row['cannot run']}")
            continue
        for head, (key, factor, form) in columns.items():
            value = row.get(key)
            line += f"{'' if value is None else format(value * factor, form):>{max(9, len(head) + 2)}}"
        print(f"{line}  {'{:.2f} to {:.2f}'.format(*row['x base, least and most'])}", flush=True)
