"""Makes megatron-core's local layers, schedule and optimizer run on a machine without CUDA. Not needed on GPUs.

megatron-core assumes CUDA where it

- places buffers: with torch.cuda.current_device(), and with device="cuda" in the schedule, the optimizer and the
  gradient clipping, which also checks that gradients are of a CUDA type;
- forks the CUDA random number generator for dropout: its tracker for inference does not (dropout must be 0);
- marks the layer norm's parameters for sequence parallelism: only apex's layer norm does that in the local layers.

`prepare` replaces all of them in the calling process. Call it before the model is built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaIsCpu(TorchFunctionMode):
    """device="cuda" becomes "cpu", and a tensor's type is called that of CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        answer = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


class _LayerNorm(torch.nn.LayerNorm):
    """torch's layer norm with Megatron's constructor and its mark for sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def prepare() -> None:
    """Let this process's megatron-core use the CPU where it would use the current GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    _CudaIsCpu().__enter__()

    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import transformer_block

    initialize_rng_tracker(inference_rng_tracker=True)
    backends.LNImpl = backends.WrappedTorchNorm = _LayerNorm
    gpt_layer_specs.LNImpl = transformer_block.LayerNormImpl = _LayerNorm
