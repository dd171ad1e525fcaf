"""What the user calls: which calls are quantized, what is counted, and how mistakes are answered."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import dispatch, environment, groups
from flash_allreduce_plugin.codec.format import WIRE_VERSION
from flash_allreduce_plugin.collectives import messages, transport
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]

QUANTIZED = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096)
EXACT_DTYPES = ("float64", "int64", "int32", "uint8", "bool", "complex64")


def counts(call: Callable[[], Any]) -> dict[str, Any]:
    fap.reset_stats()
    call()
    counted = fap.stats()
    fap.reset_stats()
    return counted


def still_works() -> bool:
    x = torch.full((20_000,), dist.get_rank() + 1.0)
    fap.all_reduce(x, config=QUANTIZED)
    world = dist.get_world_size()
    return bool((x - world * (world + 1) / 2).abs().max() < 0.1)


# ---- full precision ----


def other_dtypes() -> list[tuple[str, bool, dict[str, int]]]:
    """(name, equal to the plain collective, reasons) of each dtype and collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outcomes = []
    for name in EXACT_DTYPES:
        dtype = getattr(torch, name)
        x = (gaussian(world * 50, seed=rank) * 10).to(dtype)
        plain, ours = x.clone(), x.clone()
        dist.all_reduce(plain)
        counted = counts(lambda ours=ours: fap.all_reduce(ours, config=QUANTIZED))
        outcomes.append((name, same_bits(plain, ours), counted["full_precision"]))
        plain, shard = x.new_empty(50), x.new_empty(50)
        transport.reduce_scatter_single(plain, x)
        counted = counts(lambda x=x, shard=shard: fap.reduce_scatter(shard, x, config=QUANTIZED))
        outcomes.append((name, same_bits(shard, plain), counted["full_precision"]))
        whole, parts = x.new_empty(world * world * 50), [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        counted = counts(lambda x=x, whole=whole: fap.all_gather(whole, x, config=QUANTIZED))
        outcomes.append((name, same_bits(whole, torch.cat(parts)), counted["full_precision"]))
    return outcomes


@pytest.mark.parametrize("world_size", [2, 3])
def test_guarantee_5_other_dtypes_go_in_full_precision_and_are_counted(ranks: GetRanks, world_size: int) -> None:
    for outcomes in ranks(world_size).run(other_dtypes):
        for name, equal, reasons in outcomes:
            assert equal, name
            assert reasons == {f"dtype {name}": 1}


def other_operators() -> list[tuple[str, bool, dict[str, int]]]:
    outcomes = []
    for name in ("MAX", "MIN", "PRODUCT"):
        op = getattr(dist.ReduceOp, name)
        plain = gaussian(300, seed=dist.get_rank())
        ours = plain.clone()
        dist.all_reduce(plain, op)
        counted = counts(lambda ours=ours, op=op: fap.all_reduce(ours, op, config=QUANTIZED))
        outcomes.append((name.lower(), same_bits(plain, ours), counted["full_precision"]))
    return outcomes


def test_guarantee_5_other_operators_go_in_full_precision_and_are_counted(ranks: GetRanks) -> None:
    for outcomes in ranks(2).run(other_operators):
        for name, equal, reasons in outcomes:
            assert equal and reasons == {f"operator {name}": 1}


def reasons() -> dict[str, dict[str, Any]]:
    """Why each call went in full precision, counted at a site of its own."""
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


def alone() -> tuple[bool, dict[str, int]]:
    x = gaussian(1000)
    y, shard, whole, exchanged = x.clone(), torch.empty(1000), torch.empty(1000), torch.empty(1000)

    def call() -> None:
        fap.all_reduce(y, config=QUANTIZED)
        fap.reduce_scatter(shard, x, dist.ReduceOp.AVG, config=QUANTIZED)
        fap.all_gather(whole, x, config=QUANTIZED)
        fap.all_to_all(exchanged, x, [1000], config=QUANTIZED)

    counted = counts(call)
    assert counted["bytes_sent"] == 0
    return all(torch.equal(x, t) for t in (y, shard, whole, exchanged)), counted["full_precision"]


def test_one_rank_is_left_alone(ranks: GetRanks) -> None:
    assert ranks(1).run(alone) == [(True, {"one-rank group": 4})]


def leaf() -> bool:
    x = torch.nn.Parameter(gaussian(5000, seed=dist.get_rank()))
    expected = x.detach().clone()
    fap.all_reduce(expected, config=QUANTIZED)
    fap.all_reduce(x, config=QUANTIZED)
    return same_bits(x.detach(), expected) and x.requires_grad and x.grad_fn is None


def test_a_leaf_that_needs_its_gradient_is_reduced_like_any_tensor(ranks: GetRanks) -> None:
    assert ranks(2).run(leaf) == [True, True]


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


# ---- agreement ----


def mismatch(changes: list[dict[str, Any]], environment: list[str]) -> tuple[str, bool]:
    """Rank r has changes[r] and environment[r] in a new group; (message, tensor untouched)."""
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
    fap.all_reduce(x, group=group, config=QUANTIZED)  # the group itself has taken no harm
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


def known_to_go_plainly() -> list[dict[str, int]]:
    """full_precision of one call after another, each in its own way unlike the ones before it; -1: quantized."""
    found = []
    small = fap.FlashConfig(min_bytes=1 << 20)
    x = gaussian(5000, seed=dist.get_rank())

    def again(tensor: Tensor, config: fap.FlashConfig = small, **how: Any) -> None:
        plain = tensor.clone()
        dist.all_reduce(plain, how.get("op", dist.ReduceOp.SUM))
        counted = counts(lambda: fap.all_reduce(tensor, config=config, **how))
        assert same_bits(tensor, plain) == (counted["quantized"] == 0)
        found.append(counted["full_precision"])

    again(x.clone())
    again(x.clone())
    again(x.clone()[:4000])
    again(x.double())
    again(x.clone(), op=dist.ReduceOp.MAX)
    again(x.clone().view(50, 100).t())
    again(x.clone(), QUANTIZED)
    again(x.clone(), fap.FlashConfig(min_bytes=1 << 20, exclude=["b"]))
    warm = fap.FlashConfig(min_bytes=0, warmup_steps=1)
    again(x.clone(), warm, step=0)
    again(x.clone(), warm, step=1)
    os.environ[environment.DISABLE] = "1"
    try:
        again(x.clone()[:3000])
        again(x.clone())
    finally:
        del os.environ[environment.DISABLE]
    again(x.clone()[:3000])
    return found


def test_a_call_that_went_in_full_precision_is_remembered_as_what_it_was(ranks: GetRanks) -> None:
    small, quantized = {"message below min_bytes": 1}, {}
    other = [{"dtype float64": 1}, {"operator max": 1}]
    expected = [small, small, small, *other, small, quantized, small, {"warm-up": 1}, quantized]
    expected += [{"FLASH_ALLREDUCE_DISABLE": 1}, small, small]
    assert ranks(2).run(known_to_go_plainly) == [expected] * 2


REASONS = {
    "message below min_bytes": {"config": fap.FlashConfig(min_bytes=1 << 30)},
    "disabled by configuration": {"config": fap.FlashConfig(enabled=False)},
    "warm-up": {"config": fap.FlashConfig(min_bytes=0, warmup_steps=3), "step": 2},
    "asked for": {"config": QUANTIZED, "full_precision": "asked for"},
}


def their_own(async_op: bool) -> list[Any]:
    """Each collective twice, by one that is told apart from torch's: it leaves 7 where the result belongs."""
    x, part, whole = gaussian(6000), torch.zeros(3000), torch.zeros(6000)

    def once(name: str, how: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, int], bool, int]:
        ran: list[Tensor] = []

        def theirs() -> Any:
            ran.append(tensors[0].fill_(7))
            return dist.barrier(async_op=True) if async_op else None

        def call() -> None:
            handle = getattr(fap, name)(*tensors, async_op=async_op, plain=theirs, **how)
            assert (handle is None) == (not async_op)
            if async_op:
                handle.wait()

        counted = counts(call)["full_precision"]
        return counted, bool((tensors[0] == 7).all()), len(ran)

    calls = {"all_reduce": [x], "reduce_scatter": [part, x], "all_gather": [whole, part]}
    return [
        (reason, *once(name, how, [tensors[0].zero_(), *tensors[1:]]))
        for reason, how in REASONS.items()
        for name, tensors in calls.items()
        for _ in range(2)
    ]


@pytest.mark.parametrize("async_op", [False, True])
def test_full_precision_is_the_frameworks_own_collective(ranks: GetRanks, async_op: bool) -> None:
    for found in ranks(2).run(their_own, async_op):
        assert len(found) == 2 * 3 * len(REASONS)
        for reason, counted, sevens, ran in found:
            assert counted == {reason: 1} and sevens and ran == 1, reason


def their_failure() -> str:
    def theirs() -> None:
        raise RuntimeError("connection reset")

    try:
        fap.all_reduce(gaussian(6000), config=fap.FlashConfig(enabled=False), plain=theirs, site=fap.Site("here"))
    except fap.CollectiveError as error:
        return str(error)
    return ""


def test_a_frameworks_own_collective_that_fails_is_named(ranks: GetRanks) -> None:
    for rank, message in enumerate(ranks(2).run(their_failure)):
        assert (
            message.startswith(f"all_reduce at site 'here', rank {rank} of 2, failed") and "connection reset" in message
        )


def parts_in_pieces() -> list[bool]:
    """A part, and the output, may be tensors one after another: the bits of the joined ones."""
    rank, same = dist.get_rank(), []
    x = gaussian(9000, seed=rank)
    for config in (QUANTIZED, fap.FlashConfig(enabled=False), fap.FlashConfig(min_bytes=0, quality_interval=1)):
        joined = [x[:5000].clone(), x[5000:].clone()]
        expected = torch.empty(len(joined[rank]))
        fap.reduce_scatter(expected, joined, config=config)
        pieces: list[list[Tensor]] = [[x[:1], x[1:2001], x[2001:5000]], [x[5000:]]]
        output = [torch.empty(one.numel()) for one in pieces[rank]]
        fap.reduce_scatter(output, pieces, config=config)
        same.append(same_bits(torch.cat(output), expected))
    return same


def test_parts_in_pieces_are_parts(ranks: GetRanks) -> None:
    assert ranks(2).run(parts_in_pieces) == [[True] * 3] * 2


def plain_calls_of_other_shapes() -> list[Tensor]:
    """Each twice: the second is a remembered one."""
    small, rank, found = fap.FlashConfig(min_bytes=1 << 20), dist.get_rank(), []
    x = torch.arange(24.0) * (1 + rank)
    for _ in range(2):
        for shape in ((12,), (2, 6), (12, 1), (3, 2, 2)):
            output = torch.empty(shape)
            fap.reduce_scatter(output, x, config=small)
            found.append(output.flatten())
            whole = torch.empty(2, *shape)
            fap.all_gather(whole, x[:12].view(6, 2), config=small)
            found.append(whole.flatten())
    return found


def test_plain_calls_take_tensors_of_any_shapes_again_and_again(ranks: GetRanks) -> None:
    x = torch.arange(24.0)
    for rank, found in enumerate(ranks(2).run(plain_calls_of_other_shapes)):
        assert all(torch.equal(output, 3 * x[12 * rank : 12 * rank + 12]) for output in found[::2])
        assert all(torch.equal(whole, torch.cat([x[:12], 2 * x[:12]])) for whole in found[1::2])


def remembers_no_more_than() -> int:
    group = dist.new_group()
    config = fap.FlashConfig(check_ranks=False)
    dispatch._REMEMBERED = 10
    for numel in range(1, 40):
        fap.all_reduce(torch.ones(numel), group=group, config=config)
        fap.all_gather(torch.ones(2 * numel), torch.ones(numel), group=group, config=config)
        fap.reduce_scatter(torch.ones(numel), torch.ones(2 * numel), group=group, config=config)
    return len(groups.state_of(group).plain)


def test_shapes_that_change_with_every_call_fill_no_memory(ranks: GetRanks) -> None:
    assert all(0 < count <= 10 for count in ranks(2).run(remembers_no_more_than))


def test_switched_off_everywhere_all_goes_in_full_precision(ranks: GetRanks) -> None:
    assert ranks(2).run(switched_off) == [(True, {"FLASH_ALLREDUCE_DISABLE": 1})] * 2


def agreements() -> list[int]:
    """Collectives of a first, a second and an unchecked first call, beside those of the call itself."""
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


def from_environment() -> tuple[int, dict[str, int]]:
    os.environ.update(FLASH_ALLREDUCE_MIN_BYTES="0", FLASH_ALLREDUCE_BITS="4")
    dispatch._default_config.cache_clear()
    try:
        counted = counts(lambda: fap.all_reduce(torch.ones(1280)))
    finally:
        del os.environ["FLASH_ALLREDUCE_MIN_BYTES"], os.environ["FLASH_ALLREDUCE_BITS"]
        dispatch._default_config.cache_clear()
    return counted["bytes_sent"], counted["full_precision"]


def test_without_a_config_the_environment_gives_it(ranks: GetRanks) -> None:
    assert ranks(2).run(from_environment) == [(2 * 5 * (4 + 64), {})] * 2


# ---- all_to_all in full precision ----


def exchanges_in_full_precision() -> list[tuple[bool, dict[str, int], int]]:
    """Of each kind of call: equal to torch's own, reasons, calls of `plain`; then the same again with `plain`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [[(2 * a + b) % 3 for b in range(world)] for a in range(world)]
    sent, received = sizes[rank], [row[rank] for row in sizes]
    found = []
    kinds: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        **{name: (getattr(torch, name), {"config": QUANTIZED}) for name in EXACT_DTYPES},
        "off": (torch.float32, {"config": fap.FlashConfig(enabled=False)}),
        "warm-up": (torch.float32, {"config": fap.FlashConfig(min_bytes=0, warmup_steps=3), "step": 2}),
        "full": (torch.float32, {"config": QUANTIZED, "site": fap.Site("experts", fap.Role.EXPERT)}),
        "asked": (torch.float32, {"config": QUANTIZED, "full_precision": "evaluation"}),
    }
    for dtype, how in kinds.values():
        x = (10 * gaussian(sum(sent), 5, seed=rank)).to(dtype)
        exact = x.new_zeros(sum(received), 5)
        dist.all_to_all_single(exact, x, received, sent)
        for async_op in (False, True):
            for theirs in (False, True):
                output, called = torch.zeros_like(exact), 0

                def plain(output: Tensor = output, x: Tensor = x, async_op: bool = async_op) -> Any:
                    nonlocal called
                    called += 1
                    return dist.all_to_all_single(output, x, received, sent, async_op=async_op)

                def call(output: Tensor = output, x: Tensor = x, how: Any = how, async_op: bool = async_op) -> None:
                    more = {**how, "plain": plain} if theirs else how  # noqa: B023
                    work = fap.all_to_all(output, x, received, sent, None, async_op, **more)
                    assert (work is not None) == async_op
                    if work is not None:
                        work.wait()

                counted = counts(call)
                assert called == theirs and counted["bytes_sent"] == counted["bytes_full_precision"]
                assert counted["bytes_sent"] == 5 * (sum(sent) - sent[rank]) * x.element_size()
                found.append((same_bits(output, exact), counted["full_precision"]))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exchange_in_full_precision_is_the_frameworks_own(ranks: GetRanks, world_size: int) -> None:
    reasons = [f"dtype {name}" for name in EXACT_DTYPES]
    reasons += ["disabled by configuration", "warm-up", "expert_bits is full", "evaluation"]
    for found in ranks(world_size).run(exchanges_in_full_precision):
        assert found == [(True, {reason: 1}) for reason in reasons for _ in range(4)]


# ---- bad input ----


def bad_calls() -> dict[str, tuple[Callable[[], Any], list[Tensor]]]:
    """Name -> (the call, the tensors that it must not touch)."""
    world = dist.get_world_size()
    x, y, z = torch.ones(60 * world), torch.ones(60), torch.ones(60 * world + 1)
    half, wide = torch.ones(60, dtype=torch.float16), torch.ones(1).expand(600)
    sparse = torch.ones(4, 4).to_sparse()
    whole, short = torch.ones(60 * world, dtype=torch.int64), torch.ones(60 * world, dtype=torch.int16)
    complex_, op = torch.ones(60 * world, dtype=torch.complex64), dist.ReduceOp
    wrapped = DTensor.from_local(x, DeviceMesh("cpu", [dist.get_rank()], _init_backend=False), run_check=False)
    negated = complex_.conj().imag
    return {
        "list": (lambda: fap.all_reduce([1.0, 2.0], config=QUANTIZED), []),
        "sparse": (lambda: fap.all_reduce(sparse, config=QUANTIZED), []),
        "config": (lambda: fap.all_reduce(x, config={"bits": 4}), [x]),
        "meta": (lambda: fap.all_reduce(torch.ones(600, device="meta"), config=QUANTIZED), []),
        "expanded": (lambda: fap.all_reduce(wide, config=QUANTIZED), [wide]),
        "expanded output": (lambda: fap.all_gather(wide, torch.ones(600 // world), config=QUANTIZED), [wide]),
        "indivisible": (lambda: fap.reduce_scatter(y, z, config=QUANTIZED), [y, z]),
        "swapped": (lambda: fap.reduce_scatter(x, y, config=QUANTIZED), [x, y]),
        "gather size": (lambda: fap.all_gather(z, y, config=QUANTIZED), [y, z]),
        "dtypes": (lambda: fap.reduce_scatter(half, x, config=QUANTIZED), [half, x]),
        "gather dtypes": (lambda: fap.all_gather(x, half, config=QUANTIZED), [half, x]),
        "devices": (lambda: fap.reduce_scatter(torch.ones(60, device="meta"), x, config=QUANTIZED), [x]),
        "average of integers": (lambda: fap.all_reduce(whole, op.AVG, config=QUANTIZED), [whole]),
        "scattered average": (lambda: fap.reduce_scatter(whole[:60], whole, op.AVG, config=QUANTIZED), [whole]),
        "bits of floats": (lambda: fap.all_reduce(x, op.BAND, config=QUANTIZED), [x]),
        "greatest complex": (lambda: fap.all_reduce(complex_, op.MAX, config=QUANTIZED), [complex_]),
        "int16": (lambda: fap.all_reduce(short, config=QUANTIZED), [short]),
        "gathered int16": (lambda: fap.all_gather(short, short[:60], config=QUANTIZED), [short]),
        "operator": (lambda: fap.all_reduce(x, "sum", config=QUANTIZED), [x]),
        "conjugate": (lambda: fap.all_reduce(complex_.conj(), config=QUANTIZED), [complex_]),
        "negative": (lambda: fap.all_reduce(negated, config=QUANTIZED), [complex_]),
        "negative input": (lambda: fap.all_gather(x, negated[:60], config=QUANTIZED), [x]),
        "site": (lambda: fap.all_reduce(x, config=QUANTIZED, site="mine"), [x]),
        "group": (lambda: fap.all_reduce(x, group="mine", config=QUANTIZED), [x]),
        "mesh": (lambda: fap.all_reduce(x, group=wrapped.device_mesh, config=QUANTIZED), [x]),
        "step": (lambda: fap.all_reduce(x, config=QUANTIZED, step="3"), [x]),
        "feedback": (lambda: fap.all_reduce(x, config=QUANTIZED, feedback=fap.Feedback()), [x]),
        "no input": (lambda: fap.reduce_scatter(y, None, config=QUANTIZED), [y]),
        "scatter config": (lambda: fap.reduce_scatter(y, x, config={"bits": 4}), [x, y]),
        "gather config": (lambda: fap.all_gather(x, y, config={"bits": 4}), [x, y]),
        "DTensor": (lambda: fap.all_reduce(wrapped, config=QUANTIZED), [x]),
        **bad_exchanges(world, x, y),
    }


def bad_exchanges(world: int, x: Tensor, y: Tensor) -> dict[str, tuple[Callable[[], Any], list[Tensor]]]:
    rank, out, odd = dist.get_rank(), torch.ones(60 * world), torch.ones(60 * world - 1)
    own = [0] * world
    own[rank] = 60

    def call(output: Any, input: Any, *sizes: Any, **how: Any) -> tuple[Callable[[], Any], list[Tensor]]:
        tensors = [one for one in (output, input) if isinstance(one, Tensor)]
        return lambda: fap.all_to_all(output, input, *sizes, **{"config": QUANTIZED, **how}), tensors

    return {
        "exchange list": call(out, [x]),
        "exchange dtypes": call(out.half(), x),
        "exchange number": call(torch.tensor(1.0), x),
        "exchange uneven": call(out, odd[: 60 * world - 1] if world > 1 else x, None, None if world > 1 else [59]),
        "exchange few sizes": call(out, x, [60] * (world + 1)),
        "exchange sum": call(out, x, None, [61] * world),
        "exchange negative": call(out, x, None, [-1] * world),
        "exchange halves": call(out, x, [60.0] * world),
        "exchange own": call(out[:59], y, [59 if r == rank else 0 for r in range(world)], own),
        "exchange in place": call(x, x),
        "exchange overlap": call(x[: 59 * world], x[world:]),
        "exchange config": call(out, x, config={"bits": 4}),
        "exchange int16": call(out.short(), x.short()),
        "gather sizes": (lambda: fap.all_gather(out, y, config=QUANTIZED, output_split_sizes=[1] * world), [out, y]),
        "gather part": (
            lambda: fap.all_gather(out, torch.ones(59), config=QUANTIZED, output_split_sizes=[60] * world),
            [out],
        ),
    }


SENTENCES = {
    "list": "TypeError: tensor is list; expected a dense tensor.",
    "sparse": "TypeError: tensor is torch.sparse_coo; expected a dense tensor.",
    "config": "TypeError: config is dict; expected FlashConfig or None.",
    "meta": "ValueError: the tensor is on meta, which the group's backend does not serve",
    "expanded": "ValueError: tensor has strides (0,), several elements at one place in memory",
    "expanded output": "ValueError: output has strides (0,), several elements at one place in memory",
    "indivisible": "ValueError: input has {z} elements and output 60; expected output x {world} ranks",
    "swapped": "ValueError: input has 60 elements and output {x}; expected output x {world} ranks = input.",
    "gather size": "ValueError: output has {z} elements and input 60; expected input x {world} ranks",
    "dtypes": "ValueError: output is torch.float16 on cpu and input torch.float32 on cpu; expected",
    "gather dtypes": "ValueError: input is torch.float16 on cpu and output torch.float32 on cpu; expected",
    "devices": "ValueError: output is torch.float32 on meta and input torch.float32 on cpu; expected",
    "average of integers": "ValueError: all_reduce of torch.int64: gloo does not reduce it by AVG; take SUM.",
    "scattered average": "ValueError: reduce_scatter of torch.int64: gloo does not reduce it by AVG; take SUM.",
    "bits of floats": "ValueError: all_reduce of torch.float32: gloo does not reduce it by BAND; take SUM.",
    "greatest complex": "ValueError: all_reduce of torch.complex64: gloo does not reduce it by MAX; take SUM.",
    "int16": "ValueError: all_reduce of torch.int16: gloo does not take it; convert the tensor to one of float32",
    "gathered int16": "ValueError: all_gather of torch.int16: gloo does not take it; convert",
    "operator": "TypeError: op is 'sum'; expected one of torch.distributed.ReduceOp.",
    "conjugate": "ValueError: tensor is a view that stands for the conjugate of its memory; resolve_conj() it first.",
    "negative": "ValueError: tensor is a view that stands for the negative of its memory; resolve_neg() it first.",
    "negative input": "ValueError: input is a view that stands for the negative of its memory",
    "site": "TypeError: site is str; expected Site, for example Site('mine').",
    "group": "TypeError: group is str; expected a ProcessGroup or None.",
    "mesh": "TypeError: group is DeviceMesh; expected a ProcessGroup (its get_group()) or None.",
    "step": "TypeError: step is str; expected a whole number or None.",
    "feedback": "TypeError: feedback is Feedback; expected what Feedback.slot() gives, or None.",
    "no input": "TypeError: input is NoneType; expected a dense tensor, or a list of one for each rank.",
    "scatter config": "TypeError: config is dict; expected FlashConfig or None.",
    "gather config": "TypeError: config is dict; expected FlashConfig or None.",
    "DTensor": "TypeError: tensor is DTensor; expected a plain dense tensor: give its to_local().",
    "exchange list": "TypeError: input is list; expected a dense tensor.",
    "exchange dtypes": "ValueError: output is torch.float16 on cpu and input torch.float32 on cpu; expected the same",
    "exchange number": "ValueError: output is a single number; expected rows, which are split along the",
    "exchange uneven": "ValueError: input",
    "exchange few sizes": "ValueError: output_split_sizes has {more} sizes; expected one for each of {world} ranks.",
    "exchange sum": "ValueError: input_split_sizes is [61",
    "exchange negative": "ValueError: input_split_sizes is [-1",
    "exchange halves": "TypeError: output_split_sizes is [60.0",
    "exchange own": "ValueError: input has 60 elements for rank",
    "exchange in place": "ValueError: output and input share memory; an all_to_all needs a tensor for each.",
    "exchange overlap": "ValueError: output and input share memory",
    "exchange config": "TypeError: config is dict; expected FlashConfig or None.",
    "exchange int16": "ValueError: all_to_all of torch.int16: gloo does not take it; convert the tensor to one of",
    "gather sizes": "ValueError: output_split_sizes is [1",
    "gather part": "ValueError: input has 59 elements; expected 60, as output_split_sizes has them.",
}


def bad_input(name: str, on: list[int]) -> tuple[str, bool, bool, bool]:
    """The error on the ranks `on`; tensors untouched, nothing counted, the group still works."""
    message, untouched, counted = "", True, {"calls": 0}
    if dist.get_rank() in on:
        call, tensors = bad_calls()[name]
        before = [t.clone() for t in tensors]
        fap.reset_stats()
        try:
            call()
        except (TypeError, ValueError) as error:
            message = f"{type(error).__name__}: {error}"
        counted = fap.stats()
        untouched = all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    return message, untouched, counted["calls"] == 0, still_works()


@pytest.mark.parametrize("name", SENTENCES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input_is_refused_before_anything_is_sent(ranks: GetRanks, world_size: int, name: str) -> None:
    sentence = SENTENCES[name].format(world=world_size, more=world_size + 1, x=60 * world_size, z=60 * world_size + 1)
    if name == "swapped" and world_size == 1:
        pytest.skip("one rank: nothing to swap")
    # On one rank only: had anything been sent, the other rank's next collective would meet it.
    for on in ([0], list(range(world_size))):
        for rank, (message, *good) in enumerate(ranks(world_size).run(bad_input, name, on)):
            assert message.startswith(sentence) if rank in on else message == ""
            assert good == [True, True, True]


def taken() -> list[str]:
    """Of every dtype and operator: where we refuse what torch.distributed takes, or the other way round."""
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

    def outcome(call: Callable[..., Any], dtype: torch.dtype, op: Any) -> str:
        try:
            call(torch.ones(8).to(dtype), op)
        except ValueError:
            return "refused"
        except RuntimeError:
            return "failed"
        return "taken"

    wrong = []
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        for name in names:
            op = getattr(dist.ReduceOp, name)
            found = outcome(dist.all_reduce, dtype, op), outcome(fap.all_reduce, dtype, op)
            if found not in (("taken", "taken"), ("failed", "refused")):
                wrong.append(f"{dtype} {name}: {found}")
    return wrong


def test_in_full_precision_just_what_torch_refuses_is_refused(ranks: GetRanks) -> None:
    assert ranks(2).run(taken) == [[]] * 2


def views_after_remembered_calls() -> list[str]:
    refused = []
    for x in (torch.ones(60, dtype=torch.complex64).conj(), torch.ones(60, dtype=torch.complex64).conj().imag):
        for _ in range(3):
            fap.all_reduce(torch.ones(60, dtype=x.dtype))
        try:
            fap.all_reduce(x)
        except ValueError as error:
            refused.append(str(error))
    return refused


def test_a_lazy_view_is_refused_where_its_like_is_remembered(ranks: GetRanks) -> None:
    for conjugate, negative in ranks(2).run(views_after_remembered_calls):
        assert "conjugate" in conjugate and "negative" in negative


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized; call init_process_group first"):
        fap.all_reduce(torch.ones(3))
