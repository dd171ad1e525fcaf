"""lab/results: compact, as lab/benchmarks/results.py writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks import results

FILES = sorted((Path(__file__).resolve().parents[2] / "lab" / "results").rglob("*.json"))
LINES, LONGEST_LIST = 2000, 60


def lists_of_numbers(content: Any) -> Iterator[list[Any]]:
    if isinstance(content, list) and content and isinstance(content[0], (int, float)):
        yield content
    elif isinstance(content, (dict, list)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from lists_of_numbers(value)


def test_the_results_in_git_are_small() -> None:
    assert FILES and sum(file.read_text().count("\n") for file in FILES) < LINES


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_result_is_compact_and_has_no_list_of_every_step(file: Path) -> None:
    content = json.loads(file.read_text())
    assert file.read_text() == results.text(content) + "\n", "write it by lab.benchmarks.results.write_json"
    assert max(map(len, lists_of_numbers(content)), default=0) <= LONGEST_LIST


def test_a_table_has_one_row_a_line(tmp_path: Path) -> None:
    rows = [{"bits": bits, "seconds": [0.125] * 100} for bits in (8, 4)]
    content = {"about": {"steps": 2}, "rows": rows, "by name": {"a": rows[0], "b": rows[1]}, "empty": []}
    results.write_json(tmp_path / "a.json", content)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == content
    assert text.splitlines()[:4] == ["{", ' "about": {"steps": 2},', ' "rows": [', f"  {json.dumps(rows[0])},"]
    assert results.text(rows[0]) == json.dumps(rows[0])  # a row stands on one line, however long
    results.write_json(None, content)  # without --json


def test_smoothed_losses_are_means() -> None:
    assert results.smooth([1.0] * 50 + [2.0] * 50 + [3.0, 5.0]) == [1.0, 2.0, 4.0]
