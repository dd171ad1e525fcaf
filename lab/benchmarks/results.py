"""The JSON of a benchmark's results: one row a line, no list of every step, so that git shows a changed figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: A table of at most this many characters stands on one line.
LINE = 700
#: The key of `smooth` in the results of a training, and how many steps one mean is taken over.
LOSSES, SMOOTHED = "losses, means of 50 steps", 50


def write_json(file: Path | None, content: Any) -> None:
    """Write the results to the file of --json, if there is one."""
    if file is not None:
        file.write_text(text(content) + "\n")


def text(content: Any, indent: str = "") -> str:
    """Return JSON. A list of objects and an object of objects are tables, with one entry a line."""
    line = json.dumps(content, default=str)  # a path
    if len(line) <= LINE or not _has_table(content):
        return line
    inner = indent + " "
    if isinstance(content, dict):
        entries = [f"{json.dumps(str(key))}: {text(value, inner)}" for key, value in content.items()]
    else:
        entries = [text(value, inner) for value in content]
    lines = ",\n".join(inner + entry for entry in entries)
    return f"{line[0]}\n{lines}\n{indent}{line[-1]}"


def _has_table(content: Any) -> bool:
    if isinstance(content, list):
        return any(isinstance(value, dict) for value in content)
    if not isinstance(content, dict) or not content:
        return False
    return all(isinstance(value, dict) for value in content.values()) or any(map(_has_table, content.values()))


def smooth(values: Sequence[float], width: int = SMOOTHED) -> list[float]:
    """Return the mean of each `width` values; the last mean may be of fewer."""
    return [statistics.fmean(values[i : i + width]) for i in range(0, len(values), width)]
