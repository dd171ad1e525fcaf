"""torch's DistributedDataParallel.

By hand, a hook for one model (hook.py); or every model that is built from now on:

    fap.ddp.enable(fap.FlashConfig(bits=8))

FLASH_ALLREDUCE_ATTACH=ddp does the same for a program that nobody edits (docs/use/torch.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.ddp import attach
from flash_allreduce_plugin.integrations.ddp.hook import ddp_hook as ddp_hook
from flash_allreduce_plugin.integrations.patching import Seam
from flash_allreduce_plugin.telemetry.report import Report


def enable(config: FlashConfig | None = None) -> None:
    """Register a `ddp_hook` of its own with every DistributedDataParallel that is built from now on.

    config: default `FlashConfig.from_env()`; warmup_steps counts the steps of the optimizer. Enabled already: it is
    that of the models to come. A hook that the program registers itself goes before ours. What cannot be served is left
    alone; rank 0 says so, and why. Every rank must enable the same thing.
    Raises TypeError where config is no FlashConfig; ConfigError for keys that have no effect here; PatchError, changing
    nothing, if this torch's DistributedDataParallel is not as this version knows it.
    """
    attach.integration.enable(config)


def by_environment() -> None:
    """As `enable`, by FLASH_ALLREDUCE_ATTACH: a configuration that cannot be served ends the program when the first
    such model is built.
    """
    attach.integration.by_environment()


def disable() -> None:
    """Leave coming models alone; those that are served reduce in full precision, by DDP's own operation, to the bit.

    Raises PatchError, changing nothing, if somebody has replaced one of DistributedDataParallel's methods since.
    """
    attach.integration.disable()


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return attach.integration.is_on


def report() -> Report:
    """Calls since `reset_stats`, and in `models` a line for each model that was built while enabled."""
    return attach.integration.report()


def seams() -> Sequence[Seam]:
    """Return every function of torch's that is replaced while enabled."""
    return attach.integration.patchset.seams
