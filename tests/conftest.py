"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.distributed import Ranks

# A shell that starts the tests in the background has SIGINT ignored, and so would every process that they start:
# the tests of Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(n): n running ranks, kept for the whole session and replaced when a case has killed them."""
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started or not started[world_size].alive:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield get
    for pool in started.values():
        pool.close()
