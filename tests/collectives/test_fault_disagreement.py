"""Ranks that do not make the same call: an error on every rank in bounded time, and no tensor is written."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.runtime import groups
from tests.distributed import Ranks

TIMEOUT = timedelta(seconds=2)
CONFIG = FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
LEVELS = FlashConfig(
    bits=4, min_bytes=0, chunk_bytes=4096, hierarchical={"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 1}
)
WORLD = 2


def other_call(what: str) -> list[tuple[str, Any]]:
    """Return consecutive (collective, its arguments) of this rank; rank 1 differs in one thing."""
    other = dist.get_rank() == 1
    site = fap.Site("layer 7")
    here = {"config": CONFIG, "site": site}

    def whole(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((numel,), 1.0 + dist.get_rank(), dtype=dtype)

    if what == "size":
        return [("all_reduce", ((whole(90_000 if other else 30_000),), here))]
    if what == "size, as many groups":  # the payloads are of one length
        return [("all_reduce", ((whole(1020 if other else 1000),), here))]
    if what == "dtype":
        return [("all_reduce", ((whole(30_000, torch.bfloat16 if other else torch.float32),), here))]
    if what == "operator":
        op = dist.ReduceOp.AVG if other else dist.ReduceOp.SUM
        return [("all_reduce", ((whole(30_000), op), here))]
    if what == "collective":
        arguments = (whole(60_000), whole(30_000)) if other else (whole(30_000), whole(60_000))
        return [("all_gather" if other else "reduce_scatter", (arguments, here))]
    if what == "order":
        calls = [("all_reduce", ((whole(30_000),), {**here, "site": fap.Site(f"layer {i}")})) for i in (1, 2)]
        return calls[::-1] if other else calls
    if what == "order of layers of one site":  # each would get the other's tokens
        sites = [fap.Site("layers", layer=layer) for layer in (0, 1)]
        calls = [("all_to_all", ((whole(30_000), whole(30_000)), {**here, "site": layer})) for layer in sites]
        return calls[::-1] if other else calls
    if what == "order of collectives of one size":
        calls = [("all_reduce", ((whole(60_000),), here)), ("all_gather", ((whole(60_000), whole(30_000)), here))]
        return calls[::-1] if other else calls
    if what == "one call more":
        return [("all_reduce", ((whole(30_000),), here))] * (2 if other else 1)
    if what == "parts":
        parts = [whole(10_000), whole(20_000)]
        if other:
            return [("reduce_scatter", ((whole(15_000), [whole(15_000), whole(15_000)]), here))]
        return [("reduce_scatter", ((whole(10_000), parts), here))]
    if what == "levels":
        return [("all_reduce", ((whole(90_000 if other else 30_000),), {"config": LEVELS, "site": site}))]
    if what == "configuration, not compared":
        config = CONFIG.model_copy(update={"check_ranks": False, "bits": 5 if other else 4})
        return [("all_reduce", ((whole(30_000),), {**here, "config": config}))]
    if what == "configuration, later":  # a rank that compares configurations, with peers that see no reason to
        config = CONFIG.model_copy(update={"bits": 5}) if other else CONFIG
        return [("all_reduce", ((whole(30_000),), {**here, "config": config}))]
    assert what == "quantized or not"
    config = CONFIG.model_copy(update={"check_ranks": False, "min_bytes": 0 if other else 1 << 30})
    return [("all_reduce", ((whole(30_000),), {**here, "config": config}))]


def disagreeing(what: str) -> list[tuple[str, float, bool]]:
    """Return the error of each call, its seconds, and if all tensors are as before: no foreign bytes were decoded."""
    for config in (CONFIG, LEVELS):
        fap.all_reduce(torch.ones(1000), config=config)  # all is well, and the configurations are agreed on
    found = []
    for collective, (arguments, keywords) in other_call(what):
        tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        start, message = time.monotonic(), "no error"
        try:
            getattr(fap, collective)(*arguments, **keywords)
        except fap.CollectiveError as error:
            message = str(error)
        found.append((message, time.monotonic() - start, all(map(torch.equal, tensors, before))))
    return found


QUICK = ("size", "size, as many groups", "order", "order of layers of one site")
KINDS = (
    *QUICK,
    *("dtype", "operator", "collective", "order of collectives of one size", "parts", "levels"),
    *("configuration, not compared", "configuration, later", "quantized or not"),
)


@pytest.mark.parametrize("what", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KINDS])
def test_guarantee_7_ranks_that_make_different_calls(what: str) -> None:
    with Ranks(WORLD, TIMEOUT) as ranks:
        outcomes = ranks.outcomes(disagreeing, what, timeout=90)
    for rank, (kind, calls) in enumerate(outcomes):
        assert kind == "value", calls
        for message, seconds, untouched in calls:
            assert f", rank {rank} of {WORLD}, failed while " in message and "at site 'layer" in message, message
            assert seconds < TIMEOUT.total_seconds() + 3
            assert untouched or "in full precision" in message  # which is torch.distributed's own call


def one_call_more() -> list[str]:
    found = []
    for _, (arguments, keywords) in other_call("one call more"):
        try:
            fap.all_reduce(*arguments, **keywords)
            found.append("no error")
        except fap.CollectiveError as error:
            found.append(str(error))
    if dist.get_rank() == 0:
        time.sleep(TIMEOUT.total_seconds() + 1)  # a rank that ends is noticed immediately
    return found


@pytest.mark.slow
def test_guarantee_7_a_rank_that_makes_one_call_more() -> None:
    with Ranks(WORLD, TIMEOUT) as ranks:
        (_, first), (_, second) = ranks.outcomes(one_call_more, timeout=90)
    assert first == ["no error"]
    assert second[0] == "no error" and "failed while" in second[1]


def another_field() -> str:
    """Imitate a release with one more field of the configuration, and otherwise equal."""
    if dist.get_rank() == 1:
        to_dict, digest = FlashConfig.to_dict, FlashConfig.digest
        FlashConfig.to_dict = lambda self: {**to_dict(self), "new_field": 1}  # type: ignore[method-assign]
        FlashConfig.digest = lambda self: digest(self)[::-1]  # type: ignore[method-assign]
    try:
        fap.all_reduce(torch.ones(1000), group=dist.new_group(), config=CONFIG)
    except fap.MismatchError as error:
        return str(error)
    return "no error"


def test_guarantee_7_a_release_with_another_configuration() -> None:
    with Ranks(WORLD, TIMEOUT) as ranks:
        for message in ranks.run(another_field, timeout=90):
            assert 'new_field is "unknown" on rank 0; 1 on rank 1' in message


def after_an_error_in_the_handshake() -> list[str]:
    """Call on one rank, then on the other: the message names the phase of the handshake."""
    if dist.get_rank() == 0:
        time.sleep(TIMEOUT.total_seconds() + 1)
    found = []
    for _ in range(2):
        try:
            fap.all_reduce(torch.ones(1000), config=CONFIG)
            found.append("no error")
        except fap.CollectiveError as error:
            found.append(str(error))
    state = groups.known(dist.group.WORLD)
    return [*found, str(state is not None and len(state._agreed))]


@pytest.mark.slow
def test_a_handshake_that_failed_is_not_remembered() -> None:
    with Ranks(WORLD, TIMEOUT) as ranks:
        for _, found in ranks.outcomes(after_an_error_in_the_handshake, timeout=90):
            assert all("failed while gathering the configurations" in message for message in found[:2]), found
            assert found[2] == "0"
