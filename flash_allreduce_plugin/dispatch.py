"""The collectives that a user calls: checked, decided, run.

Every call either runs quantized, as decision.decide plans it, or is a collective in full precision: `plain`, the one
that the framework itself would have called, or torch.distributed's. Which of the two, and why, is in stats().
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import checks, groups, traced
from flash_allreduce_plugin.collectives import copies, flat, transport, two_level, two_shot
from flash_allreduce_plugin.collectives.copies import Exactly, Range
from flash_allreduce_plugin.collectives.error_feedback import Residual, Slot
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.collectives.work import StreamWork, Work
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.decision import Call, decide, full_precision_bytes, lasts
from flash_allreduce_plugin.policy import LOW_SQNR, Collective, Plan, Site
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.beside import ours

Plain = Callable[[], Any]
"""Runs a framework's own collective, which leaves its result where ours would; returns its handle, if it has one."""

_REMEMBERED = 4096  # calls of a group, by shape, dtype, site and configuration

_ALL_REDUCE = Site("all_reduce")
_REDUCE_SCATTER = Site("reduce_scatter")
_ALL_GATHER = Site("all_gather")


def all_reduce(
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    config: FlashConfig | None = None,
    async_op: bool = False,
    *,
    site: Site = _ALL_REDUCE,
    step: int | None = None,
    feedback: Slot | None = None,
    exact: Sequence[Range] = (),
    plain: Plain | None = None,
    full_precision: str | None = None,
) -> Any:
    """Reduce `tensor` over the group, in place; every rank ends with the same bits.

    Args:
        tensor: any shape, stride and dtype. float32, bfloat16 and float16 are quantized.
        op: SUM, AVG and PREMUL_SUM by a number are quantized.
        group: the default group if None.
        config: FlashConfig.from_env() if None. All ranks must have the same.
        async_op: return a handle at once; the tensor must not be touched until its wait() has returned.
        site: what the counters call this place in the program, the same on all ranks.
        step: finished training steps, for warmup_steps; None: no warm-up.
        feedback: of a gradient: where the residual of this call lies (Feedback.slot); None: no error feedback.
        exact: ascending ranges (first, end) of elements that are summed in full precision, by a small collective beside
            the quantized one: gradients of parameters that other ranks have copies of (collectives/copies.py).
        plain: runs a framework's own collective, asynchronously if async_op, and returns its handle: it takes the place
            of torch.distributed's wherever the call goes in full precision. A graph of torch.compile has torch's.
        full_precision: a reason to go in full precision, as stats() will show it; None: the configuration decides.

    Returns:
        A handle with wait() if async_op (a Work of ours, or what `plain` returned), else None.

    Raises:
        TypeError, ValueError: bad arguments; nothing was sent, the tensor is untouched.
        MismatchError: the ranks have different configurations.
        CollectiveError: a peer failed or the group's timeout passed.
    """
    if torch.compiler.is_dynamo_compiling():
        more = {"feedback": feedback, "exact": exact, "full_precision": full_precision}
        return traced.all_reduce(tensor, op, group, config, async_op, site, step, **more)
    if config is None:
        config = _default_config()
    key = None if async_op or full_precision else _key("all_reduce", tensor, tensor, op, config, site)
    if key is not None and (known := _plain_again(key, group, site)) is not None:
        _run("all_reduce", site, known, plain or (lambda: dist.all_reduce(tensor, group=known)))
        return None
    checks.check_written(tensor, "tensor")
    call = _call("all_reduce", tensor, tensor.numel(), op, group, config, site, step, feedback, exact)
    call.theirs, call.full_precision = plain is not None, full_precision
    plan = _decide(call, key, tensor)
    if plan is None and plain is not None and not call.exact and not call.quality.watching:
        return _run("all_reduce", site, call.group, plain)
    steps = _plain_all_reduce(call, tensor, plain) if plan is None else _all_reduce(call, plan, tensor, async_op)
    return _started(call, steps, plan, async_op, [tensor])


def reduce_scatter(
    output: Tensor | Sequence[Tensor],
    input: Tensor | Sequence[Tensor | Sequence[Tensor]],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    config: FlashConfig | None = None,
    async_op: bool = False,
    *,
    site: Site = _REDUCE_SCATTER,
    step: int | None = None,
    feedback: Slot | None = None,
    exact: Sequence[Range] = (),
    plain: Plain | None = None,
    full_precision: str | None = None,
    instead_of: int | None = None,
) -> Any:
    """Reduce `input` over the group; rank r gets the r-th of its world_size equal parts in `output`.

    input has world_size times as many elements as output, in row-major order, the same dtype and device; or it is
    a list of parts, one for each rank, of any sizes on which the ranks agree, and output has the size of this
    rank's. Such a part, and output, may be lists of tensors one after another. Groups are anchored at the first element
    of every part. Arguments, results and errors as all_reduce; ValueError too where the sizes do not fit. exact: ranges
    of the parts one after another. instead_of: the bytes that a rank sends in the collective that this one takes the
    place of, if that is another one.
    """
    if torch.compiler.is_dynamo_compiling():
        more = {"feedback": feedback, "exact": exact, "full_precision": full_precision, "instead_of": instead_of}
        return traced.reduce_scatter(output, input, op, group, config, async_op, site, step, **more)
    if config is None:
        config = _default_config()
    key = None if async_op or full_precision else _key("reduce_scatter", output, input, op, config, site)
    if key is not None and (known := _plain_again(key, group, site)) is not None:
        theirs = plain or (lambda: transport.reduce_scatter_single(_flat(output), _flat(input), group=known))
        _run("reduce_scatter", site, known, theirs)
        return None
    outputs = [output] if isinstance(output, Tensor) else _pieces(output, "output")
    for number, one in enumerate(outputs):
        checks.check_written(one, "output" if isinstance(output, Tensor) else f"output[{number}]")
    parts: list[list[Tensor]] | None = None
    if isinstance(input, Tensor):
        checks.check_tensor(input, "input")
        numel, like = input.numel(), input
    else:
        parts = _parts(input)
        numel, like = sum(piece.numel() for part in parts for piece in part), outputs[0]
    call = _call("reduce_scatter", like, numel, op, group, config, site, step, feedback, exact)
    call.theirs, call.full_precision, call.instead_of = plain is not None, full_precision, instead_of
    if parts is None:
        checks.check_pair(outputs[0], "output", like, "input", call.world_size)
    else:
        checks.check_parts(outputs, parts, call.world_size, call.state.rank)
        call.parts = [sum(map(Tensor.numel, part)) for part in parts]
    plan = _decide(call, key, like)
    if plan is None and plain is not None and not call.exact and not call.quality.watching:
        return _run("reduce_scatter", site, call.group, plain)
    shards = like.detach().contiguous().view(call.world_size, -1) if parts is None else list(map(_joined, parts))
    steps = _reduce_scatter(call, plan, outputs, shards, plain)
    return _started(call, steps, plan, async_op, outputs, *([shards] if isinstance(shards, Tensor) else shards))


def all_gather(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    config: FlashConfig | None = None,
    async_op: bool = False,
    *,
    site: Site = _ALL_GATHER,
    step: int | None = None,
    plain: Plain | None = None,
    full_precision: str | None = None,
) -> Any:
    """Gather `input` of every rank, in rank order, into `output`, which has world_size times its elements.

    Every rank gets the same bits, its own part included. Arguments, results and errors as reduce_scatter.
    """
    if torch.compiler.is_dynamo_compiling():
        more = {"full_precision": full_precision}
        return traced.all_gather(output, input, group, config, async_op, site, step, **more)
    if config is None:
        config = _default_config()
    key = None
    if not async_op and not full_precision:
        key = _key("all_gather", output, input, dist.ReduceOp.SUM, config, site)
    if key is not None and (known := _plain_again(key, group, site)) is not None:
        theirs = plain or (lambda: transport.all_gather_single(_flat(output), _flat(input), group=known))
        _run("all_gather", site, known, theirs)
        return None
    checks.check_written(output, "output")
    checks.check_tensor(input, "input")
    call = _call("all_gather", input, output.numel(), dist.ReduceOp.SUM, group, config, site, step)
    call.theirs, call.full_precision = plain is not None, full_precision
    checks.check_pair(input, "input", output, "output", call.world_size)
    plan = _decide(call, key, input)
    if plan is None and plain is not None and not call.quality.watching:
        return _run("all_gather", site, call.group, plain)
    return _started(call, _all_gather(call, plan, output, input, plain), plan, async_op, [output], input)


traced.serve_collectives(all_reduce, reduce_scatter, all_gather)
traced.never_trace(Work.wait, Work.is_completed, Work.get_future, StreamWork.wait, StreamWork.is_completed)


# ---- before a call ----


def _key(
    collective: Collective, output: Any, input: Any, op: Any, config: FlashConfig, site: Site
) -> tuple[Any, ...] | None:
    """What decides about a call, of those that torch.distributed can be given as they are; None: it is none of them."""
    if (
        op is dist.ReduceOp.SUM
        and type(output) is Tensor
        and type(input) is Tensor
        and output.layout is torch.strided
        and input.layout is torch.strided
        and output.is_contiguous()
        and input.is_contiguous()
        and not output.requires_grad
        and not input.requires_grad
        and not input.is_neg()
        and (input is output or not output.is_neg())
        and (numel := input.numel())
    ):
        where = output.device, input.device
        return collective, numel, output.numel(), input.dtype, output.dtype, *where, id(config), id(site)
    return None


def _plain_again(key: tuple[Any, ...], group: dist.ProcessGroup | None, site: Site) -> dist.ProcessGroup | None:
    """The group of a call that is known to go in full precision, counted; None: it is not known.

    Small messages are the many; beside a plain collective of theirs, checking and planning each anew would show.
    FLASH_ALLREDUCE_DISABLE is not looked at: it would change nothing.
    """
    if group is None:
        group = dist.group.WORLD
    state = groups.known(group)
    if state is None or (answer := state.plain.get(key)) is None:
        return None
    counters.record_full_precision(site, answer[0], answer[1])
    return group


def _call(
    collective: Collective,
    like: Tensor,
    numel: int,
    op: Any,
    group: dist.ProcessGroup | None,
    config: FlashConfig,
    site: Site,
    step: int | None,
    feedback: Slot | None = None,
    exact: Sequence[Range] = (),
) -> Call:
    """The facts of a call, checked. like: a tensor of its dtype and device."""
    copies.check(exact, numel)
    name = checks.op_name(op)
    group = checks.group_of(group)
    checks.check_named(site, step, feedback)
    if not isinstance(config, FlashConfig):
        raise TypeError(f"config is {type(config).__name__}; expected FlashConfig or None.")
    checks.check_taken(collective, name, like, group)
    call = Call(collective, numel, like.dtype, like.device, group, config, site, op, name, step)
    call.feedback, call.exact = feedback, exact
    return call


def _decide(call: Call, key: tuple[Any, ...] | None, like: Tensor) -> Plan | None:
    """The plan; None if the call goes in full precision: remembered by `key` if it always will."""
    answer = decide(call)
    if isinstance(answer, Plan):
        return answer
    if answer.reason != LOW_SQNR:  # the one reason that the groups of other copies need not have
        call.exact = ()
    if key is not None and lasts(answer) and not like.is_complex():  # whose next one may be a conjugate
        if len(call.state.plain) == _REMEMBERED:
            call.state.plain.clear()
        call.state.plain[key] = answer.reason, full_precision_bytes(call), (call.config, call.site)
    return None


@cache
def _default_config() -> FlashConfig:
    return FlashConfig.from_env()


def _pieces(tensors: Any, name: str) -> list[Tensor]:
    if not isinstance(tensors, Sequence) or not tensors:
        raise TypeError(f"{name} is {type(tensors).__name__}; expected a dense tensor, or a list of them.")
    return list(tensors)


def _parts(input: Any) -> list[list[Tensor]]:
    """The pieces of every rank's part."""
    if not isinstance(input, Sequence):
        raise TypeError(f"input is {type(input).__name__}; expected a dense tensor, or a list of one for each rank.")
    parts = []
    for rank, part in enumerate(input):
        pieces = list(part) if isinstance(part, list | tuple) else [part]
        for piece in pieces:
            checks.check_tensor(piece, f"input[{rank}]")
        parts.append(pieces)
    return parts


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """1-D and contiguous; of one contiguous tensor its own memory."""
    flat = [piece.detach().contiguous().view(-1) for piece in pieces]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _flat(tensor: Any) -> Tensor:
    """A contiguous tensor in one dimension: gloo compares shapes, and ours need not be alike."""
    assert isinstance(tensor, Tensor)
    return tensor if tensor.dim() == 1 else tensor.view(-1)


# ---- running it ----


def _run(collective: Collective, site: Site, group: dist.ProcessGroup, plain: Plain) -> Any:
    """A plain collective as it is. Raises CollectiveError where it fails."""
    try:
        with ours:
            return plain()
    except RuntimeError as error:
        raise Label(collective, site.name, group).error(transport.PLAINLY, error) from error


def _started(
    call: Call, steps: Iterator[None], plan: Plan | None, async_op: bool, outputs: list[Tensor], *inputs: Tensor
) -> Work | None:
    if not async_op:
        for _ in steps:
            pass
        return None
    name = f"{call.collective} at site {call.site.name!r}"
    if transport.queues(call.group, call.device):
        return StreamWork(steps, name, outputs, call.device, (*outputs, *inputs))
    helper = call.state.helper if transport.by_messages(call.group, call.device) else None
    return Work(steps, name, outputs, helper, at_once=plan is not None)


def _plain_op(call: Call) -> tuple[Any, float]:
    """The operator for torch's collective, and what its result is still to be multiplied with: gloo can only sum."""
    if call.op_name in ("avg", "premul_sum") and call.group._get_backend(call.device).name() == "gloo":
        return dist.ReduceOp.SUM, call.factor
    return call.op, 1.0


def _exactly(call: Call, parts: Sequence[Tensor]) -> Exactly | None:
    """Starts what is summed in full precision beside the call; parts: its input, contiguous."""
    return Exactly(call.exact, parts, call.factor, call.label, call.site) if call.exact else None


def _residual(call: Call, plan: Plan, sizes: Sequence[int]) -> Residual | None:
    """What the last such call lost. sizes: elements of the tensor, or of each rank's part."""
    if call.feedback is None or plan.nodes is not None:  # the configuration refuses both
        return None
    layout = f"{call.collective} of {call.dtype} {list(sizes)} as rank {call.state.rank} of {call.world_size} by {plan}"
    of_residual = flat.groups_of_residual(call.collective, sizes, plan, call.world_size)
    return call.feedback.open(layout, call.site, of_residual, plan.reduce.group_size, call.device)


def _measure(call: Call, input: Tensor | Sequence[Tensor]) -> None:
    """A quantized call begins. input: in world_size even parts, or one 1-D tensor a rank."""
    if not call.quality.measured:
        return
    if call.config.quality_measure == "local":
        call.quality.measure_locally(call.factor, call.device)
    else:
        op, factor = _plain_op(call)
        even = input if isinstance(input, Tensor) else _padded(input)
        call.quality.measure_exactly(even, op, factor)


def _plain_all_reduce(call: Call, tensor: Tensor, plain: Plain | None) -> Iterator[None]:
    if call.numel == 0 and plain is None:
        return
    tensor = tensor.detach()
    whole = tensor.contiguous()
    op, factor = (call.op, 1.0) if plain is not None else _plain_op(call)
    call.quality.watch([whole.view(-1)], call.factor)
    exactly = _exactly(call, [whole])
    theirs = plain or (lambda: dist.all_reduce(whole, op, group=call.group, async_op=True))
    pending = transport.plainly(theirs, call.label)
    yield
    pending.wait()
    if plain is not None and whole is not tensor:
        whole.copy_(tensor)
    if factor != 1.0:
        whole.mul_(factor)
    if exactly is not None:
        exactly.write(whole.view(-1))
    if whole is not tensor:
        tensor.copy_(whole)
    yield
    call.quality.watched(whole.view(-1))


def _all_reduce(call: Call, plan: Plan, tensor: Tensor, async_op: bool) -> Iterator[None]:
    tensor = tensor.detach()
    whole = tensor.contiguous().view(-1)
    exactly = _exactly(call, [whole])
    _measure(call, whole)
    meter, residual = call.quality.meter, _residual(call, plan, [whole.numel()])
    carried = () if residual is None else (residual,)
    how = {"asynchronous": async_op, "feedback": residual is not None, "measured": meter is not None}
    if not (whole.is_cuda and two_shot.all_reduce(whole, call.factor, plan, call.label, call.key, **how)):
        pool = call.state.pool(whole.device)
        yield from _levels(plan).all_reduce(whole, call.factor, plan, call.label, pool, call.key, *carried, meter=meter)
    if exactly is not None:
        exactly.write(whole)
    if not tensor.is_contiguous():
        tensor.copy_(whole.view(tensor.shape))
    yield
    if call.feedback is not None:
        call.feedback.check(whole)
    call.quality.end(whole)


def _reduce_scatter(
    call: Call, plan: Plan | None, outputs: list[Tensor], shards: Tensor | Sequence[Tensor], plain: Plain | None
) -> Iterator[None]:
    """shards [world, numel], or a list of 1-D tensors."""
    if call.numel == 0 and plain is None:
        return
    outputs = [one.detach() for one in outputs]
    in_place = len(outputs) == 1 and outputs[0].is_contiguous()
    shard = outputs[0].view(-1) if in_place else outputs[0].new_empty(sum(map(Tensor.numel, outputs)))
    exactly = _exactly(call, [shards] if isinstance(shards, Tensor) else shards)
    if plan is None:
        call.quality.watch(shards, call.factor)
        yield from _plain_reduce_scatter(call, shard, shards, plain)
        if plain is not None and not in_place:
            torch.cat([one.reshape(-1) for one in outputs], out=shard)
    else:
        _measure(call, shards)
        pool = call.state.pool(shard.device)
        residual = _residual(call, plan, list(map(len, shards)))
        carried = () if residual is None else (residual,)
        how = (call.factor, plan, call.label, pool, call.key, *carried)
        yield from _levels(plan).reduce_scatter(shard, shards, *how, meter=call.quality.meter)
    if exactly is not None:
        exactly.write(shard, call.start)
    if not in_place:
        for one, result in zip(outputs, shard.split([one.numel() for one in outputs]), strict=True):
            one.copy_(result.view(one.shape))
    yield
    if plan is None:
        call.quality.watched(shard)
        return
    if call.feedback is not None:
        call.feedback.check(shard)
    call.quality.end(shard)


def _plain_reduce_scatter(
    call: Call, shard: Tensor, shards: Tensor | Sequence[Tensor], plain: Plain | None
) -> Iterator[None]:
    """The framework's own, whose result is in the caller's output; else torch's, whose result is in `shard`."""
    if plain is not None:
        pending = transport.plainly(plain, call.label)
        yield
        pending.wait()
        return
    op, factor = _plain_op(call)
    even = shards if isinstance(shards, Tensor) else _padded(shards)
    sums = shard if even is shards else shard.new_empty(even.shape[1])
    flat_in, how = even.view(-1), {"group": call.group, "async_op": True}
    pending = transport.plainly(lambda: transport.reduce_scatter_single(sums, flat_in, op, **how), call.label)
    yield
    pending.wait()
    if even is not shards:
        shard.copy_(sums[: len(shard)])
    if factor != 1.0:
        shard.mul_(factor)


def _padded(shards: Sequence[Tensor]) -> Tensor:
    """1-D tensors as rows [world, the longest's numel], filled up with zeros."""
    even = shards[0].new_zeros(len(shards), max(map(len, shards)))
    for row, shard in zip(even, shards, strict=True):
        row[: len(shard)] = shard
    return even


def _all_gather(call: Call, plan: Plan | None, output: Tensor, input: Tensor, plain: Plain | None) -> Iterator[None]:
    if call.numel == 0 and plain is None:
        return
    output = output.detach()
    in_place = output.is_contiguous()
    whole = output.view(-1) if in_place else output.new_empty(output.numel())
    own = input.detach().contiguous().view(-1)
    if plan is None:
        call.quality.watch([own], 1.0)
        theirs = plain or (lambda: transport.all_gather_single(whole, own, group=call.group, async_op=True))
        pending = transport.plainly(theirs, call.label)
        yield
        pending.wait()
        if plain is not None and not in_place:
            whole.view(output.shape).copy_(output)
    else:
        _measure(call, own)
        pool = call.state.pool(own.device)
        yield from _levels(plan).all_gather(whole, own, plan, call.label, pool, call.key, meter=call.quality.meter)
    if not in_place:
        output.copy_(whole.view(output.shape))
    yield
    if plan is None:
        call.quality.watched(whole)
    else:
        call.quality.end(whole)


def _levels(plan: Plan) -> ModuleType:
    return flat if plan.nodes is None else two_level
