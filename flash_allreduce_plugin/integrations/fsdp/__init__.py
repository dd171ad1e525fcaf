"""torch's FullyShardedDataParallel: FSDP2 (`fully_shard`), its replicas (HSDP), and FSDP1.

By hand, objects for torch's own interfaces (fsdp2.py, fsdp1.py); or every model that is built from now on:

    fap.fsdp.enable(fap.FlashConfig(bits=8))

FLASH_ALLREDUCE_ATTACH=fsdp does the same for a program that nobody edits (docs/use/torch.md).
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
    """Serve every module that `fully_shard` or FullyShardedDataParallel wraps from now on.

    config: default `FlashConfig.from_env()`. Gradients travel at `bits`, also between replicas; parameters of FSDP2 at
    `param_bits`, as values: take 8, and measure. warmup_steps counts the steps of the optimizer. Enabled already: it is
    that of the models to come. What the program sets itself (set_custom_reduce_scatter, register_comm_hook) goes before
    ours. What cannot be served is left alone; rank 0 says so, and why. Every rank must enable the same thing.
    Raises TypeError where config is no FlashConfig; ConfigError for keys that have no effect here; PatchError, changing
    nothing, if this torch's FSDP is not as this version knows it.
    """
    attach.integration.enable(config)


def by_environment() -> None:
    """As `enable`, by FLASH_ALLREDUCE_ATTACH: a configuration that cannot be served ends the program when the first
    such model is built.
    """
    attach.integration.by_environment()


def disable() -> None:
    """Leave coming models alone, and give those that are served torch's own communication back.

    Raises PatchError, changing nothing, if somebody has replaced one of torch's functions since.
    """
    attach.integration.disable()


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return attach.integration.is_on


def report() -> Report:
    """Calls of each site since `reset_stats`, and in `models` a line for each model that has trained while enabled."""
    return attach.integration.report()


def seams() -> Sequence[Seam]:
    """Return every function of torch's that is replaced while enabled."""
    return attach.integration.patchset.seams
