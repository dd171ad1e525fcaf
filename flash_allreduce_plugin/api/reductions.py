"""The collectives that a user calls: checked (api/checks.py), decided (runtime/decision.py), run (runtime/stages.py).

A call runs quantized, by the plan of decision.decide, or in full precision: by `plain`, the framework's own collective,
or by torch.distributed's. stats() counts both, with the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import checks
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import all_to_all as exchanges
from flash_allreduce_plugin.collectives import replicated_params, transport
from flash_allreduce_plugin.collectives.error_feedback import Slot
from flash_allreduce_plugin.collectives.replicated_params import Copied, Copy, Range
from flash_allreduce_plugin.collectives.weight_differences import HeldWeights
from flash_allreduce_plugin.collectives.work import StreamWork, Work
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import LOW_SQNR, Collective, Plan, Site
from flash_allreduce_plugin.runtime import groups, stages, traced
from flash_allreduce_plugin.runtime.decision import Call, Request, apart, decide, full_precision_bytes, lasts
from flash_allreduce_plugin.runtime.stages import Apart, Plain
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.other_traffic import ours

_REMEMBERED = 1024  # cached calls of a group, by shape, dtype, site and configuration

_ALL_REDUCE = Site("all_reduce")
_REDUCE_SCATTER = Site("reduce_scatter")
_ALL_GATHER = Site("all_gather")
_ALL_TO_ALL = Site("all_to_all")


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
    exact: Copied = (),
    plain: Plain | None = None,
    full_precision: str | None = None,
) -> Any:
    """Reduce `tensor` over the group, in place. Every rank ends with the same bits.

    Args:
        tensor: any shape, stride and dtype. float32, bfloat16 and float16 are quantized.
        op: SUM, AVG and PREMUL_SUM by a number are quantized.
        group: the default group if None.
        config: FlashConfig.from_env() if None. All ranks must have the same.
        async_op: return a handle immediately. The tensor must not be touched until its wait() has returned.
        site: the name of this place in the program, for the counters; equal on all ranks.
        step: finished training steps, for warmup_steps; None: no warm-up.
        feedback: for a gradient: the slot of the call's residual (Feedback.slot); None: no error feedback.
        exact: gradients of parameters with copies on other ranks (collectives/replicated_params.py): ascending ranges
            (first, end) of elements, summed in full precision by a small separate all-reduce, and Copy for a whole
            gradient, which gets a separate quantized all-reduce if it is large.
        plain: runs a framework's own collective, asynchronously if async_op, and returns its handle. It replaces
            torch.distributed's if the call runs in full precision. A graph of torch.compile uses torch's.
        full_precision: a reason for full precision, shown in stats(); None: the configuration decides.

    Returns:
        A handle with wait() if async_op (our Work, or the result of `plain`), else None.

    Raises:
        TypeError, ValueError: bad arguments; nothing was sent, the tensor is untouched.
        MismatchError: the ranks have different configurations.
        CollectiveError: a peer failed or the group's timeout passed.
    """
    if torch.compiler.is_dynamo_compiling():
        more = {"feedback": feedback, "exact": exact, "full_precision": full_precision}
        return traced.all_reduce(tensor, op, group, config, async_op, site, step, **more)
    config = default_config() if config is None else config
    key = None if async_op or full_precision else _key("all_reduce", tensor, tensor, op, config, site)
    if key is not None and (known := _plain_again(key, group, site)) is not None:
        try:
            with ours:
                dist.all_reduce(tensor, group=known) if plain is None else plain()
        except RuntimeError as error:
            raise stages.failed("all_reduce", site, known, error) from error
        return None
    checks.check_written(tensor, "tensor")
    facts = (op, group, config, site, step, feedback, exact, plain is not None, full_precision)
    call = call_of("all_reduce", tensor, tensor.numel(), *facts)
    if call.request.copies and (every := _apart(call, tensor)):
        return stages.start(call, stages.all_reduce_apart(every, tensor), every[0].plan, async_op, [tensor])
    plan = _decide(call, key, tensor)
    if plan is None and plain is not None and not call.exact and not call.quality.watching:
        return stages.plainly("all_reduce", site, call.request.group, plain, async_op)
    steps = stages.plain_all_reduce(call, tensor, plain) if plan is None else stages.all_reduce(call, plan, tensor)
    return stages.start(call, steps, plan, async_op, [tensor])


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
    exact: Copied = (),
    plain: Plain | None = None,
    full_precision: str | None = None,
    instead_of: int | None = None,
) -> Any:
    """Reduce `input` over the group. Rank r gets the r-th of its world_size equal parts in `output`.

    input has world_size times as many elements as output, in row-major order, the same dtype and device. Or input is a
    list of parts, one for each rank, of any sizes, equal on all ranks, and output has the size of this rank's part.
    Such a part, and output, may be lists of tensors. Groups start at the first element of every part.

    Arguments, results and errors as all_reduce; ValueError also if the sizes do not fit. exact: ranges of the joined
    parts. instead_of: the bytes that a rank sends in the collective that this call replaces, if that is another one.
    """
    if torch.compiler.is_dynamo_compiling():
        more = {"feedback": feedback, "exact": exact, "full_precision": full_precision, "instead_of": instead_of}
        return traced.reduce_scatter(output, input, op, group, config, async_op, site, step, **more)
    config = default_config() if config is None else config
    key = None if async_op or full_precision else _key("reduce_scatter", output, input, op, config, site)
    if key is not None and (known := _plain_again(key, group, site)) is not None:
        try:
            with ours:
                transport.reduce_scatter_single(_flat(output), _flat(input), group=known) if plain is None else plain()
        except RuntimeError as error:
            raise stages.failed("reduce_scatter", site, known, error) from error
        return None
    outputs = [output] if isinstance(output, Tensor) else _pieces(output, "output")
    for number, one in enumerate(outputs):
        checks.check_written(one, "output" if isinstance(output, Tensor) else f"output[{number}]")
    group, parts, sizes = checks.group_of(group), None, None
    if isinstance(input, Tensor):
        checks.check_tensor(input, "input")
        numel, like = input.numel(), input
        checks.check_pair(outputs[0], "output", like, "input", group.size())
    else:
        parts, like = _parts(input), outputs[0]
        checks.check_parts(outputs, parts, group.size(), group.rank())
        sizes = [sum(map(Tensor.numel, part)) for part in parts]
        numel = sum(sizes)
    facts = (op, group, config, site, step, feedback, exact, plain is not None, full_precision)
    call = call_of("reduce_scatter", like, numel, *facts, sizes, instead_of)
    every = _apart(call, like) if call.request.copies else []
    plan = every[0].plan if every else _decide(call, key, like)
    if plan is None and plain is not None and not call.exact and not call.quality.watching:
        return stages.plainly("reduce_scatter", site, call.request.group, plain, async_op)
    shards = rows.flat(like).view(call.world_size, -1) if parts is None else list(map(_joined, parts))
    if every:
        steps = stages.reduce_scatter_apart(call, every, outputs, shards)
    else:
        steps = stages.reduce_scatter(call, plan, outputs, shards, plain)
    return stages.start(call, steps, plan, async_op, outputs, *([shards] if isinstance(shards, Tensor) else shards))


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
    output_split_sizes: Sequence[int] | None = None,
    held: HeldWeights | None = None,
    exact: Sequence[Range] = (),
    which: object = None,
) -> Any:
    """Gather `input` of every rank, in rank order, into `output`, which has world_size times its elements.

    Every rank gets the same bits, its own part included. Arguments, results and errors as reduce_scatter.

    output_split_sizes: the rows of output from each rank, equal on all ranks; None: the same number from every rank.
    held: one HeldWeights for each output, for differences of weights (collectives/weight_differences.py). output,
        contiguous, holds the result of the last such call on every rank. input, in float32 or in output's dtype, is
        the new value of this rank's part. The first call, and a call after another change of output, sends whole
        values, and is counted.
    exact: ascending ranges (first, end) of output's elements that are gathered in full precision.
    which: name of the tensors, with an equal repr on all ranks. On gloo, calls with other names do not match.
    """
    if torch.compiler.is_dynamo_compiling():
        more: dict[str, Any] = {"full_precision": full_precision, "output_split_sizes": output_split_sizes}
        more.update(held=held, exact=exact)
        return traced.all_gather(output, input, group, config, async_op, site, step, **more)
    config = default_config() if config is None else config
    key = None
    if not async_op and not full_precision and output_split_sizes is None and held is None:
        key = _key("all_gather", output, input, dist.ReduceOp.SUM, config, site)
    if key is not None and (known := _plain_again(key, group, site)) is not None:
        try:
            with ours:
                transport.all_gather_single(_flat(output), _flat(input), group=known) if plain is None else plain()
        except RuntimeError as error:
            raise stages.failed("all_gather", site, known, error) from error
        return None
    checks.check_written(output, "output")
    checks.check_tensor(input, "input")
    group = checks.group_of(group)
    checks.check_held(held, output, input)
    like = input if held is None else output
    parts = None
    if output_split_sizes is None:
        checks.check_pair(input, "input", output, "output", group.size(), dtypes=held is None)
    else:
        parts = checks.runs_of(output, "output", output_split_sizes, group.size())
        checks.check_part(input, output, parts[group.rank()], dtypes=held is None)
    facts = (dist.ReduceOp.SUM, group, config, site, step, None, exact, plain is not None, full_precision, parts)
    whole = None if held is None else partial(held.agree, output)
    call = call_of("all_gather", output, output.numel(), *facts, whole=whole, which=which)
    plan = _decide(call, key, like)
    if held is not None:
        steps = stages.gather_differences(call, plan, output, input, held, plain)
        return stages.start(call, steps, plan, async_op, [output], input)
    if plan is None and plain is not None and not call.quality.watching:
        return stages.plainly("all_gather", site, call.request.group, plain, async_op)
    return stages.start(call, stages.all_gather(call, plan, output, input, plain), plan, async_op, [output], input)


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: FlashConfig | None = None,
    site: Site = _ALL_TO_ALL,
    step: int | None = None,
    plain: Plain | None = None,
    full_precision: str | None = None,
) -> Any:
    """Send run r of `input` to rank r and get run r of `output` from it, as torch.distributed.all_to_all_single.

    One rounding. A rank's run for itself is rounded too: a row is rounded the same for every destination. A run is sent
    in full precision if its bytes times world_size are below min_bytes, because only its two ends have its size. Runs
    may be empty, and ranks may have different sizes. The error is measured locally, for every quality_measure.

    Args:
        output, input: [rows, ...] of the same dtype on the same device, of any strides; they must not share memory.
        output_split_sizes, input_split_sizes: rows from and to each rank, which add up to those of the tensor; None:
            the same number for every rank.
        async_op: return a handle immediately. The tensors must not be touched until its wait() has returned.

    Other arguments, results and errors as all_reduce. If two ranks have different sizes for the run between them, at
    least one of them gets CollectiveError, within the group's timeout. torch.compile breaks the graph.
    """
    config = default_config() if config is None else config
    checks.check_written(output, "output")
    checks.check_tensor(input, "input")
    group = checks.group_of(group)
    world = group.size()
    received = checks.runs_of(output, "output", output_split_sizes, world)
    sent = checks.runs_of(input, "input", input_split_sizes, world)
    checks.check_exchange(output, input, received, sent, group.rank())
    checks.check_config(config)
    rule = exchanges.Rule(input.dtype.itemsize, world, config.min_bytes)
    numel = max(sent) * world  # min_bytes applies to a call with runs of this length only
    facts = (dist.ReduceOp.SUM, group, config, site, step, None, (), plain is not None, full_precision, sent)
    call = call_of("all_to_all", input, numel, *facts, rule=rule)
    plan = _decide(call, None, input)
    if plan is None and plain is not None and not call.quality.watching:
        return stages.plainly("all_to_all", site, call.request.group, plain, async_op)
    steps = stages.all_to_all(call, plan, rule, output, input, received, sent, plain)
    return stages.start(call, steps, plan, async_op, [output], input)


traced.serve_collectives(all_reduce, reduce_scatter, all_gather)
traced.never_trace(all_to_all, reason="no graph holds an all_to_all of flash_allreduce")
traced.never_trace(Work.wait, Work.is_completed, Work.get_future, StreamWork.wait, StreamWork.is_completed)


# ---- before a call ----


def _key(
    collective: Collective, output: Any, input: Any, op: Any, config: FlashConfig, site: Site
) -> tuple[Any, ...] | None:
    """Return the facts that decide about a call; None if torch.distributed cannot take its tensors unchanged."""
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
    """Return the group of a call that is known to run in full precision, and count the call; None: not known.

    Most messages are small, and their check and plan would take a visible share of their time. FLASH_ALLREDUCE_DISABLE
    is not read: it would change nothing.
    """
    if group is None:
        group = dist.group.WORLD
    state = groups.known(group)
    if state is None or (answer := state.plain.get(key)) is None:
        return None
    counters.record_full_precision(site, answer[0], answer[1])
    return group


def call_of(
    collective: Collective,
    like: Tensor,
    numel: int,
    op: Any,
    group: dist.ProcessGroup | None,
    config: FlashConfig,
    site: Site,
    step: int | None,
    feedback: Slot | None = None,
    exact: Copied = (),
    theirs: bool = False,
    full_precision: str | None = None,
    parts: list[int] | None = None,
    instead_of: int | None = None,
    **more: Any,
) -> Call:
    """Check the arguments of a call and create it. like: a tensor of its dtype and device. more: facts of a Request."""
    ranges: Sequence[Range] = ()
    if exact:
        ranges = replicated_params.ranges_of(exact)
        replicated_params.check(ranges, numel)
        if ranges is not exact:
            more["copies"] = [one for one in exact if isinstance(one, Copy)]
    name = checks.op_name(op)
    group = checks.group_of(group)
    checks.check_named(site, step, feedback)
    checks.check_config(config)
    checks.check_taken(collective, name, like, group)
    # By position: building a Request by name costs as much as the rest of this function.
    facts = (like.dtype, like.device, group, config, site, op, name, step, feedback, ranges, theirs, full_precision)
    return Call(Request(collective, numel, *facts, parts, instead_of, **more))


def _apart(call: Call, like: Tensor) -> list[Apart]:
    """Return the decided parts of a call with large copies; empty if the call is not split."""
    return [Apart(ranges, part, _decide(part, None, like)) for ranges, part in apart(call)]


def _decide(call: Call, key: tuple[Any, ...] | None, like: Tensor) -> Plan | None:
    """Return the plan; None for full precision, cached by `key` if that answer is permanent."""
    answer = decide(call)
    if isinstance(answer, Plan):
        return answer
    if answer.reason != LOW_SQNR:  # the one reason that may not hold for other copies
        call.exact = ()
    if key is not None and lasts(answer) and not like.is_complex():  # the next complex one may be a conjugate
        if len(call.state.plain) == _REMEMBERED:
            call.state.plain.clear()
        call.state.plain[key] = answer.reason, full_precision_bytes(call), (call.request.config, call.request.site)
    return None


@cache
def default_config() -> FlashConfig:
    return FlashConfig.from_env()


def _pieces(tensors: Any, name: str) -> list[Tensor]:
    if not isinstance(tensors, Sequence) or not tensors:
        raise TypeError(f"{name} is {type(tensors).__name__}; expected a dense tensor, or a list of them.")
    return list(tensors)


def _parts(input: Any) -> list[list[Tensor]]:
    """Return the pieces of every rank's part."""
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
    """Join the pieces into one 1-D contiguous tensor; a single contiguous piece keeps its memory."""
    flat = list(map(rows.flat, pieces))
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _flat(tensor: Any) -> Tensor:
    """Return a contiguous tensor as 1-D: gloo compares shapes, which may differ between ranks."""
    assert isinstance(tensor, Tensor)
    return tensor if tensor.dim() == 1 else tensor.view(-1)
