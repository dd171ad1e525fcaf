import torch

from ..distributed import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim, symmetric_all_reduce
from .base import TransformerEngineBaseModule

__all__ = ["LayerNormLinear"]


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, ln_weight, ln_bias, weight, weight_workspace, bias, non_tensor_args):
        eps, tp_group, tp_size, sequence_parallel, parallel_mode, symmetric_ar_type = non_tensor_args
        inputmat = inp.reshape(-1, inp.shape[-1])
        ln_out, mu, rsigma = torch.native_layer_norm(inputmat, inputmat.shape[-1:], ln_weight, ln_bias, eps)
        if parallel_mode == "column" and sequence_parallel:
            ln_out_total, _ = gather_along_first_dim(ln_out, tp_group, quantizer=None)
        else:
            ln_out_total = ln_out
        out = torch.mm(ln_out_total, weight.t())
        if bias is not None:
            out = out + bias
        if parallel_mode == "row" and tp_size > 1:
            if sequence_parallel:
                out, _ = reduce_scatter_along_first_dim(out, tp_group)
            elif symmetric_ar_type is not None:
                out, _ = symmetric_all_reduce(out, tp_group, all_reduce_type=symmetric_ar_type)
            else:
                out, _ = allreduce(out, tp_group)
        if ctx is not None:
            ctx.save_for_backward(inputmat, ln_weight, ln_bias, weight, mu, rsigma, ln_out)
            ctx.tp_group, ctx.tp_size, ctx.sequence_parallel = tp_group, tp_size, sequence_parallel
            ctx.parallel_mode, ctx.use_bias, ctx.inp_shape = parallel_mode, bias is not None, inp.shape
        return out.view(-1, *inp.shape[1:-1], out.shape[-1]), None, None

    @staticmethod
    def backward(ctx, *grad_outputs):
        inputmat, ln_weight, ln_bias, weight, mu, rsigma, ln_out = ctx.saved_tensors
        grad_output, _ = TransformerEngineBaseModule.grad_output_preprocess(
            ctx, grad_outputs[0], ctx.parallel_mode == "row", None
        )
        ln_out_total, ln_out_total_work = ln_out, None
        if ctx.parallel_mode == "column" and ctx.sequence_parallel:
            ln_out_total, ln_out_total_work = gather_along_first_dim(
                ln_out, ctx.tp_group, async_op=True, quantizer=None
            )
        dgrad, dgrad_work = torch.mm(grad_output, weight), None
        if ctx.parallel_mode == "column" and ctx.tp_size > 1:
            if ctx.sequence_parallel:
                dgrad, dgrad_work = reduce_scatter_along_first_dim(dgrad, ctx.tp_group, async_op=True)
            else:
                dgrad, dgrad_work = allreduce(dgrad, ctx.tp_group, async_op=True)
        if ln_out_total_work is not None:
            ln_out_total_work.wait()
        wgrad = torch.mm(grad_output.t(), ln_out_total)
        if dgrad_work is not None:
            dgrad_work.wait()
        dgrad, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
            dgrad, inputmat, inputmat.shape[-1:], mu, rsigma, ln_weight, ln_bias, [True, True, True]
        )
        grad_bias = grad_output.sum(0) if ctx.use_bias else None
        return dgrad.view(ctx.inp_shape), dgamma, dbeta, wgrad, None, grad_bias, None


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        symmetric_ar_type=None,
        **_userbuffers,
    ):
        super().__init__(tp_group, tp_size, sequence_parallel, parallel_mode, symmetric_ar_type)
        self.eps, self.in_features = eps, in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.layer_norm_weight = self.new_vector(in_features, 1.0, params_dtype)
        self.layer_norm_bias = self.new_vector(in_features, 0.0, params_dtype)
        self.weight = self.new_weight(self.out_features, in_features, init_method, params_dtype)
        self.use_bias, self.return_bias = bias, return_bias
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype)) if bias else None

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        is_grad_enabled = torch.is_grad_enabled()
        fwd_fn, autograd_ctx = (_LayerNormLinear.apply, []) if is_grad_enabled else (_LayerNormLinear.forward, [None])
        bias = self.bias if self.use_bias and not self.return_bias else None
        non_tensor_args = (
            *(self.eps, self.tp_group, self.tp_size, self.sequence_parallel, self.parallel_mode),
            self.symmetric_ar_type,
        )
        out, _, _ = fwd_fn(
            *autograd_ctx,
            *(inp, self.layer_norm_weight, self.layer_norm_bias, self.weight, None, bias, non_tensor_args),
        )
        return (out, self.bias) if self.return_bias else out
