"""The estimate behind the default limits: its formulas by hand on small numbers, and that the limits are its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_allreduce_plugin.cli.plan.presets import Shares
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import two_shot
from lab.benchmarks import command
from lab.planning import fused_estimate
from lab.planning.fused_estimate import BOXES, Box, fused_seconds, limit, limits

INT4 = Format(4, 128)  # 68 bytes of 256
SHARES = Shares(encode=0.5, decode=0.4, decode_sum=0.3, decode_sum_encode=0.2)
MACHINE = replace(BOXES[0].machine, copy=1e9, link=1e8)
BOX = replace(BOXES[0], machine=MACHINE, processors=30, meeting=1.0)


@pytest.mark.parametrize("box", BOXES, ids=lambda box: box.machine.name)
def test_the_default_limits_are_those_of_the_estimate(box: Box) -> None:
    """Check that the command prints the limits of the table in two_shot.py."""
    table = two_shot.NVLINK if box.nvlink else two_shot.PCIE
    assert table == {ranks: limits(box, ranks) for ranks in range(2, two_shot.MOST_RANKS + 1)}


def test_a_call_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute by hand 4 ranks, 40 pieces of 1024: 10 stripes in two shots, 40 in one; 10 blocks of at most 30 SMs."""
    monkeypatch.setattr(fused_estimate, "GENERAL", SHARES)
    numel, tensor, payload = 40 * 1024, 80 * 1024, 40 * 544
    two = fused_seconds(numel, INT4, BOX, 4, one_shot=False)
    assert two == pytest.approx(
        5e-6
        + 2.0
        + 2 * 3 / 4 * payload / 1e8
        + 3e-9 * ((tensor + payload) / 0.5 + (payload + payload / 4) / 0.2 + (payload + tensor) / 0.4)
    )
    one = fused_seconds(numel, INT4, BOX, 4, one_shot=True)
    kernel = 3e-9 * ((tensor + payload) / 0.5 + (4 * payload + tensor) / 0.2)
    assert one == pytest.approx(5e-6 + 1.0 + 3 * payload / 1e8 + kernel)
    few = fused_seconds(4 * 1024, INT4, BOX, 4, one_shot=False)  # one block
    assert few == pytest.approx(2.0, rel=0.01) and few > 2.0 + 30e-9 * 2 * 4 * 1024 * (1 / 0.5 + 1 / 0.4)


def test_a_limit_is_the_largest_size_that_is_not_slower() -> None:
    assert limit(lambda numel, c: numel, lambda numel, c: 1 << 20) == 2 << 20
    assert limit(lambda numel, c: 1, lambda numel, c: 0) == 0
    assert limit(lambda numel, c: numel * c.bits, lambda numel, c: 8 << 20) == 2 << 20  # at both widths


def test_one_command_prints_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fused_estimate"])
    assert command.main(None, lambda _: None, fused_estimate.run) == 0
    text = capsys.readouterr().out
    assert "not a measurement" in text and text.count("meeting:") == 2
