"""Megatron's options that replace or bypass the collectives that we quantize, and our fields that have no effect in
Megatron: they are refused with an error.

The launch flags check Megatron-LM's arguments. While enabled, every configuration that is built is checked too, for
scripts that call `enable` themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config import refusals as keys
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.patching import Seam

Spelling = Callable[..., str]

_LACKS = {"param_backward_bits": "which gathers no parameters for the backward pass alone"}


def of_fields(config: FlashConfig, spelled: Callable[[str], str] = str) -> list[str]:
    """One line for each field that was given and has no effect in Megatron; spelled: names it as its user wrote it."""
    return keys.refusals(config.given(), "Megatron", _LACKS, spelled)


def refusals(settings: Any, spelled: Spelling, plugin: str) -> list[str]:
    """One line for each option of `settings` that does not go with this plugin.

    settings: Megatron-LM's arguments or a ModelParallelConfig. spelled(name) and spelled(name, value) write an option
    as its user did, `plugin` is what the user wrote for us.
    """
    if getattr(settings, "tensor_model_parallel_size", None) == 1:
        return []  # there is no tensor-parallel collective to bypass
    lines = []

    def refuse(option: str, why: str) -> None:
        lines.append(f"{option} and {plugin} exclude each other: {why}")

    if getattr(settings, "tp_comm_overlap", False):
        refuse(
            spelled("tp_comm_overlap"),
            "Transformer Engine's overlapped GEMMs communicate inside their own kernels; drop one of the two.",
        )
    symmetric = getattr(settings, "symmetric_ar_type", None)
    if symmetric is not None:
        refuse(
            spelled("symmetric_ar_type", symmetric),
            "both replace the tensor-parallel all-reduce; drop one of the two.",
        )
    if getattr(settings, "use_transformer_engine_op_fuser", False):
        refuse(
            spelled("use_transformer_engine_op_fuser"),
            "Transformer Engine's fused operations have collectives of their own; drop one of the two.",
        )
    if getattr(settings, "transformer_impl", None) == "inference_optimized":
        refuse(
            spelled("transformer_impl", "inference_optimized"),
            f"its layers reduce with NVLS kernels of their own; take {spelled('transformer_impl', 'local')}.",
        )
    return lines


def helpers() -> list[Seam]:
    """The seam that asks every configuration; it moves nothing."""
    return [
        Seam(
            "megatron.config",
            "megatron.core.model_parallel_config",
            "ModelParallelConfig.__post_init__",  # TransformerConfig and its heirs pass here
            ("self",),
            _checked,
            "refuses options that bypass the collectives",
        )
    ]


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        original(self)
        lines = refusals(self, _field, "flash_allreduce_plugin")
        if lines:
            raise ConfigError("\n".join(lines))

    return __post_init__


def _field(name: str, value: str | None = None) -> str:
    return name if value is None else f"{name}={value!r}"
