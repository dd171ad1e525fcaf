"""Quantized two-step all-reduce for Megatron-LM and DeepSpeed.

The import changes nothing and loads almost nothing: a public name loads its module at the first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from flash_allreduce_plugin.aliases import Finder
from flash_allreduce_plugin.autoload import AfterImport
from flash_allreduce_plugin.integrations.registry import BY_NAME

__version__ = "0.1.0"

sys.meta_path.insert(0, Finder())  # first: an old package has the folder of the new one
# torch.ops.flash_allreduce, whether torch is imported before this package or after it.
AfterImport(("torch._ops",), lambda: importlib.import_module(f"{__name__}.api.operators").attach()).install()

_HOMES = {
    "ConfigError": "errors",
    "CollectiveError": "errors",
    "FlashAllReduceError": "errors",
    "MismatchError": "errors",
    "PatchError": "errors",
    "Feedback": "collectives.error_feedback",
    "FlashAllGather": "integrations.fsdp",
    "FlashAllReduce": "integrations.fsdp",
    "FlashConfig": "config",
    "FlashReduceScatter": "integrations.fsdp",
    "HeldWeights": "collectives.weight_differences",
    "P2POp": "api.sends",
    "Role": "policy",
    "Site": "policy",
    "all_gather": "api.reductions",
    "all_reduce": "api.reductions",
    "all_to_all": "api.reductions",
    "batch_isend_irecv": "api.sends",
    "broadcast": "api.one_to_many",
    "ddp_hook": "integrations.ddp",
    "gather": "api.one_to_many",
    "irecv": "api.sends",
    "isend": "api.sends",
    "recv": "api.sends",
    "reduce": "api.one_to_many",
    "scatter": "api.one_to_many",
    "send": "api.sends",
    "fsdp1_hook": "integrations.fsdp",
    "reduce_scatter": "api.reductions",
    "decode": "api.tensors",
    "encode": "api.tensors",
    "load_state_dict": "runtime.checkpoint",
    "log_to": "telemetry.tensorboard",
    "payload_bytes": "api.tensors",
    "reset_stats": "telemetry.counters",
    "state_dict": "runtime.checkpoint",
    "stats": "telemetry.counters",
}
__all__ = ["__version__", *sorted(_HOMES), *BY_NAME]

if TYPE_CHECKING:
    from flash_allreduce_plugin.api.one_to_many import broadcast as broadcast
    from flash_allreduce_plugin.api.one_to_many import gather as gather
    from flash_allreduce_plugin.api.one_to_many import reduce as reduce
    from flash_allreduce_plugin.api.one_to_many import scatter as scatter
    from flash_allreduce_plugin.api.reductions import all_gather as all_gather
    from flash_allreduce_plugin.api.reductions import all_reduce as all_reduce
    from flash_allreduce_plugin.api.reductions import all_to_all as all_to_all
    from flash_allreduce_plugin.api.reductions import reduce_scatter as reduce_scatter
    from flash_allreduce_plugin.api.sends import P2POp as P2POp
    from flash_allreduce_plugin.api.sends import batch_isend_irecv as batch_isend_irecv
    from flash_allreduce_plugin.api.sends import irecv as irecv
    from flash_allreduce_plugin.api.sends import isend as isend
    from flash_allreduce_plugin.api.sends import recv as recv
    from flash_allreduce_plugin.api.sends import send as send
    from flash_allreduce_plugin.api.tensors import decode as decode
    from flash_allreduce_plugin.api.tensors import encode as encode
    from flash_allreduce_plugin.api.tensors import payload_bytes as payload_bytes
    from flash_allreduce_plugin.collectives.error_feedback import Feedback as Feedback
    from flash_allreduce_plugin.collectives.weight_differences import HeldWeights as HeldWeights
    from flash_allreduce_plugin.config import FlashConfig as FlashConfig
    from flash_allreduce_plugin.errors import CollectiveError as CollectiveError
    from flash_allreduce_plugin.errors import ConfigError as ConfigError
    from flash_allreduce_plugin.errors import FlashAllReduceError as FlashAllReduceError
    from flash_allreduce_plugin.errors import MismatchError as MismatchError
    from flash_allreduce_plugin.errors import PatchError as PatchError
    from flash_allreduce_plugin.integrations import apex as apex
    from flash_allreduce_plugin.integrations import context_parallel as context_parallel
    from flash_allreduce_plugin.integrations import ddp as ddp
    from flash_allreduce_plugin.integrations import deepspeed as deepspeed
    from flash_allreduce_plugin.integrations import fsdp as fsdp
    from flash_allreduce_plugin.integrations import megatron as megatron
    from flash_allreduce_plugin.integrations import megatron_fsdp as megatron_fsdp
    from flash_allreduce_plugin.integrations import pipelining as pipelining
    from flash_allreduce_plugin.integrations import tensor_parallel as tensor_parallel
    from flash_allreduce_plugin.integrations.ddp import ddp_hook as ddp_hook
    from flash_allreduce_plugin.integrations.fsdp import FlashAllGather as FlashAllGather
    from flash_allreduce_plugin.integrations.fsdp import FlashAllReduce as FlashAllReduce
    from flash_allreduce_plugin.integrations.fsdp import FlashReduceScatter as FlashReduceScatter
    from flash_allreduce_plugin.integrations.fsdp import fsdp1_hook as fsdp1_hook
    from flash_allreduce_plugin.policy import Role as Role
    from flash_allreduce_plugin.policy import Site as Site
    from flash_allreduce_plugin.runtime.checkpoint import load_state_dict as load_state_dict
    from flash_allreduce_plugin.runtime.checkpoint import state_dict as state_dict
    from flash_allreduce_plugin.telemetry.counters import reset_stats as reset_stats
    from flash_allreduce_plugin.telemetry.counters import stats as stats
    from flash_allreduce_plugin.telemetry.tensorboard import log_to as log_to


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in BY_NAME:
        value = importlib.import_module(BY_NAME[name].module)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
