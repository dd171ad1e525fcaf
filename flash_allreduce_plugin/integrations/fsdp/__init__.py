"""torch's FullyShardedDataParallel: FSDP2 (`fully_shard`), its replicas (HSDP), and FSDP1.

Give objects to torch's interfaces by hand (fsdp2.py, fsdp1.py), or quantize every model that is built from now on:

    fap.fsdp.enable(fap.FlashConfig(bits=8))

FLASH_ALLREDUCE_ATTACH=fsdp does the same for an unmodified program (docs/use/torch.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.fsdp import attach
from flash_allreduce_plugin.integrations.fsdp.fsdp1 import fsdp1_hook as fsdp1_hook
from flash_allreduce_plugin.integrations.fsdp.fsdp2 import FlashAllGather as FlashAllGather
from flash_allreduce_plugin.integrations.fsdp.fsdp2 import FlashAllReduce as FlashAllReduce
from flash_allreduce_plugin.integrations.fsdp.fsdp2 import FlashReduceScatter as FlashReduceScatter
from flash_allreduce_plugin.integrations.patching import Seam
from flash_allreduce_plugin.telemetry.report import Report


def enable(config: FlashConfig | None = None) -> None:
    """Quantize every module that `fully_shard` or FullyShardedDataParallel wraps from now on.

    config: default `FlashConfig.from_env()`. Gradients are sent at `bits`, also between replicas; parameters of FSDP2
    at `param_bits`, as values: use 8, and measure. warmup_steps counts the steps of the optimizer. A second call
    changes the configuration of later models. Settings of the program (set_custom_reduce_scatter, register_comm_hook)
    replace ours. A model that cannot be quantized is unchanged, and rank 0 prints the reason. Every rank must enable
    the same.
    Raises TypeError if config is no FlashConfig; ConfigError for keys without an effect here; PatchError, changing
    nothing, for an unknown form of torch's FSDP.
    """
    attach.integration.enable(config)


def by_environment() -> None:
    """Enable by FLASH_ALLREDUCE_ATTACH. A refused configuration ends the program when the first model is built."""
    attach.integration.by_environment()


def disable() -> None:
    """Stop: later models are unchanged, and attached ones get torch's own communication back.

    Raises PatchError, changing nothing, if one of torch's functions was replaced since.
    """
    attach.integration.disable()


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return attach.integration.is_on


def report() -> Report:
    """Return the calls of each site since `reset_stats`, and in `models` a line a model trained while enabled."""
    return attach.integration.report()


def seams() -> Sequence[Seam]:
    """Return every function of torch's that is replaced while enabled."""
    return attach.integration.patchset.seams
