"""send, recv, isend, irecv and batches on real ranks, against the reference codec bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import policy
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives import point_to_point
from flash_allreduce_plugin.collectives.chunks import queued_chunk_bytes
from flash_allreduce_plugin.collectives.point_to_point import HEADER_BYTES, Ends
from flash_allreduce_plugin.policy import Plan
from flash_allreduce_plugin.runtime import groups
from tests.codecs import gaussian, same_bits
from tests.distributed import Ranks
from tests.queued import Queue, queued
from tests.simulation import QUANTIZED, VALUES, decoded, digest, encoded

GetRanks = Callable[[int], Ranks]

LENGTHS = [0, 1, 31, 127, 128, 129, 997, 7919, 100_003]
DTYPES = ("float32", "bfloat16", "float16")
CONFIGS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 4},
    {"bits": 5, "gather_bits": 3, "group_size": 32},
    {"bits": 6, "group_size": 256, "symmetric": True},
    {"bits": 2, "group_size": 64, "spike_reserving": True, "range": "mse"},
    {"bits": 3, "group_size": 32, "rounding": "stochastic", "hadamard": True},
    {"bits": 4, "hierarchical": {"intra_bits": 8, "inter_bits": 2, "ranks_per_node": 1}},
    {"bits": 4, "target_sqnr_db": 40.0, "min_sqnr_db": 30.0, "quality_interval": 1},
]


@dataclass(frozen=True)
class Send:
    """A message to the next rank. Every process can compute its content."""

    numel: int
    dtype: str = "float32"
    config: dict[str, Any] = field(default_factory=dict)
    kind: str = "gaussian"
    strided: bool = False
    tag: int = 0

    @property
    def flash_config(self) -> fap.FlashConfig:
        return fap.FlashConfig(**{**QUANTIZED, **self.config})

    def input(self, rank: int) -> Tensor:
        noise = gaussian(self.numel, seed=rank)
        x = VALUES[self.kind](noise, rank).to(getattr(torch, self.dtype))
        return torch.stack([x, x], dim=-1)[:, 0] if self.strided else x

    def arrives(self, source: int, number: int) -> Tensor:
        """Return the tensor that arrives. number: of quantized messages that the source has sent before."""
        config, x = self.flash_config, self.input(source).contiguous()
        codec = config.format(config.gather_bits or config.bits)
        if not self.numel:
            return x
        return decoded(encoded(x, codec, Draw(rows.draw_key(config.seed, source, number))), x, codec)


def around(sends: list[Send], how: str) -> list[str]:
    """Receive from the previous rank and return the differences found. how: the form in which the calls are made."""
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    groups.state_of(dist.group.WORLD).sends = Counter()
    found = []
    for one in sends:
        x, config = one.input(rank), one.flash_config
        y = torch.full_like(x, 7.0)
        if how == "sync":
            for what in (0, 1) if rank else (1, 0):  # rank 0 receives last
                if what:
                    fap.send(x, after, tag=one.tag, config=config)
                else:
                    assert fap.recv(y, before, tag=one.tag, config=config) == before
        elif how == "async":
            works = [
                fap.isend(x, after, None, one.tag, config=config),
                fap.irecv(y, before, None, one.tag, config=config),
            ]
            assert all(work.wait() and work.is_completed() for work in works)
        elif how == "polled":
            works = [fap.irecv(y, before, tag=one.tag, config=config), fap.isend(x, after, tag=one.tag, config=config)]
            assert works[0].get_future().wait()[0] is y
            deadline = time.monotonic() + 30
            while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
                time.sleep(0.001)
        else:
            kind, theirs = (fap.P2POp, fap) if how == "batch" else (dist.P2POp, dist)
            ops = [kind(theirs.isend, x, after, None, one.tag), kind(theirs.irecv, y, before, None, one.tag)]
            works = fap.batch_isend_irecv(ops, config=config)
            assert len(works) == 2 and all(work.wait() for work in works)
        found.append(digest(y))
    return found


def check(ranks: GetRanks, world: int, sends: list[Send], how: str) -> None:
    for rank, results in enumerate(ranks(world).run(around, sends, how)):
        number = 0
        for one, result in zip(sends, results, strict=True):
            assert result == digest(one.arrives((rank - 1) % world, number)), f"rank {rank}: {one}"
            number += one.numel > 0


# ---- bit for bit ----


@pytest.mark.parametrize("how", ["sync", "async", "polled", "batch", "torch's batch"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_guarantee_5_any_length_dtype_stride_and_tag_around_a_ring(ranks: GetRanks, world: int, how: str) -> None:
    """Use as many chunks of 4096 bytes as the messages have; the group's common decisions do not matter."""
    sends = [
        Send(numel, DTYPES[i % 3], CONFIGS[(i + world) % len(CONFIGS)], strided=i % 2 == 1, tag=(0, 7, 65_535)[i % 3])
        for i, numel in enumerate(LENGTHS)
    ]
    check(ranks, world, sends, how)


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf", "from 1e-30 to 1e30", "zero", "constant", "huge", "tiny"])
def test_guarantees_2_6_and_8_values_of_any_kind(ranks: GetRanks, kind: str) -> None:
    check(ranks, 2, [Send(3003, "float32", CONFIGS[i], kind) for i in (0, 1)], "async")


def lost() -> list[int]:
    y = torch.zeros(1000)
    if dist.get_rank() == 1:
        fap.send(Send(1000, kind="nan").input(1), 0, config=fap.FlashConfig(bits=4, min_bytes=0))
        return []
    fap.recv(y, 1, config=fap.FlashConfig(bits=4, min_bytes=0))
    return (~y.isfinite()).nonzero().view(-1).tolist()


def test_guarantee_2_a_nan_loses_its_group_alone(ranks: GetRanks) -> None:
    assert ranks(2).run(lost)[0] == list(range(128))


def drawn(stages: bool) -> Tensor:
    """Return the tensor received from either rank for the same values; stages: from two ranks of one pipeline stage."""
    config = fap.FlashConfig(bits=2, rounding="stochastic", min_bytes=0)
    rank, y = dist.get_rank(), torch.zeros(4000)
    groups.state_of(dist.group.WORLD).sends = Counter()
    work = fap.irecv(y, 1 - rank, config=config)
    fap.send(gaussian(4000), 1 - rank, config=config, drawn_as=3 if stages else None)
    work.wait()
    return y


def test_ranks_with_one_seed_round_equally(ranks: GetRanks) -> None:
    assert same_bits(*ranks(2).run(drawn, True))
    assert not same_bits(*ranks(2).run(drawn, False))


def batch_of_sites() -> list[Any]:
    """Run a batch with messages of different sites, and a batch that its caller wants in full precision."""
    rank, y = dist.get_rank(), torch.zeros(3000)
    fap.reset_stats()
    config = fap.FlashConfig(bits=4, pipeline_bits=8, min_bytes=0)
    for reason in (None, "wanted"):
        ops = [fap.P2POp(fap.isend, gaussian(3000), 1 - rank), fap.P2POp(fap.irecv, y, 1 - rank)]
        sites = [policy.Site("to", policy.Role.PIPELINE), policy.Site("from", policy.Role.PIPELINE)]
        for work in fap.batch_isend_irecv(ops, config=config, site=sites, full_precision=reason):
            work.wait()
    return [y, {name: (one["quantized"], one["full_precision"]) for name, one in fap.stats()["sites"].items()}]


def test_a_batch_has_a_site_for_each_message(ranks: GetRanks) -> None:
    for y, sites in ranks(2).run(batch_of_sites):
        assert same_bits(y, gaussian(3000))
        assert sites == {"to": (1, {"wanted": 1}), "from": (1, {"wanted": 1})}


def untouched() -> bool:
    x = gaussian(5000).requires_grad_()
    if dist.get_rank():
        fap.recv(x, 0, config=fap.FlashConfig(bits=2, min_bytes=0))
        return bool(x.requires_grad and x.grad_fn is None and (x != gaussian(5000)).any())
    fap.send(x, 1, config=fap.FlashConfig(bits=2, min_bytes=0))
    return same_bits(x.detach(), gaussian(5000))


def test_the_senders_tensor_does_not_change(ranks: GetRanks) -> None:
    assert ranks(2).run(untouched) == [True, True]


# ---- in full precision ----


def as_they_are(dtype: torch.dtype) -> tuple[bool, dict[str, int]]:
    fap.reset_stats()
    rank = dist.get_rank()
    x = (torch.arange(600).view(20, 30).t() % 251).to(dtype)
    if rank == 0:
        fap.send(x, 1)
        return True, fap.stats()["full_precision"]
    y = torch.zeros(30, 20, dtype=dtype)
    source = fap.recv(y, 0)
    return source == 0 and same_bits(x, y), fap.stats()["full_precision"]


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "int64", "int16", "uint8", "bool", "float64", "complex64", "float8_e4m3fn"]
)
def test_small_messages_integers_and_masks_are_exact(ranks: GetRanks, name: str) -> None:
    reason = "message below min_bytes" if name in DTYPES else f"dtype {name}"
    assert ranks(2).run(as_they_are, getattr(torch, name)) == [(True, {reason: 1})] * 2


def other_shape() -> bool:
    if dist.get_rank() == 0:
        fap.send(torch.arange(12.0).view(3, 4), 1)
        return True
    y = torch.zeros(12)
    fap.recv(y, 0)
    return torch.equal(y, torch.arange(12.0))


def test_as_in_torch_the_shape_may_be_another(ranks: GetRanks) -> None:
    assert ranks(2).run(other_shape) == [True, True]


# ---- matching ----


def from_anybody() -> list[tuple[int, float]]:
    if dist.get_rank():
        time.sleep(0.05 * (3 - dist.get_rank()))
        fap.send(torch.full((5000,), float(dist.get_rank())), 0, tag=3, config=fap.FlashConfig(min_bytes=0))
        return []
    y, found = torch.zeros(5000), []
    for _ in range(2):
        source = fap.recv(y, tag=3, config=fap.FlashConfig(min_bytes=0))
        found.append((source, float(y.mean())))
    return found


def test_from_whoever_sends_first(ranks: GetRanks) -> None:
    assert sorted(ranks(3).run(from_anybody)[0]) == [(1, 1.0), (2, 2.0)]


def out_of_order() -> list[float]:
    """Receive two tags in the other order, then three messages of one tag in order, waiting for the last one first."""
    config, rank = fap.FlashConfig(bits=8, min_bytes=0, chunk_bytes=4096), dist.get_rank()
    values = {0: (1.0, 2.0, 3.0), 9: (4.0,)}
    if rank == 0:
        works = [fap.isend(torch.full((50_000,), v), 1, tag=tag, config=config) for tag in (9, 0) for v in values[tag]]
        fap.send(torch.tensor([5]), 1, tag=9)
        for work in works[::-1]:
            work.wait()
        return []
    got = [torch.zeros(50_000) for _ in range(4)]
    works = [fap.irecv(y, 0, tag=tag, config=config) for y, tag in zip(got, (0, 0, 0, 9), strict=True)]
    last = torch.tensor([0])
    fap.recv(last, 0, tag=9)
    for work in works[::-1]:
        work.wait()
    return [*(float(y.mean()) for y in got), float(last)]


def test_messages_of_a_tag_keep_their_order(ranks: GetRanks) -> None:
    assert ranks(2).run(out_of_order)[1] == [1.0, 2.0, 3.0, 4.0, 5.0]


def beside_collectives() -> bool:
    """Check that a receive that is matched last of all does not delay the collectives after it."""
    config, rank, x = fap.FlashConfig(bits=8, min_bytes=0), dist.get_rank(), torch.ones(20_000)
    y = torch.zeros(20_000)
    if rank == 0:
        receiving = fap.irecv(y, 1, config=config)
        assert not receiving.is_completed()
        reducing = fap.all_reduce(x, config=config, async_op=True)
        reducing.wait()
        fap.send(x, 1, config=config)
        receiving.wait()
        return bool((y == 3).all())
    fap.all_reduce(x, config=config)
    fap.recv(y, 0, config=config)
    fap.send(y + 1, 0, config=config)
    return bool((x == 2).all())


def test_a_receive_holds_up_nothing_else(ranks: GetRanks) -> None:
    assert ranks(2).run(beside_collectives) == [True, True]


def in_a_part_of_the_ranks() -> list[float]:
    group, rank, config = dist.new_group([1, 3]), dist.get_rank(), fap.FlashConfig(min_bytes=0)
    y = torch.zeros(1000)
    if rank == 1:
        fap.send(torch.ones(1000), 3, group, config=config)
        fap.send(torch.ones(1000) * 2, group=group, group_dst=1, config=config)
    if rank == 3:
        assert fap.recv(y, 1, group, config=config) == 1
        x = torch.zeros(1000)
        assert fap.recv(x, group=group, group_src=0, config=config) == 1
        return [float(y.mean()), float(x.mean())]
    return []


def test_in_a_group_of_some_ranks(ranks: GetRanks) -> None:
    assert ranks(4).run(in_a_part_of_the_ranks) == [[], [], [], [1.0, 2.0]]


# ---- counted, measured, continued ----


def counted() -> dict[str, Any]:
    fap.reset_stats()
    config, x, rank = fap.FlashConfig(bits=4, min_bytes=20_000), torch.ones(5000), dist.get_rank()
    for numel in (5000, 4999):
        if rank:
            fap.recv(x[:numel], 0, config=config)
        else:
            fap.send(x[:numel], 1, config=config)
    return fap.stats()["sites"]


def test_a_send_counts_its_bytes_at_the_sender(ranks: GetRanks) -> None:
    sent, received = ranks(2).run(counted)
    send, recv = sent["send"], received["recv"]
    payload = Format(4, 128).payload_bytes(5000)
    assert send["bytes_sent"] == payload + 4 * 4999 + 2 * HEADER_BYTES
    assert send["bytes_full_precision"] == 4 * (5000 + 4999) and send["bytes_plain"] == 4 * 4999 + HEADER_BYTES
    assert recv["bytes_sent"] == recv["bytes_full_precision"] == recv["bytes_plain"] == 0
    for one in (send, recv):
        assert (one["quantized"], one["bits"]) == (1, 4) and one["full_precision"] == {"message below min_bytes": 1}


def measured() -> dict[str, Any]:
    fap.reset_stats()
    config, rank = fap.FlashConfig(bits=4, min_bytes=0, quality_interval=2), dist.get_rank()
    for _ in range(3):
        if rank:
            fap.recv(torch.empty(20_000), 0, config=config, site=fap.Site("stage 1"))
        else:
            fap.send(gaussian(20_000), 1, config=config, site=fap.Site("stage 1"))
    found = fap.stats()["sites"]["stage 1"]
    fap.reset_stats()
    return found


def test_the_sender_measures_the_error(ranks: GetRanks) -> None:
    sent, received = ranks(2).run(measured)
    assert 19 < sent["sqnr_db"] < 21 and received["sqnr_db"] is None


def continued() -> bool:
    """Continue from a saved state: stochastic rounding draws the random numbers that would have followed."""
    config = fap.FlashConfig(bits=2, min_bytes=0, rounding="stochastic")
    group, rank, x = dist.group.WORLD, dist.get_rank(), gaussian(1000)

    def message() -> Tensor:
        y = torch.zeros(1000)
        if rank:
            fap.recv(y, 0, config=config)
        else:
            fap.send(x, 1, config=config)
        return y

    first, kept, second = message(), groups.state_of(group).state_dict(), message()
    groups.state_of(group).load_state_dict(kept)
    again = message()
    return rank == 0 or (same_bits(second, again) and not same_bits(first, second))


def test_a_resumed_run_continues_with_its_random_numbers(ranks: GetRanks) -> None:
    assert ranks(2).run(continued) == [True, True]


# ---- refused ----


def refused() -> list[str]:
    x, rank = torch.ones(100), dist.get_rank()
    other = 1 - rank
    group = dist.new_group([0, 1])
    calls: dict[str, Callable[[], Any]] = {
        "itself": lambda: fap.send(x, rank),
        "nobody": lambda: fap.isend(x),
        "anybody, at once": lambda: fap.irecv(x),
        "both": lambda: fap.recv(x, other, group_src=other),
        "beyond": lambda: fap.send(x, 2),
        "tag": lambda: fap.send(x, other, tag=1 << 16),
        "expanded": lambda: fap.recv(torch.ones(1).expand(5), other),
        "a list": lambda: fap.send([x], other),
        "operation": lambda: fap.P2POp(fap.send, x, other),
        "no operations": lambda: fap.batch_isend_irecv([fap.isend]),
        "groups": lambda: fap.batch_isend_irecv(
            [fap.P2POp(fap.isend, x, other), fap.P2POp(fap.irecv, x, other, group)]
        ),
        "a bad one in a batch": lambda: fap.batch_isend_irecv(
            [fap.P2POp(fap.isend, x, other), fap.P2POp(fap.irecv, torch.ones(1).expand(5), other)]
        ),
        "site": lambda: fap.send(x, other, site="mine"),
    }
    found = []
    for name, call in calls.items():
        try:
            call()
            found.append(f"{name}: no error")
        except (TypeError, ValueError) as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    assert fap.batch_isend_irecv([]) == []
    return found


REFUSALS = [
    "itself: ValueError: dst is this rank itself, which has the tensor.",
    "nobody: ValueError: dst is None and group_dst None; give one of them.",
    "anybody, at once: ValueError: src is None and group_src None; give one of them.",
    "both: ValueError: src is ",
    "beyond: ValueError: dst is 2; the group has the ranks 0 to 1.",
    "tag: ValueError: tag is 65536; expected 0 to 65535.",
    "expanded: ValueError: tensor has strides",
    "a list: TypeError: tensor is list; expected a dense tensor.",
    "operation: ValueError: op is <function send",
    "no operations: TypeError: p2p_op_list is not a list of P2POp, torch's or ours.",
    "groups: ValueError: p2p_op_list has operations of several groups",
    "a bad one in a batch: ValueError: tensor has strides",
    "site: TypeError: site is str; expected Site",
]


def test_bad_arguments_are_refused_before_anything_is_sent(ranks: GetRanks) -> None:
    for seen in ranks(2).run(refused):
        for said, expected in zip(seen, REFUSALS, strict=True):
            assert said.startswith(expected), said


# ---- guarantee 7 ----

TIMEOUT = timedelta(seconds=2)
CONFIG = fap.FlashConfig(bits=4, min_bytes=1000, chunk_bytes=4096)
KINDS: dict[str, tuple[tuple[Tensor, fap.FlashConfig], tuple[Tensor, fap.FlashConfig]]] = {
    "more elements": ((torch.ones(3, 10_000), CONFIG), (torch.ones(29_000), CONFIG)),
    "fewer elements": ((torch.ones(20_000), CONFIG), (torch.ones(30_000), CONFIG)),
    "as many groups": ((torch.ones(1000), CONFIG), (torch.ones(1020), CONFIG)),
    "quantized or not": ((torch.ones(20_000), CONFIG), (torch.ones(200), CONFIG)),
    "small ones": ((torch.ones(100), CONFIG), (torch.ones(101), CONFIG)),
    "none": ((torch.ones(0), CONFIG), (torch.ones(1), CONFIG)),
    "dtype": ((torch.ones(20_000).bfloat16(), CONFIG), (torch.ones(20_000).half(), CONFIG)),
    "dtype, full": ((torch.ones(10).int(), CONFIG), (torch.ones(10), CONFIG)),
    "bits": ((torch.ones(20_000), CONFIG), (torch.ones(20_000), CONFIG.model_copy(update={"bits": 5}))),
    "rounding": ((torch.ones(20_000), CONFIG), (torch.ones(20_000), CONFIG.model_copy(update={"hadamard": True}))),
    "off": ((torch.ones(20_000), CONFIG), (torch.ones(20_000), CONFIG.model_copy(update={"enabled": False}))),
}
SAYS = {
    "more elements": ("float32 [3, 10000] in 4 bits, groups of 128, chunks", "float32 [29000] in 4 bits"),
    "quantized or not": ("float32 [20000] in 4 bits", "float32 [200] in full precision (message below min_bytes)"),
    "none": ("float32 [0] in full precision (empty message)", "float32 [1] in full precision"),
    "dtype": ("bfloat16 [20000] in", "float16 [20000] in"),
    "dtype, full": ("int32 [10] in full precision (dtype int32)", "float32 [10] in full precision (message below"),
    "bits": ("in 4 bits, groups of 128, chunks of 4096 bytes", "in 5 bits"),
    "rounding": ("in 4 bits, groups of 128, chunks", "in 4 bits, groups of 128, hadamard, chunks"),
    "off": ("in 4 bits", "in full precision (disabled by configuration)"),
}


def disagreeing(what: str) -> tuple[str, str, float]:
    """Return the kind of the error, its text, its seconds."""
    rank = dist.get_rank()
    (x, config), start = KINDS[what][rank], time.monotonic()
    try:
        if rank:
            fap.recv(x.clone(), 0, tag=2, config=config)
        else:
            fap.send(x, 1, tag=2, config=config)
    except (fap.CollectiveError, fap.MismatchError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        seconds = time.monotonic() - start
        time.sleep(max(0.0, TIMEOUT.total_seconds() + 1 - seconds))  # a rank that ends is noticed immediately
    return "no error", "", 0.0


QUICK = ("more elements", "quantized or not", "dtype, full", "rounding")


@pytest.mark.parametrize("what", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KINDS])
def test_guarantee_7_ends_that_do_not_agree_are_both_named(what: str) -> None:
    """Check that the receiver raises immediately and the sender after its timeout, at any size."""
    with Ranks(2, TIMEOUT) as ranks:
        (sender, said, waited), (receiver, message, seconds) = ranks.run(disagreeing, what, timeout=90)
    assert receiver == "MismatchError" and seconds < 1.5, message
    sends, expects = SAYS.get(what, ("float32", "float32"))
    assert message.startswith("recv at site 'recv', tag 2: rank 0 sends "), message
    assert sends in message.partition(", and rank 1 expects ")[0] and expects in message.partition(" expects ")[2]
    if what == "none":  # no elements: nothing follows the header
        assert sender == "no error"
    else:
        assert sender == "MismatchError" and said == message and waited < TIMEOUT.total_seconds() + 3


def alone(which: int) -> tuple[str, float]:
    """Let one end call and the other never."""
    rank, start, x = dist.get_rank(), time.monotonic(), torch.ones(20_000)
    try:
        if rank == which == 0:
            fap.send(x, 1, config=CONFIG)
        if rank == which == 1:
            fap.irecv(x, 0, config=CONFIG, site=fap.Site("stage 1")).wait()
    except fap.CollectiveError as error:
        return str(error), time.monotonic() - start
    time.sleep(TIMEOUT.total_seconds() + 1)
    return "no error", 0.0


@pytest.mark.parametrize("which", [0, 1], ids=["sender", "receiver"])
def test_guarantee_7_an_end_that_does_not_come(which: int) -> None:
    with Ranks(2, TIMEOUT) as ranks:
        message, seconds = ranks.run(alone, which, timeout=90)[which]
    name, doing = ("send at site 'send'", "sending") if which == 0 else ("recv at site 'stage 1'", "receiving")
    assert message.startswith(f"{name}, rank {which} of 2, failed while {doing} the header"), message
    assert seconds < TIMEOUT.total_seconds() + 3


def killed() -> tuple[str, float]:
    rank, start, x = dist.get_rank(), time.monotonic(), torch.ones(20_000_000)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        fap.send(x, 1, config=CONFIG.model_copy(update={"chunk_bytes": 1 << 20}))
    except fap.CollectiveError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def test_guarantee_7_an_end_that_dies() -> None:
    with Ranks(2, TIMEOUT) as ranks:
        (kind, (message, seconds)), _ = ranks.outcomes(killed, timeout=90)
    assert kind == "value" and message.startswith("send at site 'send', rank 0 of 2, failed while"), message
    assert seconds < TIMEOUT.total_seconds() + 3


# ---- over a backend that queues ----


class Done:
    def wait(self) -> bool:
        return True


@contextmanager
def between_gpus(together: bool = False) -> Iterator[tuple[Queue, list[list[str]]]]:
    """Yield the issued operations and the batches of messages; rank 1 of 4. A received header is the expected one."""
    batches: list[list[str]] = []
    with queued(4, rank=1) as queue, pytest.MonkeyPatch.context() as patch:

        def taken(tensor: Tensor, incoming: bool) -> None:
            if incoming and len(tensor) == HEADER_BYTES:
                content = point_to_point.header(Ends((100_000,), 100_000, torch.float32, PLAN))
                tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

        def isend(tensor: Tensor, **_: Any) -> Done:
            queue.note("collective", "isend", messages=[tensor])
            return Done()

        def irecv(tensor: Tensor, **_: Any) -> Done:
            taken(tensor, True)
            queue.note("collective", "irecv", messages=[tensor])
            return Done()

        def batch(ops: list[dist.P2POp]) -> list[Done]:
            batches.append([f"{one.op.__name__} {len(one.tensor)} {one.group_peer}" for one in ops])
            for one in ops:
                taken(one.tensor, one.op is dist.irecv)
            return [Done()]

        fakes: dict[str, Any] = {"batch_isend_irecv": batch} if together else {"isend": isend, "irecv": irecv}
        for name, fake in fakes.items():
            patch.setattr(dist, name, fake)
        yield queue, batches


TO_GPUS = fap.FlashConfig(bits=8, min_bytes=0)
PAYLOAD = Format(8, 128).payload_bytes(100_000)
PLAN = Plan(Format(8, 128), Format(8, 128), queued_chunk_bytes(TO_GPUS.chunk_bytes, PAYLOAD))


def test_over_nccl_a_message_is_one_piece_and_the_first_of_a_kind_has_a_header() -> None:
    with between_gpus() as (queue, _):
        x = torch.ones(100_000)
        for _ in range(2):
            fap.send(x, 2, config=TO_GPUS)
        fap.send(x, 3, config=TO_GPUS)
        pieces = [len(one.messages[0]) for one in queue.issued if one.what == "collective"]
        assert pieces == [HEADER_BYTES, PAYLOAD, PAYLOAD, HEADER_BYTES, PAYLOAD]
        assert queue.count("launch", "encode") == 3


def test_over_nccl_a_receive_is_issued_whole_unless_it_has_a_header_to_look_at() -> None:
    """Avoid waiting on the host for a header: the peer may have to receive first."""
    with between_gpus() as (queue, _):
        y = torch.ones(100_000)
        works = [fap.irecv(y, 2, config=TO_GPUS)]
        assert queue.count("collective", "irecv") == 2 and queue.count("launch", "decode") == 0
        works[0].wait()
        assert queue.count("launch", "decode") == 1
        fap.irecv(y, 2, config=TO_GPUS)
        assert queue.count("collective", "irecv") == 3 and queue.count("launch", "decode") == 2


def test_over_nccl_a_batch_is_one_launch_of_messages() -> None:
    with between_gpus(together=True) as (queue, batches):
        x, y = torch.ones(100_000), torch.ones(100_000)
        operations = [fap.P2POp(fap.isend, x, 2), fap.P2POp(fap.irecv, y, 0)]
        for _ in range(2):
            [work] = fap.batch_isend_irecv(operations, config=TO_GPUS)
            work.wait()
        kinds = [f"isend {PAYLOAD} 2", f"irecv {PAYLOAD} 0"]
        assert batches == [[f"isend {HEADER_BYTES} 2", kinds[0], f"irecv {HEADER_BYTES} 0", kinds[1]], kinds]
        assert queue.count("launch", "encode") == queue.count("launch", "decode") == 2
