"""scripts/make_benchmarks.py: the tables of docs/benchmarks.md are what their results give, and can be made again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmark_tables import TABLES, Table, markdown, ring
from scripts.make_benchmarks import DOCUMENT, INDEX, RESULTS, ROOT, block, missing, rewrite

pytest.importorskip("typer")

INDEX_OF_RESULTS = json.loads((RESULTS / INDEX).read_text())


def test_the_tables_of_the_document_are_those_of_the_results() -> None:
    document = DOCUMENT.read_text()
    assert rewrite(document, INDEX_OF_RESULTS, RESULTS) == document, "run: python -m scripts.make_benchmarks --text"


def test_a_changed_figure_is_noticed() -> None:
    document = DOCUMENT.read_text()
    assert "| 44.52 |" in document
    changed = document.replace("| 44.52 |", "| 45.52 |")
    assert rewrite(changed, INDEX_OF_RESULTS, RESULTS) == document


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_has_its_commands_machine_and_date(table: Table) -> None:
    entry = INDEX_OF_RESULTS.get(table.name)
    lines = block(table, entry, RESULTS).splitlines()
    assert lines[1 : 1 + len(table.commands)] == [command.line for command in table.commands]
    if entry is None:
        assert lines[-1] == "Not measured yet."
        return
    assert lines[-1].startswith(f"{entry['date']}, {entry['machine']}, {entry['cores']} cores")
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) > 2 and len({row.count("|") for row in rows}) == 1


def test_marks_without_a_table_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        rewrite(DOCUMENT.read_text().replace("<!-- table: codec -->", "<!-- table: codecs -->"), {}, RESULTS)
    with pytest.raises(ValueError, match="no <!-- end of codec"):
        rewrite(DOCUMENT.read_text().replace("<!-- end of codec -->", ""), {}, RESULTS)


def test_a_table_of_rings_goes_by_variant_and_ranks() -> None:
    row = {"wire_bytes": 10**6, "wire_bytes_formula": 10**6, "sqnr_db": 40.0, "seconds": None}
    rows = [
        {**row, "ranks": n, "variant": f"INT8{' ring' * is_ring}", "steps": 1, "roundings": n, "algorithm": name}
        for n in (2, 4)
        for is_ring, name in ((True, "ring"), (False, "two-step"))
    ]
    table = markdown(ring([{"rows": [{"variant": "full precision"}, *rows]}]))
    assert [line.split(" | ")[:2] for line in table[2:]] == [
        ["| INT8, two-step", "2"],
        ["| INT8, two-step", "4"],
        ["| INT8, ring", "2"],
        ["| INT8, ring", "4"],
    ]


def test_made_again_with_small_sizes(tmp_path: Path) -> None:
    document, results = tmp_path / "benchmarks.md", tmp_path / "results"
    document.write_text(DOCUMENT.read_text())
    links = [] if missing(next(table for table in TABLES if table.name == "ring")) else ["ring"]
    script = [sys.executable, "-m", "scripts.make_benchmarks", "--quick", "--results", str(results)]
    done = subprocess.run(
        [*script, "--document", str(document), "--only", "codec", *links],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    index = json.loads((results / INDEX).read_text())
    assert list(index) == ["codec", *links]
    text = document.read_text()
    assert text != DOCUMENT.read_text() and text == rewrite(text, index, results)
    assert "| INT4, ring | 2 | 2 | 2 | 0.009 | 0.009 |" in text or not links


def test_quick_figures_do_not_reach_the_document() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.make_benchmarks", "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--quick is no measurement" in done.stderr
