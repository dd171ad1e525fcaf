"""The decision about one call: a Plan, or the reason for full precision. It is counted here.

    agree     compare the configuration on all ranks of the group                             runtime/groups.py
    policy    decide by size, dtype, operator, role, module and step: quantized or not, width   policy/plan.py
    auto      enabled "auto": full precision in steps, or at sites, where that is faster        runtime/auto.py
    quality   raise the width, or require full precision, after a measurement at the site       quality/
    count     the bytes sent, and the bytes that full precision would have sent                 telemetry/

`decide` sees the facts of a call and no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import flat, point_to_point, replicated_params, transport, two_level
from flash_allreduce_plugin.collectives.all_to_all import Rule
from flash_allreduce_plugin.collectives.chunks import aligned, queued_chunk_bytes
from flash_allreduce_plugin.collectives.error_feedback import Slot
from flash_allreduce_plugin.collectives.replicated_params import Copy, Range
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import (
    EMPTY,
    LOW_SQNR,
    ONE_RANK,
    SLOWER,
    SMALL,
    SUMS,
    TRIAL,
    WARM_UP,
    Collective,
    FullPrecision,
    Plan,
    Site,
    make_plan,
    widths_follow_errors,
)
from flash_allreduce_plugin.quality.control import Quality
from flash_allreduce_plugin.runtime import auto, groups
from flash_allreduce_plugin.telemetry import counters, run_log

_PLANS = 1024  # cached plans of a group
_COPY = 1  # separates the random numbers of copies from others

DISABLED = environment.DISABLE
"""The reason of a call while FLASH_ALLREDUCE_DISABLE is set."""


class Request(NamedTuple):
    """The facts of one call, as its caller states them.

    collective: the requested collective.
    numel: elements of the whole tensor: the input of a reduce_scatter, the output of an all_gather.
    op, op_name: the given operator; "sum", "avg", "premul_sum", "max" ...
    step: finished training steps, for warmup_steps; None: no warm-up.
    feedback: the slot of this call's residual; None: no error feedback.
    exact: ascending ranges (first, end) of elements that are copies, summed in full precision by another call.
    theirs: True if the framework's own collective runs the call in full precision.
    full_precision: the caller's reason for full precision on all ranks, which then skip the agreement; None: the
        policy decides.
    parts: elements of each rank's part, if they differ. For an all_to_all, a gather or a scatter: of the parts that
        this rank sends.
    instead_of: bytes that the framework's own collective would send, if that is another one; None: the ring's.
    root: the rank in the group that sends or receives everything, if there is one.
    copies: the parts of `exact` that are whole gradients (collectives/replicated_params.py).
    copy: the number of the copy that the call reduces alone; None: the call reduces no single copy.
    rule: for an all_to_all: decides which runs are quantized. Its ranks do not have each other's sizes.
    drawn_as: for a send: the number of its random numbers, shared by ranks of one number; None: the rank in the group.
    whole: for differences of weights: asks all ranks, with the call's label, for a reason to send whole values.
    which: name of the tensors, equal on all ranks: on gloo, messages of calls with other names do not match.
    """

    collective: Collective
    numel: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    config: FlashConfig
    site: Site
    op: Any = dist.ReduceOp.SUM
    op_name: str = "sum"
    step: int | None = None
    feedback: Slot | None = None
    exact: Sequence[Range] = ()
    theirs: bool = False
    full_precision: str | None = None
    parts: list[int] | None = None
    instead_of: int | None = None
    root: int | None = None
    copies: Sequence[Copy] = ()
    copy: int | None = None
    rule: Rule | None = None
    drawn_as: int | None = None
    whole: Callable[[Label], str | None] | None = None
    which: object = None

    @property
    def factor(self) -> float:
        """The factor of the sum."""
        if self.op_name == "avg":
            return 1 / self.group.size()
        return float(self.op.__getstate__()[1]) if self.op_name == "premul_sum" else 1.0


class Call:
    """A request, and the state of its call.

    label: names the call in messages and errors.
    state: of the group.
    alone: True for a send and its receiving end: other ranks do not see the call, and there is no agreement.
    exact: the request's; empty after the whole call was found to run in full precision.
    key: of stochastic rounding; equal on all ranks.

    Raises ValueError for a group that was created before this process was forked.
    """

    __slots__ = ("alone", "exact", "key", "label", "quality", "request", "state")

    def __init__(self, request: Request) -> None:
        collective, group, site = request.collective, request.group, request.site
        self.request = request
        self.exact = request.exact
        self.label = label = Label(collective, site.name, group)
        self.alone = collective in ("send", "recv")
        self.state = state = groups.state_of(group)
        self.quality = Quality(collective, site, label, state.sites, request.config)
        self.key = 0

    @property
    def world_size(self) -> int:
        return self.state.world_size

    @property
    def start(self) -> int:
        """The first element of this rank's part."""
        rank, parts = self.state.rank, self.request.parts
        return sum(parts[:rank]) if parts is not None else rank * (self.request.numel // self.world_size)


def decide(call: Call) -> Plan | FullPrecision:
    """Decide how a call runs, and count it. The ranks may exchange messages: all call this in the same order.

    Raises:
        MismatchError: the ranks have different configurations.
        CollectiveError: a peer failed or the group's timeout passed.
        ConfigError: the log of the run cannot be written, at the first call of a configuration.
    """
    request = call.request
    state, config = call.state, request.config
    if state.logged is not config:
        state.logged = config
        run_log.start(config)
    disabled = environment.is_on(environment.DISABLE)
    if request.full_precision is None and not call.alone:
        groups.agree(call.label, config, disabled, request.device)
    answer: Plan | FullPrecision
    if disabled or request.full_precision is not None:
        given = ONE_RANK if call.world_size == 1 else str(request.full_precision)
        answer = FullPrecision(DISABLED if disabled else given)
    else:
        answer = _planned(call)
        if isinstance(answer, Plan) and (slower := _slower(call)) is not None:
            answer = FullPrecision(slower)
        flat = isinstance(answer, Plan) and answer.nodes is not None and _one_level(call)
        if flat:
            answer = _planned(call, flat=True)
        if isinstance(answer, Plan) and not call.alone:
            answer = call.quality.decide(answer, lambda width: _at_width(call, width, flat), request.device)
        if isinstance(answer, Plan) and request.whole is not None and (why := request.whole(call.label)) is not None:
            answer = FullPrecision(why)
    if isinstance(answer, FullPrecision):
        plain = full_precision_bytes(call)
        message = request.numel * request.dtype.itemsize
        instead_of = plain if call.alone else request.instead_of
        sent = plain + _header_bytes(call)
        counters.record_full_precision(request.site, answer.reason, sent, instead_of=instead_of, message=message)
        return answer
    if not call.alone and call.label.by_messages(request.device):  # tags keep calls apart
        if request.rule is not None:
            alike: tuple[Any, ...] = (request.rule.min_bytes,)
        else:
            alike = (request.numel, request.parts) if request.root is None else (request.numel, request.root)
        formats = (answer.reduce, answer.gather, answer.inside, answer.chunk_bytes)
        named = (request.site.layer, *call.exact, request.which)
        call.label.sign(request.op_name, request.factor, request.dtype, *alike, *formats, *named)
    _count(call, answer)
    if request.collective == "send":
        sender = state.rank if request.drawn_as is None else request.drawn_as
        call.key = rows.draw_key(config.seed, sender, state.sends.total())
        state.sends[request.site.name] += 1
    elif answer.reduce.stochastic and not call.alone:
        if request.copy is None:
            call.key = rows.draw_key(config.seed, state.draws)
            state.draws += 1
        else:  # equal on the ranks that have the copy: other calls of the group do not count
            name = f"copy {request.copy}"
            call.key = rows.draw_key(config.seed, request.numel, state.sites.calls[name], _COPY)
            state.sites.calls[name] += 1
    return answer


def _one_level(call: Call) -> bool:
    """Return True if enabled "auto" runs a call of several nodes in one level. Call it after `_slower`."""
    config, step = call.request.config, call.request.step
    return config.enabled == "auto" and config.hierarchical == "auto" and step is not None and auto.is_flat(step)


def apart(call: Call) -> list[tuple[Sequence[Range], Call]]:
    """Split a call into calls for its large copies and one for the rest, with the elements of each. Empty: no split.

    The size of a copy and the configuration decide about it: both are equal on all ranks that have the copy.
    """
    request = call.request
    config = request.config
    if request.full_precision is not None or environment.is_on(environment.DISABLE) or config.hierarchical != "off":
        return []
    if widths_follow_errors(config) or _slower(call) is not None:
        return []
    found: list[tuple[Sequence[Range], Call]] = []
    left = total = instead_of_bytes(call)
    for copy in request.copies:
        if copy.numel * request.dtype.itemsize < config.min_bytes:
            continue
        feedback = request.feedback
        alone = _part_of(
            call,
            copy.pieces,
            request.collective if copy.cut_alike else "all_reduce",
            instead_of=total * copy.numel // request.numel,
            copy=copy.number,
            feedback=None if feedback is None else feedback.of_copy(copy.number),
        )
        if isinstance(_planned(alone), Plan):
            found.append((copy.pieces, alone))
            left -= total * copy.numel // request.numel
    if not found:
        return []
    rest = replicated_params.between(sorted(chain.from_iterable(ranges for ranges, _ in found)), request.numel)
    if rest:
        other = _part_of(
            call,
            rest,
            request.collective,
            instead_of=left,
            feedback=request.feedback,
            exact=replicated_params.ranges_of(replicated_params.moved(call.exact, rest)),
        )
        found.append((rest, other))
    return found


def _part_of(call: Call, ranges: Sequence[Range], collective: Collective, **facts: Any) -> Call:
    """Return a call for some elements of `call`; facts: of its request."""
    whole = call.request
    parts = None
    if collective == "reduce_scatter":
        sizes = whole.parts or [whole.numel // call.world_size] * call.world_size
        parts = [replicated_params.numel_of(each) for each in replicated_params.split(ranges, sizes)]
    same = (whole.dtype, whole.device, whole.group, whole.config, whole.site, whole.op, whole.op_name, whole.step)
    return Call(Request(collective, replicated_params.numel_of(ranges), *same, parts=parts, **facts))


def lasts(answer: FullPrecision) -> bool:
    """Return True if the answer may be cached: every call of the same facts gets it."""
    return answer.reason not in (DISABLED, WARM_UP, LOW_SQNR, TRIAL, SLOWER)


def _slower(call: Call) -> str | None:
    """Return why enabled "auto" runs a call in full precision; None: it is quantized."""
    request = call.request
    if request.config.enabled != "auto":
        return None
    nbytes = request.numel * request.dtype.itemsize
    how = (request.config.auto_interval, call.label, request.device)
    return auto.reason(request.site, request.step, nbytes, *how)


def ring_bytes(collective: str, nbytes: int, world_size: int) -> int:
    """Return the bytes that a rank sends in a ring collective of a tensor of nbytes: an all-reduce has two halves."""
    half = nbytes * (world_size - 1) // world_size
    return 2 * half if collective == "all_reduce" else half


def full_precision_bytes(call: Call) -> int:
    """Return the bytes that a rank sends in full precision."""
    request = call.request
    if request.theirs and request.instead_of is not None:
        return request.instead_of
    if request.parts is not None:
        return _to_others(call, request.parts) * request.dtype.itemsize
    if request.collective == "broadcast":
        return _passed_on(call, request.numel * request.dtype.itemsize)
    if call.alone:
        return request.numel * request.dtype.itemsize if request.collective == "send" else 0
    return ring_bytes(request.collective, request.numel * request.dtype.itemsize, call.world_size)


def instead_of_bytes(call: Call) -> int:
    """Return the bytes that a rank would send without the plugin."""
    request = call.request
    return full_precision_bytes(call) if request.instead_of is None else request.instead_of


def _to_others(call: Call, sizes: list[int]) -> int:
    """Return the bytes that a rank sends for parts of these sizes: the others' parts, or its own to each of them."""
    own = sizes[call.state.rank]
    return own * (call.world_size - 1) if call.request.collective == "all_gather" else sum(sizes) - own


def _passed_on(call: Call, nbytes: int) -> int:
    """Return the bytes that a rank sends in a broadcast of nbytes: all of them once (root), or those it passes on."""
    others = call.world_size - 1
    if others == 0:
        return 0
    return nbytes if call.state.rank == call.request.root else nbytes * (others - 1) // others


def _header_bytes(call: Call) -> int:
    """Return the bytes of the header of a sent message. 0 on backends where few messages have a header."""
    request = call.request
    headed = request.collective == "send" and transport.by_messages(request.group, request.device)
    return point_to_point.HEADER_BYTES if headed else 0


def _count(call: Call, plan: Plan) -> None:
    """Count a call that runs as planned. All runs of this rank in an all_to_all may be too short to be quantized."""
    request = call.request
    bits, plain = plan.bits(request.collective), instead_of_bytes(call)
    if request.rule is None or request.parts is None:
        sent, between_nodes = _sent_bytes(call, plan)
        counters.record_quantized(request.site, sent, plain, between_nodes, bits)
    elif any(map(request.rule.quantizes, request.parts)):
        sent, exact = request.rule.sent_bytes(request.parts, call.state.rank, plan.gather)
        counters.record_quantized(request.site, sent, plain, bits=bits, bytes_plain=exact)
    else:
        reason = SMALL if any(request.parts) else EMPTY
        counters.record_full_precision(request.site, reason, plain, message=request.numel * request.dtype.itemsize)


def _planned(call: Call, width: int | None = None, flat: bool = False) -> Plan | FullPrecision:
    request = call.request
    config, known = request.config, call.state.plans
    warm = request.step is not None and request.step < config.warmup_steps
    site = request.site.name, request.site.role, request.site.module
    what = (
        request.collective,
        request.numel,
        request.dtype,
        request.op_name,
        *site,
        id(config),
        warm,
        width,
        flat,
        request.device,
    )
    if (remembered := known.get(what)) is not None:
        return remembered[0]
    answer = make_plan(
        request.collective,
        numel=request.numel,
        dtype=request.dtype,
        world_size=call.world_size,
        op=request.op_name,
        site=request.site,
        config=config,
        step=request.step,
        nodes=None if call.alone or flat else groups.nodes_of(call.label, config, request.device),
        width=width,
    )
    if isinstance(answer, Plan) and transport.queues(request.group, request.device):
        payload = answer.widest.payload_bytes(request.numel)
        answer = replace(answer, chunk_bytes=queued_chunk_bytes(answer.chunk_bytes, payload))
    if len(known) >= _PLANS:
        known.clear()
    known[what] = answer, config
    return answer


def _at_width(call: Call, width: int, flat: bool) -> Plan:
    plan = _planned(call, width, flat)
    assert isinstance(plan, Plan)
    return plan


def _sent_bytes(call: Call, plan: Plan) -> tuple[int, int]:
    """Return the bytes that a rank sends as planned, and the part to other nodes; 0 for a call without nodes."""
    request = call.request
    if plan.nodes is not None:
        shards = request.parts or [request.numel // call.world_size] * call.world_size
        sizes = request.numel if request.collective == "all_reduce" else shards
        kind = "reduce_scatter" if request.collective == "reduce" else request.collective
        return two_level.sent_bytes(kind, sizes, plan, call.state.rank)
    if request.collective == "broadcast":
        return _passed_on(call, plan.gather.payload_bytes(request.numel)), 0
    if call.alone:
        return _header_bytes(call) + (
            plan.gather.payload_bytes(request.numel) if request.collective == "send" else 0
        ), 0
    if request.parts is not None:
        half = plan.reduce if request.collective in SUMS else plan.gather
        return _to_others(call, [aligned(half.payload_bytes(numel)) for numel in request.parts]), 0
    return flat.sent_bytes(request.collective, request.numel, plan, call.world_size), 0
