"""The collectives with a root that sends or receives everything: broadcast, reduce, gather, scatter. One rounding each.

As in reductions.py, every call is checked, decided, and runs quantized or as torch.distributed's collective.

    broadcast   encode at the root -> decode on all ranks, the root too                       collectives/broadcast.py
    reduce      encode on all ranks -> decode, sum at the root: a reduce_scatter of one part     flat.py, two_level.py
    gather      encode on all ranks -> decode at the root, its own too: an all_to_all of runs to it      all_to_all.py
    scatter     encode at the root -> decode on all ranks, its own too: an all_to_all of runs from it    all_to_all.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import checks
from flash_allreduce_plugin.api.reductions import call_of, default_config
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import all_to_all as exchanges
from flash_allreduce_plugin.collectives import transport
from flash_allreduce_plugin.collectives.broadcast import broadcast as broadcast_quantized
from flash_allreduce_plugin.collectives.work import Stage
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import Plan, Site, WithOneRoot
from flash_allreduce_plugin.runtime import stages, traced
from flash_allreduce_plugin.runtime.decision import Call, decide

_BROADCAST = Site("broadcast")
_REDUCE = Site("reduce")
_GATHER = Site("gather")
_SCATTER = Site("scatter")


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    config: FlashConfig | None = None,
    site: Site = _BROADCAST,
    step: int | None = None,
) -> Any:
    """Broadcast `tensor` from rank `src`, in place, as torch.distributed.broadcast. All ranks end with the same bits.

    The root's tensor is rounded too. One rounding. Errors are measured at the root.

    Args:
        tensor: any shape, stride and dtype; the same number of elements on every rank.
        src, group_src: the root, as a rank of the default group or of `group`: one of the two.
        group, config, async_op, site, step: as all_reduce.

    Returns:
        A handle with wait() if async_op, else None.

    Raises:
        TypeError, ValueError: bad arguments; nothing was sent, the tensor is untouched.
        MismatchError: the ranks have different configurations.
        CollectiveError: a peer failed or the group's timeout passed. It also passes if the ranks name different roots,
            sizes or dtypes.
    """
    checks.check_written(tensor, "tensor")
    root = checks.rank_in(checks.group_of(group), src, group_src, "src")
    call = _call("broadcast", tensor, tensor.numel(), group, config, site, step, root)
    plan = _decided(call)
    return stages.start(call, _broadcast(call, plan, tensor), plan, async_op, [tensor])


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    config: FlashConfig | None = None,
    site: Site = _REDUCE,
    step: int | None = None,
) -> Any:
    """Reduce `tensor` over the group to rank `dst`, in place there, as torch.distributed.reduce.

    One rounding: the root sums in float32, in rank order, and keeps the sum. A quantized call does not change the
    tensors of the other ranks. SUM, AVG and PREMUL_SUM by a number are quantized.

    Arguments, results and errors as broadcast.
    """
    checks.check_written(tensor, "tensor")
    root = checks.rank_in(checks.group_of(group), dst, group_dst, "dst")
    parts = _to_one(root, tensor.numel(), checks.group_of(group).size())
    call = _call("reduce", tensor, tensor.numel(), group, config, site, step, root, op, parts=parts)
    plan = _decided(call)
    outputs = [tensor] if call.state.rank == root else []
    return stages.start(call, _reduce(call, plan, tensor), plan, async_op, outputs, tensor)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    config: FlashConfig | None = None,
    site: Site = _GATHER,
    step: int | None = None,
) -> Any:
    """Gather `tensor` of every rank to rank `dst`, as torch.distributed.gather. One rounding, of the root's tensor too.

    gather_list: on the root only: a tensor for each rank, of as many elements. dst, group_dst: rank 0 if neither is
    given. min_bytes is compared with all that the root receives. Other arguments, results and errors as broadcast.
    """
    checks.check_tensor(tensor, "tensor")
    root = _root_or_first(group, dst, group_dst, "dst")
    group = checks.group_of(group)
    outputs = _listed(group, root, gather_list, "gather_list", tensor, written=True)
    parts = _to_one(root, tensor.numel(), group.size())
    call = _call("gather", tensor, tensor.numel() * group.size(), group, config, site, step, root, parts=parts)
    plan = _decided(call)
    return stages.start(call, _gather(call, plan, tensor, outputs), plan, async_op, outputs, tensor)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    config: FlashConfig | None = None,
    site: Site = _SCATTER,
    step: int | None = None,
) -> Any:
    """Scatter `scatter_list` of rank `src`: its r-th tensor to `tensor` of rank r, as torch.distributed.scatter.

    One rounding, of the root's tensor too. scatter_list: on the root only: a tensor for each rank, of as many elements
    as `tensor`. src, group_src: rank 0 if neither is given. min_bytes is compared with the whole list.
    Other arguments, results and errors as broadcast.
    """
    checks.check_written(tensor, "tensor")
    root = _root_or_first(group, src, group_src, "src")
    group = checks.group_of(group)
    inputs = _listed(group, root, scatter_list, "scatter_list", tensor, written=False)
    parts = [tensor.numel() if inputs else 0] * group.size()
    call = _call("scatter", tensor, tensor.numel() * group.size(), group, config, site, step, root, parts=parts)
    plan = _decided(call)
    return stages.start(call, _scatter(call, plan, tensor, inputs), plan, async_op, [tensor], *inputs)


traced.never_trace(broadcast, reduce, gather, scatter, reason="no graph holds a collective with a root")


# ---- before a call ----


def _call(
    collective: WithOneRoot,
    like: Tensor,
    numel: int,
    group: dist.ProcessGroup | None,
    config: FlashConfig | None,
    site: Site,
    step: int | None,
    root: int,
    op: Any = dist.ReduceOp.SUM,
    parts: list[int] | None = None,
) -> Call:
    config = default_config() if config is None else config
    return call_of(collective, like, numel, op, group, config, site, step, root=root, parts=parts)


def _root_or_first(group: dist.ProcessGroup | None, rank: int | None, group_rank: int | None, name: str) -> int:
    """Return the root's rank in the group; without both arguments global rank 0, as in torch."""
    return checks.rank_in(checks.group_of(group), 0 if rank is group_rank is None else rank, group_rank, name)


def _listed(
    group: dist.ProcessGroup, root: int, tensors: Any, name: str, like: Tensor, *, written: bool
) -> list[Tensor]:
    at_root = group.rank() == root
    checks.check_list(tensors, name, like, group.size(), at_root=at_root, written=written)
    return list(tensors) if at_root else []


def _to_one(root: int, numel: int, world_size: int) -> list[int]:
    """Return the elements of each rank's part if the root has all of them."""
    return [numel if rank == root else 0 for rank in range(world_size)]


def _decided(call: Call) -> Plan | None:
    answer = decide(call)
    return answer if isinstance(answer, Plan) else None


# ---- the stages of the calls, as in runtime/stages.py ----


def _measure(call: Call, plan: Plan, input: Tensor, sizes: Sequence[int]) -> None:
    """Measure a quantized call before it starts. input: of this rank. sizes: elements of its parts."""
    request = call.request
    call.quality.try_codebook(plan, input)
    if call.quality.measured:
        call.quality.measure_locally(request.factor, request.device, plan.reduce, sizes)


def _broadcast(call: Call, plan: Plan | None, tensor: Tensor) -> Iterator[Stage]:
    request = call.request
    if request.numel == 0:
        return
    assert request.root is not None
    tensor = tensor.detach()
    whole, root = rows.flat(tensor), request.root
    if plan is None:
        call.quality.watch([whole] if call.state.rank == root else [], 1.0)
        pending = transport.broadcast(whole, root, call.label, transport.PLAINLY)
        yield Stage.PROGRESS
        pending.wait()
    else:
        _measure(call, plan, whole if call.state.rank == root else whole[:0], [len(whole)])
        pool, meter = stages.pool_of(call, plan), call.quality.meter
        yield from broadcast_quantized(whole, root, plan, call.label, pool, call.key, meter=meter)
    if not tensor.is_contiguous():
        tensor.copy_(whole.view(tensor.shape))
    yield Stage.FINISH
    _end(call, plan, whole)


def _reduce(call: Call, plan: Plan | None, tensor: Tensor) -> Iterator[Stage]:
    request = call.request
    if request.numel == 0:
        return
    tensor = tensor.detach()
    whole, at_root = rows.flat(tensor), call.state.rank == request.root
    result = whole if at_root else whole[:0]
    if plan is None:
        op, factor = stages.plain_op(call)
        call.quality.watch([whole], request.factor)
        pending = transport.plainly(
            lambda: dist.reduce(whole, group_dst=request.root, op=op, group=request.group, async_op=True),
            call.label,
        )
        yield Stage.PROGRESS
        pending.wait()
        if factor != 1.0:
            result.mul_(factor)
    else:
        _measure(call, plan, whole, [len(whole)])
        parts = [whole if rank == request.root else whole[:0] for rank in range(call.world_size)]
        how = (request.factor, plan, call.label, stages.pool_of(call, plan), call.key)
        yield from stages.levels_of(plan).reduce_scatter(result, parts, *how, meter=call.quality.meter)
    if at_root and not tensor.is_contiguous():
        tensor.copy_(whole.view(tensor.shape))
    yield Stage.FINISH
    _end(call, plan, result)


def _gather(call: Call, plan: Plan | None, tensor: Tensor, outputs: Sequence[Tensor]) -> Iterator[Stage]:
    request = call.request
    if request.numel == 0:
        return
    own = rows.flat(tensor)
    whole = own.new_empty(len(own) * len(outputs))
    parts = list(whole.split(len(own))) if outputs else None
    if plan is None:
        call.quality.watch([own], 1.0)
        pending = transport.plainly(
            lambda: dist.gather(own, parts, group_dst=request.root, group=request.group, async_op=True),
            call.label,
        )
        yield Stage.PROGRESS
        pending.wait()
    else:
        assert request.parts is not None
        received = [len(own) if outputs else 0] * call.world_size
        yield from _runs(call, plan, whole, own, received, request.parts)
    for output, part in zip(outputs, parts or (), strict=True):
        output.detach().copy_(part.view(output.shape))
    yield Stage.FINISH
    _end(call, plan, whole)


def _scatter(call: Call, plan: Plan | None, tensor: Tensor, inputs: Sequence[Tensor]) -> Iterator[Stage]:
    request = call.request
    if request.numel == 0:
        return
    tensor = tensor.detach()
    own = rows.flat(tensor) if tensor.is_contiguous() else tensor.new_empty(tensor.numel())
    flat = list(map(rows.flat, inputs))
    if plan is None:
        call.quality.watch(flat, 1.0)
        pending = transport.plainly(
            lambda: dist.scatter(own, flat or None, group_src=request.root, group=request.group, async_op=True),
            call.label,
        )
        yield Stage.PROGRESS
        pending.wait()
    else:
        assert request.parts is not None
        received = [len(own) if rank == request.root else 0 for rank in range(call.world_size)]
        yield from _runs(call, plan, own, torch.cat(flat) if flat else own[:0], received, request.parts)
    if not tensor.is_contiguous():
        tensor.copy_(own.view(tensor.shape))
    yield Stage.FINISH
    _end(call, plan, own)


def _runs(
    call: Call, plan: Plan, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int]
) -> Iterator[Stage]:
    """Run an all_to_all in which one end of every run is the root, and every run is quantized."""
    request = call.request
    _measure(call, plan, input, sent)
    rule, pool, meter = (
        exchanges.Rule(request.dtype.itemsize, call.world_size, 0),
        call.state.pool(request.device),
        call.quality.meter,
    )
    yield from exchanges.all_to_all(output, input, received, sent, plan, rule, call.label, pool, call.key, meter=meter)


def _end(call: Call, plan: Plan | None, result: Tensor) -> None:
    if plan is None:
        call.quality.watched(result)
    else:
        call.quality.end(result)
