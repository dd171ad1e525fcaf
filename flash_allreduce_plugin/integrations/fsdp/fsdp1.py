"""torch's FSDP1 (`FullyShardedDataParallel`, accelerate's default): gradients, through its communication hook.

    model = FullyShardedDataParallel(model, ...)
    model.register_comm_hook(None, fap.fsdp1_hook(fap.FlashConfig(bits=8)))

FSDP1 calls the hook with a flat, padded gradient and the output for this rank's shard; without shards (NO_SHARD) with
the gradient only. FSDP1 does not divide then: the hook averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.config import FlashConfig, refusals
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations import patching
from flash_allreduce_plugin.policy import Site
from flash_allreduce_plugin.telemetry import other_traffic, run_log
from flash_allreduce_plugin.telemetry.notices import FirstPasses
from flash_allreduce_plugin.telemetry.unreduced import Reductions

SITE = Site("fsdp1.gradients")

Hook = Callable[..., None]
StepSource = Callable[[], int | None]
_UNSEEN = "which does not see whose gradient it is given"
LACKS = {
    "include": _UNSEEN,
    "exclude": _UNSEEN,
    "warmup_steps": "which torch does not tell the step",
    **dict.fromkeys(
        ("param_bits", "param_backward_bits", "quantize_frozen"), "whose gathers of parameters have no hook"
    ),
    "error_feedback": f"{_UNSEEN} (FSDP2's fap.FlashReduceScatter does)",
}


def fsdp1_hook(config: FlashConfig | None = None) -> Hook:
    """Return a hook for `FullyShardedDataParallel.register_comm_hook(state, hook)`, on the root, before a forward pass.

    config: FlashConfig.from_env() if None. state: the process group of the model, or None, to find it.
    FULL_SHARD and SHARD_GRAD_OP: a reduce-scatter, which rounds once; NO_SHARD: an all-reduce. torch accepts no hooks
    for the hybrid strategies. Counters: "fsdp1.gradients".
    Raises TypeError if config is no FlashConfig; ConfigError for `error_feedback` (that of a preset is left out),
    `include`, `exclude`, `warmup_steps` and the keys of Megatron, and in the backward pass of a model with tensor
    parallelism on a device mesh; PatchError if the caller is not FSDP1, or in an unknown form.
    """
    return hook_of(refusals.serve(config, "fsdp1_hook", LACKS))


def hook_of(
    config: FlashConfig, attached_to: str = "FullyShardedDataParallel", step: StepSource = lambda: None
) -> Hook:
    """Return fsdp1_hook of a checked configuration. step: finished training steps, for warmup_steps."""
    run_log.start(config)
    passes = FirstPasses(config, attached_to)
    handles: WeakSet[Any] = WeakSet()
    reduced = Reductions(attached_to, lambda: _with_gradients(handles))
    other_traffic.attach(passes)

    def flash_fsdp1_hook(state: Any, gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
        calls = _reduction()
        group = _group(state, calls["state"])
        passes.at(config, id(calls["handle"]))
        site = passes.of(SITE)
        handles.add(calls["handle"])
        reduced.noted()
        if shard is None:
            reductions.all_reduce(gradient, dist.ReduceOp.AVG, group, config, site=site, step=step())
        else:
            reductions.reduce_scatter(shard, gradient, dist.ReduceOp.AVG, group, config, site=site, step=step())

    return flash_fsdp1_hook


def _with_gradients(handles: Iterable[Any]) -> list[torch.Tensor]:
    """Return the parameters, flat and original, that have gradients now."""
    flat = [handle.flat_param for handle in handles]
    every = [parameter for one in flat for parameter in (one, *(one._params or ()))]
    return [parameter for parameter in every if parameter.grad is not None]


def _reduction() -> Mapping[str, Any]:
    """Return the variables of the function that calls the hook."""
    calls = patching.locals_of("_reduce_grad", "_reduce_grad_no_shard") or {}
    if not calls.keys() >= {"state", "handle"}:
        raise PatchError(
            "fsdp1_hook was not called by FullyShardedDataParallel as torch 2.11 to 2.13 have it, and does not see the "
            "model's process group; register it with a FullyShardedDataParallel, alone or in a wrapper that calls it."
        )
    return calls


def _group(state: Any, wrapped: Any) -> dist.ProcessGroup:
    """Return the group of the model's gradients. state: a group, torch's DefaultState, or None. wrapped: the model."""
    if getattr(wrapped, "_fsdp_extension", None) is not None:
        raise ConfigError(
            "fsdp1_hook does not go together with tensor parallelism on a device mesh: copies of parameters would "
            "drift apart, and FSDP1 does not say where they are; take FSDP2 (fap.FlashReduceScatter)."
        )
    given = getattr(state, "process_group", state)
    return wrapped.process_group if given is None else given
