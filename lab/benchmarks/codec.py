"""The codec on one core, or on several, against memcpy, torch's add_ and torch's own FBGEMM row-wise codec.

    python -m lab.benchmarks.codec

64 MiB of fp32, groups of 128. All are timed in turn, round after round; a ratio is the median over the rounds of
the two times of the same round. "encode / memcpy" is the speed at which encode reads over that at which
`y.copy_(x)` reads. "sum of 2 / add_" is the time to decode and sum two payloads over that of `y.add_(x)` on the
tensors they stand for: below 1 is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flash_allreduce_plugin.codec import ops, reference, rows
from flash_allreduce_plugin.codec.format import Format
from lab.benchmarks import command

FBGEMM = {
    8: (torch.ops.quantized.embedding_bag_byte_prepack, torch.ops.quantized.embedding_bag_byte_unpack),
    4: (torch.ops.quantized.embedding_bag_4bit_prepack, torch.ops.quantized.embedding_bag_4bit_unpack),
}


def time_in_turn(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_:  # the first touches the memory
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """Median over the rounds of time of a / time of b."""
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))


def measure(numel: int, group_size: int, symmetric: bool, rounds: int) -> list[dict[str, Any]]:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    y, z = torch.empty_like(x), x.clone()
    measured = []
    for bits in (8, 7, 6, 5, 4, 3, 2):
        c = Format(bits, group_size, symmetric)
        payloads = torch.empty(2, c.payload_bytes(numel), dtype=torch.uint8)
        rows.encode(x.expand(2, -1), payloads, c)
        one, again = payloads[:1], torch.empty_like(payloads[0])
        spare = torch.empty_like(one)
        runs: dict[str, Callable[[], Any]] = {
            "memcpy": partial(y.copy_, x),
            "read": x.sum,
            "encode": partial(rows.encode, x.view(1, -1), spare, c),
            "add_": partial(z.add_, x),
            "sum of 2": partial(rows.decode_sum, payloads, y, c, 1.0),
            "sum of 2, encode": partial(rows.decode_sum_encode, payloads, again, c, c, 1.0),
            "decode": partial(rows.decode, one, y.view(1, -1), c),
        }
        if bits in FBGEMM:
            pack, unpack = FBGEMM[bits]
            rows_of_group = x.view(-1, group_size)
            runs["fbgemm encode"] = partial(pack, rows_of_group)
            runs["fbgemm decode"] = partial(unpack, pack(rows_of_group))
        times = time_in_turn(runs, rounds)
        rows.decode(one, y.view(1, -1), c)
        noise = (y - x).double().square().sum()
        row = {
            "bits": bits,
            "bits per element": c.bits_per_element,
            "SQNR dB": 10 * float(torch.log10(x.double().square().sum() / noise)),
            "x.sum() GB/s": 4e-9 * numel / statistics.median(times["read"]),
            "encode GB/s": 4e-9 * numel / statistics.median(times["encode"]),
            "decode GB/s": 4e-9 * numel / statistics.median(times["decode"]),
            "encode / memcpy": 1 / ratio(times, "encode", "memcpy"),
            "sum of 2 / add_": ratio(times, "sum of 2", "add_"),
            "sum of 2, encode / add_": ratio(times, "sum of 2, encode", "add_"),
        }
        if bits in FBGEMM:
            row["fbgemm encode GB/s"] = 4e-9 * numel / statistics.median(times["fbgemm encode"])
            row["encode x fbgemm"] = ratio(times, "fbgemm encode", "encode")
            row["decode x fbgemm"] = ratio(times, "fbgemm decode", "decode")
        measured.append(row)
    return measured


def _cell(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:{width}.{0 if isinstance(value, int) else 2}f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements (default 16777216: 64 MiB)")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="of torch's, for all that is timed")
    parser.add_argument("--rounds", type=int, default=15)


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    torch.set_num_threads(arguments.threads)
    # Correctness first: a fast codec that is wrong has no speed.
    sample = torch.randn(1, 10_000)
    for bits in range(2, 9):
        c = Format(bits, arguments.group_size, arguments.symmetric)
        ours = torch.empty(1, c.payload_bytes(sample.numel()), dtype=torch.uint8)
        theirs = torch.empty_like(ours)
        rows.encode(sample, ours, c)
        reference.encode(sample, theirs, c)
        assert torch.equal(ours, theirs), f"{bits} bits: the compiled codec and the reference differ"
    measured = measure(arguments.numel, arguments.group_size, arguments.symmetric, arguments.rounds)
    threads = f"{arguments.threads} thread{'s' * (arguments.threads > 1)}"
    print(f"{threads}, {ops.cpu_capability()}, {arguments.numel} fp32, groups of {arguments.group_size}")
    columns = list(measured[0])  # 8 bits has them all
    print("  ".join(f"{name:>6}" for name in columns))
    for row in measured:
        print("  ".join(_cell(row.get(name), max(len(name), 6)) for name in columns))
    keep({"rows": measured})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
