"""Estimate the time of an all-reduce on machines that we could not measure.

    python -m lab.planning.cost_estimate --kernels cuda_codec.json
    python -m lab.planning.cost_estimate                      without a file: the shares of presets.py
    python -m lab.planning.cost_estimate --share 0.9          one assumed share for all kernels

The estimate is for a bf16 tensor at 8 and 4 bits in groups of 128, from three kernels a rank and the sent bytes:

    encode              of the whole tensor              reads it, writes its payload
    decode_sum_encode   of the shard, N payloads         reads a payload's worth, writes an N-th
    decode              of the whole tensor              reads a payload, writes it
    link, both halves   2 (N-1)/N payloads over the link of one rank

A kernel takes its bytes over (share x the speed of a copy on that GPU), and at least a launch. "in turn" is the sum of
kernels and link, "overlapped" the longer of them: chunks in flight come close to it for large tensors. Both take at
least the host's time of the call. Between two nodes a flat call sends half of the payload to the other node. Two levels
(docs/use/clusters.md) send INT8 inside, and an L-th of the payload between. NCCL sends 2 (N-1)/N of the tensor at its
published bus bandwidth.

The estimate ignores barriers, contention inside a switch or between the sockets of a PCIe machine, that kernels and
transfers share a GPU's memory and processors, and that NCCL is slower than its bus bandwidth on small tensors.
Latencies are assumptions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flash_allreduce_plugin.cli.plan import presets
from flash_allreduce_plugin.cli.plan.cost_model import Kernel, Shares, host_seconds
from flash_allreduce_plugin.cli.plan.presets import DEVICES, LATENCY_NODES, LATENCY_NVLINK, LATENCY_PCIE, LAUNCH, LINKS
from flash_allreduce_plugin.codec.format import Format
from lab.benchmarks import command

ELEMENT = 2  # bytes of bf16
MIB = 1 << 20
SIZES = (1, 4, 16, 64, 256, 1024)  # MiB
WIDTHS = (8, 4)
INSIDE = Format(8, 128)
#: Flash Communication, arXiv 2412.04964: INT4 over NCCL's ring, above 64 MB, L40 on PCIe.
PAPER = 3.18
HOST = f"measured without a GPU (docs/trust/cuda.md), and {presets.LAUNCHES} launches of {1e6 * LAUNCH:g} us, assumed"


@dataclass(frozen=True)
class Machine:
    """`ranks` GPUs in `nodes` nodes. Speeds are the reached bytes a second of one rank, in one direction.

    copy: read and written together. shares: the kernels' shares of copy in the model (presets.py). link: inside a node.
    wire: between nodes, 0 with one node. bus: NCCL's bus bandwidth of an all_reduce. latency: seconds of one exchange
    among all ranks, assumed. sources: of the speeds.
    """

    name: str
    ranks: int
    nodes: int
    copy: float
    link: float
    wire: float
    bus: float
    latency: float
    sources: tuple[str, ...]
    shares: Mapping[int, Shares]


H100_COPY = f"copy: {DEVICES['h100'].copy.source}"
NVLINK = f"link: {LINKS['nvlink-h100'].source}"
INFINIBAND = f"wire: 47 GB/s, {LINKS['infiniband-400g'].source}"
H100 = Machine(
    "8 x H100, NVLink",
    ranks=8,
    nodes=1,
    copy=DEVICES["h100"].copy.reached,
    link=LINKS["nvlink-h100"].reached,
    wire=0.0,
    bus=480e9,
    latency=LATENCY_NVLINK,
    sources=(H100_COPY, NVLINK, "NCCL: 480 GB/s with NVLink SHARP (nccl-tests/issues/212)"),
    shares=DEVICES["h100"].shares,
)
NODES = replace(
    H100,
    name="2 nodes of 8 x H100, 8 x 400 Gbit/s a node",
    ranks=16,
    nodes=2,
    wire=LINKS["infiniband-400g"].reached,
    bus=H100.link,
    latency=LATENCY_NODES,
    sources=(
        H100_COPY,
        NVLINK,
        INFINIBAND + ", one a GPU",
        "NCCL: 370 GB/s, a ring over 8 adapters that NVLink limits, an assumption from the two before",
    ),
)
MACHINES = (
    H100,
    replace(
        H100,
        name="8 x H100, NVLink, NCCL ring",
        bus=H100.link,
        sources=(H100_COPY, NVLINK, "NCCL: 370 GB/s with NCCL_ALGO=RING (nccl-tests/issues/212)"),
    ),
    Machine(
        "8 x L40, PCIe 4.0 x16",
        ranks=8,
        nodes=1,
        copy=DEVICES["l40"].copy.reached,
        link=LINKS["pcie4"].reached,
        wire=0.0,
        bus=LINKS["pcie4"].reached,
        latency=LATENCY_PCIE,
        sources=(
            f"copy: {DEVICES['l40'].copy.source}",
            f"link: {LINKS['pcie4'].source}",
            "NCCL: the same 24 GB/s, an assumption: no published figure of 8 L40 was found. Between sockets both are "
            "slower, and the two-step exchange crosses them with half of its bytes",
        ),
        shares=DEVICES["l40"].shares,
    ),
    NODES,
    replace(
        NODES,
        name="2 nodes of 8 x H100, one 400 Gbit/s a node",
        wire=NODES.wire / 8,
        bus=NODES.wire * 2 * 15 / 16,
        sources=(
            H100_COPY,
            NVLINK,
            INFINIBAND + ", shared by 8 GPUs",
            "NCCL: 88 GB/s, a tree that sends the tensor once over the adapter, which 2 nodes allow "
            "(github.com/NVIDIA/nccl-tests/issues/196), an assumption of its best case",
        ),
    ),
)


@dataclass(frozen=True)
class Kernels:
    """The speeds of the kernels: a share of a copy by kernel, bits and bytes moved; seconds of a launch.

    Without points: one assumed share for all, or the shares of the machine's model.
    """

    points: dict[tuple[str, int], list[tuple[float, float]]]
    launch: float
    assumed: float | None = None

    @classmethod
    def of_json(cls, results: dict[str, Any]) -> Kernels:
        """Read the results of lab.benchmarks.cuda_codec: bf16, groups of 128."""
        points: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for row in results["rows"]:
            if row["dtype"] == "bf16" and row["group_size"] == 128 and not row["options"]:
                for kernel, share in row["share"].items():
                    points.setdefault((kernel, row["bits"]), []).append((float(row["bytes"][kernel]), float(share)))
        return cls({key: sorted(values) for key, values in points.items()}, 1e-6 * float(results["launch us"]))

    @classmethod
    def assume(cls, share: float | None) -> Kernels:
        return cls({}, LAUNCH, share)

    def share(self, kernel: Kernel, bits: int, nbytes: float, machine: Machine) -> float:
        """Return the share at a size: linear between two measured sizes, the nearest one's outside of them."""
        if self.assumed is not None:
            return self.assumed
        if not self.points:
            return float(getattr(machine.shares[bits], kernel))
        points = self.points[kernel, bits]
        for (low, a), (high, b) in itertools.pairwise(points):
            if low <= nbytes <= high:
                return a + (b - a) * (nbytes - low) / (high - low)
        return points[0][1] if nbytes < points[0][0] else points[-1][1]

    def seconds(self, kernel: Kernel, bits: int, nbytes: float, machine: Machine) -> float:
        return max(self.launch, nbytes / (machine.copy * self.share(kernel, bits, nbytes, machine)))


def kernel_seconds(numel: int, c: Format, machine: Machine, kernels: Kernels) -> float:
    """Return the seconds of encode, decode_sum_encode of a shard, and decode, of one rank."""
    payload = c.payload_bytes(numel)
    moved: dict[Kernel, float] = {
        "encode": ELEMENT * numel + payload,
        "decode_sum_encode": payload + payload / machine.ranks,
        "decode": payload + ELEMENT * numel,
    }
    return sum(kernels.seconds(kernel, c.bits, nbytes, machine) for kernel, nbytes in moved.items())


def flat_link_seconds(numel: int, c: Format, machine: Machine) -> float:
    """Return the seconds of both halves: over the link inside the node and over the wire between nodes, together."""
    payload, node = c.payload_bytes(numel), machine.ranks // machine.nodes
    inside = payload * (node - 1) / machine.ranks / machine.link
    between = payload * (machine.ranks - node) / machine.ranks / machine.wire if machine.nodes > 1 else 0.0
    return 2 * (max(inside, between) + machine.latency)


def nccl_seconds(numel: int, machine: Machine) -> float:
    """Return the seconds of NCCL, by nccl-tests' bus bandwidth: bytes / time x 2 (N-1)/N."""
    return ELEMENT * numel * 2 * (machine.ranks - 1) / machine.ranks / machine.bus + 2 * machine.latency


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call. kernels: of all kernels of a rank. link: of the slowest link. host: of all launches."""

    kernels: float
    link: float
    nccl: float
    host: float

    @property
    def in_turn(self) -> float:
        return max(self.kernels + self.link, self.host)

    @property
    def overlapped(self) -> float:
        return max(self.kernels, self.link, self.host)

    @property
    def speedups(self) -> tuple[float, float]:
        """Return the speed-ups over NCCL: in turn, overlapped."""
        return self.nccl / self.in_turn, self.nccl / self.overlapped


def flat(numel: int, c: Format, machine: Machine, kernels: Kernels) -> Estimate:
    return Estimate(
        kernel_seconds(numel, c, machine, kernels),
        flat_link_seconds(numel, c, machine),
        nccl_seconds(numel, machine),
        host_seconds(presets.host(), c.payload_bytes(numel)),
    )


def two_levels(numel: int, c: Format, machine: Machine, kernels: Kernels) -> Estimate:
    """Estimate two levels, N nodes of L ranks: INT8 inside, c between and back (docs/use/clusters.md).

    Kernels: encode inside; sums of L payloads of an L-th each; of N payloads of an (N L)-th; decode.
    """
    nodes, node = machine.nodes, machine.ranks // machine.nodes
    inside, between = INSIDE.payload_bytes(numel), c.payload_bytes(numel)
    moved: tuple[tuple[Kernel, int, float], ...] = (
        ("encode", INSIDE.bits, ELEMENT * numel + inside),
        ("decode_sum_encode", INSIDE.bits, inside + between / node),
        ("decode_sum_encode", c.bits, between / node + between / (node * nodes)),
        ("decode", c.bits, between + ELEMENT * numel),
    )
    link = (node - 1) / node * (inside + between) / machine.link
    wire = 2 * (nodes - 1) / nodes * between / node / machine.wire
    # Slabs are in flight on the link and on the wire together.
    return Estimate(
        sum(kernels.seconds(kernel, bits, nbytes, machine) for kernel, bits, nbytes in moved),
        max(link, wire) + 4 * machine.latency,
        nccl_seconds(numel, machine),
        host_seconds(presets.host(), inside),
    )


def rows_of(machine: Machine, kernels: Kernels) -> list[dict[str, Any]]:
    ways = {"flat": flat} if machine.nodes == 1 else {"flat": flat, "two levels": two_levels}
    rows = []
    for way, estimate in ways.items():
        for bits in WIDTHS:
            for mib in SIZES:
                e = estimate(mib * MIB // ELEMENT, Format(bits, 128), machine, kernels)
                rows.append(
                    {
                        "machine": machine.name,
                        "way": way,
                        "bits": bits,
                        "MiB": mib,
                        "kernels us": 1e6 * e.kernels,
                        "link us": 1e6 * e.link,
                        "host us": 1e6 * e.host,
                        "NCCL us": 1e6 * e.nccl,
                        "x in turn": e.speedups[0],
                        "x overlapped": e.speedups[1],
                    }
                )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernels", type=Path, help="what lab.benchmarks.cuda_codec --json wrote")
    parser.add_argument("--share", type=float, help="of a copy, all kernels alike (default without --kernels: a model)")


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    if arguments.kernels:
        kernels = Kernels.of_json(json.loads(arguments.kernels.read_text()))
        basis = f"kernels as measured in {arguments.kernels.name}"
    else:
        kernels = Kernels.assume(arguments.share)
        reach = "as an H100 measured them"
        if arguments.share is not None:
            reach = f"ASSUMED to reach {arguments.share:g} of a copy's speed"
        basis = f"kernels {reach}, and {1e6 * kernels.launch:g} us a launch, assumed"
    call, chunk = (1e6 * seconds for seconds in presets.host())
    print(f"An estimate, not a measurement: bf16, groups of 128; {basis}.")
    print(f"The host: {call:.0f} us a call, {chunk:.0f} us each chunk after the first ({HOST}).")
    rows = []
    for machine in MACHINES:
        print(f"\n{machine.name}")
        for source in machine.sources:
            print(f"    {source}")
        print(
            f"    {'way':12}{'bits':>4}{'MiB':>6}{'kernels us':>12}{'link us':>10}{'host us':>9}{'NCCL us':>10}", end=""
        )
        print(f"{'x in turn':>11}{'x overlapped':>14}")
        for row in rows_of(machine, kernels):
            rows.append(row)
            print(
                f"    {row['way']:12}{row['bits']:4}{row['MiB']:6}{row['kernels us']:12.0f}{row['link us']:10.0f}"
                f"{row['host us']:9.0f}{row['NCCL us']:10.0f}{row['x in turn']:11.2f}{row['x overlapped']:14.2f}"
            )
    print(f"\nThe paper: {PAPER} x over NCCL's ring, INT4, above 64 MB, L40 on PCIe (arXiv 2412.04964).")
    about = {"basis": basis, "sources": {m.name: m.sources for m in MACHINES}, "paper": PAPER}
    keep({"about": about, "rows": rows})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
