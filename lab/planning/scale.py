"""Estimate an all-reduce over thousands of ranks: the fastest way, and the size of its messages.

    python -m lab.planning.scale                       16 to 16384 H100, 8 a node
    python -m lab.planning.scale --ranks 1024 --mib 64 --bits 8

Chunks, slabs, messages and bytes come from the code (policy.make_plan, collectives/flat.py and two_level.py). Links,
kernels and the host are those of `flash-allreduce plan`. Full precision is the faster of NCCL's ring and tree, with the
latencies of NCCL's model (src/graph/tuning.cc: protocol Simple, NVLink and network). A message between two ranks takes
--message seconds of the device besides its bytes, an assumption. No part has run on a GPU. "KiB": size of a message, in
two levels of one between nodes. "pad": sent bytes over those of the elements. "layout": seconds on this machine, once
for each size of tensor.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from flash_allreduce_plugin.cli.plan import cost_model
from flash_allreduce_plugin.cli.plan.cost_model import Cluster, Group, Traffic
from flash_allreduce_plugin.cli.plan.inputs import cluster_of
from flash_allreduce_plugin.collectives import flat, two_level
from flash_allreduce_plugin.collectives.chunks import queued_chunk_bytes
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import Plan, Site, make_plan
from flash_allreduce_plugin.policy.topology import neighbours
from lab.benchmarks import command

MIB, PER_NODE = 1 << 20, 8
RING_NVLINK, RING_NETWORK = 3.4e-6, 14.0e-6  # seconds a step
TREE_NVLINK, TREE_NETWORK, TREE_SPEED = 4.0e-6, 14.0e-6, 0.9


def traffic(nbytes: int, ranks: int) -> Traffic:
    return Traffic("call", None, "all_reduce", nbytes // 2, 2, 1, Group(ranks, PER_NODE))


def full_precision(nbytes: int, ranks: int, c: Cluster) -> tuple[float, str]:
    """Return the seconds of bf16 and the algorithm."""
    nodes = ranks // PER_NODE
    link = cost_model.full_precision(traffic(nbytes, ranks), replace(c, latency=0.0, far=0.0))[1]
    ring = link + 2 * (ranks - nodes) * RING_NVLINK + 2 * (nodes - 1) * RING_NETWORK
    tree = link / TREE_SPEED + 2 * ((PER_NODE - 1) * TREE_NVLINK + math.log2(nodes) * TREE_NETWORK)
    return min((ring, "ring"), (tree, "tree"))


def plan_of(nbytes: int, ranks: int, bits: int, levels: int) -> Plan:
    """Return the plan of a call over NCCL, as in api/reductions.py."""
    hierarchical: Any = {"intra_bits": 8, "inter_bits": bits, "ranks_per_node": PER_NODE} if levels == 2 else "off"
    plan = make_plan(
        "all_reduce",
        numel=nbytes // 2,
        dtype=torch.bfloat16,
        world_size=ranks,
        op="sum",
        site=Site("scale"),
        config=FlashConfig(bits=bits, min_bytes=0, hierarchical=hierarchical),
        nodes=neighbours(ranks, PER_NODE) if levels == 2 else None,
    )
    assert isinstance(plan, Plan)
    chunk_bytes = queued_chunk_bytes(plan.chunk_bytes, plan.widest.payload_bytes(nbytes // 2))
    return replace(plan, chunk_bytes=chunk_bytes)


def quantized(nbytes: int, ranks: int, bits: int, levels: int, c: Cluster, message: float) -> dict[str, Any]:
    """Return the seconds of the device and of the host, and the parts of the call."""
    plan, numel, nodes = plan_of(nbytes, ranks, bits, levels), nbytes // 2, ranks // PER_NODE
    if levels == 1:
        _, link, kernels = cost_model.flat(traffic(nbytes, ranks), c, plan.gather)
        chunks = flat._chunks_of_tensor(numel, plan, ranks).count
        sent = flat.sent_bytes("all_reduce", numel, plan, ranks)
        exchanges, messages = 2 * chunks, 2 * chunks * (ranks - 1)
        needed = 2 * (ranks - 1) * plan.gather.payload_bytes(numel) / ranks
        far, layout = sent / messages, 0.0
    else:
        _, link, kernels = cost_model.two_levels(traffic(nbytes, ranks), c, plan.gather)
        begin = time.perf_counter()
        slabs = len(two_level._slabs_of_tensor(numel, plan))
        sent, to_nodes = two_level.sent_bytes("all_reduce", numel, plan, 0)
        layout = time.perf_counter() - begin
        exchanges, messages = 4 * slabs, 2 * slabs * (PER_NODE - 1 + nodes - 1)
        far = to_nodes / (2 * slabs * (nodes - 1))
        narrow, wide = plan.gather.payload_bytes(numel), plan.inside.payload_bytes(numel) if plan.inside else 0
        between = 2 * (nodes - 1) / nodes * narrow / PER_NODE
        needed = (PER_NODE - 1) / PER_NODE * (wide + narrow) + between
    host = c.host[0] + (exchanges / 2 - 1) * c.host[1]
    device = c.start + max(link, kernels) + messages * message
    return {
        "seconds": max(device, host),
        "device": device,
        "host": host,
        "exchanges": exchanges,
        "messages": messages,
        "message bytes": far,
        "sent / needed": sent / needed,
        "layout": layout,
    }


def row(nbytes: int, ranks: int, bits: int, c: Cluster, message: float) -> dict[str, Any]:
    seconds, by = full_precision(nbytes, ranks, c)
    found: dict[str, Any] = {"ranks": ranks, "bytes": nbytes, "full precision": seconds, "by": by}
    for levels, name in ((1, "flat"), (2, "two levels")):
        if levels == 1 or ranks > PER_NODE:
            found[name] = quantized(nbytes, ranks, bits, levels, c, message)
    times: dict[str, float] = {"full precision": seconds}
    times.update((name, found[name]["seconds"]) for name in ("flat", "two levels") if name in found)
    found["fastest"] = min(times, key=lambda name: times[name])
    return found


def shown(one: dict[str, Any]) -> str:
    text = f"{one['ranks']:7}{one['bytes'] // MIB:7}{1e3 * one['full precision']:9.2f} {one['by']}"
    for name in ("flat", "two levels"):
        if name in one:
            way = one[name]
            limit = "*" if way["host"] > way["device"] else " "
            text += f"{1e3 * way['seconds']:10.2f}{limit}{way['message bytes'] / 1024:9.1f}{way['exchanges']:6}"
            text += f"{way['sent / needed']:6.2f}"
    text += f"{one['two levels']['layout']:8.3f}" if "two levels" in one else ""
    return f"{text}   {one['fastest']}"


def of_whole_nodes(text: str) -> int:
    ranks = int(text)
    if ranks % PER_NODE:
        raise argparse.ArgumentTypeError(f"{ranks}: expected a multiple of {PER_NODE}, the ranks of a node")
    return ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=of_whole_nodes, nargs="+", default=[16, 64, 256, 1024, 16384])
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 128, 1024], help="of the bf16 tensor")
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--cluster", default="h100", help="of `flash-allreduce plan --list`")
    parser.add_argument("--message", type=float, default=1e-6, help="seconds a message, assumed")


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    print(f"{'ranks':>7}{'MiB':>7}{'bf16 ms':>9}      {'flat ms':>10}{'KiB':>9}{'exch.':>6}{'pad':>6}", end="")
    print(f"{'two ms':>10}{'KiB':>9}{'exch.':>6}{'pad':>6}{'layout':>8}   fastest (*: the host's time)")
    rows = []
    for ranks in arguments.ranks:
        cluster, _ = cluster_of(f"{arguments.cluster}-{PER_NODE}x{ranks // PER_NODE}")
        for mib in arguments.mib:
            rows.append(row(mib * MIB, ranks, arguments.bits, cluster, arguments.message))
            print(shown(rows[-1]), flush=True)
    keep({"bits": arguments.bits, "rows": rows})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
