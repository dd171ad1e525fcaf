import torch

from ..distributed import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim, symmetric_all_reduce
from .base import TransformerEngineBaseModule

__all__ = ["LayerNormMLP"]


class _LayerNormMLP(torch.autograd.Function):
    """Two layers in one function; the checkpoint is taken inside its own backward, as from 2.11 on."""

    @staticmethod
    def _forward(ctx, inp, ln_weight, ln_bias, fc1_weight, fc2_weight, non_tensor_args):
        tp_group, sequence_parallel, tensor_parallel, symmetric_ar_type, checkpoint, recompute_for_bwd = non_tensor_args
        inputmat = inp.reshape(-1, inp.shape[-1])
        ln_out, mu, rsigma = torch.native_layer_norm(inputmat, inputmat.shape[-1:], ln_weight, ln_bias, 1e-5)
        ln_out_total = ln_out
        if sequence_parallel:
            ln_out_total, _ = gather_along_first_dim(ln_out, tp_group, quantizer=None)
        act_out = torch.mm(ln_out_total, fc1_weight.t()).tanh()
        fc2_out = None
        if not recompute_for_bwd:
            fc2_out = torch.mm(act_out, fc2_weight.t())
            if sequence_parallel:
                fc2_out, _ = reduce_scatter_along_first_dim(fc2_out, tp_group)
            elif tensor_parallel:
                if symmetric_ar_type is not None:
                    fc2_out, _ = symmetric_all_reduce(fc2_out, tp_group, all_reduce_type=symmetric_ar_type)
                else:
                    fc2_out, _ = allreduce(fc2_out, tp_group)
            fc2_out = fc2_out.view(-1, *inp.shape[1:-1], fc2_out.shape[-1])
        if ctx is not None:
            ctx.tp_group, ctx.sequence_parallel, ctx.tensor_parallel = tp_group, sequence_parallel, tensor_parallel
            ctx.checkpoint, ctx.other_args, ctx.inp_shape = checkpoint, non_tensor_args, inp.shape
            if not recompute_for_bwd:
                ctx.save_for_backward(inp, ln_weight, ln_bias, fc1_weight, fc2_weight)
            ctx.activations = None if checkpoint and not recompute_for_bwd else (ln_out, mu, rsigma, act_out)
        return fc2_out

    @staticmethod
    def forward(ctx, inp, ln_weight, ln_bias, fc1_weight, fc2_weight, non_tensor_args):
        non_tensor_args += (False,)
        return _LayerNormMLP._forward(ctx, inp, ln_weight, ln_bias, fc1_weight, fc2_weight, non_tensor_args)

    @staticmethod
    def _recompute(ctx):
        if ctx.checkpoint:
            _LayerNormMLP._forward(ctx, *ctx.saved_tensors, (*ctx.other_args[:-1], True))
        return ctx.activations

    @staticmethod
    def backward(ctx, *grad_outputs):
        inp, ln_weight, ln_bias, fc1_weight, fc2_weight = ctx.saved_tensors
        ln_out, mu, rsigma, act_out = _LayerNormMLP._recompute(ctx)
        inputmat = inp.reshape(-1, inp.shape[-1])
        grad_output, _ = TransformerEngineBaseModule.grad_output_preprocess(ctx, grad_outputs[0], True, None)
        ln_out_total, ln_out_total_work = ln_out, None
        if ctx.tensor_parallel and ctx.sequence_parallel:
            ln_out_total, ln_out_total_work = gather_along_first_dim(
                ln_out, ctx.tp_group, async_op=True, quantizer=None
            )
        dact = torch.mm(grad_output, fc2_weight) * (1 - act_out.square())
        fc2_wgrad = torch.mm(grad_output.t(), act_out)
        fc1_dgrad, fc1_dgrad_work = torch.mm(dact, fc1_weight), None
        if ctx.sequence_parallel:
            fc1_dgrad, fc1_dgrad_work = reduce_scatter_along_first_dim(fc1_dgrad, ctx.tp_group, async_op=True)
        elif ctx.tensor_parallel:
            fc1_dgrad, fc1_dgrad_work = allreduce(fc1_dgrad, ctx.tp_group, async_op=True)
        if ln_out_total_work is not None:
            ln_out_total_work.wait()
        fc1_wgrad = torch.mm(dact.t(), ln_out_total)
        if fc1_dgrad_work is not None:
            fc1_dgrad_work.wait()
        dgrad, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
            fc1_dgrad, inputmat, inputmat.shape[-1:], mu, rsigma, ln_weight, ln_bias, [True, True, True]
        )
        return dgrad.view(ctx.inp_shape), dgamma, dbeta, fc1_wgrad, fc2_wgrad, None


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        sequence_parallel=False,
        tp_group=None,
        tp_size=1,
        init_method=None,
        params_dtype=None,
        set_parallel_mode=False,
        symmetric_ar_type=None,
        checkpoint=False,
    ):
        mode = "column" if set_parallel_mode else None
        super().__init__(tp_group, tp_size, sequence_parallel, mode, symmetric_ar_type)
        local = ffn_hidden_size // self.tp_size
        self.layer_norm_weight = self.new_vector(hidden_size, 1.0, params_dtype)
        self.layer_norm_bias = self.new_vector(hidden_size, 0.0, params_dtype)
        self.fc1_weight = self.new_weight(local, hidden_size, init_method, params_dtype)
        self.fc2_weight = self.new_weight(hidden_size, local, init_method, params_dtype)
        self.checkpoint = checkpoint

    def forward(self, inp, is_first_microbatch=None):
        is_grad_enabled = torch.is_grad_enabled()
        fwd_fn, autograd_ctx = (_LayerNormMLP.apply, []) if is_grad_enabled else (_LayerNormMLP.forward, [None])
        non_tensor_args = (
            *(self.tp_group, self.sequence_parallel, self.tp_size > 1, self.symmetric_ar_type, self.checkpoint),
        )
        return fwd_fn(
            *autograd_ctx,
            *(inp, self.layer_norm_weight, self.layer_norm_bias, self.fc1_weight, self.fc2_weight, non_tensor_args),
        )
