"""Compare the predictions of `flash-allreduce plan` with measurements: our own, and published ones of others.

    python -m lab.planning.plan_check                       the newest day of lab/results
    python -m lab.planning.plan_check --results FOLDER --json check.json

Exit status 0 only if every measurement of this project is predicted within 15 %; published figures are shown, not
judged (docs/decide/planning.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from flash_allreduce_plugin.cli.output import Output
from flash_allreduce_plugin.cli.plan.tables import grid
from lab.planning import plan_measured, plan_published
from lab.planning.plan_measured import WITHIN
from lab.planning.plan_measured import Row as Measured
from lab.planning.plan_published import Row as Published


def show_measured(measured: Sequence[Measured], console: Console) -> None:
    columns = ["", "measured ms", "predicted ms", "", "communication ms", "predicted ms", ""]
    table = grid("This project's own measurements on rate-limited links (lab/results)", columns)
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
        "not judged: it is a difference of two measured steps."
    )


def show_published(published: Sequence[Published], console: Console) -> None:
    table = grid("Published by others: shown, not judged", ["source", "what", "published", "predicted", "", "note"], 2)
    for other in published:
        difference = "" if other.difference is None else f"{other.difference:+.0%}"
        table.add_row(other.source, other.what, _span(other.published), _span(other.predicted), difference, other.note)
    console.print(table)
    off = [abs(other.difference) for other in published if other.difference is not None]
    near = sum(each <= WITHIN for each in off)
    said = f"{near} within {WITHIN:.0%}, the worst {max(off):.0%} off"
    console.print(f"{len(published)} rows, {len(off)} of them predicted: {said}.")


def _span(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    low, high = values
    return f"{low:.2f} x" if low == high else f"{low:.2f} to {high:.2f} x"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="folder of one day's measurements (default: the newest)")
    parser.add_argument("--json", type=Path, help="where the rows go as JSON; -: to stdout, the text to stderr")
    arguments = parser.parse_args(argv)
    folder = arguments.results or plan_measured.results_folder()
    if folder is None:
        parser.error(f"lab/results has no day with all of {', '.join(plan_measured.FILES)}; expected --results")
    try:
        measured = plan_measured.rows(folder)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        parser.error(
            f"--results {folder}: expected {', '.join(plan_measured.FILES)} as the benchmarks write them ({error})"
        )
    published = plan_published.rows()
    output = Output(arguments.json, width=180, soft_wrap=False)
    show_measured(measured, output.results)
    show_published(published, output.results)
    mine = [asdict(row) | {"error": row.error, "within": row.within} for row in measured]
    others = [asdict(row) | {"difference": row.difference} for row in published]
    try:
        output.write_json({"measured": mine, "published": others})
    except OSError as error:
        parser.error(f"--json {arguments.json}: cannot be written ({error.strerror})")
    return 0 if all(row.within for row in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
