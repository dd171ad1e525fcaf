import torch

from .tensor import Float8Quantizer, Float8TensorStorage


class CudaRNGStatesTracker:
    pass


def checkpoint(function, *arguments, **_keywords):
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=True)


def activation_recompute_forward(*_arguments, **_keywords):
    raise NotImplementedError


def is_fp8_activation_recompute_enabled():
    return False


def get_distributed_world_size(group=None):
    return torch.distributed.get_world_size(group=group) if torch.distributed.is_initialized() else 1


def reduce_scatter_along_first_dim(inp, tp_group, async_op=False):
    world_size = get_distributed_world_size(tp_group)
    if world_size == 1:
        return inp, None
    output = inp.new_empty((inp.shape[0] // world_size, *inp.shape[1:]))
    handle = torch.distributed.reduce_scatter_tensor(output, inp.contiguous(), group=tp_group, async_op=async_op)
    return output, handle


def gather_along_first_dim(inp, process_group, async_op=False, quantizer=None):
    world_size = get_distributed_world_size(process_group)
    if world_size == 1:
        return inp, None
    if isinstance(inp, Float8TensorStorage) or quantizer is not None:
        if not isinstance(inp, Float8TensorStorage):
            inp = quantizer(inp)
        data, scales = _gather(inp._data, process_group), _gather(inp._scale.view(1), process_group)
        whole = torch.cat([(part.float() - 128) * s for part, s in zip(data.chunk(world_size), scales, strict=True)])
        return Float8Quantizer()(whole), None
    output = inp.new_empty((inp.shape[0] * world_size, *inp.shape[1:]))
    handle = torch.distributed.all_gather_into_tensor(output, inp.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def _gather(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, tensor, group=group)
    return torch.cat(parts)


def symmetric_all_reduce(inp, tp_group=None, async_op=False, all_reduce_type="multimem_all_reduce"):
    raise NotImplementedError("symmetric memory needs CUDA")


def allreduce(inp, tp_group=None, async_op=False):
    if get_distributed_world_size(tp_group) == 1:
        return inp, None
    handle = torch.distributed.all_reduce(inp, group=tp_group, async_op=async_op)
    return inp, handle
