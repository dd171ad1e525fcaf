"""SQNR against bits per element, metadata included: this codec's settings, other projects' formats, floats.

    python -m benchmarks.accuracy --json accuracy.json --plot accuracy.png

SQNR = 10 log10(sum of squares of the exact values / sum of squares of the error), in dB. The frontier of a tensor
is the best SQNR that any setting reaches at a number of bits per element or fewer. --check: exit status 1 if a
peer lies above it anywhere.
"""

from __future__ import annotations

import argparse
import bisect
import json
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

from benchmarks.accuracy_tensors import RANKS, Sample, captured, made_up
from benchmarks.peer_codecs import FLOATS, PEERS, Peer
from flash_allreduce_plugin.cli.demo.model import ModelSize
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import GROUP_SIZES, Format

BUDGETS = (2.25, 2.5, 2.75, 3.25, 3.5, 4.25, 4.5, 5.3, 6.3, 8.25)
SPIKES_GAIN_DB = 4.0  # asked of 2 bits with spikes over 2 bits without, on activations
ALIKE_DB = 0.05  # of settings so close, the one with the fewest options is named


@dataclass(frozen=True, slots=True)
class Point:
    """What a format reaches on a tensor."""

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
        """None: nothing is that small."""
        count = bisect.bisect_right(self.points, bits, key=lambda point: point.bits)
        return self.points[count - 1] if count else None


def settings() -> list[Format]:
    """Every codec with rounding to nearest."""
    flags = (False, True)
    return [
        Format(bits, group_size, symmetric, spikes=spikes, hadamard=hadamard, mse=mse, compact=compact)
        for bits, group_size, symmetric, compact, spikes, hadamard, mse in product(
            range(2, 9), GROUP_SIZES, flags, flags, flags, flags, flags
        )
        if not (symmetric and compact)
    ]


def label(c: Format) -> str:
    """4/128 Hm: 4 bits, groups of 128; s symmetric, c compact, p spikes, H Hadamard, m range="mse"."""
    flags = (c.symmetric, c.compact, c.spikes, c.hadamard, c.mse)
    options = "".join(letter for letter, on in zip("scpHm", flags, strict=True) if on)
    return f"{c.bits}/{c.group_size} {options}".strip()


SETTINGS = {label(c): c for c in settings()}


def sqnr_db(exact: Tensor, result: Tensor) -> float:
    signal = float(torch.linalg.vector_norm(exact, dtype=torch.float64))
    noise = float(torch.linalg.vector_norm(exact - result, dtype=torch.float64))
    return 20 * math.log10(signal / noise) if noise else math.inf


def one_rounding(c: Format, x: Tensor) -> tuple[Tensor, int]:
    """As a peer's round trip: what the receiver sees, and the bytes."""
    payload = torch.empty(1, c.payload_bytes(x.numel()), dtype=torch.uint8)
    output = torch.empty(1, x.numel())
    rows.encode(x.view(1, -1), payload, c)
    rows.decode(payload, output, c)
    return output.view(x.shape), payload.numel()


def our_all_reduce(c: Format, ranks: Sequence[Tensor]) -> Tensor:
    """Two roundings, as the collective does them."""
    inputs = torch.stack([x.flatten() for x in ranks])
    payloads = torch.empty(len(ranks), c.payload_bytes(inputs.shape[1]), dtype=torch.uint8)
    rows.encode(inputs, payloads, c)
    summed = torch.empty_like(payloads[0])
    rows.decode_sum_encode(payloads, summed, c, c, 1.0)
    output = torch.empty(1, inputs.shape[1])
    rows.decode(summed.view(1, -1), output, c)
    return output.view(ranks[0].shape)


def all_reduce(peer: Peer, ranks: Sequence[Tensor]) -> Tensor:
    """Two roundings: of each rank's tensor and of the sum, in float32, of what they decode to."""
    total = torch.zeros_like(ranks[0])
    for x in ranks:
        total += peer.round_trip(x)[0]
    return peer.round_trip(total)[0]


def point(name: str, round_trip: Callable[[Tensor], tuple[Tensor, int]], x: Tensor) -> Point:
    decoded, count = round_trip(x)
    return Point(name, 8 * count / x.numel(), sqnr_db(x, decoded))


def measure(sample: Sample, peers: Sequence[Peer]) -> dict[str, Any]:
    """Points of every setting, peer and float on one tensor, and two roundings beside the frontier's best."""
    print(sample.name, file=sys.stderr, flush=True)  # a tensor takes seconds
    x = sample.one
    ours = {name: point(name, partial(one_rounding, c), x) for name, c in SETTINGS.items()}
    frontier = Frontier(ours.values())
    others = []
    for peer in (*peers, *FLOATS):
        theirs = point(peer.name, peer.round_trip, x)
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
            ranks = sample.ranks[count]
            exact = torch.stack(ranks).double().sum(0)
            assert best
            row[f"our dB at {count} ranks"] = sqnr_db(exact, our_all_reduce(SETTINGS[best.name], ranks))
            row[f"dB at {count} ranks"] = sqnr_db(exact, all_reduce(peer, ranks))
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
    """Of the settings within ALIKE_DB of the best, the best of those with the fewest options."""
    least = max(db.values()) - ALIKE_DB
    return min(
        (name for name, value in db.items() if value >= least),
        key=lambda name: (len(name.partition(" ")[2]), -db[name]),
    )


def spikes_gains(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """2 bits on activations: what spikes add in the same groups, with the whole range and with the searched one."""
    rows: list[dict[str, Any]] = []
    for size in GROUP_SIZES:
        for result in results:
            if result["kind"] == "activation":
                db = {key: result["ours"][f"2/{size} {key}".strip()].db for key in ("", "m", "p", "pm")}
                named = {"plain": db[""], "mse": db["m"], "spikes": db["p"], "spikes, mse": db["pm"]}
                rows.append({"tensor": result["tensor"], "group_size": size, **named})
    return rows


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """In Markdown."""
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(f'{cell:.2f}' if isinstance(cell, float) else str(cell) for cell in row)} |")


def _by_format(results: Sequence[dict[str, Any]], is_peer: bool) -> list[list[object]]:
    """A row for each format: bits, then what our best at as many bits or fewer is ahead of it, in dB."""
    rows: list[list[object]] = []
    for i, first in enumerate(results[0]["others"]):
        if first["is peer"] != is_peer:
            continue
        each = [result["others"][i] for result in results]
        worst = min(range(len(each)), key=lambda n: each[n]["difference"])
        low, high = min(row["bits"] for row in each), max(row["bits"] for row in each)
        bits = f"{low:.3f}" if high - low < 5e-4 else f"{low:.3f} to {high:.3f}"
        row: list[object] = [first["name"], bits, each[worst]["difference"], results[worst]["tensor"]]
        row += [each[worst]["ours"], statistics.fmean(r["difference"] for r in each)]
        row += [sum(r["difference"] < 0 for r in each)]
        for count in RANKS:
            leads = [
                r[f"our dB at {count} ranks"] - r[f"dB at {count} ranks"] for r in each if f"dB at {count} ranks" in r
            ]
            row += [min(leads), statistics.fmean(leads)] if leads else ["", ""]
        rows.append(row)
    return rows


def report(results: Sequence[dict[str, Any]], budgets: Sequence[float]) -> None:
    head = ["format", "bits", "least lead", "on", "our setting there", "mean lead", "tensors lost"]
    head += [f"{count} ranks: {what}" for count in RANKS for what in ("least", "mean")]
    print(f"\nOur best setting at as many bits or fewer, less the format's, in dB, over {len(results)} tensors: one")
    print("rounding, and the same setting in an all-reduce, two roundings, over 2 and 8 ranks.")
    table(head, _by_format(results, is_peer=True))
    print("\nFloating-point formats, as codes instead of whole numbers: the same.")
    table(head, _by_format(results, is_peer=False))
    names = [row["name"] for row in results[0]["others"] if row["is peer"]]
    print("\nOne rounding by tensor: the peer's dB (our lead).")
    table(
        ["tensor", *names],
        [
            [r["tensor"], *(f"{o['dB']:.1f} ({o['difference']:+.2f})" for o in r["others"] if o["is peer"])]
            for r in results
        ],
    )
    print("\nThe best setting at a budget of bits per element: its dB. 4/128 Hm: 4 bits, groups of 128; s symmetric,")
    print("c compact, p spikes, H Hadamard, m range=mse. Of settings as good to within")
    print(f"{ALIKE_DB} dB, the one with the fewest options is named.")
    rows = []
    for result in results:
        cells = []
        for budget in budgets:
            db = {name: at.db for name, at in result["ours"].items() if at.bits <= budget}
            cells.append(f"{max(db.values()):.1f} ({simplest(db)})")
        rows.append([result["tensor"], *cells])
    table(["tensor", *map(str, budgets)], rows)
    for kind in ("activation", "activation gradient", "weight gradient", "made up", ""):
        chosen = [result for result in results if kind in ("", result["kind"])]
        if chosen:
            print(f"\nOne setting for every {kind or 'tensor'}: dB behind each one's own best.")
            rows = [[budget, *recommended(chosen, budget)] for budget in budgets]
            table(["bits", "setting", "mean", "largest"], rows)
    gains = spikes_gains(results)
    if gains:
        print(f"\n2 bits on activations, dB: plain, range=mse, spikes, both (asked: {SPIKES_GAIN_DB:.0f} over plain).")
        rows, columns = [], ("plain", "mse", "spikes", "spikes, mse")
        for size in GROUP_SIZES:
            of_size = [row for row in gains if row["group_size"] == size]
            more = [row["spikes, mse"] - row["plain"] for row in of_size]
            bits = [Format(2, size, spikes=spikes).bits_per_element for spikes in (False, True)]
            means = [statistics.fmean(row[key] for row in of_size) for key in columns]
            rows.append([size, *bits, *means, min(more), "yes" if min(more) >= SPIKES_GAIN_DB else "no"])
        table(["groups", "bits", "bits with spikes", *columns, "least gain of both", "reached"], rows)


def plot(results: Sequence[dict[str, Any]], path: Path, limit: int = 6) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    middle = [r for r in results if r["tensor"] in ("Gaussian", "outlier channels", "Student t, 3 degrees")]
    middle += [r for r in results if r["tensor"].endswith(", MLP, late")]
    shown = middle[:limit]
    figure, axes = pyplot.subplots(-(-len(shown) // 3), 3, figsize=(13, 4 * -(-len(shown) // 3)), squeeze=False)
    for axis, result in zip(axes.flat, shown, strict=False):
        points = result["frontier"].points
        axis.step([p.bits for p in points], [p.db for p in points], where="post", label="this codec, best setting")
        for is_peer, marker, name in ((True, "o", "peers"), (False, "x", "floats")):
            rows = [row for row in result["others"] if row["is peer"] == is_peer]
            axis.plot([r["bits"] for r in rows], [r["dB"] for r in rows], marker, markersize=4, label=name)
        axis.set(title=result["tensor"], xlabel="bits per element", ylabel="SQNR, dB", xlim=(2, 9.5))
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=70)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 17, help="elements of a made-up tensor (default 131072)")
    parser.add_argument("--steps", type=int, default=200, help="of the training; 0: made-up tensors only")
    parser.add_argument("--hidden", type=int, default=256, help="of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a peer wins anywhere")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    samples = made_up(arguments.numel, arguments.seed)
    results = [measure(sample, PEERS) for sample in samples]
    if arguments.steps:
        size = ModelSize(arguments.hidden, arguments.layers, heads=8, sequence=64, batch=8)
        results += [measure(sample, PEERS) for sample in captured(size, arguments.steps, arguments.seed)]
    report(results, BUDGETS)
    lost = wins(results)
    print("\n" + ("\n".join(lost) if lost else "No peer wins anywhere."))
    if arguments.json:
        arguments.json.write_text(json.dumps(_as_json(results, arguments)) + "\n")
    if arguments.plot:
        plot(results, arguments.plot)
    return 1 if arguments.check and lost else 0


def _as_json(results: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """What was measured; of our settings those on the frontier."""
    about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    about |= {key: getattr(arguments, key) for key in ("numel", "steps", "hidden", "layers", "seed")}
    tensors = [
        {
            "tensor": result["tensor"],
            "kind": result["kind"],
            "frontier": [[at.name, at.bits, round(at.db, 3)] for at in result["frontier"].points],
            "others": [{key: _rounded(value) for key, value in row.items()} for row in result["others"]],
        }
        for result in results
    ]
    return {"about": about, "tensors": tensors, "spikes": spikes_gains(results)}


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value


if __name__ == "__main__":
    sys.exit(main())
