"""The collectives of DTensor's placements: of an activation ours, of every other tensor torch's own.

    Partial -> Replicate    all-reduce        forward: the sum of a row-parallel layer
                                              backward: the input gradient of a column-parallel layer
    Partial -> Shard        reduce-scatter    the same two, with sequence parallelism
    Shard   -> Replicate    all-gather        forward: the input of a column-parallel layer
                                              backward: the gradient of a reduce-scatter's input

A gather along the last dimension is that of a layer's output (logits). It stays exact, and so does its gradient.
In a graph of torch.compile a collective is an operator of ours (runtime/traced.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.integrations.patching import Function, names_used, rebound
from flash_allreduce_plugin.integrations.tensor_parallel.activations import Activation, moving, tracing
from flash_allreduce_plugin.policy import Collective, Role, Site
from flash_allreduce_plugin.runtime.decision import ring_bytes
from flash_allreduce_plugin.telemetry import counters

OTHER = "no activation"
LAST_DIMENSION = "gather along the last dimension"

REDUCE_FORWARD = Site("tensor_parallel.reduce.forward", Role.FORWARD)
REDUCE_BACKWARD = Site("tensor_parallel.reduce.backward", Role.BACKWARD)
GATHER_FORWARD = Site("tensor_parallel.gather.forward", Role.SEQUENCE_PARALLEL_GATHER)
GATHER_BACKWARD = Site("tensor_parallel.gather.backward", Role.SEQUENCE_PARALLEL_GRADIENT)
EMBEDDING = Site("tensor_parallel.embedding.forward", Role.EMBEDDING)
OTHERS = Site("tensor_parallel.other")
COVERS = {
    REDUCE_FORWARD: "sums of row-parallel layers",
    REDUCE_BACKWARD: "input gradients of column-parallel layers",
    GATHER_FORWARD: "gathers of sequence parallelism",
    GATHER_BACKWARD: "gathers of gradients, with sequence parallelism",
    EMBEDDING: "the sum of a vocabulary-parallel embedding",
}

#: The arguments config, site, step and full_precision of a call.
How = Callable[[Site, Activation], dict[str, Any]]
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def all_reduces(how: How) -> Callable[[Function], Function]:
    """Return a wrapper of a placement's method that calls funcol.all_reduce."""

    def wrap(original: Function) -> Function:
        def all_reduce(self: Tensor, reduceOp: str, group: Any, tag: str = "") -> Tensor:
            activation = _ours(self, reduceOp, group, "all_reduce")
            if activation is None:
                return _theirs("all_reduce")(self, reduceOp=reduceOp, group=group, tag=tag)
            site = EMBEDDING if activation.embedding else REDUCE_BACKWARD if activation.backward else REDUCE_FORWARD
            tensor, call = _waited(self), how(site, activation)
            if tracing():
                if call["full_precision"]:
                    return _theirs("all_reduce")(self, reduceOp=reduceOp, group=group, tag=tag)
                return _operator("all_reduce", tensor, _OPS[reduceOp].name, group=group, how=call)
            output, later = tensor.clone(), activation.async_op
            theirs = _Functional(output, "all_reduce", tensor, reduceOp=reduceOp, group=group, tag=tag)
            handle = reductions.all_reduce(
                *(output, _OPS[reduceOp], _members(group)), async_op=later, plain=theirs, **call
            )
            return _result(output, handle, theirs)

        return rebound(original, "funcol.all_reduce", all_reduce)

    return wrap


def reduce_scatters(how: How) -> Callable[[Function], Function]:
    """Return a wrapper of a placement's method that calls funcol.reduce_scatter_single (torch 2.12: _tensor)."""

    def wrap(original: Function) -> Function:
        name = _name("reduce_scatter", original)

        def reduce_scatter(self: Tensor, reduceOp: str, scatter_dim: int, group: Any, tag: str = "") -> Tensor:
            activation = _ours(self, reduceOp, group, "reduce_scatter")
            if activation is None:
                return _theirs(name)(self, reduceOp, scatter_dim=scatter_dim, group=group, tag=tag)
            site = EMBEDDING if activation.embedding else REDUCE_BACKWARD if activation.backward else REDUCE_FORWARD
            parts = _waited(self).chunk(_size(group), scatter_dim)
            output = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
            input = torch.cat(parts) if scatter_dim else _waited(self)
            call, later = how(site, activation), activation.async_op
            if tracing():
                if call["full_precision"]:
                    return _theirs(name)(self, reduceOp, scatter_dim=scatter_dim, group=group, tag=tag)
                return _operator("reduce_scatter", output, input, _OPS[reduceOp].name, group=group, how=call)
            theirs = _Functional(output, name, _waited(self), reduceOp, scatter_dim=scatter_dim, group=group, tag=tag)
            handle = reductions.reduce_scatter(
                *(output, input, _OPS[reduceOp], _members(group)), async_op=later, plain=theirs, **call
            )
            return _result(output, handle, theirs)

        return rebound(original, f"funcol.{name}", reduce_scatter)

    return wrap


def all_gathers(how: How) -> Callable[[Function], Function]:
    """Return a wrapper of a placement's method that calls funcol.all_gather_single (torch 2.12: _tensor)."""

    def wrap(original: Function) -> Function:
        name = _name("all_gather", original)

        def all_gather(self: Tensor, gather_dim: int, group: Any, tag: str = "") -> Tensor:
            activation = _ours(self, "sum", group, "all_gather")
            if activation is None:
                return _theirs(name)(self, gather_dim=gather_dim, group=group, tag=tag)
            site = GATHER_BACKWARD if activation.backward else GATHER_FORWARD
            tensor, ranks = _waited(self), _size(group)
            output = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
            call = how(site, activation)
            if gather_dim == tensor.dim() - 1:
                call["full_precision"] = call["full_precision"] or LAST_DIMENSION
            later = activation.async_op and gather_dim == 0
            if tracing():
                if call["full_precision"]:
                    return _theirs(name)(self, gather_dim=gather_dim, group=group, tag=tag)
                output = _operator("all_gather", output, tensor, group=group, how=call)
            else:
                theirs = _Functional(output, name, tensor, gather_dim=gather_dim, group=group, tag=tag)
                handle = reductions.all_gather(*(output, tensor, _members(group)), async_op=later, plain=theirs, **call)
                if (result := theirs.result_of(handle)) is not None:
                    return result
                output = _result(output, handle, theirs)
            return output if gather_dim == 0 else torch.cat(output.chunk(ranks), gather_dim)

        return rebound(original, f"funcol.{name}", all_gather)

    return wrap


def _ours(tensor: Tensor, op: str, group: Any, collective: Collective) -> Activation | None:
    """Return the activation that a collective of ours moves; None: torch's does, and it is counted."""
    activation = moving()
    if tracing():
        return activation if op in _OPS else None
    reason = OTHER if activation is None else None if op in _OPS else f"reduction by {op}"
    if reason is None and hasattr(_elements(tensor), "__tensor_flatten__"):  # LocalTensor: all ranks in one process
        reason = f"{type(_elements(tensor)).__name__}, no plain tensor"
    if reason is not None:
        ranks = _size(group)
        whole = tensor.numel() * tensor.element_size() * (ranks if collective == "all_gather" else 1)
        counters.record_full_precision(OTHERS, reason, ring_bytes(collective, whole, ranks), message=whole)
        return None
    return activation


def _elements(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the one that it waits for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _operator(name: str, *given: Any, group: Any, how: dict[str, Any]) -> Tensor:
    """Put our operator into the graph that is being traced. There is no step in it, and so no warm-up."""
    site, members = how["site"], _members(group)
    call = members.group_name, how["config"].text, site.name, site.role.value, site.module, site.layer, None
    result: Tensor = getattr(torch.ops.flash_allreduce, name)(*given, *call)
    return result


class _Functional:
    """Torch's functional collective, for a call in full precision. It allocates its result: `output` is a placeholder.

    gather_dim: of a gather; output's is 0.
    """

    def __init__(self, output: Tensor, name: str, *arguments: Any, **keywords: Any) -> None:
        self._output, self._run = output, partial(_theirs(name), *arguments, **keywords)
        self._gather_dim = keywords.get("gather_dim", 0)
        self._result: Tensor | None = None

    def __call__(self) -> _Functional:
        self._result = self._run()
        return self

    def wait(self) -> None:
        """Fill `output`: called only where the quality of a call is watched."""
        assert self._result is not None
        result, dim = self._result, self._gather_dim
        if dim:  # as the parts of the ranks lie in `output`
            result = torch.cat(result.chunk(self._output.shape[0] // result.shape[0], dim))
        self._output.copy_(result)

    def result_of(self, handle: Any) -> Tensor | None:
        """Return the result of a call in full precision, else None. handle: of our call."""
        return self._result if handle is None or handle is self else None


def _result(output: Tensor, handle: Any, theirs: _Functional) -> Tensor:
    if (result := theirs.result_of(handle)) is not None:
        return result
    if handle is None:
        return output
    from flash_allreduce_plugin.integrations.tensor_parallel.in_flight import InFlight

    return InFlight.of(output, handle)


def _waited(tensor: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return (tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor).contiguous()


def _theirs(name: str) -> Function:
    from torch.distributed import _functional_collectives

    function: Function = getattr(_functional_collectives, name)
    return function


def _name(collective: str, original: Function) -> str:
    single = f"{collective}_single"
    return single if single in names_used(original.__code__) else f"{collective}_tensor"


def _members(group: Any) -> dist.ProcessGroup:
    """Return the group of (mesh, dimension), as a placement names it."""
    mesh, dimension = group
    members: dist.ProcessGroup = mesh.get_group(dimension)
    return members


def _size(group: Any) -> int:
    mesh, dimension = group
    return int(mesh.size(dimension))
