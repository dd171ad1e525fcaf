"""A line on rank 0 if optimizers step under FLASH_ALLREDUCE_ATTACH and the plugin has seen no call.

1. autoload.py calls `expect` in every program with FLASH_ALLREDUCE_ATTACH.
2. torch's hook on all optimizers counts the steps of each optimizer.
3. At the third step of one optimizer rank 0 prints the line if nothing was seen until then.
4. A program with fewer steps prints the line at its end (autoload.py).

The plugin has seen a call if an integration has printed a line about a model, or if a call was counted. Gathers of
parameters and DTensor's calls for other code (tensor_parallel.other) do not count: they come without any gradient.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.telemetry import counters, notices

_STEPS = 3

said = False  # the line was printed

_counts: dict[int, int] = {}  # steps of each optimizer, by its id
_over = False  # the third step was made
_hook: Any = None


def expect() -> None:
    """Count the steps of all optimizers from now on."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_stepped)


def line() -> str | None:
    """Return the line; None if it was printed, if the plugin has seen a call, or if no optimizer has made a step."""
    steps = max(_counts.values(), default=0)
    if said or not steps or _seen():
        return None
    begins = f"{environment.ATTACH}={os.environ.get(environment.ATTACH, '').strip()}"
    after = f"in {steps} step{'s' * (steps > 1)} of its optimizer"
    if not any(room.built for room in _rooms()) and not _megatron_is_on():
        return (
            f"{begins}, and this program has built no such model on rank 0 {after}; nothing was quantized (DeepSpeed's "
            'engines: the section "flash_allreduce")'
        )
    return (
        f"{begins}, and {after} no gradient was reduced by a model that it serves. A wrapper does not reduce "
        "parameters that are added after it was made (adapters of LoRA after fully_shard), and reduces nothing if the "
        "program calls the module inside of the wrapper"
    )


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    # The hook stays: torch iterates over the hooks, and one that is removed meanwhile raises RuntimeError.
    global _over, said
    if _over or not dist.is_available() or not dist.is_initialized():
        return
    count = _counts[id(optimizer)] = _counts.get(id(optimizer), 0) + 1
    if count < _STEPS:
        return
    _over = True
    found = line()
    if found is not None:
        said = True
        notices.say(found)


def _seen() -> bool:
    return any(room.told for room in _rooms()) or any(
        one.calls and not name.endswith((".parameters", ".other")) for name, one in counters.totals().items()
    )


def _rooms() -> list[Any]:
    """Return the integrations that serve models one by one, if they are imported."""
    rooms: list[Any] = [
        sys.modules.get(f"flash_allreduce_plugin.integrations.{name}.attach") for name in ("ddp", "fsdp")
    ]
    return [room.integration for room in rooms if room is not None]


def _megatron_is_on() -> bool:
    megatron: Any = sys.modules.get("flash_allreduce_plugin.integrations.megatron")
    return megatron is not None and bool(megatron.is_enabled())
