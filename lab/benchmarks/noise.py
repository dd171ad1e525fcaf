"""The demo's control: Gaussian noise on g's forward output, in full precision.

Quantization is harmless only if the comparison would have shown a harm. Noise far below the error of 8 bits
must make no difference to the loss, noise far above it must make one; if both look the same, the comparison
says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_allreduce_plugin.integrations.megatron import scopes
from flash_allreduce_plugin.integrations.megatron.scopes import LAYERS, MAPPINGS
from flash_allreduce_plugin.integrations.megatron.tensor_parallel import mark_embedding
from flash_allreduce_plugin.integrations.patching import Patchset, Seam, rebound


def noise_patchset(level: float, seed: int) -> Patchset:
    """Seams that add noise of `level` times the output's root mean square after g (both forms), the embedding
    left alone.

    The n-th call on every rank draws the same numbers, so that replicated tensors stay equal.
    """
    generator = torch.Generator().manual_seed(seed)

    def noisy(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def reduce(input_: torch.Tensor, group: Any, *arguments: Any) -> torch.Tensor:
            output = original(input_, group, *arguments)
            if scopes.current().embedding:
                return output
            size = level * output.float().square().mean().sqrt()
            return output + (size * torch.randn(output.shape, generator=generator)).to(output.dtype)

        return reduce

    def seam(operator: str, name: str, signature: tuple[str, ...]) -> Seam:
        def replacement(original: Any) -> Callable[..., Any]:
            return rebound(original, name, noisy(original.__globals__[name]))

        return Seam(
            f"demo.noise.{name}",
            MAPPINGS,
            f"{operator}.forward",
            signature,
            replacement,
            "noise on g, forward",
        )

    return Patchset(
        "noise control",
        [
            seam("_ReduceFromModelParallelRegion", "_reduce", ("ctx", "input_", "group")),
            seam(
                "_ReduceScatterToSequenceParallelRegion",
                "_reduce_scatter_along_first_dim",
                ("ctx", "input_", "group", "input_split_sizes", "use_global_buffer"),
            ),
            Seam(
                "demo.noise.embedding",
                LAYERS,
                "VocabParallelEmbedding.forward",
                ("self", "input_"),
                mark_embedding,
                "marks the embedding's own reduction, which is left alone, forward",
            ),
        ],
    )
