"""A pytest plugin for the ranks of test_upstream.py: Megatron-LM's own tests, unedited, on gloo and the CPU.

Each rank is a pytest of its own (`torchrun -m pytest -p upstream_ranks`), with cuda_shim.py as its sitecustomize.
UPSTREAM_CONFIG is the FlashConfig to enable as JSON, empty for none. Into the folder UPSTREAM_RESULTS a rank writes
rank-<n>.json: how each test ended here, why, and the counts of each site in it.

A test that fails on one rank leaves the others waiting in a collective. So the group times out soon, and after a
test that failed anywhere every rank gives its groups up and the next test starts with new ones. So it does after a
test that has destroyed its model-parallel groups: Megatron only forgets them, and each keeps threads of gloo's.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CONFIG, FOLDER = os.environ["UPSTREAM_CONFIG"], Path(os.environ["UPSTREAM_RESULTS"])
GROUP_TIMEOUT, PATIENCE = timedelta(seconds=30), timedelta(seconds=300)

outcomes: dict[str, tuple[str, str]] = {}
sites: dict[str, dict[str, Any]] = {}
test_id, groups_made = "", 0  # name a group, so that ranks that made other groups in the last test meet again


class ProcessGroupGloo(dist.ProcessGroupGloo):
    """Use one device for all groups until they are given up.

    Each device has a thread that wakes 100 times a second, and a test may make 250 groups: on eight ranks these
    threads took the whole machine.
    """

    device: dist.ProcessGroupGloo.Device

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [self.device], GROUP_TIMEOUT  # the callers' are half an hour
        super().__init__(store, rank, size, options)


of_torchrun, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
meeting = dist.PrefixStore("meeting", of_torchrun)


def pytest_configure() -> None:
    real = dist.init_process_group

    def init_process_group(backend: str = "gloo", **arguments: Any) -> None:
        """Use gloo for NCCL, with a separate prefix for every group, because an abandoned group leaves keys behind."""
        global groups_made
        groups_made += 1
        ProcessGroupGloo.device = dist.ProcessGroupGloo.create_default_device()
        own = dist.PrefixStore(f"{test_id} {groups_made}", of_torchrun)
        real("gloo", store=own, rank=RANK, world_size=WORLD_SIZE, timeout=GROUP_TIMEOUT)

    import megatron.core.utils

    megatron.core.utils.is_te_min_version = lambda *args, **kwargs: False  # core_v0.16.1 compares None with a version
    dist.init_process_group = init_process_group
    dist.distributed_c10d.ProcessGroupGloo = ProcessGroupGloo
    if CONFIG:
        from flash_allreduce_plugin import FlashConfig
        from flash_allreduce_plugin.integrations import megatron

        megatron.enable(FlashConfig.from_dict(json.loads(CONFIG)))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
        outcomes[report.nodeid] = "failed", lines[-1].removeprefix("E").strip() if lines else "it cannot be imported"


def pytest_collection_finish() -> None:
    gc.freeze()  # the modules' objects; give_up_groups collects after many tests


def pytest_runtest_setup(item: pytest.Item) -> None:
    global test_id, groups_made
    test_id, groups_made = item.nodeid, 0
    if CONFIG:
        from flash_allreduce_plugin.telemetry import counters

        counters.reset_stats()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    report = (yield).get_result()
    if report.outcome != "passed" or item.nodeid not in outcomes:
        reason = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        outcomes[item.nodeid] = report.outcome, reason.partition("\n")[0]
    if report.when == "call":
        if CONFIG:
            from flash_allreduce_plugin.telemetry import counters

            sites[item.nodeid] = counters.stats()["sites"]
        if report.outcome == "failed":
            give_up_groups()  # before a teardown that waits for the others


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Meet the other ranks; all give their groups up if one cannot use them again."""
    from tests.unit_tests.test_utilities import Utils  # Megatron-LM's, not this project's

    outcome = outcomes[nodeid][0]
    meeting.set(f"{nodeid} {RANK}", "used" if outcome != "failed" and Utils.inited else "give up")
    if any(meeting.get(f"{nodeid} {rank}") == b"give up" for rank in range(WORLD_SIZE)):
        give_up_groups()


def give_up_groups() -> None:
    from megatron.core import parallel_state
    from tests.unit_tests.test_utilities import Utils  # Megatron-LM's, not this project's

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # models of the test hold groups
    Utils.inited = False


def pytest_sessionfinish(session: pytest.Session) -> None:
    import megatron.core

    result: dict[str, Any] = {"megatron": megatron.core.__file__, "outcomes": outcomes, "sites": sites}
    if CONFIG:
        from flash_allreduce_plugin.integrations import megatron as plugin

        result["in place"] = [entry["in_place"] for entry in plugin.report().values()]
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(result))
    meeting.set(f"written {RANK}", "")
    for rank in range(WORLD_SIZE):
        meeting.wait([f"written {rank}"])
    session.exitstatus = 0  # torchrun must not end the others for a test that failed
