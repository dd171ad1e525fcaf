"""The tables of `plan --list`, and the style of all of plan's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flash_allreduce_plugin.cli.plan import presets as presets

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def grid(title: str, columns: Sequence[str], left: int = 1) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        text = number < left or column in ("source", "note", "fields that pay")
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
    columns = ["name", "a node", "ranks", "intra", "inter", "adapters", "peak TFLOPS", "GB"]
    table = grid("Clusters (--cluster NAME, NAME-RANKSxNODES)", columns, left=2)
    for name, machine in presets.CLUSTERS.items():
        device = presets.DEVICES[machine.device]
        figures = (str(machine.adapters), f"{device.peak_flops / 1e12:g}", f"{device.memory / 1e9:g}")
        table.add_row(name, machine.about, str(machine.ranks), machine.intra, machine.inter, *figures)
    table.add_row(
        presets.CPU, "a core, docs/decide/benchmarks.md, gloo", "1", "", "ethernet-1g", "1", "0.27, reached", ""
    )
    console.print(table)
    table = grid("Links (intra, inter of --layout), GB/s in one direction", ["name", "reached", "peak", "source"])
    for name, link in presets.LINKS.items():
        table.add_row(name, f"{link.reached / 1e9:.4g}", f"{link.peak / 1e9:g}", link.source)
    console.print(table)


def amount(nbytes: float) -> str:
    """Return bytes in GB, or in MB below one GB."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
