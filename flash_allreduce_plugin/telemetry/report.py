"""The report of an integration, such as `fap.megatron.report()`: its sites and their counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flash_allreduce_plugin.policy import EMPTY, ONE_RANK
from flash_allreduce_plugin.telemetry import counters


class Report(dict[str, dict[str, Any]]):
    """Per site: `target`, `covers`, `in_place`, `calls`, `quantized`, `full_precision` {reason: count}.

    Prints the lines in `models`, the sites that were called, the names of the others, and all that this process sent
    in other calls of torch.distributed.
    """

    models: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = list(self.models)
        idle: list[str] = []
        absent: list[str] = []
        for site, entry in self.items():
            if not sends(entry):
                (idle if entry["in_place"] else absent).append(site)
                continue
            lines.append(f"{site}: {entry['calls']} calls, {entry['quantized']} quantized")
            if entry["full_precision"]:
                reasons = ", ".join(f"{count} {reason}" for reason, count in entry["full_precision"].items())
                lines[-1] += f", in full precision: {reasons}"
            lines.append(f"    {entry['covers']} [{entry['target']}]")
        for state, sites in (("in place, nothing sent", idle), ("not in place", absent)):
            if sites:
                lines.append(f"{state}: {', '.join(sites)}")
        return "\n".join(lines + counters.beside_us())


def sends(entry: Mapping[str, Any]) -> bool:
    """True if a site was called where there was anything to send; entry: of a Report."""
    return bool(entry["quantized"] or set(entry["full_precision"]) - {ONE_RANK, EMPTY})


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
