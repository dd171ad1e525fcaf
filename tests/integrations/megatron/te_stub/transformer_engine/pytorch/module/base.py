import torch

from ..distributed import gather_along_first_dim, get_distributed_world_size

_ub_communicators = None


def get_dummy_wgrad(shape, dtype, zero=False):
    return torch.zeros(shape, dtype=dtype)


def plain(tensor):
    return tensor.dequantize() if hasattr(tensor, "dequantize") and not isinstance(tensor, torch.Tensor) else tensor


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self, tp_group, tp_size, sequence_parallel, parallel_mode, symmetric_ar_type):
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else get_distributed_world_size(tp_group)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.parallel_mode = parallel_mode
        self.symmetric_ar_type = symmetric_ar_type
        self.fp8 = False

    def set_tensor_parallel_group(self, tp_group):
        self.tp_group = tp_group

    def new_weight(self, rows, columns, init_method, dtype):
        """A parameter marked as TE marks it."""
        weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype))
        (init_method or torch.nn.init.xavier_normal_)(weight.data)
        weight.tensor_model_parallel = self.parallel_mode is not None
        weight.partition_dim = 1 if self.parallel_mode == "row" else 0
        weight.partition_stride = 1
        return weight

    def new_vector(self, size, value, dtype):
        vector = torch.nn.Parameter(torch.full((size,), value, dtype=dtype))
        vector.sequence_parallel = self.sequence_parallel
        return vector

    @staticmethod
    def grad_output_preprocess(ctx, grad_output, row_parallel_mode, quantizer):
        grad_output = grad_output.reshape((-1, grad_output.shape[-1])).contiguous()
        if row_parallel_mode and ctx.sequence_parallel:
            if quantizer is None:
                grad_output, _ = gather_along_first_dim(grad_output, ctx.tp_group)
            else:
                grad_output, _ = gather_along_first_dim(grad_output, ctx.tp_group, quantizer=quantizer)
        return plain(grad_output), None
