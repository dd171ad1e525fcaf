"""A rank without the plugin: the others say who is missing within seconds, and the error names it."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import missing_ranks
from tests.distributed import Ranks

CONFIG = fap.FlashConfig(min_bytes=0)
SITE = fap.Site("layer 7")


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))


def without_it(absent: int, patience: float, subgroup: bool) -> tuple[str, float | None, list[str]]:
    """Return the error, seconds until the notice (None: there was none), the notices."""
    missing_ranks.GRACE = patience
    heard = Heard()
    logging.getLogger("flash_allreduce_plugin").addHandler(heard)
    group = dist.new_group([1, 2], timeout=timedelta(seconds=3)) if subgroup else dist.group.WORLD
    tensor, error = torch.ones(4096), ""
    begin = time.monotonic()
    if not subgroup or dist.get_rank() in (1, 2):
        try:
            if dist.get_rank() == absent:
                dist.all_reduce(tensor, group=group)
            else:
                fap.all_reduce(tensor, group=group, config=CONFIG, site=SITE)
        except (fap.CollectiveError, RuntimeError) as failure:
            error = str(failure)
    time.sleep(max(0.0, begin + 3.5 - time.monotonic()))  # the host of the store stays until all have asked it
    seconds = heard.lines[0][0] - begin if heard.lines else None
    return error, seconds, [text for _, text in heard.lines]


def test_a_rank_that_calls_plain_torch_is_named_in_seconds_and_in_the_error() -> None:
    with Ranks(3, group_timeout=timedelta(seconds=3)) as ranks:
        outcomes = ranks.run(without_it, 2, 0.5, False)
    notices = [(seconds, text) for _, seconds, lines in outcomes for text in lines if seconds is not None]
    assert len(notices) == 1, "one rank says it, once"
    assert 0.5 <= notices[0][0] < 2.5
    assert "layer 7" in notices[0][1] and "rank 2 has never said that it uses flash_allreduce" in notices[0][1]
    for error, _, _ in outcomes[:2]:
        assert "rank 2 has never said that it uses flash_allreduce in this group: is the plugin installed" in error
        assert "layer 7" in error


def test_errors_name_global_ranks_and_the_group() -> None:
    with Ranks(3, group_timeout=timedelta(seconds=3)) as ranks:
        ranks.run(used)  # all three have reported it in the default group
        outcomes = ranks.run(without_it, 2, 0.5, True)
    assert "rank 2 has never said" in outcomes[1][0]
    assert outcomes[1][2] and not outcomes[0][2]


def used() -> None:
    fap.all_reduce(torch.ones(4096), config=CONFIG)


def late(patience: float) -> list[str]:
    missing_ranks.GRACE = patience
    heard = Heard()
    logging.getLogger("flash_allreduce_plugin").addHandler(heard)
    if dist.get_rank() == 0:
        time.sleep(2)
    for _ in range(3):
        fap.all_reduce(torch.ones(4096), config=CONFIG)
    return [text for _, text in heard.lines]


def test_a_late_rank_is_named_once_and_the_call_succeeds() -> None:
    with Ranks(2) as ranks:
        lines = ranks.run(late, 0.5)
    assert lines[0] == []
    assert len(lines[1]) == 1 and "rank 0 has never said" in lines[1][0]


def test_who_is_missing_is_found_in_few_questions() -> None:
    class Store:
        asked = 0

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            return not {"flash_allreduce/7", "flash_allreduce/900"} & set(keys)

    store = Store()
    assert list(missing_ranks._missing(store, range(1024))) == [7, 900]
    assert store.asked <= 2 * 2 * 10 + 1
    store = Store()
    assert list(missing_ranks._missing(store, range(8, 900))) == []
    assert store.asked == 1


def test_nothing_is_left_behind_by_an_ordinary_first_use() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(threads_left) == [([], {}), ([], {})]


def threads_left() -> tuple[list[str], dict[object, Any]]:
    used()
    deadline = time.monotonic() + 5
    while (names := [t.name for t in threading.enumerate() if "flash" in t.name]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return names, missing_ranks._watcher._waiting
