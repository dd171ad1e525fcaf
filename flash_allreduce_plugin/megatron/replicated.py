"""What a bucket has of parameters that every tensor-parallel rank has a copy of (copies.py).

With sequence parallelism gradients of such parameters are parts, which Megatron adds up over the tensor-parallel ranks
after the data-parallel ones: they end up the same without being reduced exactly. The parameters themselves do not.
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


def parameters(found: Iterable[torch.nn.Parameter], bucket: torch.Tensor, padding: bool = False) -> list[copies.Range]:
    """Where `bucket` [numel] has parameters of which ranks have copies that share it with other numbers, ascending: on
    tensor-parallel ranks, those of experts for experts, and embeddings that pipeline stages share.

    padding: and where it has no parameter. Rotated groups would leave there what no checkpoint has.
    """
    from megatron.core import parallel_state

    found = list(found)
    ranges: list[copies.Range] = []
    if parallel_state.model_parallel_is_initialized():
        dense = parallel_state.get_tensor_model_parallel_world_size() > 1
        expert = parallel_state.get_expert_tensor_parallel_world_size() > 1
        stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
        for one in found:
            whole = not getattr(one, "tensor_model_parallel", False)
            split = dense if getattr(one, "allreduce", True) else expert
            if (whole and split) or (stages and getattr(one, "shared_embedding", False)):
                ranges += copies.within([one.detach()], bucket)
    if padding:
        used = copies.within((one.detach() for one in found), bucket)
        ends = [0, *(end for _, end in used)]
        starts = [*(start for start, _ in used), bucket.numel()]
        ranges += [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
    return sorted(ranges)


def _is_replicated(parameter: torch.nn.Parameter) -> bool:
    """Neither split, nor an expert's, nor added up over the tensor-parallel ranks afterwards."""
    others = ("tensor_model_parallel", "sequence_parallel", "average_gradients_across_tp_domain")
    return getattr(parameter, "allreduce", True) and not any(getattr(parameter, name, False) for name in others)
