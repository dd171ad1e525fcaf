"""Replacements, on the CPU, of the CUDA calls in megatron-core's schedules and optimizers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flash_allreduce_plugin.cli.demo.model import prepare_cpu


class CudaIsCpu(TorchFunctionMode):
    """Within it device="cuda" is the CPU, `.cuda()` does nothing, and a tensor's type is called that of CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        value = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            value = value.replace("torch.", "torch.cuda.", 1)
        return value


def prepare() -> None:
    """Let megatron-core's models, schedules and optimizers run in this process without CUDA."""
    prepare_cpu()
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
    CudaIsCpu().__enter__()


def prepare_experts() -> None:
    """Let megatron-core's experts run in this process without CUDA streams and without Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: SimpleNamespace(synchronize=lambda: None))
    torch.cuda.current_stream = torch.cuda.Stream = lambda *_: stream  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, return-value]
    vars(moe_utils).setdefault("te_general_gemm", None)  # a name that 0.16 looks up in any case
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and tensor is not None else tensor
    )
