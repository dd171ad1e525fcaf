"""Measures the tables of docs/decide/benchmarks.md and docs/decide/accuracy.md and writes them there: `make bench`.

    python -m scripts.make_benchmarks                      all that take minutes; --all: those that take hours too
    python -m scripts.make_benchmarks --only codec sizes   these
    python -m scripts.make_benchmarks --text               nothing is measured: the tables as the results have them

A table stands between <!-- table: NAME --> and <!-- end -->, with its commands, the machine, the date and the
codec settings where the commands name none. Results go to lab/results/<date>/, and
lab/results/tables.json says which files a table is made of. scripts/benchmark_tables.py has the commands. A
table that needs something this machine lacks (root, a package) is left out, and the reason is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flash_allreduce_plugin import FlashConfig
from flash_allreduce_plugin.cli import machine
from lab.benchmarks.results import write_json
from scripts.benchmark_tables import TABLES, Table
from scripts.benchmark_texts import Rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "lab" / "results"
DOCUMENTS = ROOT / "docs" / "decide"
INDEX = "tables.json"
END = "<!-- end -->"


def markdown(rows: Rows) -> list[str]:
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def block(table: Table, index: dict[str, Any], results: Path) -> str:
    """Return the lines between the markers.

    They have the commands of the table, and those of the tables beside it that no document has.
    """
    entry = index.get(table.name)
    unseen = [other for other in TABLES if other.name in table.beside and other.document is None]
    commands = [command.line for each in (table, *unseen) for command in each.commands]
    lines = ["```", *commands, "```", ""]
    if entry is None:
        return "\n".join([*lines, "Not measured yet."])
    beside = [index.get(name, {"files": []}) for name in table.beside]
    loaded, *others = [[json.loads((results / file).read_text()) for file in of["files"]] for of in (entry, *beside)]
    about = f"{entry['date']}, {entry['machine']}, {entry['cores']} cores, {entry['instruction_set']}"
    for other in (index[each.name] for each in unseen if each.name in index):
        if (other["date"], other["machine"]) != (entry["date"], entry["machine"]):
            about += f" (loss: {other['date']}, {other['machine']})"
    codec = "" if table.names_codec else f", {entry['codec']}"
    return "\n".join([*lines, f"{about}, torch {entry['torch']}{codec}:", "", *markdown(table.rows(loaded, *others))])


def rewrite(name: str, document: str, index: dict[str, Any], results: Path) -> str:
    """The document of that name with every table as its results have it.

    Raises ValueError for a table without its two markers, or markers without a table.
    """
    tables = [table for table in TABLES if table.document == name]
    marked = re.findall(r"<!-- table: (.+) -->", document)
    if sorted(marked) != sorted(table.name for table in tables):
        raise ValueError(f"{name} marks the tables {marked}; expected {[table.name for table in tables]}, once each")
    for table in tables:
        begin, end = f"<!-- table: {table.name} -->\n", f"\n{END}"
        before, _, rest = document.partition(begin)
        old, found, after = rest.partition(end)
        if not found or "<!-- table: " in old:
            raise ValueError(f"{name} has no {END} after the table {table.name}")
        document = before + begin + block(table, index, results) + end + after
    return document


def write(documents: Path, index: dict[str, Any], results: Path) -> None:
    for name in sorted({table.document for table in TABLES if table.document is not None}):
        path = documents / name
        path.write_text(rewrite(name, path.read_text(), index, results))


def default_codec() -> str:
    """The codec settings of a command that names none."""
    config = FlashConfig()
    return f"{'compact' if config.compact else 'plain'} groups of {config.group_size}"


def measure(table: Table, results: Path, quick: bool) -> dict[str, Any]:
    """Run the table's commands; its entry of the index. Raises CalledProcessError if one fails."""
    about = machine.about()
    folder = results / about["date"]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    seconds = 0.0
    for number, command in enumerate(table.commands, 1):
        file = folder / f"{table.name.replace(' ', '_').lower()}-{number}.json"
        name, *arguments = shlex.split(command.line)
        chosen = {}
        while "=" in name:  # a variable of the environment, as in a shell
            key, _, chosen[key] = name.partition("=")
            name, *arguments = arguments
        program = ["-m", "flash_allreduce_plugin"] if name == "flash-allreduce" else []
        line = [sys.executable, *program, *arguments, *(shlex.split(command.quick) if quick else [])]
        print(f"{table.name}: {command.line}{' ' + command.quick if quick else ''}", flush=True)
        begin = time.monotonic()
        file.unlink(missing_ok=True)
        run([*line, "--json", os.path.relpath(file, ROOT)], command.fine, chosen)
        took = time.monotonic() - begin
        write_json(file, json.loads(file.read_text()))  # the commands of the plugin write one figure a line
        seconds += took
        print(f"{table.name}: {took:.0f} s", flush=True)
        files.append(str(file.relative_to(results)))
    kept = {key: about[key] for key in ("date", "machine", "cores", "instruction_set", "torch")}
    return {**kept, "seconds": round(seconds), "codec": default_codec(), "files": files}


def run(command: list[str], fine: Sequence[int] = (0,), chosen: Mapping[str, str] | None = None) -> None:
    """Raises CalledProcessError for an exit status that is not fine. chosen: added to the environment.

    At Ctrl-C the command, which gets it too, has the time to clean up.
    """
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(chosen or {})}) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
    if status not in fine:
        raise subprocess.CalledProcessError(status, command)


def missing(table: Table) -> str:
    """Return the missing requirements of the table."""
    for need in table.needs:
        if need == "root":
            if os.geteuid() != 0:
                return "root"
            if shutil.which("tc") is None:
                return "iproute2"
        elif need == "a GPU":
            if not torch.cuda.is_available():
                return need
        elif importlib.util.find_spec(need) is None:
            return need
    return ""


def make(tables: Sequence[Table], results: Path, documents: Path, quick: bool) -> list[str]:
    """Measure the tables, one run for those with the same commands, and write them; the names of those that failed."""
    file = results / INDEX
    index: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    failed, done = [], set()
    for table in tables:
        if table.commands in done:
            continue
        done.add(table.commands)
        if need := missing(table):
            print(f"{table.name}: left out, it needs {need}", flush=True)
            continue
        try:
            entry = measure(table, results, quick)
        except subprocess.CalledProcessError as error:
            print(f"{table.name}: {error}", file=sys.stderr, flush=True)
            failed.append(table.name)
            continue
        index |= {same.name: entry for same in TABLES if same.commands == table.commands}
        if table.picture is not None:
            name, draw = table.picture
            draw([json.loads((results / made).read_text()) for made in entry["files"]], documents / name)
        write_json(file, index)  # each measurement is kept, whatever comes next
        write(documents, index, results)
    write(documents, index, results)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [table.name for table in TABLES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of: {', '.join(names)}")
    parser.add_argument("--all", action="store_true", help="those that take hours too")
    parser.add_argument("--text", action="store_true", help="measure nothing")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to try it: give --results and --documents too"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (default lab/results)")
    parser.add_argument("--documents", type=Path, default=DOCUMENTS, help="folder (default docs/decide)")
    arguments = parser.parse_args()
    results, documents = arguments.results.resolve(), arguments.documents.resolve()
    if arguments.quick and (documents == DOCUMENTS or results == RESULTS):
        parser.error("--quick is no measurement: give --results and --documents")
    results.mkdir(parents=True, exist_ok=True)
    chosen = [
        table
        for table in TABLES
        if not arguments.text and (table.name in arguments.only if arguments.only else arguments.all or not table.slow)
    ]
    failed = make(chosen, results, documents, arguments.quick)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
