"""lab/soak and lab/benchmarks/handshake.py, briefly; and that a soak finds an error on purpose."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from lab.soak import collectives, training
from lab.soak.collectives import Call, Lane
from lab.soak.watch import MIB, Watchdog, growth
from tests.distributed import RankFailure, Ranks

ROOT = Path(__file__).resolve().parents[2]
GetRanks = Callable[[int], Ranks]
CALL = Call(0, 0, (0, 1), 0, "all_reduce", torch.float32, 0, False, (1000,), 0, False, True, 3, 17)


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab.soak", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_a_thousand_collectives(tmp_path: Path) -> None:
    few = ("--calls", "1200", "--ranks", "3", "--largest", "4096", "--most-growth", "200")
    done = soak("collectives", *few, "--json", str(tmp_path / "soak.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    counts = found["counts"]
    assert found["calls"] == 1200 == sum(counts[kind] for kind in collectives.COLLECTIVES)
    assert counts["quantized"] + counts["plain"] == 1200
    assert all(counts[kind] > 60 for kind in collectives.COLLECTIVES)
    assert 0 < counts["plain"] < 200 < counts["asynchronous"] < 1200
    assert len(found["growth"]) == 3 and all(row["rss"]["before"] > 50 * MIB for row in found["growth"])
    assert "1200 of 1200" in done.stdout and "no rank grew by more than 200 MiB" in done.stdout


def test_growth_beyond_the_bound_is_a_failure() -> None:
    done = soak("collectives", "--calls", "30", "--ranks", "2", "--largest", "64", "--most-growth", "-1000")
    assert done.returncode == 1 and "ranks 0, 1 grew by more than -1000 MiB" in done.stderr, done.stdout + done.stderr


def test_growth_is_measured_after_the_warm_up() -> None:
    done = list(range(10, 1001, 10))
    flat = growth(done, [100 if count < 90 else 7000 for count in done], 1000)
    assert (flat["growth"], flat["per call"]) == (0, 0)
    assert growth(done, [5 * count for count in done], 1000)["per call"] == 5


def lane(world: int, watchdog: Watchdog) -> Lane:
    draw = random.Random(1)
    configs = [collectives.draw_config(draw, i) for i in range(8)]
    settings = {"seed": 1, "largest": 4096, "world": world}
    return Lane(0, [dist.group.WORLD], configs, settings, watchdog)


def makes_calls(collective: str, spoil: str | None) -> list[int]:
    """Make calls; results of the function `spoil` are too large at one place, by more than any width explains."""
    real = getattr(fap, spoil or "all_reduce")

    def spoilt(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        work = real(tensor, *arguments, **options)
        assert work is not None
        work.wait()
        tensor[500] += 2 * float(tensor.abs().max())
        return work

    same = replace(CALL, collective=collective)
    calls = [replace(same, number=number, config=1 + number % 7, start=1000 * number) for number in range(6)]
    with pytest.MonkeyPatch.context() as patch, Watchdog(dist.get_rank(), 100) as watchdog:
        if spoil:
            patch.setattr(collectives.fap, spoil, spoilt)
        checksums: list[int] = lane(2, watchdog).run(calls).tolist()
    return checksums


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "irecv"])
def test_a_wrong_element_is_found(ranks: GetRanks, collective: str) -> None:
    kind = {"irecv": "send"}.get(collective, collective)
    first, second = ranks(2).run(makes_calls, kind, None)
    assert (first == second) == (collective == "all_reduce") and max(len(set(first)), len(set(second))) == 6
    # One rank sees it and the other waits for its calls, as long as the timeout says.
    with (
        Ranks(2, group_timeout=timedelta(seconds=2)) as own,
        pytest.raises(RankFailure, match="further from the exact result than guarantee 6 allows"),
    ):
        own.run(makes_calls, kind, collective)


def test_different_bits_are_found() -> None:
    calls = [replace(CALL, number=0), replace(CALL, collective="reduce_scatter"), replace(CALL, ranks=(0, 2))]
    same = torch.tensor([[1, 2, 3], [1, 5, 0], [0, 0, 3]])
    assert collectives.differing(calls, same) == []
    same[2, 2] = 4
    assert collectives.differing(calls, same) == [calls[2]]


def compares_replicas() -> list[bool]:
    x, group = torch.zeros(8, dtype=torch.bfloat16), dist.group.WORLD
    assert group is not None
    same = training._same([x, x], group)
    x[3] = -0.0 if dist.get_rank() else 0.0  # equal values in other bits
    return [same, training._same([x, x], group)]


def test_replicas_are_compared_bit_for_bit(ranks: GetRanks) -> None:
    assert ranks(2).run(compares_replicas) == [[True, False]] * 2


def test_the_watchdog_ends_a_rank_that_does_not_advance() -> None:
    script = (
        "import time\nfrom lab.soak.watch import Watchdog\nwith Watchdog(3, 0.5) as dog:\n"
        "    dog.advance('lane 1', 'the last call')\n    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "rank 3: nothing has advanced for 0.5 s" in done.stderr and "lane 1: 'the last call'" in done.stderr


def test_a_rank_lives_on_after_its_watchdog() -> None:
    script = (
        "import threading, time\nfrom lab.soak.watch import Watchdog\nwith Watchdog(3, 0.5):\n    pass\n"
        "time.sleep(2)\nassert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_handshakes_of_a_few_groups(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab.benchmarks.handshake", "--ranks", "2", "--groups", "3", "--json"]
    done = subprocess.run([*command, str(tmp_path / "h.json")], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "h.json").read_text())["rows"]
    assert [(row["ranks"], row["check_ranks"]) for row in rows] == [(2, True), (2, False)]
    assert all(row["first ms"] > 0 and row["later ms"] > 0 for row in rows)


@pytest.mark.parametrize("what", ["ddp", "fsdp"])
def test_some_steps(what: str, tmp_path: Path) -> None:
    done = soak(what, "--steps", "12", "--most-growth", "200", "--json", str(tmp_path / "soak.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["loss"].keys() == {"int8", "int4", "thin"} and found["replicas compared"] == 12
    assert all(calls > 0 for calls in found["quantized"].values()) and found["quantized"]
