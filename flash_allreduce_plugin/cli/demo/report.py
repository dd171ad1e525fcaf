"""The demo's output at the end: checks, table, picture, versions."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.cli.demo import slow_link
from flash_allreduce_plugin.cli.demo.training import Settings
from flash_allreduce_plugin.integrations.megatron import sequence_parallel, tensor_parallel

_SMOOTHING = 10  # steps, of the loss curves in the picture


#: The line that switches the plugin on, by framework, and its place. The README has the same lines.
SWITCH_ON = {
    "Megatron-LM": (
        "add to the command:",
        "--flash-allreduce --flash-allreduce-preset int8 --flash-allreduce-enabled auto",
    ),
    "DeepSpeed": ("add to the JSON configuration:", '"flash_allreduce": {"preset": "int8", "enabled": "auto"}'),
    "DDP, FSDP": (
        "set before the command:",
        "FLASH_ALLREDUCE_ATTACH=all FLASH_ALLREDUCE_PRESET=int8 FLASH_ALLREDUCE_ENABLED=auto",
    ),
}


def console() -> Console:
    """Return the console of the results on stdout, wide enough for the tables without a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=150)


def progress_console() -> Console:
    """Return the console of the progress on stderr."""
    return Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=150)


def expected_quantized(settings: Settings, preset: bool) -> dict[str, int]:
    """Return the quantized calls of each site in a training step of the demo's model.

    Two a layer, and the LM head's in the backward pass. A preset also has the embedding's and the gathers of sequence
    parallelism.
    """
    module = sequence_parallel if settings.sequence_parallel else tensor_parallel
    layers = settings.size.layers
    expected = {module.G_FORWARD.name: 2 * layers, module.LINEAR_DGRAD.name: 2 * layers + 1}
    if preset:
        expected[tensor_parallel.EMBEDDING.name] = 1
    if preset and settings.sequence_parallel:
        gathers = (sequence_parallel.LINEAR_GATHER, sequence_parallel.LINEAR_REGATHER, sequence_parallel.G_BACKWARD)
        expected |= {site.name: 2 * layers + 1 for site in gathers}
    return expected


def checks(result: dict[str, Any], settings: Settings) -> list[dict[str, Any]]:
    """Return the checks for exit status 0: [{"check", "held", "detail"}]."""
    found = []

    def check(name: str, held: bool, detail: str) -> None:
        found.append({"check": name, "held": bool(held), "detail": detail})

    for name, variant in result["variants"].items():
        finite = all(math.isfinite(loss) for loss in [*variant["losses"], variant["validation_loss"]])
        first = variant["losses"][0]
        check(f"{name}: losses are finite", finite, f"{len(variant['losses'])} steps")
        check(
            f"{name}: the loss fell",
            variant["validation_loss"] < first,
            f"loss {first:.3f} at the first step, {variant['validation_loss']:.3f} held out",
        )
        check(
            f"{name}: replicated parameters are equal on all ranks, bit for bit",
            variant["replicas_equal"],
            "SHA-256 of every parameter outside tensor parallelism",
        )
        if not variant["quantized"]:
            continue
        preset = variant["preset"] is not None
        expected = {site: count * settings.steps for site, count in expected_quantized(settings, preset).items()}
        fired = {site: counts["quantized"] for site, counts in variant["sites"].items() if counts["quantized"]}
        check(
            f"{name}: every expected seam fired",
            fired == expected,
            f"quantized calls {fired}, expected {expected}",
        )
        if preset:
            continue
        embedding = variant["sites"].get(tensor_parallel.EMBEDDING.name, {}).get("full_precision", {})
        check(
            f"{name}: the embedding stayed in full precision",
            embedding == {policy.EMBEDDING: settings.steps},
            f"calls by reason {embedding}",
        )
    return found


def show(console: Console, result: dict[str, Any], files: list[Path]) -> None:
    """Print the comparison, the checks, the estimate for slow links and how to switch the plugin on."""
    variants = result["variants"]
    console.print(_comparison(variants))
    console.print("One seed. Another seed changes differences of this size by as much.", highlight=False)
    _show_checks(console, result["checks"])
    _show_slow_links(console, slow_link.costs(variants))
    _show_link(console, result["link"])
    console.print("\n[bold]Switch it on[/bold]")
    for framework, (place, line) in SWITCH_ON.items():
        console.print(f"  {framework:13}{place:31}{line}", highlight=False, markup=False)
    written = ", ".join(str(file) for file in files)
    console.print(f"\n{result['wall_seconds']:.0f} s; written: {written}", highlight=False)


def _comparison(variants: dict[str, Any]) -> Table:
    base = next(iter(variants.values()))
    table = Table(title="Held-out loss, error and cost of each variant, on this machine")
    for column in ("variant", "validation loss", "difference", "SQNR dB fwd / bwd", "bits/element"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for column in ("MB sent/step", "ms/step", "time ratio"):
        table.add_column(column, justify="right")
    for name, variant in variants.items():
        table.add_row(
            name,
            f"{variant['validation_loss']:.4f}",
            f"{difference_percent(variant, base):+.3f} %" if variant is not base else "-",
            _sqnr(variant),
            f"{bits_per_element(variant):.3f}",
            _number(_bytes_per_step(variant, variants), 1e-6, ".2f"),
            _number(variant["seconds_per_step"], 1e3, ".0f"),
            _ratio(variant["seconds_per_step"], base["seconds_per_step"]),
        )
    return table


def _show_checks(console: Console, checks: list[dict[str, Any]]) -> None:
    """Print one line if all checks passed, else a line for each that failed."""
    failed = [check for check in checks if not check["held"]]
    for check in failed:
        console.print(f"[red]FAIL[/red] {check['check']} ({check['detail']})", highlight=False)
    if not failed:
        console.print(
            f"[green]ok[/green]   {len(checks)} checks: losses are finite and fell, every expected call was quantized, "
            "ranks are equal bit for bit",
            highlight=False,
        )


def _show_slow_links(console: Console, found: dict[str, tuple[float, float]]) -> None:
    if not found:
        return
    table = Table(title="On a slow link: milliseconds of a step, estimated")
    for column in ("link", *found):
        table.add_column(column, justify="left" if column == "link" else "right")
    for link, rate in slow_link.RATES.items():
        table.add_row(link, *(f"{1e3 * slow_link.step_seconds(cost, rate):.0f}" for cost in found.values()))
    console.print("")
    console.print(table)
    console.print(f"Estimate: {slow_link.FORMULA}.", highlight=False)
    console.print("Without overlap and latency. bf16: full precision with half of the bytes.")
    for name in list(found)[2:]:
        console.print(slow_link.verdict(name, found), highlight=False)
    console.print("Here one CPU core a rank computes and encodes. For a cluster of GPUs: flash-allreduce plan --help")


def _show_link(console: Console, link: dict[str, Any]) -> None:
    """Print the steps that were measured on a slow link, or why there are none."""
    if seconds := link.get("seconds"):
        base = seconds[slow_link.BF16]
        said = ", ".join(f"{name} {1e3 * took:.0f} ms ({base / took:.2f} x)" for name, took in seconds.items())
        hosts = f"between hosts with links of {slow_link.MEASURED}, in bf16"
        console.print(f"[bold]Measured[/bold] {hosts}: {said}", highlight=False)
    elif why := link.get("not measured"):
        console.print(f"No step was measured on a slow link: {why}", highlight=False, markup=False)


def difference_percent(variant: dict[str, Any], base: dict[str, Any]) -> float:
    return 100.0 * (variant["validation_loss"] / base["validation_loss"] - 1.0)


def bits_per_element(variant: dict[str, Any]) -> float:
    """Return the bits on the wire of an element of the quantized calls, with metadata and padding; 32 without any."""
    sites = [site for site in variant["sites"].values() if site["quantized"]]
    full = sum(site["bytes_full_precision"] for site in sites)
    return 32.0 * sum(site["bytes_sent"] for site in sites) / full if full else 32.0


def _bytes_per_step(variant: dict[str, Any], variants: dict[str, Any]) -> float | None:
    """Return the bytes that a rank sends in a step's tensor-parallel reductions.

    An unpatched variant has no counters: it sends the bytes that the quantized variants count for full precision.
    """
    if variant["quantized"]:
        return variant["bytes_sent_per_step"]
    quantized = (other["bytes_full_precision_per_step"] for other in variants.values() if other["quantized"])
    return next(quantized, None)


def _sqnr(variant: dict[str, Any]) -> str:
    def mean(part: str) -> str:
        values = [site["sqnr_db"] for name, site in variant["sites"].items() if name.endswith(part)]
        measured = [value for value in values if value is not None]
        return f"{sum(measured) / len(measured):.1f}" if measured else "-"

    return f"{mean('forward')} / {mean('dgrad')}" if variant["quantized"] else "-"


def _number(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(value * scale, form)


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or base is None else f"{value / base:.2f} x"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the loss curves, averaged over a few steps, and the bytes of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = result["variants"]
    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(2, 1))
    for index, (name, variant) in enumerate(variants.items()):
        losses = variant["losses"]
        width = min(_SMOOTHING, len(losses))
        smooth = [sum(losses[i - width : i]) / width for i in range(width, len(losses) + 1)]
        label = f"{name}: {variant['validation_loss']:.4f} held out"
        thickness = 4.0 / (1 + index)  # the curves overlap: later ones are thinner
        curves.plot(range(width, len(losses) + 1), smooth, label=label, linewidth=max(0.8, thickness))
    curves.set(xlabel="step", ylabel=f"training loss, nats per byte (mean of {_SMOOTHING} steps)")
    curves.legend()
    counted = {name: _bytes_per_step(variant, variants) for name, variant in variants.items() if not variant["noise"]}
    heights = [(value or 0) * 1e-6 for value in counted.values()]
    drawn = bars.bar(list(counted), heights)
    bars.bar_label(drawn, fmt="%.1f")
    bars.set(ylabel="MB sent per rank and step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def settings_dict(settings: Settings) -> dict[str, Any]:
    values = dataclasses.asdict(settings)
    values["data"] = None if settings.data is None else str(settings.data)
    return values


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for package in ("flash-allreduce-plugin", "torch", "megatron-core"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
