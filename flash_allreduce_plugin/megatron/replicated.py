"""Which gradients of a bucket are of parameters that every tensor-parallel rank has a copy of (copies.py).

With sequence parallelism such gradients are parts, which Megatron adds up over the tensor-parallel ranks after the
data-parallel ones: they end up the same without being reduced exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flash_allreduce_plugin.collectives import copies


def ranges(parameters: Iterable[torch.nn.Parameter], bucket: torch.Tensor) -> list[copies.Range]:
    """Where `bucket` [numel], or a shard of one, has gradients of replicated parameters, ascending."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return []
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return []
    gradients = (getattr(parameter, "main_grad", None) for parameter in parameters if _is_replicated(parameter))
    return copies.within((gradient for gradient in gradients if gradient is not None), bucket)


def _is_replicated(parameter: torch.nn.Parameter) -> bool:
    """Neither split, nor an expert's, nor added up over the tensor-parallel ranks afterwards."""
    others = ("tensor_model_parallel", "sequence_parallel", "average_gradients_across_tp_domain")
    return getattr(parameter, "allreduce", True) and not any(getattr(parameter, name, False) for name in others)
