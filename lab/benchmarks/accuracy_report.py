"""The tables and the picture of docs/decide/accuracy.md, from the --json file of lab/benchmarks/accuracy.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = list[Sequence[object]]

#: (in the results, in a table's head). "" is every tensor.
KINDS = (
    ("activation", "activations"),
    ("activation gradient", "activation gradients"),
    ("weight gradient", "weight gradients"),
    ("parameter step", "AdamW steps"),
    ("", "all"),
)
#: Rows of the documents: our settings on real tensors, then those on other tensors, and the others' formats.
_OURS = {
    *("8/128", "8/128 b", "8/256 bp", "6/128", "6/128 b", "6/128 bp", "5/128 bp", "4/128", "4/128 b", "4/128 bp"),
    *("4/32 cm", "4/256 bm", "2/128 bp"),
}
_SETTINGS = {*("8/128", "8/64 c", "6/128", "4/128", "4/64 c", "4/32 cm", "4/256 bm", "4/256 bHm", "3/32 cm", "2/32 cm")}
_OTHERS = {
    *("QuickReduce INT8", "QuickReduce INT6", "QuickReduce INT4", "FlyDSL INT4", "FBGEMM 8", "FBGEMM 4"),
    *("DeepSpeed INT8", "DeepSpeed INT4", "TACO FP8", "torchft FP8", "MXFP8 e4m3", "NVFP4", "MXFP4"),
    "Flash Comm. V2 INT4 spikes",
}
PLOTTED = ("Gaussian", "Student t, 3 degrees", "outlier channels")


def others(tensor: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the other formats on a tensor, which the results keep as columns."""
    columns = tensor["others"]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def lead(row: dict[str, Any], ranks: int | None = None) -> float | None:
    """Our best setting at as many bits or fewer, less the format, in dB: of one rounding, or of an all-reduce over
    `ranks`. None: not measured.
    """
    if ranks is None:
        return -math.inf if row["difference"] is None else row["difference"]
    ours = row.get(f"our dB at {ranks} ranks")
    return None if ours is None else ours - row[f"dB at {ranks} ranks"]


def _leads(result: dict[str, Any], name: str, ranks: int | None = None) -> list[float]:
    found = [lead(row, ranks) for tensor in result["tensors"] for row in others(tensor) if row["name"] == name]
    return [value for value in found if value is not None]


def _formats(result: dict[str, Any], is_peer: bool) -> list[str]:
    return [row["name"] for row in others(result["tensors"][0]) if row["is peer"] == is_peer]


def _by_format(result: dict[str, Any], names: Sequence[str]) -> Rows:
    rows: Rows = [["format", "bits", "one rounding: least", "mean", "8 ranks: least", "mean"]]
    for name in names:
        bits = [row["bits"] for tensor in result["tensors"] for row in others(tensor) if row["name"] == name]
        least, most = f"{min(bits):.3f}", f"{max(bits):.3f}"
        cells: list[object] = [name, least if least == most else f"{least} to {most}"]
        for leads in (_leads(result, name), _leads(result, name, 8)):
            cells += [f"{min(leads):+.2f}", f"{statistics.fmean(leads):+.2f}"] if leads else ["", ""]
        rows.append(cells)
    return rows


def by_kind(result: dict[str, Any]) -> Rows:
    """A row a format, ours (the named settings) and the others', by bits: mean dB of one rounding by kind of tensor."""
    shown = [(kind, head) for kind, head in KINDS if any(tensor["kind"] == kind for tensor in result["tensors"])]
    found: list[tuple[float, list[object]]] = []
    for name, of in result["settings"].items():
        cells = [f"{of['dB'][head]:.1f}" for _, head in shown]
        found.append((of["bits"], [f"**{name}**", f"{of['bits']:g}", *cells]))
    for name in (row["name"] for row in others(result["tensors"][0])):
        if " g" in name:  # floats in this codec's groups, which no project sends
            continue
        rows = [(tensor["kind"], row) for tensor in result["tensors"] for row in others(tensor) if row["name"] == name]
        bits = statistics.fmean(row["bits"] for _, row in rows)
        means = [statistics.fmean(row["dB"] for of_kind, row in rows if of_kind == kind) for kind, _ in shown]
        found.append((bits, [name, f"{bits:.2f}", *(f"{mean:.1f}" for mean in means)]))
    header: Sequence[object] = ["format", "bits", *(head for _, head in shown)]
    return [header, *(cells for _, cells in sorted(found, key=lambda pair: -pair[0]))]


def shown(result: dict[str, Any]) -> Rows:
    """Return by_kind for the documents, with fewer settings and formats."""
    header, *rows = by_kind(result)
    return [header, *(row for row in rows if str(row[0]).strip("*") in (_OURS if "**" in str(row[0]) else _OTHERS))]


def rivals(result: dict[str, Any]) -> Rows:
    """A row a rival's format: bits, then the least and the mean of our leads."""
    return _by_format(result, _formats(result, is_peer=True))


def lost(result: dict[str, Any]) -> Rows:
    """A row a rival's format and tensor on which it is ahead of us, once rounded or in an all-reduce; or "none"."""
    rows: Rows = [["format", "tensor", "one rounding", "2 ranks", "8 ranks"]]
    for tensor in result["tensors"]:
        for row in others(tensor):
            leads = [lead(row, ranks) for ranks in (None, 2, 8)]
            if row["is peer"] and any(value is not None and value < 0 for value in leads):
                cells = ["" if value is None else f"{value:+.2f}" for value in leads]
                rows.append([row["name"], tensor["tensor"], *cells])
    return rows if len(rows) > 1 else [*rows, ["none", "", "", "", ""]]


def floats(result: dict[str, Any]) -> Rows:
    """The floating-point formats as published; of those with this codec's groups, the ones ahead of us somewhere."""

    def ahead(name: str) -> bool:
        return any(value < 0 for ranks in (None, 2, 8) for value in _leads(result, name, ranks))

    return _by_format(result, [name for name in _formats(result, False) if " g" not in name or ahead(name)])


def settings(result: dict[str, Any]) -> Rows:
    """Return a row a setting that the documents show: its bits, and its dB on each kind of tensor."""
    named = {name: of for name, of in result["settings"].items() if name in _SETTINGS}
    heads = list(next(iter(named.values()))["dB"])
    rows: Rows = [["setting", "bits", *heads]]
    return rows + [
        [name, f"{of['bits']:g}", *(f"{of['dB'][head]:.1f}" for head in heads)] for name, of in named.items()
    ]


def budgets(result: dict[str, Any]) -> Rows:
    """A row a budget of bits: the setting least behind each tensor's own best, by kind of tensor."""
    of_kind = result["recommended"]
    shown = [(kind, head) for kind, head in KINDS if kind in of_kind]
    rows: Rows = [["bits", *(head for _, head in shown)]]
    for i, (budget, *_) in enumerate(of_kind[""]):
        cells = [of_kind[kind][i][1:] for kind, _ in shown]
        rows.append([f"{budget:g}", *(f"{name}: {mean:.2f}, {most:.2f}" for name, mean, most in cells)])
    return rows


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The frontier of a few tensors, and where the other formats lie."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tensors = results[0]["tensors"]
    shown = [tensor for name in PLOTTED for tensor in tensors if tensor["tensor"] == name]
    shown += [tensor for tensor in tensors if tensor["tensor"].endswith(", MLP, late")]
    rows = -(-len(shown) // 3)
    figure = Figure(figsize=(13, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 3, squeeze=False)
    for axis, tensor in zip(axes.flat, shown, strict=False):
        _, bits, db = zip(*tensor["frontier"], strict=True)
        axis.step(bits, db, where="post", label="this codec, best setting")
        for is_peer, marker, name in ((True, "o", "rivals"), (False, "x", "floats")):
            formats = [row for row in others(tensor) if row["is peer"] == is_peer]
            axis.plot([r["bits"] for r in formats], [r["dB"] for r in formats], marker, markersize=4, label=name)
        axis.set(title=tensor["tensor"], xlabel="bits per element", ylabel="SQNR, dB", xlim=(2, 9.5))
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.savefig(path, dpi=70)
