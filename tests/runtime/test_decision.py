"""One decision: the ranks' agreement, which calls are quantized, and the counters."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import environment
from flash_allreduce_plugin.codec.format import WIRE_VERSION
from flash_allreduce_plugin.collectives import messages
from flash_allreduce_plugin.policy import Plan
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.runtime.decision import Call, Request, decide, ring_bytes
from tests.api.test_reductions import QUANTIZED, counts
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]


def reasons() -> dict[str, dict[str, Any]]:
    """Return why each call was in full precision, counted at a separate site."""
    config, site = fap.FlashConfig, fap.Site
    backward = site("backward", fap.Role.BACKWARD)

    def call() -> None:
        fap.all_reduce(torch.ones(99), config=config(), site=site("small"))
        fap.all_reduce(torch.ones(0), config=QUANTIZED, site=site("empty"))
        fap.all_reduce(torch.ones(99), config=config(enabled=False, min_bytes=0), site=site("off"))
        fap.all_reduce(torch.ones(99), config=config(min_bytes=0), site=backward)
        fap.all_reduce(torch.ones(99), config=QUANTIZED, site=site("quantized"))

    return counts(call)["sites"]


def test_every_reason_is_counted_at_its_site(ranks: GetRanks) -> None:
    for sites in ranks(2).run(reasons):
        assert sites["small"]["full_precision"] == {"message below min_bytes": 1}
        assert sites["small"]["bytes_sent"] == sites["small"]["bytes_full_precision"] == 99 * 4
        assert sites["empty"]["full_precision"] == {"empty message": 1}
        assert sites["empty"]["bytes_sent"] == 0
        assert sites["off"]["full_precision"] == {"disabled by configuration": 1}
        assert sites["backward"]["full_precision"] == {"backward_bits is full": 1}
        assert sites["quantized"]["quantized"] == 1 and not sites["quantized"]["full_precision"]
        assert sites["quantized"]["bytes_sent"] == 2 * (4 + 64)


def measured(interval: int) -> list[dict[str, Any]]:
    config = QUANTIZED.model_copy(update={"quality_interval": interval, "bits": 8})
    rank, world = dist.get_rank(), dist.get_world_size()

    def call() -> None:
        for i in range(5):
            x, shard, whole = (
                gaussian(world * 6000, seed=rank + 10 * i),
                torch.empty(6000),
                torch.empty(world * world * 6000),
            )
            fap.reduce_scatter(shard, x, config=config)
            fap.all_gather(whole, x, config=config)
            work = fap.all_reduce(x, dist.ReduceOp.AVG, config=config, async_op=True)
            work.wait()

    return [counts(call)["sites"][name] for name in ("all_reduce", "reduce_scatter", "all_gather")]


def test_quality_interval_measures_the_error(ranks: GetRanks) -> None:
    for interval in (1, 3):
        for sites in ranks(2).run(measured, interval):
            # One rounding gives 44.5 dB; two, each of the size of its own input, about 3 dB less at most.
            assert [40 < site["sqnr_db"] < 48 for site in sites] == [True] * 3
    for sites in ranks(2).run(measured, 0):
        assert [site["sqnr_db"] for site in sites] == [None] * 3


def mismatch(changes: list[dict[str, Any]], environment: list[str]) -> tuple[str, bool]:
    """Run with rank r at changes[r] and environment[r] in a new group. Return (message, tensor untouched)."""
    rank = dist.get_rank()
    group = dist.new_group()
    config = fap.FlashConfig(**{"min_bytes": 0, **changes[rank]})
    x = gaussian(5000, seed=rank)
    before = x.clone()
    os.environ["FLASH_ALLREDUCE_DISABLE"] = environment[rank]
    try:
        fap.all_reduce(x, group=group, config=config)
        message = "no error"
    except fap.MismatchError as error:
        message = str(error)
    finally:
        del os.environ["FLASH_ALLREDUCE_DISABLE"]
    untouched = torch.equal(x, before)
    fap.all_reduce(x, group=group, config=QUANTIZED)  # the group itself still works
    dist.destroy_process_group(group)
    return message, untouched


@pytest.mark.parametrize(
    ("changes", "environment", "sentence"),
    [
        ([{"bits": 8}, {"bits": 4}, {"bits": 8}], [""] * 3, "bits is 8 on ranks 0, 2; 4 on rank 1"),
        ([{}, {}, {"group_size": 64}], [""] * 3, "group_size is 128 on ranks 0, 1; 64 on rank 2"),
        ([{"enabled": False}, {}, {}], [""] * 3, "enabled is false on rank 0; true on ranks 1, 2"),
        ([{}, {}, {}], ["", "1", ""], "FLASH_ALLREDUCE_DISABLE is false on ranks 0, 2; true on rank 1"),
        (
            [{"reduce_bits": 4, "chunk_bytes": 4096}, *[{"chunk_bytes": 8192}] * 2],
            [""] * 3,
            "chunk_bytes is 4096 on rank 0; 8192 on ranks 1, 2, and reduce_bits is 4 on rank 0; null on ranks 1, 2",
        ),
    ],
    ids=["bits", "group_size", "enabled", "switched off on one rank", "two fields"],
)
def test_guarantee_7_ranks_that_disagree_get_mismatch_error_on_every_rank(
    ranks: GetRanks, changes: list[dict[str, Any]], environment: list[str], sentence: str
) -> None:
    for message, untouched in ranks(3).run(mismatch, changes, environment):
        assert sentence in message and message.endswith("Give every rank the same flags, file and environment.")
        assert untouched


def other_wire_version() -> str:
    group = dist.new_group()
    version = groups.WIRE_VERSION
    groups.WIRE_VERSION = version + dist.get_rank()
    try:
        fap.all_reduce(torch.ones(100), group=group, config=QUANTIZED)
    except fap.MismatchError as error:
        return str(error)
    finally:
        groups.WIRE_VERSION = version
        dist.destroy_process_group(group)
    return "no error"


def test_guarantee_7_two_versions_of_the_package_find_each_other_out(ranks: GetRanks) -> None:
    for message in ranks(2).run(other_wire_version):
        assert f"wire version is {WIRE_VERSION} on rank 0; {WIRE_VERSION + 1} on rank 1" in message


def switched_off() -> tuple[bool, dict[str, int]]:
    os.environ[environment.DISABLE] = "1"
    try:
        x = gaussian(5000, seed=dist.get_rank())
        plain = x.clone()
        dist.all_reduce(plain)
        counted = counts(lambda: fap.all_reduce(x, config=QUANTIZED))
        return same_bits(x, plain), counted["full_precision"]
    finally:
        del os.environ[environment.DISABLE]


def test_disabled_everything_stays_in_full_precision(ranks: GetRanks) -> None:
    assert ranks(2).run(switched_off) == [(True, {"FLASH_ALLREDUCE_DISABLE": 1})] * 2


def agreements() -> list[int]:
    """Count collectives of a first, a second and an unchecked first call, without those of the call itself."""
    group = dist.new_group()
    gathers = 0
    agree = messages.gather

    def counting(*arguments: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return agree(*arguments)

    messages.gather = counting
    counted = []
    try:
        for config in (QUANTIZED, QUANTIZED, QUANTIZED.model_copy(update={"bits": 8, "check_ranks": False})):
            gathers = 0
            fap.all_reduce(torch.ones(300), group=group, config=config)
            counted.append(gathers)
    finally:
        messages.gather = agree
        dist.destroy_process_group(group)
    return counted


def test_ranks_are_compared_once_a_configuration_and_not_without_check_ranks(ranks: GetRanks) -> None:
    assert ranks(2).run(agreements) == [[1, 0, 0]] * 2


def test_the_ring_has_two_halves_for_an_all_reduce() -> None:
    assert ring_bytes("all_reduce", 400, 4) == 600
    assert ring_bytes("reduce_scatter", 400, 4) == ring_bytes("all_gather", 400, 4) == 300
    assert ring_bytes("all_reduce", 400, 1) == 0


def decided() -> list[tuple[Any, ...]]:
    """Return decide's answers and counts for the same facts under changing conditions; there is no tensor."""
    found: list[tuple[Any, ...]] = []

    def once(**facts: Any) -> None:
        given = {"numel": 8000, "config": QUANTIZED, "site": fap.Site("facts"), **facts}
        where = {"dtype": torch.float32, "device": torch.device("cpu"), "group": dist.group.WORLD}
        call = Call(Request("all_reduce", **where, **given))
        fap.reset_stats()
        answer = decide(call)
        counted = fap.stats()["sites"]["facts"]
        how = answer.gather.bits if isinstance(answer, Plan) else answer.reason
        found.append((how, counted["bytes_sent"], counted["bytes_full_precision"]))

    once()
    once(instead_of=5)
    once(full_precision="because")
    once(full_precision="because", theirs=True, instead_of=5)
    once(config=fap.FlashConfig(min_bytes=1 << 30))
    os.environ[environment.DISABLE] = "1"
    try:
        once(full_precision="because")
    finally:
        del os.environ[environment.DISABLE]
    return found


def test_it_returns_once_with_a_plan_or_a_reason_and_counts(ranks: GetRanks) -> None:
    ring, sent = 32_000, 2 * 32 * 68  # 63 groups of 128 in two shards of 32
    expected = [
        (4, sent, ring),
        (4, sent, 5),
        ("because", ring, ring),
        ("because", 5, 5),
        ("message below min_bytes", ring, ring),
        ("FLASH_ALLREDUCE_DISABLE", ring, ring),
    ]
    assert ranks(2).run(decided) == [expected] * 2
