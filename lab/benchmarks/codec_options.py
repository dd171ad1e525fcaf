"""The codec with each option on, against the same width with it off, on one core.

    python -m lab.benchmarks.codec_options

64 MiB of fp32 (--numel 65536: in the cache), groups of 128. All are timed in turn, round after round; a number is the
median over the rounds of the speed with the option over the speed without it in the same round. "call" is the codec's
part of an all_reduce on two ranks: encode, sum of two and encode again, decode. "feedback" is error feedback, with
residuals of 8 bits or bf16. Groups below 128 have no codebook.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flash_allreduce_plugin.codec import ops, rows
from flash_allreduce_plugin.codec.format import MIN_CODEBOOK_GROUP_SIZE, Draw, Format, residual_format
from lab.benchmarks import command
from lab.benchmarks.codec import time_in_turn

OPTIONS: dict[str, dict[str, bool]] = {
    "compact": {"compact": True},
    "hadamard": {"hadamard": True},
    "stochastic": {"stochastic": True},
    "spikes": {"spikes": True},
    "mse": {"mse": True},
    "spikes, mse": {"spikes": True, "mse": True},
    "hadamard, mse": {"hadamard": True, "mse": True},
    "compact, mse": {"compact": True, "mse": True},
    "codebook": {"codebook": True},
    "codebook, mse": {"codebook": True, "mse": True},
    "codebook, spikes": {"codebook": True, "spikes": True},
}
FEEDBACK = {"feedback": torch.uint8, "feedback, bf16": torch.bfloat16}
PARTS = ("encode", "decode", "sum of 2", "sum of 2, encode")


def runs_of(
    c: Format, x: torch.Tensor, y: torch.Tensor, kept: torch.dtype | None = None
) -> dict[str, Callable[[], Any]]:
    """kept: of the residual; None: no error feedback."""
    payloads = torch.empty(2, c.payload_bytes(x.numel()), dtype=torch.uint8)
    rows.encode(x.expand(2, -1), payloads, c)
    spare = torch.empty_like(payloads[:1])
    runs: dict[str, Callable[[], Any]] = {
        "encode": partial(rows.encode, x.view(1, -1), spare, c, Draw(1)),
        "decode": partial(rows.decode, payloads[:1], y.view(1, -1), c),
        "sum of 2": partial(rows.decode_sum, payloads, y, c, 1.0),
        "sum of 2, encode": partial(rows.decode_sum_encode, payloads, spare[0], c, c, 1.0, Draw(1)),
    }
    if kept is not None:
        width = residual_format(c.group_size).record_bytes if kept is torch.uint8 else c.group_size
        before, after = (torch.zeros(c.groups(x.numel()), width, dtype=kept) for _ in range(2))
        runs["encode"] = partial(rows.encode_feedback, x.view(1, -1), spare, before, 0.8, c)
        runs["sum of 2, encode"] = partial(rows.decode_sum_encode_feedback, payloads, spare[0], after, c, c, 1.0, 0.8)
    return runs


def measure(bits: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    x = torch.randn(arguments.numel, generator=torch.Generator().manual_seed(0))
    y = torch.empty_like(x)
    plain = Format(bits, arguments.group_size)
    variants = {"": runs_of(plain, x, y)}
    small = arguments.group_size < MIN_CODEBOOK_GROUP_SIZE
    chosen = {name: options for name, options in OPTIONS.items() if not (small and "codebook" in options)}
    variants |= {name: runs_of(replace(plain, **options), x, y) for name, options in chosen.items()}
    variants |= {name: runs_of(plain, x, y, kept) for name, kept in FEEDBACK.items()}
    runs = {f"{name}/{part}": run for name, parts in variants.items() for part, run in parts.items()}
    times = time_in_turn(runs, arguments.rounds)
    for name in variants:
        parts = [times[f"{name}/{part}"] for part in ("encode", "sum of 2, encode", "decode")]
        # Of the sum each of two ranks has half.
        times[f"{name}/call"] = [encode + half / 2 + decode for encode, half, decode in zip(*parts, strict=True)]
    rows = []
    for name in (*chosen, *FEEDBACK):
        speeds = {
            part: statistics.median(
                off / on for off, on in zip(times[f"/{part}"], times[f"{name}/{part}"], strict=True)
            )
            for part in (*PARTS, "call")
        }
        rows.append({"bits": bits, "option": name, **speeds})
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements (default 16777216: 64 MiB)")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--rounds", type=int, default=9)


def run(arguments: argparse.Namespace, keep: command.Keep) -> None:
    torch.set_num_threads(1)
    rows = [row for bits in arguments.bits for row in measure(bits, arguments)]
    print(f"one core, {ops.cpu_capability()}, {arguments.numel} fp32, groups of {arguments.group_size}: on / off")
    print(f"{'bits':>4}  {'option':16}" + "".join(f"{part:>18}" for part in (*PARTS, "call")))
    for row in rows:
        print(f"{row['bits']:4}  {row['option']:16}" + "".join(f"{row[part]:18.2f}" for part in (*PARTS, "call")))
    keep({"rows": rows})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
