"""`flash-allreduce report`: its output, files and refusals; the page, parsed and in a browser if one is installed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.main import app
from flash_allreduce_plugin.cli.report.log import read, total
from flash_allreduce_plugin.cli.report.page import _POINTS
from flash_allreduce_plugin.cli.report.plot import curve
from flash_allreduce_plugin.cli.report.text import NOTHING_TO_SEND, amount, duration, percent
from flash_allreduce_plugin.policy import EMPTY, ONE_RANK

ROOT = Path(fap.__file__).parents[1]
G, EMBEDDING, HOSTILE = "megatron.g.forward", "megatron.embedding.forward", 'a<script>alert("1")</script>&[red]b'

HEADER: dict[str, Any] = {
    "flash_allreduce_log": 1,
    "kind": "start",
    "time": 1_790_000_000.0,
    "rank": 0,
    "world": 8,
    "host": "node<17>",
    "pid": 12,
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "wire": 2,
    "environment": {"FLASH_ALLREDUCE_BITS": "4 & more"},
    "configuration": fap.FlashConfig(bits=4, exclude=["*.head"]).to_dict(),
}


def interval(seconds: float, step: int | None, kind: str = "interval", **sites: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "seconds": seconds, "step": step, "sites": sites}


def quantized(calls: int, sqnr: float | None = None, bits: int = 4) -> dict[str, Any]:
    fields = {"calls": calls, "quantized": calls, "full_precision": {}, "bits": bits}
    fields |= {"bytes_sent": 133 * calls, "bytes_full_precision": 1000 * calls}
    if sqnr is not None:
        fields |= {"measured": 1, "signal": 10 ** (sqnr / 10), "noise": 1.0, "sqnr_db": sqnr}
    return fields


def in_full(calls: int, reason: str) -> dict[str, Any]:
    return {
        **{"calls": calls, "quantized": 0, "full_precision": {reason: calls}},
        **{"bytes_sent": 1000 * calls, "bytes_full_precision": 1000 * calls},
    }


RUN = [
    HEADER,
    interval(1.0, 10, **{G: in_full(4, "warm-up"), EMBEDDING: in_full(2, "embedding"), HOSTILE: quantized(1)}),
    interval(2.0, 20, **{G: quantized(8, 20.0), EMBEDDING: in_full(3, "embedding")}),
    {"kind": "configuration", "seconds": 2.5, "configuration": fap.FlashConfig(bits=5).to_dict()},
    interval(3.0, 30, **{G: quantized(8, 26.0, bits=5)}),
    interval(4.5, 40, "end", **{G: {**quantized(4, bits=5), "residuals_dropped": {"loss scale changed": 3}}}),
]

Log = Callable[..., Path]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    def write(lines: list[Any] = RUN, name: str = "run.jsonl", end: str = "") -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
        return file

    return write


def report(*words: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, words)])


def unwrapped(text: str) -> str:
    """Return the text without the box that breaks messages up, and without spaces."""
    return re.sub(r"[│╭╮╰╯─\s]", "", text)


def rows(output: str) -> dict[str, list[str]]:
    """Return the cells of the printed table by the first one."""
    found = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in found}


def test_sites_with_nothing_to_send_are_one_line(log: Log, tmp_path: Path) -> None:
    assert {ONE_RANK, EMPTY} == NOTHING_TO_SEND
    alone = {**in_full(4, "one-rank group"), "bytes_sent": 0, "bytes_full_precision": 0}
    lines = [HEADER, interval(1.0, 10, "end", **{G: quantized(1), EMBEDDING: alone})]
    page = tmp_path / "x.html"
    done = report(log(lines), "--html", page)
    assert done.exit_code == 0, done.output
    assert f"Nothing to send: {EMBEDDING}." in done.output and EMBEDDING not in rows(done.output)
    assert page.read_text().count(EMBEDDING) == 1 and "one-rank group" not in page.read_text()


def test_other_traffic_is_in_the_table_and_on_the_page(log: Log, tmp_path: Path) -> None:
    gathers, hostile = "all_gather, DATA_PARALLEL_GROUP of 2 ranks", "send, <b>&[red] of 2 ranks"
    first = {gathers: {"calls": 3, "bytes_sent": 3000}, hostile: {"calls": 1, "bytes_sent": 5}}
    lines = [
        HEADER,
        {**interval(1.0, 10, **{G: {**quantized(1), "bytes_plain": 33}}), "beside": first},
        {**interval(2.0, 20, "end"), "beside": {gathers: {"calls": 1, "bytes_sent": 1000}}},
    ]
    page = tmp_path / "x.html"
    done = report(log(lines), "--html", page, "--json", tmp_path / "x.json")
    assert done.exit_code == 0, done.output
    table = rows(done.output)
    assert table[gathers] == ["4", "0 %", "4 kB", "4 kB", "0 %", "-", "-", "4 outside the plugin"]
    assert table["everything"] == ["6", "16.7 %", "4.14 kB", "5 kB", "17.3 %", "", "", ""]
    assert "2.4 % were quantized, 0.8 % left in full precision by the plugin, 96.8 % outside the plugin." in done.output
    assert ElementTree.fromstring(page.read_text().removeprefix("<!DOCTYPE html>")) is not None
    assert f"outside the plugin: {gathers}" in page.read_text() and "<b>&[red]" not in page.read_text()
    [told] = json.loads((tmp_path / "x.json").read_text())["logs"]
    assert told["beside"] == {gathers: {"calls": 4, "bytes_sent": 4000}, hostile: {"calls": 1, "bytes_sent": 5}}


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"x": {}}, '"bytes_sent" is missing'),
        ({"x": {"calls": -1, "bytes_sent": 1}}, '"calls" is -1'),
        ([1], "is no line of such a log"),
        ({"x": 1}, "is no line of such a log"),
    ],
)
def test_bad_counts_of_other_traffic_are_refused(log: Log, beside: Any, said: str) -> None:
    done = report(log([HEADER, {**interval(1.0, 1, "end"), "beside": beside}]))
    assert done.exit_code == 2 and f"line 2{'' if said[0] == 'i' else ':'} {said}".replace(" ", "") in unwrapped(
        done.output
    )


def test_the_table(log: Log, tmp_path: Path) -> None:
    done = report(log(), "--json", tmp_path / "x.json")
    assert done.exit_code == 0, done.output
    table = rows(done.output)
    assert table[G] == ["24", "83.3 %", "6.66 kB", "24 kB", "72.2 %", "24.0", "5", "4 warm-up"]
    assert table[EMBEDDING] == ["5", "0 %", "5 kB", "5 kB", "0 %", "-", "-", "5 embedding"]
    assert table[HOSTILE] == ["1", "100 %", "133 B", "1 kB", "86.7 %", "-", "4", "-"]
    assert table["all"] == ["30", "70.0 %", "11.8 kB", "30 kB", "60.7 %", "", "", "5 embedding, 4 warm-up"]
    assert "rank 0 of 8 on node<17>, from 2026-09-21 14:13:20 UTC, 4.5 s, 40 steps" in done.output
    assert f"{G}: 3 residuals of error feedback dropped: loss scale changed" in done.output
    assert "missing" not in done.output and "cut off" not in done.output
    [told] = json.loads((tmp_path / "x.json").read_text())["logs"]
    assert told["ended"] and told["cut_off"] == 0 and told["steps"] == 40 and told["seconds"] == 4.5
    assert told["starts"] == [HEADER]
    assert told["sites"][G]["calls"] == 24 and told["sites"][G]["full_precision"] == {"warm-up": 4}
    assert told["sites"][G]["sqnr_db"] == pytest.approx(23.96, abs=0.01), "of the sums, not the mean of decibels"
    assert told["total"]["bytes_sent"] == 11793


def test_piped_stdout_has_the_report_alone(log: Log, tmp_path: Path) -> None:
    file, page = log(), tmp_path / "page.html"
    text, pure = (
        subprocess.run(
            [sys.executable, "-m", "flash_allreduce_plugin", "report", str(file), *more],
            cwd=ROOT, capture_output=True, text=True,
        )
        for more in (["--html", str(page)], ["--json", "-"])
    )  # fmt: skip
    assert text.returncode == pure.returncode == 0, text.stderr + pure.stderr
    assert text.stderr == f"written: {page}\n" and "written" not in text.stdout
    assert json.loads(pure.stdout)["logs"][0]["log"] == str(file) and pure.stderr == text.stdout


def test_several_logs(log: Log) -> None:
    done = report(log(), log([{**HEADER, "rank": 1}, *RUN[1:]], "other.jsonl"))
    assert done.exit_code == 0
    assert "rank 0 of 8" in done.output and "rank 1 of 8" in done.output and done.output.count(f"│ {G} ") == 2


def test_an_incomplete_last_line_is_reported(log: Log) -> None:
    done = report(log(RUN[:-1], end='{"kind": "end", "seco'))
    assert done.exit_code == 0
    assert "1 line was cut off and left out." in done.output
    assert "The last line is missing: the run continues or was killed" in done.output
    assert rows(done.output)[G][0] == "20"


def test_the_decision_of_auto_is_printed(log: Log) -> None:
    line = "auto: a step takes 9 ms in full precision and 7 ms quantized (4 steps): on; to pin it: enabled=true"
    decided = {"kind": "auto", "seconds": 2.2, "step": 21, "on": True, "but": [], "line": line}
    done = CliRunner().invoke(app, ["report", str(log([*RUN[:3], decided, *RUN[3:]]))])
    assert done.exit_code == 0 and f"A{line[1:]}." in " ".join(done.output.split())
    edited = str(log([*RUN[:3], {**decided, "line": 7}]))
    done = CliRunner().invoke(app, ["report", edited], env={"COLUMNS": "1000"})
    assert done.exit_code == 2 and 'line 4: "line" is 7; expected a sentence' in " ".join(done.output.split())


def test_a_run_that_was_started_again_is_added_up(log: Log) -> None:
    again = [{**HEADER, "time": 1_790_001_000.0}, interval(2.0, 35, "end", **{G: quantized(6)})]
    file = log(RUN[:-1], end='{"kind": "end", "seco\n' + "".join(json.dumps(line) + "\n" for line in again))
    done = report(file)
    assert done.exit_code == 0 and "The file has 2 starts; their counts are added." in done.output
    assert rows(done.output)[G][0] == "26"
    found = read(file)
    assert [one.seconds for one in found.intervals] == [1, 2, 3, 5] and found.seconds == 5


def test_a_log_without_calls(log: Log, tmp_path: Path) -> None:
    done = report(log([HEADER]), "--html", tmp_path / "x.html", "--json", tmp_path / "x.json")
    assert done.exit_code == 0 and "No call was counted." in done.output
    assert "No call was counted." in "".join(parsed(tmp_path / "x.html").itertext())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read (No such file or directory)."),
        ("", "empty; expected a log that a run with FLASH_ALLREDUCE_LOG="),
        ("\n\n", "empty; expected a log"),
        ("import torch\n", "no log of a run; expected a file that FLASH_ALLREDUCE_LOG="),
        ("[]\n", "no log of a run"),
        ('{"step": 1}\n', "no log of a run"),
        ('{"flash_allreduce_log": 1, "kin', "no log of a run"),
        ('{"flash_allreduce_log": 9, "kind": "start"}\n', "version 9 of the log; this package reads version 1."),
        ('{"kind": "start"}\n', "version None of the log"),
        ('{"flash_allreduce_log": 1, "kind": "start"}\n', 'line 1: "time" is missing; was it edited?'),
        (json.dumps(HEADER) + '\n{"kind": "interval"}\n', 'line 2: "sites" is missing; was it edited?'),
        (json.dumps(HEADER) + '\n{"kind": "other"}\n', "line 2 is no line of such a log"),
        (json.dumps(HEADER) + "\n7\n", "line 2 is no line of such a log"),
        (
            json.dumps(HEADER) + '\n{"kind": "interval", "seconds": 1, "sites": {"a": {"quantized": "x"}}}\n',
            "line 2: site 'a': \"quantized\" is 'x'; expected a whole number, 0 or more; was it edited?",
        ),
        ("\x00\xff\xfe binary", "no log of a run"),
    ],
)
def test_other_files_than_logs_are_refused_in_one_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "run.jsonl"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    done = report(file, "--html", tmp_path / "x.html")
    assert done.exit_code == 2
    assert unwrapped(f"run.jsonl: {said}") in unwrapped(done.output), done.output
    assert "Traceback" not in done.output and not (tmp_path / "x.html").exists()


SITE = {**quantized(4, 20.0), "bytes_between_nodes": 100}
EDITED: list[tuple[dict[str, Any], str]] = [
    ({"bits": 99}, '"bits" is 99; expected a whole number from 2 to 8'),
    ({"bits": 4.0}, '"bits" is 4.0; expected a whole number from 2 to 8'),
    ({"calls": 5}, '"calls" is 5, and quantized and full_precision add up to 4'),
    ({"quantized": 3}, '"calls" is 4, and quantized and full_precision add up to 3'),
    ({"full_precision": {"warm-up": 1}}, '"calls" is 4, and quantized and full_precision add up to 5'),
    ({"full_precision": {"warm-up": -1}}, '"full_precision": "warm-up" is -1; expected a whole number, 0 or more'),
    ({"bytes_sent": -1}, '"bytes_sent" is -1; expected a whole number, 0 or more'),
    ({"bytes_between_nodes": 533}, '"bytes_between_nodes" is 533 of 532 bytes that were sent'),
    ({"noise": -1.0}, '"noise" is -1.0; expected a number, 0 or more'),
    ({"noise": 0.5}, '"sqnr_db" is 20.0, and signal and noise are of 23.01'),
    ({"noise": 0.0}, '"sqnr_db" is 20.0, and signal and noise are of None'),
    ({"sqnr_db": 31.5}, '"sqnr_db" is 31.5, and signal and noise are of 20.0'),
    ({"sqnr_db": None}, '"sqnr_db" is None, and signal and noise are of 20.0'),
    ({"measured": 0}, '"sqnr_db" is 20.0, and no call was measured'),
    ({"measured": 9}, '"measured" adds up to 9, and "quantized" to 8'),
    ({"quantized": 0, "full_precision": {"a": 4}, "bytes_sent": 4000}, '"bits" is 4, and no call was quantized'),
    (
        {"quantized": 0, "full_precision": {"a": 4}, "bits": None},
        '"bytes_sent" is 532 of 4000 bytes, and no call was quantized',
    ),
]


@pytest.mark.parametrize(("change", "said"), EDITED, ids=[said for _, said in EDITED])
def test_figures_that_were_edited_are_refused_by_line_and_field(
    log: Log, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    unmeasured = {key: SITE[key] for key in SITE if key not in ("measured", "signal", "noise", "sqnr_db")}
    lines = [HEADER, interval(1.0, 1, **{G: unmeasured}), interval(2.0, 2, **{G: SITE})]
    assert report(log(lines)).exit_code == 0
    lines[2] = interval(2.0, 2, **{G: {**SITE, **change}})
    done = report(log(lines), "--html", tmp_path / "x.html")
    assert done.exit_code == 2 and not (tmp_path / "x.html").exists()
    assert unwrapped(f"run.jsonl: line 3: site '{G}': {said}; was it edited?") in unwrapped(done.output), done.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 8}, '"rank" is 8; expected a whole number from 0 to 7'),
        ({"world": 0}, '"world" is 0; expected a whole number, 1 or more'),
        ({"versions": []}, '"versions" is []; expected keys and values'),
        ({"configuration": {"bits": 99}}, '"configuration": bits=99 is not valid; expected a whole number from 2 to 8'),
    ],
)
def test_a_first_line_that_was_edited_is_refused(log: Log, change: dict[str, Any], said: str) -> None:
    done = report(log([{**HEADER, **change}]))
    assert done.exit_code == 2 and unwrapped(f"line 1: {said}; was it edited?") in unwrapped(done.output), done.output


def test_a_configuration_of_a_later_version_is_none_that_was_edited(log: Log) -> None:
    later = {**HEADER, "configuration": {**HEADER["configuration"], "not_known_here": [1]}}
    assert report(log([later])).exit_code == 0


def test_a_key_twice_in_a_line_and_a_byte_order_mark(log: Log) -> None:
    done = report(log(RUN, end='{"kind": "end", "kind": "end", "seconds": 9, "sites": {}}\n'))
    assert done.exit_code == 2
    said = 'line 7: the key "kind" stands twice; expected each key once; was it edited?'
    assert unwrapped(said) in unwrapped(done.output), done.output
    file = log()
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert report(file).exit_code == 0


def test_the_page_and_the_json_in_one_file_are_refused(log: Log, tmp_path: Path) -> None:
    done = report(log(), "--html", tmp_path / "x", "--json", tmp_path / "y" / ".." / "x")
    assert done.exit_code == 2 and not (tmp_path / "x").exists()
    assert unwrapped(f"--html and --json are both {tmp_path / 'x'}; expected two files") in unwrapped(done.output)


def test_files_that_cannot_be_written_are_refused(log: Log, tmp_path: Path) -> None:
    file = log()
    before = file.read_bytes()
    for option in ("--html", "--json"):
        done = report(file, option, tmp_path / "none" / "x")
        assert done.exit_code == 2 and unwrapped("x: cannot be written (No such") in unwrapped(done.output)
        done = report(file, option, file)
        assert done.exit_code == 2 and unwrapped("is one of the logs") in unwrapped(done.output)
    assert file.read_bytes() == before


def test_a_report_needs_no_torch(log: Log) -> None:
    script = "import sys; sys.modules['torch'] = None; from flash_allreduce_plugin.cli import run as main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "report", str(log())],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    assert G in done.stdout and done.stderr.strip() == ""


# The page.


def test_without_matplotlib_one_sentence(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = report(log(), "--html", tmp_path / "x.html")
    assert done.exit_code == 1 and "report: --html: matplotlib is not installed: " in done.output
    assert not (tmp_path / "x.html").exists() and report(log()).exit_code == 0


def parsed(file: Path) -> ElementTree.Element:
    """Parse the page. Fail if a tag is not closed or something is not escaped."""
    return ElementTree.fromstring(file.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>"))


def page(logs: list[Path], folder: Path) -> ElementTree.Element:
    file = folder / "page.html"
    done = report(*logs, "--html", file)
    assert done.exit_code == 0, done.output
    return parsed(file)


def titles(root: ElementTree.Element, tag: str) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(tag)]


def test_the_page_has_every_site_and_needs_nothing_else(log: Log, tmp_path: Path) -> None:
    root = page([log()], tmp_path)
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?:|//[a-z]|\bsrc=|@import|url\(|<script|<link", text)
    assert titles(root, "h3") == [
        *("Calls in full precision, by reason", "Residuals of error feedback dropped"),
        *(HOSTILE, G),  # the curves; the embedding was never quantized
        *("2 configurations", "Versions", "Environment"),
    ]
    cells = titles(root, "td")
    for said in (HOSTILE, G, EMBEDDING, "83.3 %", "72.2 %", "24.0", "warm-up", "loss scale changed", "2.13.0"):
        assert said in cells, said
    assert '["*.head"]' in cells and "4 & more" in cells and "node<17>" in "".join(root.itertext())


def curves(root: ElementTree.Element) -> dict[str, list[str]]:
    """Return the labels of the points of each curve, by the curve's name."""
    return {svg.attrib["aria-label"]: titles(svg, "title") for svg in root.iter("svg")}


def test_the_curves(log: Log, tmp_path: Path) -> None:
    found = curves(page([log()], tmp_path))
    assert found == {
        f"bytes saved at {HOSTILE}, percent": ["step 10: 86.7 %"],
        f"bytes saved at {G}, percent": ["step 10: 0.0 %", *(f"step {step}: 86.7 %" for step in (20, 30, 40))],
        f"SQNR at {G}, dB": ["step 20: 20.0 dB", "step 30: 26.0 dB"],
        f"width at {G}, bits": ["step 20: 4.0 bits", "step 30: 5.0 bits", "step 40: 5.0 bits"],
    }


def test_without_steps_the_curves_are_over_time(log: Log, tmp_path: Path) -> None:
    lines = [HEADER, *(interval(90.0 * n, None, **{G: quantized(1)}) for n in range(1, 5))]
    found = curves(page([log(lines)], tmp_path))
    assert found[f"bytes saved at {G}, percent"][-1] == "minutes 6: 86.7 %"
    lines = [HEADER, *(interval(float(n), step, **{G: quantized(1)}) for n, step in enumerate((10, 20, 15), 1))]
    found = curves(page([log(lines)], tmp_path))  # it was started again from a checkpoint
    assert found[f"bytes saved at {G}, percent"] == [f"seconds {n}: 86.7 %" for n in (1, 2, 3)]


def test_of_a_long_run_intervals_are_put_together(log: Log, tmp_path: Path) -> None:
    count = 3 * _POINTS + 1
    lines = [HEADER, *(interval(float(n), n, **{G: quantized(1, 20.0)}) for n in range(1, count + 1))]
    file = log(lines)
    found = curves(page([file], tmp_path))
    for points in found.values():
        assert 2 * _POINTS / 3 < len(points) <= _POINTS and points[-1].startswith(f"step {count}: ")
    assert total(read(file).sites).calls == count


@pytest.mark.parametrize("count", [1, 5, _POINTS])
def test_a_drawing_has_every_point_in_its_place(count: int) -> None:
    points = [(float(10 * n), 50.0 + n * n % 7) for n in range(count)]
    drawn = curve(points, ("step", 0.0, points[-1][0]), "%", 0, 100, "saved", "a < b")
    assert drawn == curve(points, ("step", 0.0, points[-1][0]), "%", 0, 100, "saved", "a < b")
    marks = [mark for mark in ElementTree.fromstring(drawn).iter("use") if mark.find("title") is not None]
    assert len(marks) == count
    where = [(float(mark.attrib["x"]), float(mark.attrib["y"])) for mark in marks]
    assert all(left < right for (left, _), (right, _) in itertools.pairwise(where))
    heights = {y: round(height, 3) for (_, y), (_, height) in zip(points, where, strict=True)}
    assert len(set(heights.values())) == len(heights)  # a value has a height of its own
    assert [heights[y] for y in sorted(heights)] == sorted(heights.values(), reverse=True)  # and SVG counts downwards


def test_numbers() -> None:
    assert [amount(n) for n in (0, 999, 1000, 12345, 999_600, 10**12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 kB",
        "1 MB",
        "1 TB",
    ]
    assert [duration(n) for n in (1.25, 99, 100, 3600, 90000)] == [
        "1.2 s",
        "99.0 s",
        "1 min 40 s",
        "1 h 0 min",
        "1 d 1 h",
    ]
    assert [percent(*pair) for pair in ((0, 0), (0, 5), (5, 5), (1, 3))] == ["-", "0 %", "100 %", "33.3 %"]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome here to show the page")
def test_a_browser_shows_the_page(log: Log, tmp_path: Path) -> None:
    """Check that curves are drawn, that nothing overflows the window in both widths, and that no log runs a script."""
    page([log()], tmp_path)
    text = (tmp_path / "page.html").read_text()
    # The test's own script reports the result; the page has no script.
    measure = """<script>document.title = JSON.stringify({
        overflow: document.documentElement.scrollWidth - innerWidth,
        curves: [...document.querySelectorAll("svg .line")].map(line => line.getBoundingClientRect().width),
        sites: [...document.querySelectorAll(".site h3")].map(title => title.textContent)})</script>"""
    (tmp_path / "measured.html").write_text(text.replace("</body>", f"{measure}</body>"), encoding="utf-8")
    for width in (1200, 500):
        dom = browse(tmp_path, f"--window-size={width},1500", "--dump-dom", "measured.html")
        [title] = re.findall("<title>(.*?)</title>", dom, flags=re.DOTALL)[:1]
        seen = json.loads(title.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
        assert seen["overflow"] <= 0, width
        assert seen["sites"] == [HOSTILE, G]
        assert sum(drawn > 100 for drawn in seen["curves"]) == 3, "all but the one of one point"
    picture = tmp_path / "page.png"
    browse(tmp_path, "--window-size=1200,1500", f"--screenshot={picture}", "page.html")
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1200, 1500)
    assert len(picture.read_bytes()) > 30_000, "more than an empty page"


def browse(folder: Path, *words: str) -> str:
    *options, file = words
    assert BROWSER is not None
    quiet = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder}/browser",
    )
    done = subprocess.run(
        [BROWSER, *quiet, *options, (folder / file).as_uri()], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
