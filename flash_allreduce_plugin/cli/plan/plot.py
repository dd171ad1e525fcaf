"""The picture of `plan --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flash_allreduce_plugin.cli.plan.report import Forecast


def draw(plan: Forecast, scale: Sequence[tuple[int, Forecast | str]], path: Path) -> None:
    """Draw steps as stacked bars, and the speed-up over several numbers of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    planned = [(ranks, each) for ranks, each in scale if not isinstance(each, str)]
    figure, axes = pyplot.subplots(1, 2 if planned else 1, figsize=(11 if planned else 7, 4.5), squeeze=False)
    bars = axes[0][0]
    names = ["full precision", *(f"INT{bits}" for bits in plan.steps)]
    steps = list(plan.steps.values())
    layers = {"computing": [plan.full.compute] * len(names)}
    layers["bubble"] = [plan.full.bubble_before, *(step.bubble_after for step in steps)]
    for number, part in enumerate(plan.full.parts):
        layers[part.kind] = [part.before.exposed, *(step.parts[number].after.exposed for step in steps)]
    bottom = [0.0] * len(names)
    for kind, heights in layers.items():
        if any(heights):
            bars.bar(names, [1e3 * height for height in heights], bottom=bottom, label=kind)
            bottom = [low + 1e3 * height for low, height in zip(bottom, heights, strict=True)]
    bars.set(ylabel="ms of a step, exposed", title=f"{plan.name}, {plan.cluster.name}, {plan.layout.ranks} ranks")
    bars.legend(fontsize=8)
    if planned:
        curves = axes[0][1]
        for bits in plan.steps:
            curves.plot(
                [n for n, _ in planned], [each.steps[bits].speedup for _, each in planned], "o-", label=f"INT{bits}"
            )
        curves.set(xlabel="ranks", ylabel="speed-up over full precision", xscale="log")
        curves.set_xticks([n for n, _ in planned], [str(n) for n, _ in planned])
        curves.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
