"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.distributed import POOLS, Pool, Ranks

# A shell that starts the tests in the background has SIGINT ignored, and so would every process that they start:
# the tests of Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_crowds() -> Iterator[None]:
    """Each process group of gloo has threads that wake up every ten milliseconds for as long as it lives: ranks that
    have made many of them are replaced between two tests, or they take the machine from the tests that follow.
    """
    yield
    for pool in POOLS:
        pool.close(crowded=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(n): n running ranks, kept for the whole session and replaced when a case has failed."""
    pool = Pool()
    yield pool
    pool.close()
