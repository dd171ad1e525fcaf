"""lab/benchmarks/trainings.py, steps.py and command.py: the parts that all benchmarks share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.benchmarks import command, ranks, steps, trainings
from lab.benchmarks.results import LOSSES
from tests.distributed import Ranks


def test_the_noise_is_on_the_first_seed_and_each_seed_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"full precision": 2.0, "a": 2.01, "noise 1": 3.0}
    kept: list[list[int]] = []
    seeds = trainings.by_seed(
        argparse.Namespace(seeds=[1, 7], noise=["1"]),
        ["full precision", "a"],
        lambda seed, variants: {name: {"validation loss": losses[name] + 0.01 * (seed == 7)} for name in variants},
        lambda found: kept.append([*found]),
    )
    assert kept == [[1], [1, 7]]
    assert [[*one] for one in seeds.values()] == [[*losses], ["full precision", "a"]]
    trainings.show(seeds, lambda results: f" {len(results)} seeds")
    _, a, noise = capsys.readouterr().out.splitlines()
    assert a.split() == ["a", "2.0150", "+0.499", "%", "2", "seeds", "by", "seed", "1:", "+0.500", "7:", "+0.498"]
    assert "+50.000 % 1 seeds  by seed 1: +50.000" in noise


def outcome(length: int) -> tuple[dict[str, Any], torch.Tensor]:
    arguments = argparse.Namespace(batch=2, sequence=3)
    mine = trainings.batch(torch.arange(1000), 5, 1, arguments, dist.get_rank())
    return trainings.outcome([1.0 + dist.get_rank(), 2.0 + dist.get_rank()], [dist.get_rank()] * length, right=1), mine


def test_the_losses_are_means_over_the_ranks_and_batches_are_not_the_same(ranks: Callable[[int], Ranks]) -> None:
    (first, mine), (second, other) = ranks(2).run(outcome, 60)
    assert first == second == {"validation loss": 2.0, LOSSES: [0.5, 0.5], "right": 1}
    assert mine.shape == other.shape == (2, 4) and not torch.equal(mine, other)
    assert torch.equal(mine, mine[:, :1] + torch.arange(4))  # sequences, each with the token after it


def test_a_table_has_medians_against_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"full": [0.2, 0.4, 0.3], "ours": [0.1, 0.1, 0.3]}
    counts = {"wire": {"full": [8e6], "ours": [2e6]}, "sent": {"full": 0.0, "ours": 1.5e6}, "quantized": {}}
    entry = steps.table("1gbit", {"seconds": seconds, **counts}, "full", share=0.5)
    ours = entry["variants"]["ours"]
    assert ours["step, seconds"] == 0.1 and ours["x base"] == pytest.approx(3) and ours["wire, bytes"] == 2e6
    assert ours["x base, least and most"] == [1.0, 4.0] and entry["share"] == 0.5
    entry["variants"]["theirs"] = {"cannot run": "IndexError"}
    steps.show(entry, "full", steps.SENT)
    head, _, _, shown, failed = capsys.readouterr().out.strip().splitlines()
    assert head == "links of 1gbit, against full, communication is 50% of its step"
    assert shown.split() == ["ours", "100", "3.00", "2.00", "1.5", "1.00", "to", "4.00"]
    assert failed.split() == ["theirs", "IndexError"]
    assert steps.rotated("abc", 4) == ["b", "c", "a"]


def test_a_command_keeps_its_results_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: argparse.Namespace, keep: command.Keep) -> int:
        keep({"rows": [arguments.bits]})
        return 3

    file = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--bits", "4", "--json", str(file)])
    assert command.main("Text.", lambda parser: parser.add_argument("--bits", type=int), run) == 3
    found = json.loads(file.read_text())
    assert found["rows"] == [4] and found["about"]["arguments"] == {"bits": 4}
    assert found["about"]["command"].endswith("--bits 4 --json " + str(file)) and "torch" in found["about"]


def test_a_rank_gets_the_options_and_more() -> None:
    line = ranks.command(outcome, argparse.Namespace(folder=Path("runs"), seed=1), seed=2)  # type: ignore[arg-type]
    assert line[:3] == ["-m", "lab.benchmarks.ranks", "tests.lab.test_trainings:outcome"]
    assert json.loads(line[3]) == {"folder": "runs", "seed": 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_bf16_are_rounded_once_and_others_left_alone(dtype: torch.dtype) -> None:
    a, b, c = (torch.randint(-50, 50, shape).to(dtype) for shape in ((5, 300), (300, 7), (5, 7)))
    with trainings.Float32Products():
        products = a @ b, torch.addmm(c, a, b), (a[None] @ b[None])[0]
    exact = a.double() @ b.double()
    for product, expected in zip(products, (exact, exact + c.double(), exact), strict=True):
        assert product.dtype is dtype and torch.equal(product, expected.to(dtype))
