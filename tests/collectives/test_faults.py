"""Guarantee 7: no wait is unbounded. A dead or absent rank surfaces as CollectiveError on the others."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import transport
from tests.distributed import Ranks

TIMEOUT = timedelta(seconds=3)
CONFIG = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
SITE = fap.Site("layer 7")


def message_of(collective: str) -> tuple[str, float]:
    """Return the CollectiveError of a call, and its seconds; every later wait of the handle raises it too."""
    world = dist.get_world_size()
    small, large = torch.ones(100_000), torch.ones(100_000 * world)
    start = time.monotonic()
    work: Any = None
    try:
        if collective == "all_reduce":
            work = fap.all_reduce(large, config=CONFIG, async_op=True, site=SITE)
        elif collective == "reduce_scatter":
            work = fap.reduce_scatter(small, large, config=CONFIG, async_op=True, site=SITE)
        else:
            work = fap.all_gather(large, small, config=CONFIG, async_op=True, site=SITE)
        work.wait()
    except fap.CollectiveError as error:
        if work is not None:
            with pytest.raises(fap.CollectiveError):
                work.wait()
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def killed_in_the_middle(collective: str, victim: int) -> tuple[str, float]:
    fap.all_reduce(torch.ones(1000), config=CONFIG)  # all is well, and the configuration is agreed on
    if dist.get_rank() == victim:
        issued = 0
        pending = transport.Pending

        def dying(*arguments: Any) -> transport.Pending:
            nonlocal issued
            issued += 1
            if issued > 20:
                os._exit(17)
            return pending(*arguments)

        transport.Pending = dying  # type: ignore[assignment, misc]
    return message_of(collective)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_guarantee_7_a_rank_that_is_killed(collective: str) -> None:
    with Ranks(3, TIMEOUT) as ranks:
        outcomes = ranks.outcomes(killed_in_the_middle, collective, 1, timeout=30)
    assert outcomes[1] == ("died", 17)
    for rank in (0, 2):
        kind, value = outcomes[rank]
        assert kind == "value", value
        message, seconds = value
        assert message.startswith(f"{collective} at site 'layer 7', rank {rank} of 3, failed while "), message
        # The connection is found closed by a wait, or by the next post where that is earlier.
        waited = "a peer died, did not answer within the group's timeout" in message
        assert waited or "could not be started, because a peer died" in message, message
        assert seconds < TIMEOUT.total_seconds() + 3


def dead_before_the_call(victim: int) -> tuple[str, float]:
    fap.all_reduce(torch.ones(1000), config=CONFIG)
    if dist.get_rank() == victim:
        os._exit(17)
    time.sleep(1)  # its connections are closed by now: the first post of the call finds that out
    return message_of("all_reduce")


def test_guarantee_7_a_rank_that_died_before_the_call() -> None:
    with Ranks(3, TIMEOUT) as ranks:
        outcomes = ranks.outcomes(dead_before_the_call, 1, timeout=30)
    assert outcomes[1] == ("died", 17)
    for rank in (0, 2):
        kind, value = outcomes[rank]
        assert kind == "value", value
        message, seconds = value
        assert message.startswith(f"all_reduce at site 'layer 7', rank {rank} of 3, failed while "), message
        assert "it could not be started, because a peer died" in message
        assert seconds < TIMEOUT.total_seconds()


def absent(agreed: bool) -> tuple[str, float]:
    if agreed:
        fap.all_reduce(torch.ones(1000), config=CONFIG)
    if dist.get_rank() == 0:
        time.sleep(TIMEOUT.total_seconds() + 2)
        return "slept", 0
    return message_of("all_reduce")


@pytest.mark.parametrize("agreed", [False, True], ids=["at the first use", "later"])
def test_guarantee_7_a_rank_that_never_calls(agreed: bool) -> None:
    with Ranks(2, TIMEOUT) as ranks:
        _, (kind, value) = ranks.outcomes(absent, agreed, timeout=30)
    assert kind == "value", value
    message, seconds = value
    assert message.startswith("all_reduce at site 'layer 7', rank 1 of 2, failed while "), message
    assert ("gathering the configurations" in message) == (not agreed)
    assert TIMEOUT.total_seconds() - 1 < seconds < TIMEOUT.total_seconds() + 3


def alone_in_full_precision(known: bool) -> tuple[str, float]:
    config = fap.FlashConfig(check_ranks=False)
    if known:
        fap.all_reduce(torch.ones(10), config=config, site=SITE)
    if dist.get_rank() == 0:
        time.sleep(TIMEOUT.total_seconds() + 2)
        return "slept", 0
    start = time.monotonic()
    try:
        fap.all_reduce(torch.ones(10), config=config, site=SITE)
    except fap.CollectiveError as error:
        return str(error), time.monotonic() - start
    return "no error", 0


@pytest.mark.parametrize("known", [False, True], ids=["the first of its kind", "a later one"])
def test_guarantee_7_also_in_full_precision(known: bool) -> None:
    with Ranks(2, TIMEOUT) as ranks:
        _, (kind, value) = ranks.outcomes(alone_in_full_precision, known, timeout=30)
    assert kind == "value", value
    assert "all_reduce at site 'layer 7', rank 1 of 2, failed while sending in full precision" in value[0]
