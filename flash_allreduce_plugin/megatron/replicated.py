"""Gradients of parameters that every tensor-parallel rank has a copy of: layer norms, biases after a sum.

Copies stay the same because their gradients are the same bits on all tensor-parallel ranks. In a bucket such a gradient
shares groups with its neighbours, which are other numbers on every tensor-parallel rank, and comes back with other
roundings: the copies would drift apart, step by step. What is replicated is therefore reduced once more, in full
precision, in a small collective beside the bucket's, and takes the place of what was quantized.

With sequence parallelism such gradients are parts, which Megatron adds up over the tensor-parallel ranks after the
data-parallel ones: they end up the same without this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.beside import ours
from flash_allreduce_plugin.megatron.tensor_parallel import record_original
from flash_allreduce_plugin.policy import Site

REASON = "replicated over tensor-parallel ranks"

Range = tuple[int, int]
"""First element, and the element after the last one."""


def ranges(parameters: Iterable[torch.nn.Parameter], bucket: torch.Tensor) -> list[Range]:
    """Where `bucket` [numel] has gradients of replicated parameters, ascending."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return []
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return []
    found = []
    for parameter in parameters:
        gradient = getattr(parameter, "main_grad", None)
        if gradient is None or not _is_replicated(parameter):
            continue
        first = (gradient.data_ptr() - bucket.data_ptr()) // bucket.element_size()
        if first >= 0 and first + gradient.numel() <= bucket.numel():
            found.append((first, first + gradient.numel()))
    return sorted(found)


def _is_replicated(parameter: torch.nn.Parameter) -> bool:
    """Neither split, nor an expert's, nor added up over the tensor-parallel ranks afterwards."""
    others = ("tensor_model_parallel", "sequence_parallel", "average_gradients_across_tp_domain")
    return getattr(parameter, "allreduce", True) and not any(getattr(parameter, name, False) for name in others)


class Replicated:
    """The collective of what is replicated in one bucket: made before the bucket's own, of its numbers."""

    def __init__(
        self,
        where: list[Range],
        bucket: torch.Tensor,
        output: torch.Tensor,
        op: Any,
        group: dist.ProcessGroup,
        site: Site,
    ) -> None:
        """output: the part of the bucket's memory in which the result is wanted, or the bucket."""
        self._first = (output.data_ptr() - bucket.data_ptr()) // bucket.element_size()
        self._where, self._output, self._group, self._site = where, output, group, site
        self._exact = torch.cat([bucket[first:last] for first, last in where])
        # gloo has no AVG.
        self._divisor = group.size() if op == dist.ReduceOp.AVG else 1
        self._op = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op

    def around(self, collective: Callable[[], Any], async_op: bool) -> Any:
        """Start both; a handle for both if they are asynchronous."""
        handle = collective()
        record_original(self._site, REASON, self._exact, self._group, all_reduce=True)
        with ours:
            self._own = dist.all_reduce(self._exact, op=self._op, group=self._group, async_op=async_op)
        if async_op:
            self._bucket = handle
            return self
        self._write()
        return handle

    def wait(self) -> None:
        self._bucket.wait()
        self._own.wait()
        self._write()

    def _write(self) -> None:
        at, end = 0, self._first + self._output.numel()
        if self._divisor > 1:
            self._exact /= self._divisor
        for first, last in self._where:
            begin, stop = max(first, self._first), min(last, end)
            if begin < stop:
                part = self._exact[at + begin - first : at + stop - first]
                self._output[begin - self._first : stop - self._first] = part
            at += last - first
