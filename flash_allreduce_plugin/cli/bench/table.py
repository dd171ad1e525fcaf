"""The rows of `bench` as text, like nccl-tests'. The tables of docs/decide/benchmarks.md have the same cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]

WIDTH = 160


def bytes_text(size: int) -> str:
    """Return a size in the largest unit that leaves a whole number: 64K, 8M; 1000."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _number(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(key) is None else format(row[key] * scale, form)


def _word(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(key) is None else str(row[key])


def _variant(row: Row) -> str:
    return f"{row['variant']}{'*' if row.get('full_precision') else ''}"


# Name, unit, width and cell of each column.
_COLUMNS: tuple[tuple[str, str, int, Callable[[Row], str]], ...] = (
    ("size", "(B)", 12, _word("size")),
    ("count", "(elements)", 12, _word("count")),
    ("type", "", 9, _word("type")),
    ("redop", "", 6, _word("redop")),
    ("variant", "", 15, _variant),
    ("time", "(us)", 11, _number("seconds", ".1f", 1e6)),
    ("algbw", "(GB/s)", 8, _number("algbw", ".3f", 1e-9)),
    ("busbw", "(GB/s)", 8, _number("busbw", ".3f", 1e-9)),
    ("#wrong", "", 8, _word("wrong")),
    ("wire", "(B/rank)", 12, _word("wire_bytes")),
    ("SQNR", "(dB)", 7, _number("sqnr_db", ".1f")),
    ("rival", "(dB)", 7, _number("rival_sqnr_db", ".1f")),
    ("speed-up", "", 9, _number("speedup", ".2f")),
)
_LINE = ("line rate", "", 12, _number("of_the_line", ".1%"))
_RING: tuple[tuple[str, str, int, Callable[[Row], str]], ...] = (
    ("formula", "(B/rank)", 12, _number("wire_bytes_formula", ".0f")),
    ("steps", "", 6, _word("steps")),
    ("QDQ", "", 4, _word("roundings")),
)


def _columns(settings: Mapping[str, Any]) -> list[tuple[str, str, int, Callable[[Row], str]]]:
    line = [_LINE] if settings["line"] else []
    return [*_COLUMNS, *line, *(_RING if "ring" in settings["algorithms"] else [])]


def heading(about: Mapping[str, Any], settings: Mapping[str, Any], link: str) -> str:
    gpus = f", {', '.join(about['gpus'])}" if settings["device"] == "cuda" else ""
    wire = link if link == "loopback" else f"{link} each way"
    calls = f"{settings['iters']} call{'s' * (settings['iters'] > 1)} in a row"
    return (
        f"# {about['machine']}, {about['cores']} cores, codec {about['instruction_set']}{gpus}; "
        f"torch {about['torch']}; {wire}\n"
        f"# {calls}, {settings['rounds']} rounds, alternating; medians of the slowest rank; speed-up over full "
        "precision of the same run (codec: over copy_, add_)\n"
        "# SQNR against the exact sum; rival: SQNR of full precision, which adds in the tensor's dtype at every hop\n"
        "# * in full precision, by its configuration"
    )


def header(collective: str, world: int, link: str, settings: Mapping[str, Any]) -> str:
    """Return a line with the collective's name and the two header lines of its rows."""
    columns = _columns(settings)
    names = "".join(f"{name:>{width}}" for name, _, width, _ in columns)
    units = "".join(f"{unit:>{width}}" for _, unit, width, _ in columns)
    where = "loopback" if link == "loopback" else f"hosts at {link}"
    return f"#\n# {collective}, {world} rank{'s' * (world > 1)}, {where}\n#{names[1:]}\n#{units[1:]}".rstrip()


def line(row: Row, settings: Mapping[str, Any]) -> str:
    return "".join(f"{cell(row):>{width}}" for _, _, width, cell in _columns(settings))
