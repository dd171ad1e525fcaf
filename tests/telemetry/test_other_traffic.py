"""torch.distributed's other traffic: known calls give known bytes, ours are not among them, and the methods of
ProcessGroup are the originals as soon as nothing is attached.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.integrations import ddp, fsdp
from flash_allreduce_plugin.telemetry import other_traffic
from tests.distributed import run_ranks

CONFIG = fap.FlashConfig(min_bytes=0)


class Owner:
    pass


def methods() -> dict[str, Any]:
    return {name: vars(dist.ProcessGroup)[name] for name in other_traffic._METHODS if name in vars(dist.ProcessGroup)}


def known_calls() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    owner, rank, world = Owner(), dist.get_rank(), dist.get_world_size()
    group = dist.new_group(group_desc="dp")
    fap.reset_stats()
    dist.all_reduce(torch.ones(8), group=group)  # not attached yet
    other_traffic.attach(owner)
    x, parts = torch.ones(12), [torch.ones(4) for _ in range(world)]
    from torch.distributed import all_reduce as imported_by_name

    imported_by_name(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.all_reduce_coalesced([x, x], group=group)
    transport.all_gather_single(torch.empty(12 * world), x, group=group)
    dist.all_gather(parts, torch.ones(4), group=group)
    transport.reduce_scatter_single(torch.empty(4), torch.ones(4 * world), group=group)
    if dist.get_backend() != "gloo":
        dist.reduce_scatter(torch.empty(4), parts, group=group)
    dist.all_to_all_single(torch.empty(4 * world), torch.ones(4 * world), group=group)
    splits = [1 + r for r in range(world)]
    dist.all_to_all_single(
        torch.empty(splits[rank] * world), torch.ones(sum(splits)), [splits[rank]] * world, splits, group=group
    )
    dist.broadcast(x, 1, group=group)
    dist.reduce(x, 0, group=group)
    dist.gather(torch.ones(4), parts if rank == 0 else None, 0, group=group)
    dist.scatter(torch.ones(4), parts if rank == 0 else None, 0, group=group)
    if rank == 0:
        dist.send(x, 1, group=group)
    elif rank == 1:
        dist.recv(x, 0, group=group)
    dist.barrier(group=group)
    other_traffic.detach(owner)
    dist.all_reduce(torch.ones(8), group=group)
    found: dict[str, Any] = fap.stats()["beside"]
    return found


def test_the_bytes_of_known_calls() -> None:
    world = 3
    for rank, found in enumerate(run_ranks(world, known_calls)):
        expected = {
            "all_reduce": (3, 2 * 2 * (48 * 2 // 3) + 2 * (96 * 2 // 3)),
            "all_gather": (2, 144 * 2 // 3 + 48 * 2 // 3),
            "reduce_scatter": (1, 48 * 2 // 3),
            "all_to_all": (2, 32 + 4 * (6 - (1 + rank))),
            "broadcast": (1, 48 if rank == 1 else 0),
            "reduce": (1, 0 if rank == 0 else 48),
            "gather": (1, 0 if rank == 0 else 16),
            "scatter": (1, 32 if rank == 0 else 0),
        }
        if rank == 0:
            expected["send"] = (1, 48)
        assert {name: (one["calls"], one["bytes_sent"]) for name, one in found.items()} == {
            f"{name}, dp of {world} ranks": counts for name, counts in expected.items()
        }


def our_calls() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    owner, world = Owner(), dist.get_world_size()
    other_traffic.attach(owner)
    fap.reset_stats()
    for config in (CONFIG, fap.FlashConfig(min_bytes=1 << 30), fap.FlashConfig(min_bytes=0, quality_interval=1)):
        for async_op in (False, True):
            for _ in range(2):  # the second time a plain call is remembered
                x, part = torch.ones(1024), torch.empty(1024)
                whole = torch.empty(1024 * world)
                works = [
                    fap.all_reduce(x, config=config, async_op=async_op),
                    fap.reduce_scatter(part, whole, config=config, async_op=async_op),
                    fap.all_gather(whole, x, config=config, async_op=async_op),
                ]
                for work in works:
                    if work is not None:
                        work.wait()
    stats = fap.stats()
    other_traffic.detach(owner)
    return stats


def test_our_own_calls_are_not_other_traffic() -> None:
    for stats in run_ranks(2, our_calls):
        assert stats["calls"] == 36 and stats["quantized"] == 24
        assert stats["beside"] == {}
        assert 0 < stats["bytes_plain"] < stats["bytes_sent"]


def test_methods_are_put_back_exactly_with_the_last_owner() -> None:
    before, first, second = methods(), Owner(), Owner()
    other_traffic.attach(first)
    other_traffic.attach(first)
    other_traffic.attach(second)
    during = methods()
    assert all(during[name] is not before[name] for name in before)
    other_traffic.detach(first)
    assert methods() == during
    del second
    gc.collect()
    assert all(methods()[name] is before[name] for name in before)


def test_a_wrapper_of_another_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before, owner = methods(), Owner()
    other_traffic.attach(owner)
    ours = dist.ProcessGroup.allreduce
    theirs = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", theirs)
    other_traffic.detach(owner)
    assert vars(dist.ProcessGroup)["allreduce"] is theirs
    assert all(methods()[name] is before[name] for name in before if name != "allreduce")
    monkeypatch.undo()
    dist.ProcessGroup.allreduce = before["allreduce"]  # type: ignore[method-assign]


@pytest.mark.parametrize("make", [ddp.ddp_hook, fsdp.FlashReduceScatter, fsdp.FlashAllGather])
def test_hooks_count_as_long_as_they_live(make: Any) -> None:
    before = methods()
    hook = make(CONFIG)
    assert methods()["allreduce"] is not before["allreduce"]
    del hook
    gc.collect()
    assert methods() == before


@pytest.mark.parametrize("variable", ["FLASH_ALLREDUCE_COUNT_BESIDE=0", "FLASH_ALLREDUCE_DISABLE=1"])
def test_off_nothing_is_wrapped(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*variable.split("="))
    before, owner = methods(), Owner()
    other_traffic.attach(owner)
    hook = fap.ddp_hook(CONFIG)
    assert methods() == before
    assert hook is not None


def test_importing_wraps_nothing() -> None:
    script = (
        "import torch.distributed as d; before = dict(vars(d.ProcessGroup)); "
        "import flash_allreduce_plugin.api.reductions, flash_allreduce_plugin.integrations.ddp; "
        "import flash_allreduce_plugin.integrations.fsdp; assert dict(vars(d.ProcessGroup)) == before"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ})


def test_a_call_that_torch_refuses_is_refused_as_before() -> None:
    owner = Owner()
    other_traffic.attach(owner)
    try:
        with pytest.raises(TypeError):
            dist.ProcessGroup(0, 1).allreduce("nothing")  # type: ignore[call-overload]
    finally:
        other_traffic.detach(owner)


def test_apex_stops_counting_when_it_is_disabled() -> None:
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "integrations", "apex_stub"))
    try:
        apex, before = importlib.import_module("flash_allreduce_plugin.integrations.apex"), methods()
        apex.enable(CONFIG)
        assert methods() != before
        apex.disable()
        assert methods() == before
    finally:
        sys.path.pop(0)
