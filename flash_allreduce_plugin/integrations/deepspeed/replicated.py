"""Find the gradients of a bucket whose parameter other ranks keep too (replicated_params.py).

Tied weights of a PipelineModule: DeepSpeed adds up the gradients of the stages' copies before it reduces those of data
parallelism, in whose buckets every stage has other neighbours for them.

Tensor parallelism is the model's own (Megatron-DeepSpeed), or AutoTP: DeepSpeed knows its size from the `mpu`, and what
is split by a mark on the parameter. A bucket is a list of tensors; whose they are is read from their memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.replicated_params import Copy, Range

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


def ranges(
    engine: Any, tensors: Sequence[Tensor], *, tensor_parallel: bool, tied: Sequence[Parameter]
) -> list[Range | Copy]:
    """Where the tensors, one after another, have gradients of copies. tensors: contiguous.

    tensor_parallel: what is not found to be split is taken for a copy. tied: weights that other stages have as well.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    others = {id(weight) for weight in tied}

    def is_copy(parameter: Parameter) -> bool:
        return id(parameter) in others or (tensor_parallel and not is_model_parallel_parameter(parameter))

    memory = _memory(engine)
    found: list[Range | Copy] = []
    known: list[Range] = []  # of other gradients, and of copies that are found
    numel = 0
    for tensor in tensors:
        for piece, parameter, is_whole in _pieces(tensor, memory):
            place = (numel + piece[0], numel + piece[1])
            if not is_copy(parameter):
                known.append(place)
            elif is_whole:
                found.append(Copy(replicated_params.number_of(parameter), (place,)))
                known.append(place)
            elif not tensor_parallel:
                found.append(place)
        numel += tensor.numel()
    return [*found, *(replicated_params.between(known, numel) if tensor_parallel else ())]


def tied(engine: Any) -> list[Parameter]:
    """The weights that this stage of a pipeline has with others."""
    from deepspeed.pipe import PipelineModule

    module = getattr(engine, "module", None)
    return [weight for weight, _ in module.get_tied_weights_and_groups()] if isinstance(module, PipelineModule) else []


def _memory(engine: Any) -> list[tuple[int, int, Parameter]]:
    """(address, the one behind it, parameter) of every gradient, ascending."""
    # Stages 1 and 2 use the memory of a bucket again; what was reduced before may still point there.
    reduced = getattr(engine.optimizer, "params_already_reduced", None)
    numbers = getattr(engine.optimizer, "param_id", {})
    found = {}
    for parameter in engine.module.parameters():
        if reduced is not None and id(parameter) in numbers and reduced[numbers[id(parameter)]]:
            continue
        for name in _GRADIENTS:
            gradient = getattr(parameter, name, None)
            if isinstance(gradient, Tensor) and not gradient.is_sparse and gradient.numel():
                address = gradient.data_ptr()
                end = address + gradient.numel() * gradient.element_size()
                found[address, end, id(parameter)] = parameter
    return [(address, end, parameter) for (address, end, _), parameter in sorted(found.items(), key=lambda one: one[0])]


def _pieces(tensor: Tensor, memory: Sequence[tuple[int, int, Parameter]]) -> list[tuple[Range, Parameter, bool]]:
    """Each gradient in the memory of a tensor: its elements, and True if they are a whole gradient and no other's."""
    size, start = tensor.element_size(), tensor.data_ptr()
    end = start + tensor.numel() * size
    pieces: list[tuple[Range, Parameter, bool]] = []
    before = start  # the end of the gradients so far
    for address, behind, parameter in memory[max(0, bisect_right(memory, start, key=lambda one: one[0]) - 1) :]:
        if address >= end:
            break
        first, last = max(address, start), min(behind, end)
        if first < last:
            if first < before:  # two gradients in one place: which of them the tensor has is not known
                pieces[-1] = (*pieces[-1][:2], False)
            whole = first >= before and (first, last) == (address, behind)
            pieces.append((((first - start) // size, (last - start) // size), parameter, whole))
            before = max(before, last)
    return pieces
