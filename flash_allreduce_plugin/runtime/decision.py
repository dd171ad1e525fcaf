"""One decision for every call: do the ranks agree, is it quantized, how exact must it be. It is counted here.

    agree     the ranks of the group have the same configuration                         runtime/groups.py
    policy    size, dtype, operator, role, module and step say whether, and at what width  policy/plan.py
    quality   what was measured at the site may raise the width, or ask for full precision  quality/
    count     the bytes that go, and the bytes that would have gone                       telemetry/

`decide` sees the facts of a call and no tensor, and returns once: a Plan, or the reason for full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

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
    SMALL,
    SUMS,
    WARM_UP,
    Collective,
    FullPrecision,
    Plan,
    Site,
    make_plan,
)
from flash_allreduce_plugin.quality.control import Quality
from flash_allreduce_plugin.runtime import groups
from flash_allreduce_plugin.runtime.groups import GroupState
from flash_allreduce_plugin.telemetry import counters, run_log

_PLANS = 1024  # of a group that are remembered
_COPY = 1  # tells the random numbers of copies from others

DISABLED = environment.DISABLE
"""The reason of a call while FLASH_ALLREDUCE_DISABLE is set."""


@dataclass(slots=True)
class Call:
    """The facts of one call.

    Args:
        collective: what is asked for.
        numel: elements of the whole tensor: the input of a reduce_scatter, the output of an all_gather.
        parts: elements of each rank's part, where they differ from rank to rank; of an all_to_all, a gather and a
            scatter, of what this rank sends to each.
        root: the rank in the group that has or gets everything, where there is one.
        alone: of a send or its receiving end: no other rank knows of it, so that the ranks agree on nothing.
        op: the operator as it was given; op_name: "sum", "avg", "premul_sum", "max" ...
        step: finished training steps, for warmup_steps; None: no warm-up.
        exact: ascending ranges (first, end) of elements that are copies: summed in full precision beside the call.
        copies: those of them that are whole gradients (collectives/replicated_params.py).
        copy: the number of the copy that the call reduces alone; None: the call reduces something else.
        feedback: where the residual of this call lies; None: no error feedback.
        instead_of: bytes that the framework's own collective would send, if that is another one; None: the ring's.
        theirs: in full precision the framework's own collective serves the call.
        full_precision: why the caller wants full precision, on all ranks: they agree on nothing else; None: the policy
            decides.
        rule: of an all_to_all, which of its runs are quantized. Its ranks know none of each other's sizes.
        drawn_as: of a send: ranks of the same number draw the same random numbers; None: the rank in the group.
        whole: of weights that travel by differences: asks all ranks whether their whole values have to, and why.
        which: names the tensors, the same on all ranks: on gloo, messages of calls of other tensors do not meet.
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
    parts: list[int] | None = None
    root: int | None = None
    exact: Sequence[Range] = ()
    copies: Sequence[Copy] = ()
    copy: int | None = None
    feedback: Slot | None = None
    instead_of: int | None = None
    theirs: bool = False
    full_precision: str | None = None
    rule: Rule | None = None
    drawn_as: int | None = None
    whole: Callable[[], str | None] | None = None
    which: object = None
    label: Label = field(init=False)
    alone: bool = field(init=False)
    state: GroupState = field(init=False)
    quality: Quality = field(init=False)
    #: of the random numbers of a call that is rounded stochastically; the same on all ranks
    key: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Raises ValueError for a group of the process that this one was forked from."""
        self.label = Label(self.collective, self.site.name, self.group)
        self.alone = self.collective in ("send", "recv")
        self.state = groups.state_of(self.group)
        self.quality = Quality(self.collective, self.site, self.label, self.state, self.config)

    @property
    def world_size(self) -> int:
        return self.state.world_size

    @property
    def start(self) -> int:
        """The first element of this rank's part."""
        rank = self.state.rank
        return sum(self.parts[:rank]) if self.parts is not None else rank * (self.numel // self.world_size)

    @property
    def factor(self) -> float:
        """What the sum is multiplied with."""
        if self.op_name == "avg":
            return 1 / self.world_size
        return float(self.op.__getstate__()[1]) if self.op_name == "premul_sum" else 1.0

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def decide(call: Call) -> Plan | FullPrecision:
    """How a call runs, counted. The ranks may talk to each other: all of them call this in the same order.

    Raises:
        MismatchError: the ranks have different configurations.
        CollectiveError: a peer failed or the group's timeout passed.
        ConfigError: the first call of a configuration, and the log of the run cannot be written.
    """
    state, config = call.state, call.config
    if state.logged is not config:
        state.logged = config
        run_log.start(config)
    disabled = environment.is_on(environment.DISABLE)
    if call.full_precision is None and not call.alone:
        groups.agree(call.label, config, disabled, call.device)
    answer: Plan | FullPrecision
    if disabled or call.full_precision is not None:
        given = ONE_RANK if call.world_size == 1 else str(call.full_precision)
        answer = FullPrecision(DISABLED if disabled else given)
    else:
        answer = _planned(call)
        if isinstance(answer, Plan) and not call.alone:
            answer = call.quality.decide(answer, lambda width: _at_width(call, width), call.device)
        if isinstance(answer, Plan) and call.whole is not None and (why := call.whole()) is not None:
            answer = FullPrecision(why)
    if isinstance(answer, FullPrecision):
        plain = full_precision_bytes(call)
        message = call.numel * call.itemsize
        instead_of = plain if call.alone else call.instead_of
        sent = plain + _header_bytes(call)
        counters.record_full_precision(call.site, answer.reason, sent, instead_of=instead_of, message=message)
        return answer
    if not call.alone and call.label.by_messages(call.device):  # whose tags tell calls apart
        if call.rule is not None:
            alike: tuple[Any, ...] = (call.rule.min_bytes,)
        else:
            alike = (call.numel, call.parts) if call.root is None else (call.numel, call.root)
        call.label.sign(
            *(call.op_name, call.factor, call.dtype, *alike),
            *(
                answer.reduce,
                answer.gather,
                answer.inside,
                answer.chunk_bytes,
                call.site.layer,
                *call.exact,
                call.which,
            ),
        )
    _count(call, answer)
    if call.collective == "send":
        sender = state.rank if call.drawn_as is None else call.drawn_as
        call.key = rows.draw_key(config.seed, sender, state.sends.total())
        state.sends[call.site.name] += 1
    elif answer.reduce.stochastic and not call.alone:
        if call.copy is None:
            call.key = rows.draw_key(config.seed, state.draws)
            state.draws += 1
        else:  # the same where other ranks have the copy: nothing else that the group reduces counts
            name = f"copy {call.copy}"
            call.key = rows.draw_key(config.seed, call.numel, state.calls[name], _COPY)
            state.calls[name] += 1
    return answer


def apart(call: Call) -> list[tuple[Sequence[Range], Call]]:
    """The calls that a call falls into, and the elements of each: large copies, and the rest. Empty: it stays whole.

    A copy is treated by its own size and the configuration: the same on all ranks that have the copy.
    """
    config = call.config
    if call.full_precision is not None or environment.is_on(environment.DISABLE) or config.hierarchical != "off":
        return []
    if config.target_sqnr_db is not None or config.min_sqnr_db is not None:
        return []
    found: list[tuple[Sequence[Range], Call]] = []
    left = total = instead_of_bytes(call)
    for copy in call.copies:
        if copy.numel * call.itemsize < config.min_bytes:
            continue
        alone = _part_of(call, copy.pieces, call.collective if copy.cut_alike else "all_reduce")
        alone.instead_of, alone.copy = total * copy.numel // call.numel, copy.number
        alone.feedback = None if call.feedback is None else call.feedback.of_copy(copy.number)
        if isinstance(_planned(alone), Plan):
            found.append((copy.pieces, alone))
            left -= alone.instead_of
    if not found:
        return []
    rest = replicated_params.between(sorted(chain.from_iterable(ranges for ranges, _ in found)), call.numel)
    if rest:
        other = _part_of(call, rest, call.collective)
        other.exact = replicated_params.ranges_of(replicated_params.moved(call.exact, rest))
        other.instead_of, other.feedback = left, call.feedback
        found.append((rest, other))
    return found


def _part_of(call: Call, ranges: Sequence[Range], collective: Collective) -> Call:
    """A call for some elements of `call`."""
    facts = (call.dtype, call.device, call.group, call.config, call.site, call.op, call.op_name, call.step)
    part = Call(collective, replicated_params.numel_of(ranges), *facts)
    if collective == "reduce_scatter":
        sizes = call.parts or [call.numel // call.world_size] * call.world_size
        part.parts = [replicated_params.numel_of(each) for each in replicated_params.split(ranges, sizes)]
    return part


def lasts(answer: FullPrecision) -> bool:
    """Whether every call of the same facts will be answered alike."""
    return answer.reason not in (DISABLED, WARM_UP, LOW_SQNR)


def ring_bytes(collective: str, nbytes: int, world_size: int) -> int:
    """What a rank sends in a ring collective of a whole tensor of nbytes: an all-reduce has two halves."""
    half = nbytes * (world_size - 1) // world_size
    return 2 * half if collective == "all_reduce" else half


def full_precision_bytes(call: Call) -> int:
    """What a rank sends in full precision."""
    if call.theirs and call.instead_of is not None:
        return call.instead_of
    if call.parts is not None:
        return _to_others(call, call.parts) * call.itemsize
    if call.collective == "broadcast":
        return _passed_on(call, call.numel * call.itemsize)
    if call.alone:
        return call.numel * call.itemsize if call.collective == "send" else 0
    return ring_bytes(call.collective, call.numel * call.itemsize, call.world_size)


def instead_of_bytes(call: Call) -> int:
    """Return the bytes that a rank would send without us."""
    return full_precision_bytes(call) if call.instead_of is None else call.instead_of


def _to_others(call: Call, sizes: list[int]) -> int:
    """What a rank sends if the ranks' parts have these sizes: the others' parts, or its own to each of them."""
    own = sizes[call.state.rank]
    return own * (call.world_size - 1) if call.collective == "all_gather" else sum(sizes) - own


def _passed_on(call: Call, nbytes: int) -> int:
    """What a rank sends of a broadcast of nbytes: the root each byte once, the others what they pass on of it."""
    others = call.world_size - 1
    if others == 0:
        return 0
    return nbytes if call.state.rank == call.root else nbytes * (others - 1) // others


def _header_bytes(call: Call) -> int:
    """What goes before a message that this rank sends; on backends where only a few have a header it is not counted."""
    headed = call.collective == "send" and transport.by_messages(call.group, call.device)
    return point_to_point.HEADER_BYTES if headed else 0


def _count(call: Call, plan: Plan) -> None:
    """A call that goes as planned. Of an all_to_all this rank's runs may all be too short to be quantized."""
    bits, plain = plan.bits(call.collective), instead_of_bytes(call)
    if call.rule is None or call.parts is None:
        sent, between_nodes = _sent_bytes(call, plan)
        counters.record_quantized(call.site, sent, plain, between_nodes, bits)
    elif any(map(call.rule.quantizes, call.parts)):
        sent, exact = call.rule.sent_bytes(call.parts, call.state.rank, plan.gather)
        counters.record_quantized(call.site, sent, plain, bits=bits, bytes_plain=exact)
    else:
        reason = SMALL if any(call.parts) else EMPTY
        counters.record_full_precision(call.site, reason, plain, message=call.numel * call.itemsize)


def _planned(call: Call, width: int | None = None) -> Plan | FullPrecision:
    config, known = call.config, call.state.plans
    warm = call.step is not None and call.step < config.warmup_steps
    site = call.site.role, call.site.module
    what = call.collective, call.numel, call.dtype, call.op_name, *site, id(config), warm, width, call.device
    if (remembered := known.get(what)) is not None:
        return remembered[0]
    answer = make_plan(
        call.collective,
        numel=call.numel,
        dtype=call.dtype,
        world_size=call.world_size,
        op=call.op_name,
        site=call.site,
        config=config,
        step=call.step,
        nodes=None if call.alone else groups.nodes_of(call.label, config, call.device),
        width=width,
    )
    if isinstance(answer, Plan) and transport.queues(call.group, call.device):
        payload = answer.widest.payload_bytes(call.numel)
        answer = replace(answer, chunk_bytes=queued_chunk_bytes(answer.chunk_bytes, payload))
    if len(known) >= _PLANS:
        known.clear()
    known[what] = answer, config
    return answer


def _at_width(call: Call, width: int) -> Plan:
    plan = _planned(call, width)
    assert isinstance(plan, Plan)
    return plan


def _sent_bytes(call: Call, plan: Plan) -> tuple[int, int]:
    """What a rank sends as planned, and what of it goes to another node; 0 where the call knows no nodes."""
    if plan.nodes is not None:
        shards = call.parts or [call.numel // call.world_size] * call.world_size
        sizes = call.numel if call.collective == "all_reduce" else shards
        kind = "reduce_scatter" if call.collective == "reduce" else call.collective
        return two_level.sent_bytes(kind, sizes, plan, call.state.rank)
    if call.collective == "broadcast":
        return _passed_on(call, plan.gather.payload_bytes(call.numel)), 0
    if call.alone:
        return _header_bytes(call) + (plan.gather.payload_bytes(call.numel) if call.collective == "send" else 0), 0
    if call.parts is not None:
        half = plan.reduce if call.collective in SUMS else plan.gather
        return _to_others(call, [aligned(half.payload_bytes(numel)) for numel in call.parts]), 0
    return flat.sent_bytes(call.collective, call.numel, plan, call.world_size), 0
