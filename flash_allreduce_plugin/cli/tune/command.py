"""`flash-allreduce tune`: measures when quantizing pays on the user's ranks, and writes the configuration."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flash_allreduce_plugin.cli import machine, ranks
from flash_allreduce_plugin.cli.bench import command as bench
from flash_allreduce_plugin.cli.bench.table import bytes_text
from flash_allreduce_plugin.cli.output import STDOUT, Output
from flash_allreduce_plugin.cli.tune.rank import FULL_PRECISION, TUNED
from flash_allreduce_plugin.config import FlashConfig

MEASURE = "flash_allreduce_plugin.cli.tune.rank:measure"
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
LIMIT = 1.05
CHUNKS = tuple(1 << power for power in range(17, 23))  # 128 KiB to 4 MiB
CHUNK_SIZES = (8 << 20, 64 << 20)
_SILENCE = 10.0  # seconds between two lines of progress without a terminal


def run_tune(
    *,
    collectives: str,
    bits: str,
    config: str | None,
    minbytes: str,
    maxbytes: str,
    datatype: str,
    seconds: float,
    rank_count: str | None,
    link: str,
    device: str,
    output_file: Path,
    json_file: Path | None,
    plot_file: Path | None,
) -> bool:
    """Measure, print, write. Return True if no size was slower than LIMIT x full precision with the choice.

    Raises ValueError for options that cannot work, before anything is started, and ranks.RanksError if a rank fails.
    """
    chosen = bench.names("--collective", collectives, COLLECTIVES)
    world, *more = bench.worlds_of(rank_count, link, chosen)
    if more:
        raise ValueError(f"--ranks {rank_count}: expected one number")
    sizes = bench.sizes(minbytes, maxbytes, 2)
    settings: dict[str, Any] = {
        "collectives": chosen,
        "sizes": sizes,
        "datatype": bench.names("--datatype", datatype, bench.DATATYPES, single=True)[0],
        "device": bench.device_of(device, world),
        "configs": {name: each.to_dict() for name, each in _configs(bits, config).items()},
        "chunks": sorted({*CHUNKS, FlashConfig().chunk_bytes}),
        "chunk_sizes": [size for size in CHUNK_SIZES if size <= sizes[-1]],
        "seconds": seconds,
        "limit": LIMIT,
    }
    if sizes[0] < 4 * world:
        raise ValueError(f"-b {minbytes}: expected at least {4 * world} bytes, an element a rank")
    for file in (output_file, json_file, plot_file):
        if file not in (None, STDOUT) and not file.parent.is_dir():
            raise ValueError(f"{file}: expected a file in a folder that exists")
    output = Output(json_file, width=100, silent=not ranks.speaks())
    result = _measured(output, settings, world, link)
    if result is None:  # another rank of a launcher: rank 0 prints
        return True
    result["written"] = _written(FlashConfig.from_dict(result["config"]))
    result["about"] = {**machine.about(), "link": link, "ranks": world, "datatype": settings["datatype"]}
    _show(output.results, result)
    output_file.write_text(json.dumps(result["written"], indent=1) + "\n", encoding="utf-8")
    output.results.print(f"wrote {output_file}: --flash-allreduce-config {output_file}, or in DeepSpeed's JSON")
    output.results.print(f'    "flash_allreduce": {{"config": "{output_file}"}}')
    output.write_json(result)
    if plot_file:
        plot([result], plot_file)
    return not any(row["ratio"] > LIMIT for row in result["check"])


def _measured(output: Output, settings: dict[str, Any], world: int, link: str) -> dict[str, Any] | None:
    with output.progress(_SILENCE) as doing:

        def on_message(message: dict[str, Any]) -> None:
            done, of = message["done"], message["of"]
            doing(message["doing"], done, of, more=f"{done} of {of}")

        result: dict[str, Any] | None = ranks.run(
            MEASURE,
            settings,
            world_size=world,
            link=link,
            device=settings["device"],
            on_message=on_message,
            timeout=24 * 3600.0,
        )
    return result


def _written(config: FlashConfig) -> dict[str, Any]:
    """Return the fields of the file: the width, the findings, and every field that differs from its default."""
    defaults = FlashConfig().to_dict()
    changed = {key: value for key, value in config.to_dict().items() if value != defaults[key]}
    return {"bits": config.bits, "chunk_bytes": config.chunk_bytes, "min_bytes": config.min_bytes, **changed}


def _configs(bits: str, config: str | None) -> dict[str, FlashConfig]:
    """Return the configurations by name, one for each of `bits`, which quantize calls of every size."""
    _, fields = bench.fields_of(config)
    for key in ("min_bytes", "chunk_bytes", "enabled"):
        if key in fields:
            raise ValueError(f"--config: {key} is a result of tune; leave it out")
    found = bench.configs(bits, config)
    return {name: each.model_copy(update={"min_bytes": 0}) for name, each in found.items()}


def _show(console: Console, result: dict[str, Any]) -> None:
    about, written = result["about"], result["written"]
    console.print(f"{about['ranks']} ranks, {about['link']}, {about['datatype']}, {about['machine']}, {about['date']}")
    chunks = {int(c): times for c, times in result["chunk_bytes"].items() if times}
    if chunks:
        table = Table(title="ms of a quantized call, by chunk_bytes", title_justify="left")
        sizes = list(next(iter(chunks.values())))
        for column in ("chunk_bytes", *(f"{bytes_text(int(size))}" for size in sizes)):
            table.add_column(column, justify="right")
        for chunk, times in chunks.items():
            mark = " <" if chunk == written["chunk_bytes"] else ""
            table.add_row(bytes_text(chunk) + mark, *(f"{1e3 * times[size]:.2f}" for size in sizes))
        console.print(table)
    widths = [name for name in result["sweep"][0]["seconds"] if name != FULL_PRECISION]
    for collective, pays in result["pays_from"].items():
        table = Table(title=f"{collective}, ms of a call; * the faster one", title_justify="left")
        columns = ("tuned", "tuned / full precision", "full precision against itself")
        for column in ("bytes", FULL_PRECISION, *widths, *columns):
            table.add_column(column, justify="right")
        for row, check in zip(result["sweep"], result["check"], strict=True):
            if row["collective"] != collective:
                continue
            best = min(row["seconds"], key=row["seconds"].__getitem__)
            cells = [f"{1e3 * row['seconds'][n]:.3f}{' *' if n == best else '  '}" for n in (FULL_PRECISION, *widths)]
            slow = " !" if check["ratio"] > LIMIT else ""
            how = "" if check["quantized"] else " (full)"
            table.add_row(
                bytes_text(row["size"]),
                *cells,
                f"{1e3 * check['seconds'][TUNED]:.3f}{how}",
                f"{check['ratio']:.3f}{slow}",
                f"{check['control']:.3f}",
            )
        console.print(table)
        for name, size in pays.items():
            where = "from no size on" if size is None else f"from {bytes_text(size)}"
            console.print(f"{name} pays {where}")
    worst = max(result["check"], key=lambda row: row["ratio"])
    control = max(result["check"], key=lambda row: row["control"])
    console.print(f"chosen: {json.dumps(written)}")
    if not written.get("enabled", True):
        console.print("quantizing is switched off: at least one of these collectives is never faster quantized here")
    console.print(
        f"slowest against full precision: {worst['ratio']:.3f} x ({worst['collective']} of "
        f"{bytes_text(worst['size'])}; allowed {LIMIT}); full precision against itself: {control['control']:.3f} x"
    )


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the speed-up over full precision by size, a panel for each run and collective, with the choice marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [(result, collective) for result in results for collective in result["pays_from"]]
    columns = min(len(shown), 2 if len(shown) == 4 else 3)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(5.5 * columns, 4.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for panel, (result, collective) in zip(panels.flat, shown, strict=False):
        sweep = [row for row in result["sweep"] if row["collective"] == collective]
        check = [row for row in result["check"] if row["collective"] == collective]
        sizes = [row["size"] for row in sweep]
        for name in (n for n in sweep[0]["seconds"] if n != FULL_PRECISION):
            panel.plot(
                sizes,
                [row["seconds"][FULL_PRECISION] / row["seconds"][name] for row in sweep],
                linewidth=1,
                label=f"{name} at every size",
            )
        speedups = [1 / row["ratio"] for row in check]
        panel.plot(sizes, speedups, "o", color="black", markersize=4, label="tuned (the better of both)")
        panel.plot(
            sizes, [1 / row["control"] for row in check], "+", color="gray", label="full precision against itself"
        )
        panel.axhline(1, color="gray", linewidth=0.8)
        panel.axhline(1 / LIMIT, color="gray", linewidth=0.8, linestyle=":")
        about = result["about"]
        title = f"{collective}, {about['ranks']} ranks, {about['link']}, {about['datatype']}"
        panel.set(xscale="log", yscale="log", title=title, xlabel="bytes of the tensor")
        marked = [size for size in sizes if math.log2(size) % 4 == 2]
        panel.set_xticks(marked, [bytes_text(size) for size in marked])
        panel.minorticks_off()
        ticks = [0.1, 0.25, 0.5, 1, 2, 4, 8]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.legend(fontsize=8)
    for panel in panels.flat[len(shown) :]:
        panel.remove()
    for panel in panels[:, 0]:
        panel.set_ylabel("speed-up over full precision")
    figure.savefig(path, dpi=110)
