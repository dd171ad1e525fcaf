"""A pytest plugin for test_deepspeed_upstream.py: DeepSpeed's own tests, unedited, on gloo and the CPU.

DeepSpeed's harness starts the ranks of every test from a fork server. That server imports this module first, and with
it DeepSpeed and the plugin, so each rank has both. UPSTREAM_CONFIG is the FlashConfig to enable as JSON, empty for
none. Into the folder UPSTREAM_RESULTS each rank writes the counts of its sites when it ends. pytest collects them after
each test: one results.json with how every test ended, why, and the ranks that ran it.
"""

from __future__ import annotations

import functools
import json
import multiprocessing.util
import os
import time
from collections.abc import Generator
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path
from typing import Any

import cpuinfo
import deepspeed
import pytest
import torch._dynamo  # noqa: F401 (before the fork: an optimizer imports it, which takes a rank seconds)

CONFIG, FOLDER = os.environ["UPSTREAM_CONFIG"], Path(os.environ["UPSTREAM_RESULTS"])

# DeepSpeed's CPU Adam asks for the CPU's name again and again, seconds each time.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()

outcomes: dict[str, tuple[str, str]] = {}
ranks: dict[str, list[dict[str, Any]]] = {}
seconds: dict[str, float] = {}

if CONFIG:
    from flash_allreduce_plugin import FlashConfig
    from flash_allreduce_plugin.integrations import deepspeed as plugin

    plugin.enable(FlashConfig.from_dict(json.loads(CONFIG)))


def write_sites() -> None:
    sites: dict[str, Any] = {}
    if CONFIG:
        from flash_allreduce_plugin.telemetry import counters

        sites = counters.stats()["sites"]
    (FOLDER / f"rank-{os.getpid()}.json").write_text(json.dumps(sites))


# In a rank, as soon as it is forked: write when it ends. (atexit is not for the children of multiprocessing.)
multiprocessing.util.register_after_fork(
    write_sites, lambda write: multiprocessing.util.Finalize(None, write, exitpriority=0)
)


def pytest_configure() -> None:
    set_forkserver_preload([__name__])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    report = (yield).get_result()
    if report.outcome != "passed" or item.nodeid not in outcomes:
        outcome = "failed" if report.outcome == "failed" else report.outcome
        reason = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        outcomes[item.nodeid] = outcome, reason.partition("\n")[0]
    if report.when == "call":
        seconds[item.nodeid] = time.time() - call.start
        files = list(FOLDER.glob("rank-*.json"))
        ranks[item.nodeid] = [json.loads(file.read_text()) for file in files]
        for file in files:
            file.unlink()


def pytest_sessionfinish() -> None:
    result = {"deepspeed": deepspeed.__file__, "outcomes": outcomes, "ranks": ranks, "seconds": seconds}
    (FOLDER / "results.json").write_text(json.dumps(result))
