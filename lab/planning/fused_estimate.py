"""Estimate the sizes at which the fused kernel wins, in one shot or in two: the source of the default limits.

    python -m lab.planning.fused_estimate

Not measured: estimated times of a bf16 all-reduce in one node, n elements in payloads of P bytes, N ranks, at 8 and 4
bits in groups of 128:

    two-shot   launch + 2 meetings + 2 (N-1)/N P over the link + encoding, summing P + P / N bytes, decoding
    one-shot   launch + 1 meeting  +   (N-1)   P over the link + encoding, summing N P + 2 n bytes
    usual      three kernels on the whole GPU and two exchanges in turn (lab/planning/cost_estimate.py)

The kernel has one block a stripe and multiprocessor, on at most a third of the GPU. It consists of the general kernels'
code, so it moves bytes at their share of a copy's speed, times its share of the GPU. No way is shorter than the host's
launches. A limit is the largest power of two at which a way is not slower than the next one, at both widths. Meetings,
launches and the latency of an exchange are assumptions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from flash_allreduce_plugin.cli.plan.cost_model import Shares
from flash_allreduce_plugin.cli.plan.presets import HOST_CALL, LAUNCH
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import two_shot
from flash_allreduce_plugin.collectives.two_shot import Limits
from lab.benchmarks import command
from lab.planning.cost_estimate import ELEMENT, H100, MACHINES, WIDTHS, Kernels, Machine, flat

SIZES = [1 << power for power in range(10, 27)]  # bytes of the tensor
PIECE = 1024  # elements
KERNELS = Kernels.assume(None)
#: Shares of a copy's speed. The fused kernel chooses its format at run time. So did the codec's kernels at 6 bits, from
#: which these were measured on an H100 at 64 MiB.
GENERAL = Shares(0.50, 0.38, 0.23, 0.19)


@dataclass(frozen=True)
class Box:
    """A node. processors: of a GPU. meeting: seconds from the last store of a rank to the first load of its peers."""

    machine: Machine
    nvlink: bool
    processors: int
    meeting: float
    source: str


L40 = next(machine for machine in MACHINES if "L40" in machine.name)
BOXES = (
    Box(H100, True, 132, 2e-6, "meeting: 2 us, an assumption"),
    Box(L40, False, 142, 3e-6, "meeting: 3 us, of the 4.0 us that launch, copies and one take (flashinfer/pull/5023)"),
)


def fused_seconds(numel: int, c: Format, box: Box, ranks: int, one_shot: bool) -> float:
    payload = c.payload_bytes(numel)
    stripes = -(-numel // (PIECE * (1 if one_shot else ranks)))
    blocks = min(stripes, two_shot.blocks_of([box.processors]))
    speed, shares = box.machine.copy * blocks / box.processors, GENERAL
    ends = ELEMENT * numel + payload
    summed = ranks * payload + ELEMENT * numel if one_shot else payload + payload / ranks
    kernel = (ends / shares.encode + summed / shares.decode_sum_encode) / speed
    if not one_shot:
        kernel += ends / shares.decode / speed
    sent = (ranks - 1) * payload * (1 if one_shot else 2 / ranks)
    return LAUNCH + (1 if one_shot else 2) * box.meeting + sent / box.machine.link + kernel


def with_host(seconds: float) -> float:
    """Return the seconds of a kernel's call with the host's time, which is that of any call."""
    return max(HOST_CALL + LAUNCH, seconds)


def usual_seconds(numel: int, c: Format, box: Box, ranks: int) -> float:
    return flat(numel, c, replace(box.machine, ranks=ranks), KERNELS).in_turn


def limit(faster: Callable[[int, Format], float], slower: Callable[[int, Format], float]) -> int:
    """Return the bytes of the largest tensor at which `faster` is faster, at every width; 0: none."""
    codecs = [Format(bits, 128) for bits in WIDTHS]
    sizes = (size for size in SIZES if all(faster(size // ELEMENT, c) <= slower(size // ELEMENT, c) for c in codecs))
    return max(sizes, default=0)


def limits(box: Box, ranks: int) -> Limits:
    def fused(one_shot: bool) -> Callable[[int, Format], float]:
        return lambda numel, c: fused_seconds(numel, c, box, ranks, one_shot)

    def usual(numel: int, c: Format) -> float:
        return usual_seconds(numel, c, box, ranks)

    def started(numel: int, c: Format) -> float:
        return with_host(fused_seconds(numel, c, box, ranks, one_shot=False))

    return Limits(limit(fused(True), fused(False)), limit(started, usual))


def run(_arguments: argparse.Namespace, keep: command.Keep) -> None:
    print(
        f"An estimate, not a measurement: kernels as an H100 measured them, {1e6 * LAUNCH:g} us a launch, "
        f"{1e6 * HOST_CALL:g} us of the host a call."
    )
    rows = []
    for box in BOXES:
        print(f"\n{box.machine.name}")
        for source in (*box.machine.sources[:2], box.source):
            print(f"    {source}")
        print(f"    {'ranks':>5}{'one shot up to KiB':>20}{'fused up to KiB':>17}", end="")
        print(f"{'us at the first: one shot':>27}{'two-shot':>10}{'usual':>8}   (8 bits; the kernel without the host)")
        for ranks in range(2, two_shot.MOST_RANKS + 1):
            found = limits(box, ranks)
            rows.append({"machine": box.machine.name, "ranks": ranks, **found._asdict()})
            numel, c = found.one_shot // ELEMENT, Format(8, 128)
            times = [fused_seconds(numel, c, box, ranks, True), fused_seconds(numel, c, box, ranks, False)]
            times.append(usual_seconds(numel, c, box, ranks))
            print(f"    {ranks:5}{found.one_shot / 1024:20g}{found.fused / 1024:17g}", end="")
            print("{:27.1f}{:10.1f}{:8.1f}".format(*(1e6 * seconds for seconds in times)))
    keep(rows)


if __name__ == "__main__":
    sys.exit(command.main(__doc__, lambda _: None, run))
