"""Quantized two-step all-reduce for Megatron-LM and DeepSpeed.

Importing this changes nothing and imports next to nothing: the public names load what they need when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "errors",
    "CollectiveError": "errors",
    "FlashAllReduceError": "errors",
    "MismatchError": "errors",
    "PatchError": "errors",
    "Feedback": "collectives.error_feedback",
    "FlashAllGather": "fsdp",
    "FlashAllReduce": "fsdp",
    "FlashConfig": "config",
    "FlashReduceScatter": "fsdp",
    "HeldWeights": "collectives.differences",
    "P2POp": "sends",
    "Role": "policy",
    "Site": "policy",
    "all_gather": "dispatch",
    "all_reduce": "dispatch",
    "all_to_all": "dispatch",
    "batch_isend_irecv": "sends",
    "broadcast": "rooted",
    "ddp_hook": "ddp",
    "gather": "rooted",
    "irecv": "sends",
    "isend": "sends",
    "recv": "sends",
    "reduce": "rooted",
    "scatter": "rooted",
    "send": "sends",
    "fsdp1_hook": "fsdp",
    "reduce_scatter": "dispatch",
    "decode": "tensors",
    "encode": "tensors",
    "load_state_dict": "checkpoint",
    "log_to": "telemetry.tensorboard",
    "payload_bytes": "tensors",
    "reset_stats": "telemetry.counters",
    "state_dict": "checkpoint",
    "stats": "telemetry.counters",
}
_ROOMS = ("apex", "context_parallel", "ddp", "deepspeed", "fsdp", "megatron", "pipelining")

__all__ = ["__version__", *sorted(_HOMES), *_ROOMS]

if TYPE_CHECKING:
    from flash_allreduce_plugin import apex as apex
    from flash_allreduce_plugin import context_parallel as context_parallel
    from flash_allreduce_plugin import ddp as ddp
    from flash_allreduce_plugin import deepspeed as deepspeed
    from flash_allreduce_plugin import fsdp as fsdp
    from flash_allreduce_plugin import megatron as megatron
    from flash_allreduce_plugin import pipelining as pipelining
    from flash_allreduce_plugin.checkpoint import load_state_dict as load_state_dict
    from flash_allreduce_plugin.checkpoint import state_dict as state_dict
    from flash_allreduce_plugin.collectives.differences import HeldWeights as HeldWeights
    from flash_allreduce_plugin.collectives.error_feedback import Feedback as Feedback
    from flash_allreduce_plugin.config import FlashConfig as FlashConfig
    from flash_allreduce_plugin.ddp import ddp_hook as ddp_hook
    from flash_allreduce_plugin.dispatch import all_gather as all_gather
    from flash_allreduce_plugin.dispatch import all_reduce as all_reduce
    from flash_allreduce_plugin.dispatch import all_to_all as all_to_all
    from flash_allreduce_plugin.dispatch import reduce_scatter as reduce_scatter
    from flash_allreduce_plugin.errors import CollectiveError as CollectiveError
    from flash_allreduce_plugin.errors import ConfigError as ConfigError
    from flash_allreduce_plugin.errors import FlashAllReduceError as FlashAllReduceError
    from flash_allreduce_plugin.errors import MismatchError as MismatchError
    from flash_allreduce_plugin.errors import PatchError as PatchError
    from flash_allreduce_plugin.fsdp import FlashAllGather as FlashAllGather
    from flash_allreduce_plugin.fsdp import FlashAllReduce as FlashAllReduce
    from flash_allreduce_plugin.fsdp import FlashReduceScatter as FlashReduceScatter
    from flash_allreduce_plugin.fsdp import fsdp1_hook as fsdp1_hook
    from flash_allreduce_plugin.policy import Role as Role
    from flash_allreduce_plugin.policy import Site as Site
    from flash_allreduce_plugin.rooted import broadcast as broadcast
    from flash_allreduce_plugin.rooted import gather as gather
    from flash_allreduce_plugin.rooted import reduce as reduce
    from flash_allreduce_plugin.rooted import scatter as scatter
    from flash_allreduce_plugin.sends import P2POp as P2POp
    from flash_allreduce_plugin.sends import batch_isend_irecv as batch_isend_irecv
    from flash_allreduce_plugin.sends import irecv as irecv
    from flash_allreduce_plugin.sends import isend as isend
    from flash_allreduce_plugin.sends import recv as recv
    from flash_allreduce_plugin.sends import send as send
    from flash_allreduce_plugin.telemetry.counters import reset_stats as reset_stats
    from flash_allreduce_plugin.telemetry.counters import stats as stats
    from flash_allreduce_plugin.telemetry.tensorboard import log_to as log_to
    from flash_allreduce_plugin.tensors import decode as decode
    from flash_allreduce_plugin.tensors import encode as encode
    from flash_allreduce_plugin.tensors import payload_bytes as payload_bytes


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _ROOMS:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
