"""The tables of `plan --list` and `plan --check`, and how all of plan's tables look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.plan_measured import WITHIN
from benchmarks.plan_measured import Row as Measured
from benchmarks.plan_published import Row as Published
from flash_allreduce_plugin.cli.plan import presets as presets

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def grid(title: str, columns: Sequence[str], left: int = 1) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        text = number < left or column in ("source", "note", "what pays")
        table.add_column(column, justify="left" if text else "right", overflow="fold")
    return table


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def show_presets(console: Console) -> None:
    table = grid("Models (--model)", ["name", "G parameters", "published", "layers", "hidden", "sequence", "source"])
    for name, preset in presets.MODELS.items():
        m = preset.model
        counts = (f"{m.parameters / 1e9:.3f}", f"{preset.published / 1e9:.4g}", str(m.layers), str(m.hidden))
        table.add_row(name, *counts, str(m.sequence), preset.source)
    console.print(table)
    columns = ["name", "a node", "ranks", "--intra", "--inter", "adapters", "peak TFLOPS"]
    table = grid("Clusters (--cluster NAME, NAME-RANKSxNODES)", columns, left=2)
    for name, machine in presets.CLUSTERS.items():
        peak = f"{presets.DEVICES[machine.device].peak_flops / 1e12:g}"
        table.add_row(
            name, machine.about, str(machine.ranks), machine.intra, machine.inter, str(machine.adapters), peak
        )
    table.add_row(presets.CPU, "a core of docs/benchmarks.md, gloo", "1", "", "ethernet-1g", "1", "0.27, reached")
    console.print(table)
    table = grid("Links (--intra, --inter), GB/s in one direction", ["name", "reached", "peak", "source"])
    for name, link in presets.LINKS.items():
        table.add_row(name, f"{link.reached / 1e9:.4g}", f"{link.peak / 1e9:g}", link.source)
    console.print(table)


def show_check(measured: Sequence[Measured], published: Sequence[Published], console: Console) -> None:
    columns = ["", "measured ms", "predicted ms", "", "communication ms", "predicted ms", ""]
    table = grid("This project's own measurements on rate-limited links (benchmarks/results)", columns)
    for row in measured:
        cells = [row.what, f"{1e3 * row.measured:.1f}", f"{1e3 * row.predicted:.1f}", f"{row.error:+.1%}"]
        if not row.within:
            cells[3] += " beyond"
        if row.communication:
            there, said = row.communication
            cells += [f"{1e3 * there:.0f}", f"{1e3 * said:.0f}", f"{said / there - 1:+.0%}"]
        table.add_row(*cells)
    console.print(table)
    worst = max(abs(row.error) for row in measured)
    beyond = sum(not row.within for row in measured)
    console.print(
        f"{len(measured)} rows, the worst {worst:.1%} off, {beyond} beyond {WITHIN:.0%}. Communication alone is shown, "
        "not judged: it is a difference of two measured steps.",
        highlight=False,
    )
    table = grid("Published by others: shown, not judged", ["source", "what", "published", "predicted", "", "note"], 2)
    for other in published:
        difference = other.difference
        table.add_row(
            other.source, other.what, _span(other.published), _span(other.predicted),
            "" if difference is None else f"{difference:+.0%}", other.note,
        )  # fmt: skip
    console.print(table)


def _span(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    low, high = values
    return f"{low:.2f} x" if low == high else f"{low:.2f} to {high:.2f} x"
