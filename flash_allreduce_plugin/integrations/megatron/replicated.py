"""Find the gradients in a bucket of parameters with a copy on every tensor-parallel rank (replicated_params.py).

With sequence parallelism gradients of such parameters are parts, which Megatron adds up over the tensor-parallel ranks
after the data-parallel ones: they end up the same in whatever way each part is reduced. The parameters themselves do
not.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_allreduce_plugin.collectives import replicated_params
from flash_allreduce_plugin.integrations.megatron import process_groups


def ranges(bucket_group: Any, bucket: torch.Tensor) -> list[replicated_params.Range | replicated_params.Copy]:
    """Return the ranges of `bucket` [numel], or a shard of one, with gradients of replicated parameters.

    bucket_group: of megatron-core's DistributedDataParallel, with the bucket.
    """
    if process_groups.layout_of(bucket_group).tensor == 1:
        return []
    pairs = ((one, getattr(one, "main_grad", None)) for one in bucket_group.params if is_replicated(one))
    return replicated_params.of(((one, gradient) for one, gradient in pairs if gradient is not None), bucket)


def parameters(bucket_group: Any, bucket: Any, padding: bool = False) -> list[replicated_params.Range]:
    """Return the ascending ranges of a bucket [numel] of parameters that are copies next to different numbers.

    Copies are on tensor-parallel ranks (for experts on the experts'), and embeddings that pipeline stages share.
    padding: True to return ranges without a parameter too: rotated groups would leave values there that no checkpoint
    has.
    """
    layout, weights = process_groups.layout_of(bucket_group), bucket.param_data
    ranges: list[replicated_params.Range] = []
    for one in bucket.params:
        whole = not getattr(one, "tensor_model_parallel", False)
        split = (layout.tensor if getattr(one, "allreduce", True) else layout.expert) > 1
        if (whole and split) or (layout.stages > 1 and getattr(one, "shared_embedding", False)):
            ranges += replicated_params.within([one.detach()], weights)
    if padding:
        used = replicated_params.within((one.detach() for one in bucket.params), weights)
        ends = [0, *(end for _, end in used)]
        starts = [*(start for start, _ in used), weights.numel()]
        ranges += [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
    return sorted(ranges)


def is_replicated(parameter: torch.nn.Parameter) -> bool:
    """Return True if neither split, nor an expert's, nor added up over the tensor-parallel ranks afterwards."""
    others = ("tensor_model_parallel", "sequence_parallel", "average_gradients_across_tp_domain")
    return getattr(parameter, "allreduce", True) and not any(getattr(parameter, name, False) for name in others)
