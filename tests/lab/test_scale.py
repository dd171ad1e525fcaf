"""lab.planning.scale: its figures of a call are those of the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flash_allreduce_plugin.cli.plan.inputs import cluster_of
from flash_allreduce_plugin.collectives import two_level
from lab.planning import scale
from tests.lab import run_command

MIB = scale.MIB


def quantized(ranks: int, mib: int, levels: int, message: float = 1e-6) -> dict[str, float]:
    return scale.quantized(mib * MIB, ranks, 8, levels, cluster_of(f"h100-8x{ranks // 8}")[0], message)


def test_messages_in_two_levels_are_as_large_as_flat_but_fewer() -> None:
    flat, two = quantized(1024, 128, 1), quantized(1024, 128, 2)
    assert two["message bytes"] == pytest.approx(flat["message bytes"], rel=0.01)
    assert flat["messages"] / flat["exchanges"] == 1023
    assert two["messages"] / two["exchanges"] == pytest.approx((127 + 7) / 2)
    assert flat["sent / needed"] == pytest.approx(1, abs=0.02) and two["sent / needed"] == pytest.approx(1, abs=0.02)


def test_exchanges_do_not_grow_with_the_nodes() -> None:
    assert quantized(16384, 128, 2)["exchanges"] <= quantized(1024, 128, 2)["exchanges"] <= 32


def test_bytes_between_nodes_equal_the_sent_ones() -> None:
    plan = scale.plan_of(16 * MIB, 64, 8, 2)
    numel = 16 * MIB // 2
    by_hand = 2 * 7 / 8 * plan.gather.payload_bytes(numel) / 8  # a rank has an eighth of the tensor in its node
    between = [two_level.sent_bytes("all_reduce", numel, plan, rank)[1] for rank in (0, 37, 63)]
    assert between == pytest.approx([by_hand] * 3, rel=0.01)
    slabs = len(two_level._slabs_of_tensor(numel, plan))
    assert quantized(64, 16, 2)["message bytes"] * 2 * slabs * 7 == pytest.approx(by_hand, rel=0.01)


def test_a_message_costs_what_it_is_told() -> None:
    free, dear = quantized(256, 16, 1, message=0.0), quantized(256, 16, 1, message=1e-5)
    assert dear["device"] - free["device"] == pytest.approx(1e-5 * free["messages"])


def test_two_levels_overtake_full_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    file = tmp_path / "scale.json"
    monkeypatch.setattr("sys.argv", ["scale", "--ranks", "8", "64", "--mib", "16", "1024", "--json", str(file)])
    assert run_command(scale) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["ranks"], "two levels" in row) for row in rows] == [(8, False)] * 2 + [(64, True)] * 2
    assert rows[-1]["fastest"] == "two levels"
    assert len(capsys.readouterr().out.splitlines()) == 5
    monkeypatch.setattr("sys.argv", ["scale", "--ranks", "12"])
    with pytest.raises(SystemExit):
        run_command(scale)
    assert "multiple of 8" in capsys.readouterr().err
