"""What megatron-core's schedules and optimizers ask of CUDA, answered by the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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
