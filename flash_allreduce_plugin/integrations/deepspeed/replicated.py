"""Find the gradients in a bucket of parameters with copies on other ranks (replicated_params.py).

Tied weights of a PipelineModule: DeepSpeed sums the gradients of the stages' copies before the data-parallel reduction.
In its buckets a tied weight has different neighbours on every stage.

Tensor parallelism is the model's own (Megatron-DeepSpeed), or AutoTP. DeepSpeed has its size from the `mpu`, and a mark
on each split parameter. A bucket is a list of tensors; their memory addresses identify the parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.collectives.replicated_params import Copy, Range

# The attributes in which DeepSpeed keeps the gradient of a parameter.
_GRADIENTS = ("grad", "grad_accum", "_hp_grad")
# The names of tensor parallelism in an `mpu`, as in bwc.py.
_TENSOR_PARALLEL = ("tensor_model_parallel", "slice_parallel", "model_parallel")


def is_tensor_parallel(engine: Any) -> bool:
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

    mpu = getattr(engine, "mpu", None)
    if not any(hasattr(mpu, f"get_{name}_world_size") for name in _TENSOR_PARALLEL):
        return False  # an mpu of sequences only: DeepSpeed's own for transformers, until 0.19.4 at least
    return int(bwc_tensor_model_parallel_world_size(mpu)) > 1


def ranges(
    engine: Any, tensors: Sequence[Tensor], *, tensor_parallel: bool, tied: Sequence[Parameter]
) -> list[Range | Copy]:
    """Return the ranges of the joined tensors with gradients of copies. tensors: contiguous.

    tensor_parallel: True: a parameter without the mark of a split one is a copy. tied: weights of other stages too.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    others = {id(weight) for weight in tied}

    def is_copy(parameter: Parameter) -> bool:
        return id(parameter) in others or (tensor_parallel and not is_model_parallel_parameter(parameter))

    memory = _memory(engine)
    found: list[Range | Copy] = []
    known: list[Range] = []  # ranges of other gradients and of found copies
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
    """Return the weights that this stage of a pipeline shares with others."""
    from deepspeed.pipe import PipelineModule

    module = getattr(engine, "module", None)
    return [weight for weight, _ in module.get_tied_weights_and_groups()] if isinstance(module, PipelineModule) else []


def _memory(engine: Any) -> list[tuple[int, int, Parameter]]:
    """Return (address, end address, parameter) of every gradient, ascending."""
    # Stages 1 and 2 reuse the memory of a bucket; reduced gradients may still point there.
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
    """Return each gradient in a tensor's memory: its range, parameter, and True for exactly one whole gradient."""
    size, start = tensor.element_size(), tensor.data_ptr()
    end = start + tensor.numel() * size
    pieces: list[tuple[Range, Parameter, bool]] = []
    before = start  # the end of the gradients so far
    for address, behind, parameter in memory[max(0, bisect_right(memory, start, key=lambda one: one[0]) - 1) :]:
        if address >= end:
            break
        first, last = max(address, start), min(behind, end)
        if first < last:
            if first < before:  # two gradients in one place: the tensor's parameter is not known
                pieces[-1] = (*pieces[-1][:2], False)
            whole = first >= before and (first, last) == (address, behind)
            pieces.append((((first - start) // size, (last - start) // size), parameter, whole))
            before = max(before, last)
    return pieces
