"""The report of an integration, such as `fap.megatron.report()`: its sites and their counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flash_allreduce_plugin.telemetry import counters


class Report(dict[str, dict[str, Any]]):
    """Per site: `target`, `covers`, `in_place`, `calls`, `quantized`, `full_precision` {reason: count}.

    Prints as a table, below the lines in `models`, and below it all that this process sent beside us.
    """

    models: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = list(self.models)
        for site, entry in self.items():
            reasons = ", ".join(f"{count} {reason}" for reason, count in entry["full_precision"].items())
            state = "" if entry["in_place"] else " (not in place)"
            lines.append(f"{site}{state}: {entry['calls']} calls, {entry['quantized']} quantized")
            if reasons:
                lines[-1] += f", in full precision: {reasons}"
            lines.append(f"    {entry['covers']} [{entry['target']}]")
        return "\n".join(lines + counters.beside_us())


def of_sites(attached: Mapping[str, Mapping[str, Any]], models: Iterable[str] = ()) -> Report:
    """A report of sites in the order of `attached`, with their counts since `reset_stats`: zeros if never called.

    attached: per site `target`, `covers` and `in_place`, as Patchset.report gives them.
    models: a line for each model that was seen.
    """
    sites = counters.stats()["sites"]
    report = Report()
    report.models = tuple(models)
    for site, entry in attached.items():
        counts = sites.get(site, {"calls": 0, "quantized": 0, "full_precision": {}})
        report[site] = {**entry, **{key: counts[key] for key in ("calls", "quantized", "full_precision")}}
    return report
