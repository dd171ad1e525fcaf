"""The stages of a call after its decision: quantized, or in full precision.

Each function here is one kind of call: a generator that yields the next stage (collectives/work.py, Stage), so that its
stages share local variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import all_to_all as exchanges
from flash_allreduce_plugin.collectives import flat, replicated_params, transport, two_level, two_shot
from flash_allreduce_plugin.collectives.error_feedback import NO_SLOT, Residual
from flash_allreduce_plugin.collectives.replicated_params import Exactly, Range
from flash_allreduce_plugin.collectives.transport import BufferPool, Label
from flash_allreduce_plugin.collectives.weight_differences import Exact, HeldWeights
from flash_allreduce_plugin.collectives.work import Stage, StreamWork, Work
from flash_allreduce_plugin.errors import CollectiveError
from flash_allreduce_plugin.policy import Collective, Plan, Role, Site
from flash_allreduce_plugin.runtime.decision import Call
from flash_allreduce_plugin.telemetry import counters, notices
from flash_allreduce_plugin.telemetry.other_traffic import ours

#: Roles of tensors with error feedback. A preset also sets it where activations are summed; it has no effect there.
_CARRIED = (Role.ANY, Role.GRADIENT, Role.PARAMETER_DIFFERENCE)

Plain = Callable[[], Any]
"""Runs a framework's own collective, which leaves its result where ours would; returns its handle, if it has one."""


def plainly(collective: Collective, site: Site, group: dist.ProcessGroup, plain: Plain, async_op: bool = False) -> Any:
    """Run a collective in full precision; return its handle if async_op. Raises CollectiveError if it fails."""
    try:
        with ours:
            handle = plain()
    except RuntimeError as error:
        raise failed(collective, site, group, error) from error
    return handle if async_op else None


def failed(collective: Collective, site: Site, group: dist.ProcessGroup, cause: BaseException) -> CollectiveError:
    """Build the error of a failed collective in full precision."""
    return Label(collective, site.name, group).error(transport.PLAINLY, cause)


def start(
    call: Call, steps: Iterator[Stage], plan: Plan | None, async_op: bool, outputs: list[Tensor], *inputs: Tensor
) -> Work | None:
    """Run all stages, or return their handle if asynchronous. plan: None in full precision."""
    request = call.request
    if not async_op:
        for _ in steps:
            pass
        return None
    name = f"{request.collective} at site {request.site.name!r}"
    if transport.queues(request.group, request.device):
        stream = call.state.stream(request.device)
        return StreamWork(steps, name, outputs, (*outputs, *inputs), stream, request.device)
    helper = call.state.helper if transport.by_messages(request.group, request.device) else None
    return Work(steps, name, outputs, helper, at_once=plan is not None)


def plain_op(call: Call) -> tuple[Any, float]:
    """Return the operator for torch's collective and the remaining factor of its result: gloo can only sum."""
    request = call.request
    if request.op_name in ("avg", "premul_sum") and request.group._get_backend(request.device).name() == "gloo":
        return dist.ReduceOp.SUM, request.factor
    return request.op, 1.0


def _exactly(call: Call, parts: Sequence[Tensor]) -> Exactly | None:
    """Start the sum in full precision of the call's copies. parts: the call's input, contiguous."""
    request = call.request
    return Exactly(call.exact, parts, request.factor, call.label, request.site) if call.exact else None


def _residual(call: Call, plan: Plan, sizes: Sequence[int]) -> Residual | None:
    """Return the residual of the last such call. sizes: elements of the tensor, or of each rank's part."""
    request = call.request
    if request.feedback is None or plan.nodes is not None:  # the configuration refuses both
        if request.config.error_feedback and request.site.role in _CARRIED:
            counters.record_residual_dropped(request.site, NO_SLOT)
            notices.without_slot(request.site.name)
        return None
    place = f"rank {call.state.rank} of {call.world_size}"
    layout = f"{request.collective} of {request.dtype} {list(sizes)} as {place} by {plan}"
    of_residual = flat.groups_of_residual(request.collective, sizes, plan, call.world_size)
    return request.feedback.open(layout, request.site, of_residual, plan.reduce.group_size, request.device)


def _measure(call: Call, plan: Plan, input: Tensor | Sequence[Tensor]) -> None:
    """Measure a quantized call before it starts. input: in world_size even parts, or one 1-D tensor a rank."""
    request = call.request
    if not call.quality.measured:
        return
    if request.config.quality_measure == "local":
        sizes = [len(input)] if isinstance(input, Tensor) and input.dim() == 1 else flat.sizes_of(input)
        call.quality.measure_locally(request.factor, request.device, plan.reduce, sizes)
    else:
        op, factor = plain_op(call)
        even = input if isinstance(input, Tensor) else _padded(input)
        call.quality.measure_exactly(even, op, factor, request.parts if request.collective == "all_gather" else None)


def plain_all_reduce(call: Call, tensor: Tensor, plain: Plain | None) -> Iterator[Stage]:
    request = call.request
    if request.numel == 0 and plain is None:
        return
    tensor = tensor.detach()
    whole = tensor.contiguous()
    op, factor = (request.op, 1.0) if plain is not None else plain_op(call)
    call.quality.watch([whole.view(-1)], request.factor)
    exactly = _exactly(call, [whole])
    pending = transport.plainly(plain, call.label) if plain else transport.all_reduce(whole, op, call.label)
    yield Stage.PROGRESS
    pending.wait()
    if plain is not None and whole is not tensor:
        whole.copy_(tensor)
    if factor != 1.0:
        whole.mul_(factor)
    if exactly is not None:
        exactly.write(whole.view(-1))
    if whole is not tensor:
        tensor.copy_(whole)
    yield Stage.FINISH
    call.quality.watched(whole.view(-1))


def all_reduce(call: Call, plan: Plan, tensor: Tensor) -> Iterator[Stage]:
    request = call.request
    tensor = tensor.detach()
    whole = rows.flat(tensor)
    exactly = _exactly(call, [whole])
    call.quality.try_codebook(plan, whole)
    _measure(call, plan, whole)
    meter, residual = call.quality.meter, _residual(call, plan, [whole.numel()])
    carried = () if residual is None else (residual,)
    how = {"feedback": residual is not None, "measured": meter is not None}
    if not (whole.is_cuda and two_shot.all_reduce(whole, request.factor, plan, call.label, call.key, **how)):
        arguments = (whole, request.factor, plan, call.label, pool_of(call, plan), call.key, *carried)
        yield from levels_of(plan).all_reduce(*arguments, meter=meter)
    if exactly is not None:
        exactly.write(whole)
    if not tensor.is_contiguous():
        tensor.copy_(whole.view(tensor.shape))
    yield Stage.FINISH
    if request.feedback is not None:
        request.feedback.check(whole)
    call.quality.end(whole)


def reduce_scatter(
    call: Call, plan: Plan | None, outputs: list[Tensor], shards: Tensor | Sequence[Tensor], plain: Plain | None
) -> Iterator[Stage]:
    """Run a reduce-scatter. shards: [world, numel], or a list of 1-D tensors."""
    request = call.request
    if request.numel == 0 and plain is None:
        return
    outputs = [one.detach() for one in outputs]
    in_place = len(outputs) == 1 and outputs[0].is_contiguous()
    shard = rows.flat(outputs[0]) if in_place else outputs[0].new_empty(sum(map(Tensor.numel, outputs)))
    exactly = _exactly(call, [shards] if isinstance(shards, Tensor) else shards)
    if plan is None:
        call.quality.watch(shards, request.factor)
        yield from _plain_reduce_scatter(call, shard, shards, plain)
        if plain is not None and not in_place:
            torch.cat([one.reshape(-1) for one in outputs], out=shard)
    else:
        call.quality.try_codebook(plan, shards)
        _measure(call, plan, shards)
        pool = pool_of(call, plan)
        residual = _residual(call, plan, flat.sizes_of(shards))
        carried = () if residual is None else (residual,)
        how = (request.factor, plan, call.label, pool, call.key, *carried)
        yield from levels_of(plan).reduce_scatter(shard, shards, *how, meter=call.quality.meter)
    if exactly is not None:
        exactly.write(shard, call.start)
    if not in_place:
        for one, result in zip(outputs, shard.split([one.numel() for one in outputs]), strict=True):
            one.copy_(result.view(one.shape))
    yield Stage.FINISH
    if plan is None:
        call.quality.watched(shard)
        return
    if request.feedback is not None:
        request.feedback.check(shard)
    call.quality.end(shard)


@dataclass(frozen=True, slots=True)
class Apart:
    """Elements of a call that a separate call reduces: ranges of the call's input, in order."""

    ranges: Sequence[Range]
    call: Call
    plan: Plan | None


def all_reduce_apart(every: Sequence[Apart], tensor: Tensor) -> Iterator[Stage]:
    """All-reduce the tensor in separate calls (collectives/replicated_params.py)."""
    tensor = tensor.detach()
    whole = tensor.contiguous().view(-1)
    values = [replicated_params.joined(replicated_params.cut([whole], one.ranges), whole) for one in every]
    steps = [_all_reduce_of(one, value) for one, value in zip(every, values, strict=True)]
    yield from _together(steps)
    for one, value in zip(every, values, strict=True):
        if len(one.ranges) > 1:  # with one range the value is a view of the tensor
            replicated_params.write(value, one.ranges, whole)
    if not tensor.is_contiguous():
        tensor.copy_(whole.view(tensor.shape))
    yield Stage.FINISH
    _finish(steps)


def reduce_scatter_apart(
    call: Call, every: Sequence[Apart], outputs: list[Tensor], shards: Tensor | Sequence[Tensor]
) -> Iterator[Stage]:
    """Reduce-scatter the shards in separate calls. Of an all-reduced copy every rank takes its part."""
    outputs = [one.detach() for one in outputs]
    in_place = len(outputs) == 1 and outputs[0].is_contiguous()
    shard = outputs[0].view(-1) if in_place else outputs[0].new_empty(sum(map(Tensor.numel, outputs)))
    parts, sizes = list(shards), flat.sizes_of(shards)
    steps, results = [], []
    for one in every:
        if one.call.request.collective == "all_reduce":
            value, ranges = torch.cat(list(replicated_params.cut(parts, one.ranges))), one.ranges
            steps.append(_all_reduce_of(one, value))
        else:
            of_ranks, cut = replicated_params.split(one.ranges, sizes), replicated_params.cut(parts, one.ranges)
            values = [replicated_params.joined(islice(cut, len(each)), shard) for each in of_ranks]
            ranges = of_ranks[call.state.rank]
            value = shard.new_empty(replicated_params.numel_of(ranges))
            steps.append(reduce_scatter(one.call, one.plan, [value], values, None))
        results.append((value, ranges))
    yield from _together(steps)
    for value, ranges in results:
        replicated_params.write(value, ranges, shard, call.start)
    if not in_place:
        for output, result in zip(outputs, shard.split([one.numel() for one in outputs]), strict=True):
            output.copy_(result.view(output.shape))
    yield Stage.FINISH
    _finish(steps)


def _all_reduce_of(one: Apart, value: Tensor) -> Iterator[Stage]:
    return plain_all_reduce(one.call, value, None) if one.plan is None else all_reduce(one.call, one.plan, value)


def _together(calls: Sequence[Iterator[Stage]]) -> Iterator[Stage]:
    """Start all calls, yield, and finish them."""
    for one in calls:
        next(one, None)
    yield Stage.PROGRESS
    for one in calls:
        next(one, None)


def _finish(calls: Sequence[Iterator[Stage]]) -> None:
    for one in calls:
        next(one, None)


def _plain_reduce_scatter(
    call: Call, shard: Tensor, shards: Tensor | Sequence[Tensor], plain: Plain | None
) -> Iterator[Stage]:
    """Run the framework's reduce-scatter into the caller's output, or else torch's into `shard`."""
    if plain is not None:
        pending = transport.plainly(plain, call.label)
        yield Stage.PROGRESS
        pending.wait()
        return
    op, factor = plain_op(call)
    even = shards if isinstance(shards, Tensor) else _padded(shards)
    sums = shard if even is shards else shard.new_empty(even.shape[1])
    pending = transport.reduce_scatter(sums, even.view(-1), op, call.label)
    yield Stage.PROGRESS
    pending.wait()
    if even is not shards:
        shard.copy_(sums[: len(shard)])
    if factor != 1.0:
        shard.mul_(factor)


def _padded(shards: Sequence[Tensor]) -> Tensor:
    """Return 1-D tensors as rows [world, numel of the longest], padded with zeros."""
    even = shards[0].new_zeros(len(shards), max(map(len, shards)))
    for row, shard in zip(even, shards, strict=True):
        row[: len(shard)] = shard
    return even


def all_gather(call: Call, plan: Plan | None, output: Tensor, input: Tensor, plain: Plain | None) -> Iterator[Stage]:
    request = call.request
    if request.numel == 0 and plain is None:
        return
    output = output.detach()
    in_place = output.is_contiguous()
    whole = rows.flat(output) if in_place else output.new_empty(output.numel())
    own = rows.flat(input)
    if plan is None:
        call.quality.watch([own], 1.0)
        if plain is not None:
            pending = transport.plainly(plain, call.label)
        elif request.parts is not None:
            pending = transport.all_gather(whole, own, call.label, transport.PLAINLY, request.parts)
        else:
            pending = transport.all_gather_plainly(whole, own, call.label)
        yield Stage.PROGRESS
        pending.wait()
        if plain is not None and not in_place:
            whole.view(output.shape).copy_(output)
    else:
        call.quality.try_codebook(plan, own)
        _measure(call, plan, own)
        pool, how = pool_of(call, plan), {"parts": request.parts, "meter": call.quality.meter}
        sizes = request.parts or [len(own)] * call.world_size
        exact = Exact(call.exact, whole, own, sizes, call.label, request.site) if call.exact else None
        yield from levels_of(plan).all_gather(whole, own, plan, call.label, pool, call.key, **how)
        if exact is not None:
            exact.write(whole)
    if not in_place:
        output.copy_(whole.view(output.shape))
    yield Stage.FINISH
    if plan is None:
        call.quality.watched(whole)
    else:
        call.quality.end(whole)


def gather_differences(
    call: Call,
    plan: Plan | None,
    weights: Tensor,
    master: Tensor,
    held: HeldWeights,
    plain: Plain | None,
) -> Iterator[Stage]:
    """Gather weights by differences. weights: contiguous, equal on all ranks. master: this rank's new part."""
    request = call.request
    if request.numel == 0 and plain is None:
        return
    weights, master = rows.flat(weights), rows.flat(master)
    mine = weights[call.start : call.start + len(master)]
    if plan is None:
        mine.copy_(master)
        if plain is not None:
            pending = transport.plainly(plain, call.label)
        elif request.parts is not None:
            pending = transport.all_gather(weights, mine, call.label, transport.PLAINLY, request.parts)
        else:
            pending = transport.all_gather_plainly(weights, mine, call.label)
        yield Stage.PROGRESS
        pending.wait()
        call.quality.watch_weights(master, mine)
    else:
        sizes = request.parts or [len(master)] * call.world_size
        exact = Exact(call.exact, weights, master, sizes, call.label, request.site) if call.exact else None
        _measure(call, plan, master)
        pool = pool_of(call, plan)
        how = {"parts": request.parts, "meter": call.quality.meter, "held": held}
        yield from levels_of(plan).all_gather(weights, master, plan, call.label, pool, call.key, **how)
        if exact is not None:
            exact.write(weights)
    held.gathered(weights)
    yield Stage.FINISH
    if plan is None:
        call.quality.watched(weights)
    else:
        call.quality.end(weights)


def all_to_all(
    call: Call,
    plan: Plan | None,
    rule: exchanges.Rule,
    output: Tensor,
    input: Tensor,
    received: list[int],
    sent: list[int],
    plain: Plain | None,
) -> Iterator[Stage]:
    """Run an all-to-all. A rank that sends and receives nothing takes part too: the others cannot know."""
    output = output.detach()
    in_place = output.is_contiguous()
    whole = rows.flat(output) if in_place else output.new_empty(output.numel())
    own = rows.flat(input)
    if plan is None:
        call.quality.watch((run for run in own.split(sent) if rule.quantizes(len(run))), 1.0)
        theirs = plain or (
            lambda: dist.all_to_all_single(whole, own, received, sent, group=call.request.group, async_op=True)
        )
        pending = transport.plainly(theirs, call.label)
        yield Stage.PROGRESS
        pending.wait()
        if plain is not None and not in_place:
            whole.view(output.shape).copy_(output)
    else:
        call.quality.try_codebook(plan, own)
        if call.quality.measured:
            call.quality.measure_locally(1.0, own.device, plan.gather, sent)
        pool, meter = call.state.pool(own.device), call.quality.meter
        yield from exchanges.all_to_all(whole, own, received, sent, plan, rule, call.label, pool, call.key, meter=meter)
    if not in_place:
        output.copy_(whole.view(output.shape))
    yield Stage.FINISH
    if plan is None:
        call.quality.watched(whole)
    else:
        call.quality.end(whole)


def pool_of(call: Call, plan: Plan) -> BufferPool:
    """Return the buffers of a call. In two levels the ranks' buffers differ in size."""
    request = call.request
    return call.state.pool(request.device, request.group if plan.nodes is None else None)


def levels_of(plan: Plan) -> ModuleType:
    return flat if plan.nodes is None else two_level
