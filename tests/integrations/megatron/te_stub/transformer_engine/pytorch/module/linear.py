from types import SimpleNamespace

import torch

from ..distributed import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim, symmetric_all_reduce
from ..tensor import Float8Quantizer
from .base import TransformerEngineBaseModule, plain

__all__ = ["Linear"]


def _linear_forward_impl(args):
    """Compute forward and backward in functions outside the autograd function, as TE does from 2.15 on."""
    inputmat = args.inp.reshape(-1, args.inp.shape[-1])
    if args.parallel_mode == "column" and args.sequence_parallel:
        if args.fp8:
            inputmat = args.input_quantizer(inputmat)
        inputmat_total, _ = gather_along_first_dim(inputmat, args.tp_group, quantizer=args.input_quantizer)
    else:
        inputmat_total = inputmat
    out = torch.mm(plain(inputmat_total), args.weight.t())
    if args.bias is not None:
        out = out + args.bias
    if args.parallel_mode == "row" and args.tp_size > 1:
        if args.sequence_parallel:
            out, _ = reduce_scatter_along_first_dim(out, args.tp_group)
        elif args.tensor_parallel:
            if args.symmetric_ar_type is not None:
                out, _ = symmetric_all_reduce(out, args.tp_group, all_reduce_type=args.symmetric_ar_type)
            else:
                out, _ = allreduce(out, args.tp_group)
    return out.view(-1, *args.inp.shape[1:-1], out.shape[-1]), inputmat


def _linear_backward(bwd_args):
    grad_output, _ = TransformerEngineBaseModule.grad_output_preprocess(
        bwd_args, bwd_args.grad_output, bwd_args.parallel_mode == "row", bwd_args.grad_output_quantizer
    )
    inputmat_total, inputmat_total_work = bwd_args.inputmat, None
    if bwd_args.backward_input_needs_gather:
        inputmat_total, inputmat_total_work = gather_along_first_dim(
            bwd_args.inputmat, bwd_args.tp_group, async_op=True, quantizer=bwd_args.input_quantizer
        )
    dgrad = torch.mm(grad_output, bwd_args.weight)
    dgrad_work = None
    if bwd_args.parallel_mode == "column" and bwd_args.tp_size > 1:
        if bwd_args.sequence_parallel:
            dgrad, dgrad_work = reduce_scatter_along_first_dim(dgrad, bwd_args.tp_group, async_op=True)
        else:
            dgrad, dgrad_work = allreduce(dgrad, bwd_args.tp_group, async_op=True)
    wgrad = None
    if bwd_args.requires_wgrad:
        if inputmat_total_work is not None:
            inputmat_total_work.wait()
        wgrad = torch.mm(grad_output.t(), plain(inputmat_total))
    if dgrad_work is not None:
        dgrad_work.wait()
    grad_bias = grad_output.sum(0) if bwd_args.use_bias else None
    return wgrad, dgrad.view(bwd_args.inp_shape), grad_bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, inp, bias, fwd_args):
        fwd_args.weight, fwd_args.inp, fwd_args.bias = weight, inp, bias
        out, inputmat = _linear_forward_impl(fwd_args)
        if ctx is not None:
            ctx.backward_objects = SimpleNamespace(
                **{**vars(fwd_args), "inputmat": inputmat, "inp_shape": inp.shape, "use_bias": bias is not None},
                requires_wgrad=weight.requires_grad,
            )
        return out, None

    @staticmethod
    def backward(ctx, grad_output, _grad_weight_workspace):
        ctx.backward_objects.grad_output = grad_output
        return *_linear_backward(ctx.backward_objects), None


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        symmetric_ar_type=None,
        **_userbuffers,
    ):
        super().__init__(tp_group, tp_size, sequence_parallel, parallel_mode, symmetric_ar_type)
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.weight = self.new_weight(self.out_features, self.in_features, init_method, params_dtype)
        self.use_bias, self.return_bias = bias, return_bias
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype)) if bias else None

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        is_grad_enabled = torch.is_grad_enabled()
        linear_fn, autograd_ctx = (_Linear.apply, []) if is_grad_enabled else (_Linear.forward, [None])
        quantizer = Float8Quantizer() if self.fp8 else None
        fwd_args = SimpleNamespace(
            fp8=self.fp8,
            input_quantizer=quantizer,
            grad_output_quantizer=quantizer,
            parallel_mode=self.parallel_mode,
            tp_group=self.tp_group,
            tp_size=self.tp_size,
            tensor_parallel=self.tp_size > 1,
            sequence_parallel=self.sequence_parallel,
            symmetric_ar_type=self.symmetric_ar_type,
            backward_input_needs_gather=(
                self.weight.requires_grad and self.parallel_mode == "column" and self.sequence_parallel
            ),
        )
        bias = self.bias if self.use_bias and not self.return_bias else None
        out, _ = linear_fn(*autograd_ctx, self.weight, inp, bias, fwd_args)
        return (out, self.bias) if self.return_bias else out
