"""cli/launch.py: a process for each rank of this machine, without root, and nothing left behind."""

from __future__ import annotations

import os
import sys
import time

import pytest

from flash_allreduce_plugin.cli import launch


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def test_each_rank_gets_its_environment_and_needs_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    source = (
        "import os; print(*(os.environ[n] for n in 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR'.split()))"
    )
    lines: list[str] = []
    with launch.on_this_machine(2) as ranks:
        printed = ranks.run(python(source), timeout=20, on_line=lines.append)
    assert (lines, printed) == (["0 2 0 2 127.0.0.1"], ["", "1 2 1 2 127.0.0.1\n"])


def test_lines_of_rank_0_come_while_it_runs() -> None:
    source = "import os, time; print('now', flush=True); time.sleep(0.3 if os.environ['RANK'] == '0' else 0)"
    heard: list[float] = []
    with launch.on_this_machine(2) as ranks:
        ranks.run(python(source), timeout=20, on_line=lambda line: heard.append(time.monotonic()))
        ended_at = time.monotonic()
    assert len(heard) == 1 and ended_at - heard[0] > 0.2


def test_the_first_failing_rank_is_named_and_the_others_end() -> None:
    source = "import os, sys, time; sys.exit('no such tensor') if os.environ['RANK'] == '1' else time.sleep(60)"
    start = time.monotonic()
    with (
        launch.on_this_machine(2) as ranks,
        pytest.raises(launch.RankError, match=r"rank 1 ended with exit status 1:\nno such tensor") as caught,
    ):
        ranks.run(python(source), timeout=30)
    assert (caught.value.rank, caught.value.status) == (1, 1) and time.monotonic() - start < 10


def test_out_of_time() -> None:
    with (
        launch.on_this_machine(1) as ranks,
        pytest.raises(launch.RankError, match=r"rank 0 was still running after 0\.5 s") as caught,
    ):
        ranks.run(["sleep", "60"], timeout=0.5)
    assert caught.value.status == 124


@pytest.mark.parametrize("count", [0, 251])
def test_a_bad_count(count: int) -> None:
    with pytest.raises(ValueError, match=f"count is {count}; expected 1 to 250"), launch.on_this_machine(count):
        pass
