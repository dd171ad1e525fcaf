"""Fixtures shared by all tests."""

from __future__ import annotations

import json
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import selection
from tests.distributed import POOLS, Pool, Ranks

# A shell that starts the tests in the background has SIGINT ignored, and so would every process that they start:
# the tests of Ctrl-C would wait for nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_crowds() -> Iterator[None]:
    """Replace ranks with many process groups between two tests. Each gloo group has threads that wake up every ten
    milliseconds for as long as it lives: they would take the machine from the tests that follow.
    """
    yield
    for pool in POOLS:
        pool.close(crowded=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Yield ranks(n): n running ranks, kept for the whole session and replaced when a case has failed."""
    pool = Pool()
    yield pool
    pool.close()


# ---- which tests run when, and how long they take ----

DURATIONS = Path(__file__).with_name("durations.json")
_seconds: dict[str, float] = defaultdict(float)
_start = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"update {DURATIONS.name}, on a quiet machine")
    parser.addoption("--minutes", type=float, help="skip the tests that would start later")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not selection.is_product(item.nodeid):
            item.add_marker("thorough")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - _start > 60 * minutes:
        pytest.skip(f"no time: {minutes:g} minutes are over; `make test-all` runs it")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--record-durations"):
        modules: dict[str, float] = defaultdict(float)
        for test, seconds in _seconds.items():
            modules[test.partition("::")[0]] += seconds
        long = {test: seconds for test, seconds in _seconds.items() if seconds > selection.MOST_SECONDS}
        before = json.loads(DURATIONS.read_text(encoding="utf-8"))
        others = before["long tests"].items()
        kept = {test: s for test, s in others if test not in _seconds and test.partition("::")[0] not in modules}
        there = {name: s for name, s in before["modules"].items() if (DURATIONS.parents[1] / name).is_file()}
        found = {"modules": {**there, **modules}, "long tests": {**kept, **long}}
        rounded = {kind: {name: round(each[name], 1) for name in sorted(each)} for kind, each in found.items()}
        DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
