"""lab/benchmarks/ddp_hooks.py: a variant that cannot run ends in a reason, whichever way it fails, and its name."""

from __future__ import annotations

import os
import sys

import pytest

from flash_allreduce_plugin.cli import launch
from lab.benchmarks import ddp_hooks

RANK = """
import os, sys, time
from lab.benchmarks import ddp_hooks
with ddp_hooks.watched("good", 60):
    pass
with ddp_hooks.watched("bad", {limit}):
    {code}
"""
ABORT = """
    print("terminate called\\n  what():  [enforce fail at a.cc:1] 2 vs 1. Sizes differ. Is it so?", file=sys.stderr)
    sys.stderr.flush()
    os.abort()
"""
HOOK = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = ddp_hooks.wrapped("quantization_pertensor_hook", torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
"""
DRIFTED = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
    ddp_hooks.check_same_weights(model)
    torch.nn.init.constant_(model.bias, 1e-30 * dist.get_rank())
    ddp_hooks.check_same_weights(model)
"""


def run(code: str, limit: float = 60) -> tuple[str, str] | None:
    with launch.on_this_machine(2) as ranks:
        command = [sys.executable, "-c", RANK.format(code=code.strip(), limit=limit)]
        return ddp_hooks.run(ranks, command, timeout=120)[1]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("FLASH_ALLREDUCE_AUTOLOAD", "0")


def test_a_variant_that_runs_has_no_reason() -> None:
    assert run("pass") is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('too small. Take more')", "ValueError: too small, in <string>.<module>"),
        (ABORT, "ended the process: 2 vs 1. Sizes differ"),
        (DRIFTED, "ValueError: the ranks have different weights, in ddp_hooks.check_same_weights"),
        (HOOK, "IndexError: invalid index of a 0-dim tensor, in quantization_hooks.quantize_and_allgather"),
    ],
    ids=["an error", "an abort", "ranks that drift apart", "an error in a callback of gloo's"],
)
def test_a_variant_that_fails_is_named_with_its_reason(code: str, reason: str) -> None:
    assert run(code) == ("bad", reason)


def test_a_variant_that_does_not_return_is_ended() -> None:
    assert run("time.sleep(100)", limit=1) == ("bad", "did not return within 1 s")


def test_a_failure_outside_of_a_variant_is_raised() -> None:
    with launch.on_this_machine(2) as ranks, pytest.raises(launch.RankError, match="exit status 3"):
        ddp_hooks.run(ranks, [sys.executable, "-c", "raise SystemExit(3)"], timeout=60)
