"""FLASH_ALLREDUCE_AUTOSAVE for models of megatron-core that FLASH_ALLREDUCE_ATTACH serves.

1. When the first step begins (DistributedDataParallel.zero_grad_buffer), before it sends anything: all ranks look for a
   saved state.
2. When a step of Megatron's optimizer has ended, with its gathers: a state is saved, every so many steps.

A state is found by the values that this rank's optimizers own: the exact ones in float32, if there are any. With
overlap_param_gather and param_bits the last gather comes after the state: the next ones are not rounded as in a run
that was not interrupted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flash_allreduce_plugin.collectives.weight_differences import digest_of
from flash_allreduce_plugin.integrations import autosave
from flash_allreduce_plugin.integrations.megatron import process_groups
from flash_allreduce_plugin.integrations.patching import Patchset, Seam

_OPTIMIZERS = "megatron.core.optimizer.optimizer"

_depth = 0  # of steps of optimizers: a chained one steps others


@functools.cache
def patchset(supported: str) -> Patchset:
    """Return the seams; they move nothing."""
    begins = Seam(
        "megatron.autosave.begins",
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.zero_grad_buffer",
        ("self",),
        _begins,
        "looks for a saved state before the first step",
    )
    ends = [
        Seam(f"megatron.autosave.{name}", _OPTIMIZERS, f"{name}.step", ("self",), _ends, "saves the state after a step")
        for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
    ]
    return Patchset("megatron autosave", [begins, *ends], supported)


def owned() -> list[torch.Tensor]:
    """Return the values that this rank's optimizers own, sorted by their bits: objects have no order of their own."""
    optimizers = process_groups.alive("torch.optim", "Optimizer")
    found = {id(one): one for each in optimizers for group in each.param_groups for one in group["params"]}
    return sorted((one.detach() for one in found.values()), key=digest_of)


def _begins(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def zero_grad_buffer(self: Any) -> Any:
        autosave.before_reduction()
        return original(self)

    return zero_grad_buffer


def _ends(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any) -> Any:
        with _deeper():
            answer = original(self)
        if _depth == 0:
            autosave.after_step()
        return answer

    return step


@contextmanager
def _deeper() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
