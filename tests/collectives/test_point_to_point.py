"""Headers and tags of messages between two ranks; their bits and their errors: tests/api/test_sends.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import missing_ranks, point_to_point, transport
from flash_allreduce_plugin.collectives.point_to_point import HEADER_BYTES, Ends, header
from flash_allreduce_plugin.policy import FullPrecision, Plan
from tests.distributed import Ranks

GetRanks = Callable[[int], Ranks]

PLAN = Plan(Format(8, 128), Format(4, 128), 1 << 20)


def ends(**changes: Any) -> Ends:
    return Ends(**{"shape": (30, 40), "numel": 1200, "dtype": torch.float32, "plan": PLAN, **changes})


def test_a_header_has_one_length() -> None:
    widest = Format(8, 1024, spikes=True, hadamard=True, mse=True, stochastic=True, compact=True, codebook=True)
    for one in (
        ends(),
        ends(shape=(1,) * 500),
        ends(shape=(1 << 60,) * 8, plan=Plan(widest, widest, 1 << 40)),
        ends(plan=FullPrecision("a reason " * 100)),
    ):
        assert len(header(one)) == HEADER_BYTES and header(one)[16:].isascii()


def test_the_digest_has_exactly_the_facts_that_must_be_equal() -> None:
    digest = header(ends())[:16]
    others = [
        ends(numel=1201),
        ends(dtype=torch.bfloat16),
        ends(plan=FullPrecision("warm-up")),
        ends(plan=Plan(Format(8, 128), Format(5, 128), 1 << 20)),
        ends(plan=Plan(Format(8, 128), Format(4, 128), 1 << 21)),
    ]
    assert digest not in {header(one)[:16] for one in others}
    assert (
        header(ends(shape=(1200,)))[:16] == header(ends(plan=Plan(Format(2, 32), PLAN.gather, 1 << 20)))[:16] == digest
    )
    reasons = {header(ends(plan=FullPrecision(reason)))[:16] for reason in ("warm-up", "in exclude")}
    assert len(reasons) == 1  # the reason for full precision does not matter


def test_tags_of_a_header_and_of_pieces_of_other_messages_do_not_meet() -> None:
    others = [ends(), ends(numel=1201), ends(dtype=torch.bfloat16), ends(plan=FullPrecision("warm-up"))]
    digests = [None, *(header(one)[:16] for one in others)]
    tags = {transport.between_two(tag, digest) for tag in (0, 1, 65_535) for digest in digests}
    assert len(tags) == 15
    assert all(1 << 29 <= tag < 1 << 30 for tag in tags)  # those of the collectives begin there


def hostile() -> str:
    """Receive a foreign header, with a text that would clear the terminal."""
    if dist.get_rank() == 0:
        content = torch.frombuffer(
            bytearray((b"\0" * 16 + b"\x1b[2J\xff\n`").ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8
        )
        dist.isend(content, 1, tag=transport.between_two(0, None)).wait()
        return ""
    try:
        fap.recv(torch.ones(10), 0)
    except fap.MismatchError as error:
        return str(error)
    return "no error"


def test_the_words_of_a_peer_are_shown_and_nothing_else() -> None:
    with Ranks(2) as ranks:
        message = ranks.run(hostile)[1]
    assert "rank 0 sends ?[2J??`, and rank 1 expects float32 [10] in full precision" in message


def left() -> list[str | None]:
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 0:
        missing_ranks.leave(group, "test/0", "Fehler: ä")
    dist.barrier()
    found = [missing_ranks.left(group, "test/1")]
    if dist.get_rank() == 1:
        found += [missing_ranks.left(group, "test/0") for _ in range(2)]
    return found


def test_messages_of_an_earlier_rank_are_found_once(ranks: GetRanks) -> None:
    assert ranks(2).run(left) == [[None], [None, "Fehler: ä", None]]


def nothing_left(calls: int) -> tuple[int, int]:
    """Return messages and buffers kept after so many sends and receives, and those kept after the first."""
    from flash_allreduce_plugin.runtime import groups

    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    config, x = fap.FlashConfig(bits=4, min_bytes=0, chunk_bytes=4096), torch.ones(30_000)

    def both() -> tuple[int, int]:
        for work in [fap.irecv(x.clone(), 1 - rank, config=config), fap.isend(x, 1 - rank, config=config)]:
            work.wait()
        free = groups.state_of(group).pool(torch.device("cpu"))._free
        return len(transport._messages[group].unfinished), len(free)

    first = both()
    for _ in range(calls):
        last = both()
    return last[0] - first[0], last[1] - first[1]


def test_a_finished_message_leaves_nothing_behind(ranks: GetRanks) -> None:
    assert ranks(2).run(nothing_left, 20) == [(0, 0)] * 2


def posted() -> list[str]:
    """Return the order in which a batch posts, whatever the order of its list."""
    rank, posts = dist.get_rank(), []
    post = transport.post

    def noting(one: transport.Post, label: Any) -> Any:
        posts.append("send" if one.outgoing else "receive")
        return post(one, label)

    x, config = torch.ones(1000), fap.FlashConfig(min_bytes=0)
    transport.post = noting
    try:
        ops = [fap.P2POp(fap.isend, x, 1 - rank), fap.P2POp(fap.irecv, x.clone(), 1 - rank)]
        for work in fap.batch_isend_irecv(ops, config=config):
            work.wait()
    finally:
        transport.post = post
    return posts


def test_a_batch_posts_every_receive_before_the_first_send(ranks: GetRanks) -> None:
    assert ranks(2).run(posted) == [["receive", "receive", "send", "send"]] * 2


def dropped() -> bool:
    """Check that a send arrives although its handle is dropped."""
    config = fap.FlashConfig(bits=8, min_bytes=0, chunk_bytes=4096)
    if dist.get_rank() == 0:
        fap.isend(torch.ones(50_000), 1, config=config)
        dist.barrier()
        return True
    time.sleep(0.1)
    y = torch.zeros(50_000)
    fap.recv(y, 0, config=config)
    dist.barrier()
    return bool((y == 1).all())


def test_a_handle_that_is_dropped(ranks: GetRanks) -> None:
    assert ranks(2).run(dropped) == [True, True]


def test_a_limit_of_a_wait() -> None:
    with Ranks(2) as ranks:
        message, arrived = ranks.run(waits_a_little)[0]
    assert "is not done after 0:00:00.2" in message and arrived


def waits_a_little() -> tuple[str, bool]:
    if dist.get_rank():
        time.sleep(1)
        fap.send(torch.ones(100), 0)
        return "", True
    y = torch.zeros(100)
    work, message = fap.irecv(y, 1), "no error"
    try:
        work.wait(timedelta(seconds=0.2))
    except fap.CollectiveError as error:
        message = str(error)
    return message, work.wait() and bool((y == 1).all())


def test_descriptions_name_the_differences_from_the_plain_format() -> None:
    assert point_to_point._described(Format(3, 64, hadamard=True)) == "3 bits, groups of 64, hadamard"
