"""Checks of a call's arguments. A bad one is refused in one sentence, before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives.error_feedback import Slot
from flash_allreduce_plugin.collectives.weight_differences import HeldWeights
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import SUMS, Site

_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_TAKEN = {  # dtypes that torch's backends accept
    "gloo": (*rows.DTYPES, torch.float64, *_INTEGERS, *_COMPLEX),
    "nccl": (*rows.DTYPES, torch.float64, *_INTEGERS, *_COMPLEX, *_FLOAT8),
}


def check_pair(
    shard: Tensor, shard_name: str, whole: Tensor, whole_name: str, world_size: int, *, dtypes: bool = True
) -> None:
    """Raise ValueError unless `whole` has world_size times the elements of `shard`, of its dtype and device.

    dtypes: False if the dtypes were checked before.
    """
    if shard.numel() * world_size != whole.numel():
        raise ValueError(
            f"{whole_name} has {whole.numel()} elements and {shard_name} {shard.numel()}; expected "
            f"{shard_name} x {world_size} ranks = {whole_name}."
        )
    if dtypes and (shard.dtype != whole.dtype or shard.device != whole.device):
        raise ValueError(
            f"{shard_name} is {shard.dtype} on {shard.device} and {whole_name} {whole.dtype} on "
            f"{whole.device}; expected the same dtype and device."
        )


def check_parts(output: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], world_size: int, rank: int) -> None:
    """Raise ValueError unless output, the pieces of this rank's result, fits parts, the pieces of each rank's part."""
    if len(parts) != world_size:
        raise ValueError(f"input has {len(parts)} tensors; expected one for each of {world_size} ranks.")
    has, own = sum(map(Tensor.numel, output)), sum(map(Tensor.numel, parts[rank]))
    if has != own:
        raise ValueError(f"output has {has} elements; expected {own}, as this rank's input.")
    like = output[0]
    for number, part in enumerate(parts):
        for piece in part:
            if piece.dtype != like.dtype or piece.device != like.device:
                raise ValueError(
                    f"input[{number}] is {piece.dtype} on {piece.device} and output {like.dtype} on {like.device}; "
                    "expected the same dtype and device."
                )


def runs_of(tensor: Tensor, name: str, splits: Sequence[int] | None, world_size: int) -> list[int]:
    """Return the elements of each rank's run, from rows of the tensor. Raises TypeError, ValueError if they differ."""
    if tensor.dim() == 0:
        raise ValueError(f"{name} is a single number; expected rows, which are split along the first dimension.")
    height, named = len(tensor), f"{name}_split_sizes"
    if splits is None or len(splits) == 0:  # torch treats an empty list as None
        if height % world_size:
            raise ValueError(
                f"{name} has {height} rows, which {world_size} ranks cannot share evenly; give {named}, the rows of "
                "each rank."
            )
        return [tensor.numel() // world_size] * world_size
    try:
        counts = [operator.index(count) for count in splits]
    except TypeError as error:
        raise TypeError(f"{named} is {splits!r}; expected whole numbers of rows.") from error
    if len(counts) != world_size:
        raise ValueError(f"{named} has {len(counts)} sizes; expected one for each of {world_size} ranks.")
    if min(counts) < 0 or sum(counts) != height:
        raise ValueError(f"{named} is {counts}; expected sizes, 0 or more, that add up to the {height} rows of {name}.")
    width = tensor.numel() // max(height, 1)
    return [count * width for count in counts]


def check_part(input: Tensor, output: Tensor, numel: int, *, dtypes: bool = True) -> None:
    """Raise ValueError unless input has this rank's elements by output_split_sizes, of output's dtype.

    dtypes: False if the dtypes were checked before.
    """
    if dtypes:
        _check_alike(output, input)
    if input.numel() != numel:
        raise ValueError(f"input has {input.numel()} elements; expected {numel}, as output_split_sizes has them.")


def check_held(held: Any, output: Tensor, input: Tensor) -> None:
    """Raise TypeError or ValueError unless differences to input, the exact values, can be added to output."""
    if held is None:
        return
    if not isinstance(held, HeldWeights):
        raise TypeError(f"held is {type(held).__name__}; expected fap.HeldWeights(), one for each output, or None.")
    if not output.is_contiguous():
        raise ValueError(f"output has strides {output.stride()}; expected contiguous weights, to which is added.")
    if input.dtype not in (torch.float32, output.dtype) or input.device != output.device:
        raise ValueError(
            f"input is {input.dtype} on {input.device} and output {output.dtype} on {output.device}; expected the "
            "exact values in float32 or in output's dtype, on its device."
        )
    if _share_memory(output, input):
        raise ValueError("output and input share memory; exact values cannot lie where the rounded ones are held.")


def check_exchange(output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], rank: int) -> None:
    """Raise ValueError unless an all_to_all can move runs of these sizes from input to output."""
    _check_alike(output, input)
    if sent[rank] != received[rank]:
        raise ValueError(
            f"input has {sent[rank]} elements for rank {rank} itself and output {received[rank]}; expected the same "
            "number."
        )
    if _share_memory(output, input):
        raise ValueError("output and input share memory; an all_to_all needs a tensor for each.")


def _check_alike(output: Tensor, input: Tensor) -> None:
    if output.dtype != input.dtype or output.device != input.device:
        raise ValueError(
            f"output is {output.dtype} on {output.device} and input {input.dtype} on {input.device}; expected the "
            "same dtype and device."
        )


def _share_memory(a: Tensor, b: Tensor) -> bool:
    if not (a.numel() and b.numel()) or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False

    def span(tensor: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    (first, end), (other, other_end) = span(a), span(b)
    return first < other_end and other < end


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("torch.distributed is not initialized; call init_process_group first.")
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not a member of the group.")
        hint = " (its get_group())" if hasattr(group, "get_group") else ""
        raise TypeError(f"group is {type(group).__name__}; expected a ProcessGroup{hint} or None.")
    return group


def rank_in(group: dist.ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """Return the rank in the group from torch's two arguments: `name`, a global rank, or group_`name`, a rank in it.

    Raises ValueError unless one of them is given and belongs to the group.
    """
    if (rank is None) == (group_rank is None):
        raise ValueError(f"{name} is {rank} and group_{name} {group_rank}; give one of them.")
    if rank is not None:
        name, found = f"{name} is {rank}", dist.get_group_rank(group, operator.index(rank))
    else:
        name, found = f"group_{name} is {group_rank}", operator.index(group_rank or 0)
    if not 0 <= found < group.size():
        raise ValueError(f"{name}; the group has the ranks 0 to {group.size() - 1}.")
    return found


def check_list(tensors: Any, name: str, like: Tensor, world_size: int, *, at_root: bool, written: bool) -> None:
    """Raise TypeError or ValueError unless the root alone has, for every rank, a tensor like `like`."""
    if not at_root:
        if tensors:
            raise ValueError(f"{name} is given on a rank that is not the root; leave it out there.")
        return
    if not isinstance(tensors, list | tuple) or len(tensors) != world_size:
        has = f"{len(tensors)} tensors" if isinstance(tensors, list | tuple) else type(tensors).__name__
        raise ValueError(f"{name} is {has}; expected a list with one for each of {world_size} ranks, at the root.")
    for number, one in enumerate(tensors):
        (check_written if written else check_tensor)(one, f"{name}[{number}]")
        if (one.numel(), one.dtype, one.device) != (like.numel(), like.dtype, like.device):
            raise ValueError(
                f"{name}[{number}] has {one.numel()} elements of {one.dtype} on {one.device}; expected "
                f"{like.numel()} of {like.dtype} on {like.device}, as tensor."
            )


def check_named(site: Any, step: Any, feedback: Any) -> None:
    if not isinstance(site, Site):
        raise TypeError(f"site is {type(site).__name__}; expected Site, for example Site({str(site)!r}).")
    if step is not None and not isinstance(step, int):
        raise TypeError(f"step is {type(step).__name__}; expected a whole number or None.")
    if feedback is not None and not isinstance(feedback, Slot):
        raise TypeError(f"feedback is {type(feedback).__name__}; expected the result of Feedback.slot(), or None.")


def check_config(config: Any) -> None:
    if not isinstance(config, FlashConfig):
        raise TypeError(f"config is {type(config).__name__}; expected FlashConfig or None.")


def check_tensor(tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is {what}; expected a dense tensor.")
    if hasattr(tensor, "__tensor_flatten__"):  # a tensor around others: DTensor, AsyncCollectiveTensor ...
        hint = ": give its to_local()" if hasattr(tensor, "to_local") else ""
        raise TypeError(f"{name} is {type(tensor).__name__}; expected a plain dense tensor{hint}.")
    if tensor.is_conj() or tensor.is_neg():
        kind, mend = ("conjugate", "resolve_conj") if tensor.is_conj() else ("negative", "resolve_neg")
        raise ValueError(f"{name} is a view that stands for the {kind} of its memory; {mend}() it first.")


def check_written(tensor: Any, name: str) -> None:
    check_tensor(tensor, name)
    if not tensor.is_contiguous() and _overlaps(tensor):
        raise ValueError(
            f"{name} has strides {tensor.stride()}, several elements at one place in memory, and cannot hold "
            "the result; clone() it first."
        )


def _overlaps(tensor: Tensor) -> bool:
    """Return True if two elements share memory, as in most results of expand and unfold."""
    if tensor.numel() == 0:
        return False
    span, apart = 1, True  # span: from the first element of the dimensions so far to the last, both included
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        apart &= size == 1 or stride >= span
        span += (size - 1) * stride
    if apart or tensor.numel() > span:
        return not apart
    taken = torch.zeros(span, dtype=torch.bool)  # interleaved strides, which are rare: check every element
    taken.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(taken.sum()) < tensor.numel()


def check_taken(collective: str, op: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Raise ValueError for a device or dtype that the group's backend refuses, or an operator that the dtype lacks.

    Without this check the failure would look like a peer's.
    """
    try:
        backend = group._get_backend(tensor.device).name()
    except RuntimeError as error:
        raise ValueError(
            f"the tensor is on {tensor.device}, which the group's backend does not serve ({error})"
        ) from error
    dtype = tensor.dtype
    if collective in ("send", "recv"):  # sent as bytes, which every backend accepts
        return
    if dtype in rows.DTYPES and op in ("sum", "avg", "premul_sum"):
        return
    taken = _TAKEN.get(backend)
    if taken is not None and dtype not in taken:
        raise ValueError(
            f"{collective} of {dtype}: {backend} does not take it; convert the tensor to one of "
            f"{', '.join(str(each).removeprefix('torch.') for each in taken)}."
        )
    if collective not in SUMS:
        return
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if op in ("band", "bor", "bxor"):
        wrong = not exact or backend == "nccl"
    elif op in ("max", "min", "product"):
        wrong = dtype.is_complex
    elif op == "avg":
        wrong = dtype == torch.bool or (exact and backend != "nccl")
    else:
        wrong = op == "premul_sum" and exact
    if wrong:
        raise ValueError(f"{collective} of {dtype}: {backend} does not reduce it by {op.upper()}; take SUM.")


def op_name(op: Any) -> str:
    """Return the name of a ReduceOp: sum, avg, max, ..."""
    if op is dist.ReduceOp.SUM:
        return "sum"
    # ReduceOp is not hashable and hides its kind; it can only be compared.
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"):
        if op == getattr(dist.ReduceOp, name):
            return name.lower()
    raise TypeError(f"op is {op!r}; expected one of torch.distributed.ReduceOp.")
