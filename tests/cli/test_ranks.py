"""cli/ranks.py: a function in every rank, rank 0's messages and result, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flash_allreduce_plugin.cli import ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def functions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks import the functions below from this file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(ROOT)]))


def add_up(settings: dict[str, Any], say: ranks.Say) -> dict[str, Any]:
    total = torch.tensor(float(dist.get_rank() + settings["plus"]))
    dist.all_reduce(total)
    say(rank=dist.get_rank(), doing="adding")
    sys.stdout.write("something else on stdout\n")  # in one piece: the ranks of a launcher write to one place
    return {"sum": float(total), "world": dist.get_world_size()}


def fail(settings: dict[str, Any], say: ranks.Say) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such thing")
    time.sleep(60)


def sleep(settings: dict[str, Any], say: ranks.Say) -> None:
    Path(settings["folder"], str(os.getpid())).touch()
    time.sleep(60)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Any, what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def test_ranks_of_its_own() -> None:
    said: list[Any] = []
    result = ranks.run(f"{__name__}:add_up", {"plus": 1}, world_size=3, on_message=said.append, timeout=60)
    assert result == {"sum": 6.0, "world": 3}
    assert said == [{"rank": 0, "doing": "adding"}]


def test_a_rank_that_fails_is_named_and_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(ranks.RanksError, match=r"(?s)rank 1 ended with exit status 1.*ValueError: no such thing"):
        ranks.run(f"{__name__}:fail", {}, world_size=2, timeout=60)
    assert time.monotonic() - begin < 40


@pytest.mark.parametrize(("world_size", "link"), [(0, "loopback"), (2, "quick")])
def test_bad_ranks(world_size: int, link: str) -> None:
    with pytest.raises(ValueError, match=r"count is 0|rate 'quick'"):
        ranks.run(f"{__name__}:add_up", {"plus": 1}, world_size=world_size, link=link)


def test_under_a_launcher() -> None:
    program = (
        "from flash_allreduce_plugin.cli import ranks; import json, sys; "
        f"result = ranks.run('{__name__}:add_up', {{'plus': 0}}, world_size=9, "
        "on_message=lambda said: sys.stdout.write(f'said {said}\\n')); "
        "sys.stdout.write(json.dumps(result) + '\\n')"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run(
        [*launch, sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    expected = {"null": 1, json.dumps({"sum": 1.0, "world": 2}): 1, "said {'rank': 0, 'doing': 'adding'}": 1}
    assert {text: done.stdout.count(text) for text in expected} == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_command(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "from flash_allreduce_plugin.cli import ranks; "
        f"ranks.run('{__name__}:sleep', {{'folder': {str(tmp_path)!r}}}, world_size=2)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks")
        process.send_signal(number)
        process.wait(10)
    started = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: all(map(ended, started)), "the ranks to end")
