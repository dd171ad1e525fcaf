"""Sends from one rank to another, with torch.distributed's arguments. One rounding.

As in reductions.py, but a send has two ranks only. Both plan it from shape, dtype, site and configuration, and the
receiver compares the header (collectives/point_to_point.py). The width is the configured one: target_sqnr_db and
min_sqnr_db need all ranks of a group, and do not apply.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import checks
from flash_allreduce_plugin.api.reductions import call_of, default_config
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import point_to_point, sample, transport
from flash_allreduce_plugin.collectives.meter import Meter
from flash_allreduce_plugin.collectives.point_to_point import Ends, Message, header
from flash_allreduce_plugin.collectives.work import Helper, Stage, StreamWork, Work
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import BetweenTwo, Plan, Site
from flash_allreduce_plugin.runtime import traced
from flash_allreduce_plugin.runtime.decision import Call, decide
from flash_allreduce_plugin.telemetry import counters

_SEND = Site("send")
_RECV = Site("recv")


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    config: FlashConfig | None = None,
    site: Site = _SEND,
    step: int | None = None,
    full_precision: str | None = None,
    drawn_as: int | None = None,
) -> None:
    """Send `tensor` to rank `dst`, as torch.distributed.send. The tensor may be changed afterwards.

    Args:
        tensor: any shape, stride and dtype. float32, bfloat16 and float16 of min_bytes and more are quantized. Others,
            such as integers and masks, are sent in full precision.
        dst, group_dst: the receiver, as a rank of the default group or of `group`: one of the two.
        tag: 0 to 65535, equal at the receiver. Messages of one tag keep their order. NCCL has no tags.
        group, site, step: as all_reduce. The receiver may name another site, of a role with the same width.
        config: FlashConfig.from_env() if None. Both ends must have the same settings of the codec.
        full_precision: the reason for full precision, at both ends; None: the configuration decides.
        drawn_as: the number of the sender's random numbers; ranks of one number round equal tensors the same. None: the
            rank in the group.

    Raises:
        TypeError, ValueError: bad arguments; nothing was sent.
        MismatchError: the receiver expects another number of elements, dtype or configuration; both ends are named.
        CollectiveError: the receiver failed or the group's timeout passed.
    """
    request = _request("send", tensor, dst, group, tag, group_dst, config, site, step, full_precision, drawn_as)
    _run([request])


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    config: FlashConfig | None = None,
    site: Site = _RECV,
    step: int | None = None,
    full_precision: str | None = None,
) -> int:
    """Receive into `tensor` from rank `src`; on gloo from any rank, the first to send, without src and group_src.

    Arguments and errors as send. After a MismatchError or CollectiveError the content of `tensor` is undefined, and the
    group must not be used any more.

    Returns:
        The sender's rank in the default group.
    """
    request = _request(
        "recv", tensor, src, group, tag, group_src, config, site, step, full_precision, from_anybody=True
    )
    [message] = _run([request])
    assert message.peer is not None
    return dist.get_global_rank(request.call.request.group, message.peer)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    config: FlashConfig | None = None,
    site: Site = _SEND,
    step: int | None = None,
    full_precision: str | None = None,
    drawn_as: int | None = None,
) -> Work:
    """Start a send, and return a handle after the tensor was encoded and posted. Arguments and errors as send.

    A tensor in full precision must not be changed until wait() has returned.
    """
    request = _request("send", tensor, dst, group, tag, group_dst, config, site, step, full_precision, drawn_as)
    return _start([request])


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    config: FlashConfig | None = None,
    site: Site = _RECV,
    step: int | None = None,
    full_precision: str | None = None,
) -> Work:
    """Start a receive, and return a handle immediately. wait() completes the tensor. Arguments and errors as recv.

    One of src and group_src is required: several receives from any rank could not tell their messages apart.
    """
    request = _request("recv", tensor, src, group, tag, group_src, config, site, step, full_precision)
    return _start([request])


class P2POp(dist.P2POp):
    """torch's P2POp, which also accepts `isend` and `irecv` of this package."""

    def __new__(cls, op: Callable[..., Any], *_: Any, **__: Any) -> P2POp:
        if op not in _KINDS:
            raise ValueError(f"op is {op!r}; expected isend or irecv.")
        return object.__new__(cls)


def batch_isend_irecv(
    p2p_op_list: Sequence[dist.P2POp],
    *,
    config: FlashConfig | None = None,
    site: Site | Sequence[Site] | None = None,
    step: int | None = None,
    full_precision: str | None = None,
) -> list[Any]:
    """Start sends and receives in any order, as torch.distributed.batch_isend_irecv.

    p2p_op_list: torch's P2POp or ours, of one group, with isend or irecv of either. config, step, full_precision: for
    all of them. site: for all, or one for each; "send" and "recv" if None. Errors as send and recv.

    Returns:
        Handles: one for each, in their order; a single one if the backend runs the batch as a whole (NCCL).
    """
    if not isinstance(p2p_op_list, list | tuple) or not all(isinstance(one, dist.P2POp) for one in p2p_op_list):
        raise TypeError("p2p_op_list is not a list of P2POp, torch's or ours.")
    if len({one.group for one in p2p_op_list}) > 1:
        raise ValueError("p2p_op_list has operations of several groups; give them in a batch each.")
    if len({one.tensor.device for one in p2p_op_list}) > 1:
        raise ValueError("p2p_op_list has tensors on several devices; give them in a batch each.")
    sites = [site] * len(p2p_op_list) if site is None or isinstance(site, Site) else list(site)
    requests = []
    for one, its in zip(p2p_op_list, sites, strict=True):
        collective, own = _KINDS[one.op]
        where = (one.group, one.tag, one.group_peer)
        requests.append(_request(collective, one.tensor, None, *where, config, its or own, step, full_precision))
    if not requests:
        return []
    if not transport.by_messages(requests[0].call.request.group, requests[0].call.request.device):
        return [_start(requests)]
    # A rank that sends before it posts its receives blocks its peer (transport._exchange).
    receives_first = sorted(range(len(requests)), key=lambda i: requests[i].call.request.collective == "send")
    works = {i: _start([requests[i]]) for i in receives_first}
    return [works[i] for i in range(len(requests))]


_KINDS: dict[Callable[..., Any], tuple[BetweenTwo, Site]] = {
    isend: ("send", _SEND),
    dist.isend: ("send", _SEND),
    irecv: ("recv", _RECV),
    dist.irecv: ("recv", _RECV),
}
traced.never_trace(
    *(send, recv, isend, irecv, batch_isend_irecv), reason="no graph holds a send or receive of flash_allreduce"
)


# ---- before a message ----


class _Request(NamedTuple):
    """One end of a message, with checked arguments. peer: rank in the group; None: the first rank that sends."""

    call: Call
    tensor: Tensor
    peer: int | None
    tag: int


def _request(
    collective: BetweenTwo,
    tensor: Tensor,
    rank: int | None,
    group: dist.ProcessGroup | None,
    tag: int,
    group_rank: int | None,
    config: FlashConfig | None,
    site: Site,
    step: int | None,
    full_precision: str | None,
    drawn_as: int | None = None,
    from_anybody: bool = False,
) -> _Request:
    outgoing = collective == "send"
    (checks.check_tensor if outgoing else checks.check_written)(tensor, "tensor")
    if not 0 <= operator.index(tag) <= transport.MOST_TAG:
        raise ValueError(f"tag is {tag}; expected 0 to {transport.MOST_TAG}.")
    config = default_config() if config is None else config
    call = call_of(
        collective,
        tensor,
        tensor.numel(),
        dist.ReduceOp.SUM,
        group,
        config,
        site,
        step,
        full_precision=full_precision,
        drawn_as=drawn_as,
    )
    peer = None
    if rank is not None or group_rank is not None or not from_anybody:
        peer = checks.rank_in(call.request.group, rank, group_rank, "dst" if outgoing else "src")
    if peer == call.state.rank:
        raise ValueError(f"{'dst' if outgoing else 'src'} is this rank itself, which has the tensor.")
    return _Request(call, tensor, peer, operator.index(tag))


def _message(request: _Request, flat: Tensor) -> Message:
    """Return the decided and counted message. flat: the tensor, 1-D and contiguous."""
    call, meter = request.call, None
    plan = decide(call)
    outgoing, sent = call.request.collective == "send", call.state.sends[call.request.site.name]
    ends = Ends(tuple(request.tensor.shape), call.request.numel, call.request.dtype, plan)
    if isinstance(plan, Plan) and outgoing:
        call.quality.try_codebook(plan, flat)
    interval = call.request.config.quality_interval
    if isinstance(plan, Plan) and outgoing and interval and (sent - 1) % interval == 0:
        chosen = sample.sample_of(plan.gather.groups(call.request.numel), plan.gather.group_size, sent // interval)
        meter = Meter(1.0, call.request.device, chosen, summed=False)
    headed = transport.by_messages(call.request.group, call.request.device)
    if not headed and (kind := (request.peer, outgoing, header(ends))) not in call.state.headed:
        call.state.headed.add(kind)
        headed = True
    return Message(
        *(flat, ends, call.label),
        outgoing=outgoing,
        peer=request.peer,
        tag=request.tag,
        headed=headed,
        key=call.key,
        meter=meter,
    )


# ---- messages in flight, as in runtime/stages.py ----


def _run(requests: Sequence[_Request]) -> list[Message]:
    messages, steps = _prepared(requests)
    for _ in steps:
        pass
    return messages


def _start(requests: Sequence[_Request]) -> Work:
    messages, steps = _prepared(requests)
    call, tensors = requests[0].call, [one.tensor for one in requests]
    name = f"{call.request.collective} at site {call.request.site.name!r}"
    if transport.queues(call.request.group, call.request.device):
        stream, looks = call.state.stream(call.request.device), any(one.headed and not one.outgoing for one in messages)
        return StreamWork(steps, name, tensors, tensors, stream, call.request.device, looks)
    # A separate thread for is_completed() and get_future(): this message may arrive after all others.
    return Work(
        steps, name, tensors, Helper() if transport.by_messages(call.request.group, call.request.device) else None
    )


def _prepared(requests: Sequence[_Request]) -> tuple[list[Message], Iterator[Stage]]:
    flats = [rows.flat(one.tensor) for one in requests]
    messages = list(map(_message, requests, flats))
    return messages, _steps(requests, flats, messages)


def _steps(requests: Sequence[_Request], flats: Sequence[Tensor], messages: Sequence[Message]) -> Iterator[Stage]:
    call = requests[0].call
    yield from point_to_point.exchange(messages, lambda: call.state.pool(call.request.device))
    for one, flat in zip(requests, flats, strict=True):
        if one.call.request.collective == "recv" and not one.tensor.is_contiguous():
            one.tensor.detach().copy_(flat.view(one.tensor.shape))
    yield Stage.FINISH
    for one, message in zip(requests, messages, strict=True):
        if message.meter is not None:
            counters.record_sqnr(one.call.request.site, *sample.fold(message.meter.read()))
