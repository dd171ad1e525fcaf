"""scripts/check_arm.py without the cross compiler; the whole check is `nox -s check-arm`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_allreduce_plugin.codec.format import Format
from scripts import check_arm
from scripts.check_arm import ENCODE, Call, difference, report, results

CALL = Call(ENCODE, Format(5, 64, spikes=True), torch.bfloat16, 100, b"\x01\x02")
# Writes the records of its input in upper case, and ends as a finding does after the second one.
REPLAY = """
import struct, sys
for number in range(2):
    head = sys.stdin.buffer.read(4)
    if not head: break
    text = sys.stdin.buffer.read(struct.unpack("<I", head)[0]).upper()
    sys.stdout.buffer.write(struct.pack("<I", len(text)) + text)
else:
    sys.exit("found: a seeded mistake") if sys.stdin.buffer.read(1) else None
"""


def test_a_call_is_the_bytes_that_case_h_reads() -> None:
    """One byte for each of operation, set, width, width, group size, options, dtype; ranks; gap; shifts; length, ..."""
    written = replace(CALL, shift=3, cut=2, key=-2, first_group=7, wide=1).input()
    assert written[:7] == bytes([ENCODE, 2, 3, 6, 1, CALL.format.options, 1])
    assert written[7:16] == bytes([0, 0, 0, *[3] * 6])
    assert written[16:20] == bytes([0, 100, 0, 2])
    assert written[20:25] == bytes(5)
    assert written[25:33] == b"\xfe" + b"\xff" * 7
    assert written[33:41] == b"\x07" + bytes(7)
    assert written[41:] == b"\x01\x01\x01\x02"


def test_the_calls_have_every_format_and_the_golden_cases() -> None:
    formats = list(check_arm.formats())
    assert len(formats) == len(set(formats)) == 3 * 2 * 2 * 3 * 7 * 6 + 2 * 2 * 2 * 7 * 4
    assert {call.format for call in check_arm.encodings()} == set(formats)
    cases = check_arm.golden()
    assert len(cases) > 500 and all(expected for _, _, expected in cases)


def test_results_are_read_and_a_finding_names_its_call() -> None:
    replay = [sys.executable, "-c", REPLAY]
    assert results(replay, [b"ab", b""]) == [b"AB", b""]
    with pytest.raises(SystemExit, match=r"ended with 1 in call 2: found: a seeded mistake"):
        results(replay, [b"a", b"b", b"c"])


def test_a_difference_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert difference(CALL, b"abc", b"abc") is None
    text = difference(CALL, b"abc", b"abd")
    assert text is not None and text.startswith("encode of 100 torch.bfloat16, Format(bits=5")
    assert text.endswith("byte 2 of 3 differs")
    assert difference(CALL, b"abc", b"ab") is not None
    assert report("calls", [], 3) and not report("calls", [text], 3)
    assert capsys.readouterr().out.splitlines() == ["calls: 3, no difference", text, "calls: 3, 1 difference"]


def test_a_missing_tool_is_an_error_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"aarch64-linux-gnu-g\+\+ and qemu-aarch64 .* apt-get install g\+\+-aarch64"):
        check_arm.tools()
