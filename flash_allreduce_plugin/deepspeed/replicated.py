"""Which gradients of a bucket are of parameters that other ranks have a copy of (copies.py).

Tied weights of a PipelineModule: DeepSpeed adds up the gradients of the stages' copies before it reduces those of data
parallelism, in whose buckets every stage has other neighbours for them.

Tensor parallelism is the model's own (Megatron-DeepSpeed), or AutoTP: DeepSpeed knows its size from the `mpu`, and what
is split by a mark on the parameter. A bucket is a list of tensors; whose they are is read from their memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from flash_allreduce_plugin.collectives.copies import Range

# Where DeepSpeed keeps what it reduces of a parameter.
_GRADIENTS = ("grad", "grad_accum", "_hp_grad")
# What an `mpu` calls tensor parallelism, in bwc.py.
_TENSOR_PARALLEL = ("tensor_model_parallel", "slice_parallel", "model_parallel")


def is_tensor_parallel(engine: Any) -> bool:
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

    mpu = getattr(engine, "mpu", None)
    if not any(hasattr(mpu, f"get_{name}_world_size") for name in _TENSOR_PARALLEL):
        return False  # one that tells of sequences alone: DeepSpeed's own for transformers, until 0.19.4 at least
    return int(bwc_tensor_model_parallel_world_size(mpu)) > 1


def ranges(engine: Any, tensors: Sequence[Tensor], *, always: bool) -> list[Range]:
    """Where the tensors, one after another, have gradients of copies, ascending; tensors: contiguous.

    What is not found to be split is taken for a copy. always: also where nothing beside them is split, so that they
    come out the same on all tensor-parallel ranks if these quantize alike.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    memory = _memory(engine, is_model_parallel_parameter)
    found: list[Range] = []
    numel = known = 0
    split = False
    for tensor in tensors:
        for first, last, is_split in _pieces(tensor, memory):
            known += last - first
            split = split or is_split
            if is_split:
                found.append((numel + first, numel + last))
        numel += tensor.numel()
    return _between(found, numel) if always or split or known < numel else []


def tied(engine: Any) -> list[Parameter]:
    """The weights that this stage of a pipeline has with others."""
    from deepspeed.pipe import PipelineModule

    module = getattr(engine, "module", None)
    return [weight for weight, _ in module.get_tied_weights_and_groups()] if isinstance(module, PipelineModule) else []


def of_tied(engine: Any, tensors: Sequence[Tensor], weights: Sequence[Parameter]) -> list[Range]:
    """Where the tensors, one after another, have gradients of these weights, ascending."""
    memory = _memory(engine, lambda parameter: any(parameter is weight for weight in weights))
    found, numel = [], 0
    for tensor in tensors:
        pieces = _pieces(tensor, memory)
        found += [(numel + first, numel + last) for first, last, is_tied in pieces if is_tied]
        numel += tensor.numel()
    return found


def either(one: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    """The elements that are in any of the ranges."""
    found: list[Range] = []
    for first, last in sorted([*one, *other]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def _memory(engine: Any, marked: Callable[[Parameter], Any]) -> list[tuple[int, int, bool]]:
    """(address, the one behind it, whether its parameter is marked) of every gradient, ascending."""
    # Stages 1 and 2 use the memory of a bucket again; what was reduced before may still point there.
    reduced = getattr(engine.optimizer, "params_already_reduced", None)
    numbers = getattr(engine.optimizer, "param_id", {})
    found = set()
    for parameter in engine.module.parameters():
        if reduced is not None and id(parameter) in numbers and reduced[numbers[id(parameter)]]:
            continue
        for name in _GRADIENTS:
            gradient = getattr(parameter, name, None)
            if isinstance(gradient, Tensor) and not gradient.is_sparse and gradient.numel():
                address = gradient.data_ptr()
                end = address + gradient.numel() * gradient.element_size()
                found.add((address, end, bool(marked(parameter))))
    return sorted(found)


def _pieces(tensor: Tensor, memory: Sequence[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """(first element, the one behind the last, whether it is marked) of each gradient in the memory of a tensor."""
    size, start = tensor.element_size(), tensor.data_ptr()
    end = start + tensor.numel() * size
    pieces = []
    for address, behind, is_split in memory[max(0, bisect_right(memory, (start,)) - 1) :]:
        if address >= end:
            break
        first, last = max(address, start), min(behind, end)
        if first < last:
            pieces.append(((first - start) // size, (last - start) // size, is_split))
    return pieces


def _between(found: Sequence[Range], numel: int) -> list[Range]:
    """The ranges of `numel` elements between those that are found."""
    free, start = [], 0
    for first, last in [*found, (numel, numel)]:
        if start < first:
            free.append((start, first))
        start = max(start, last)
    return free
