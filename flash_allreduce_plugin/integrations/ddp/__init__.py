"""torch's DistributedDataParallel.

Register a hook with one model by hand (hook.py), or quantize every model that is built from now on:

    fap.ddp.enable(fap.FlashConfig(bits=8))

FLASH_ALLREDUCE_ATTACH=ddp does the same for an unmodified program (docs/use/torch.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.ddp import attach
from flash_allreduce_plugin.integrations.ddp.hook import ddp_hook as ddp_hook
from flash_allreduce_plugin.integrations.patching import Seam
from flash_allreduce_plugin.telemetry.report import Report


def enable(config: FlashConfig | None = None) -> None:
    """Register a separate `ddp_hook` with every DistributedDataParallel that is built from now on.

    config: default `FlashConfig.from_env()`; warmup_steps counts the steps of the optimizer. A second call changes the
    configuration of later models. A hook of the program replaces ours. A model that cannot be quantized is unchanged,
    and rank 0 prints the reason. Every rank must enable the same.
    Raises TypeError if config is no FlashConfig; ConfigError for keys without an effect here; PatchError, changing
    nothing, for an unknown form of torch's DistributedDataParallel.
    """
    attach.integration.enable(config)


def by_environment() -> None:
    """Enable by FLASH_ALLREDUCE_ATTACH. A refused configuration ends the program when the first model is built."""
    attach.integration.by_environment()


def disable() -> None:
    """Stop: later models get no hook, and present ones reduce in full precision, with the bits of DDP's own operation.

    Raises PatchError, changing nothing, if a method of DistributedDataParallel was replaced since.
    """
    attach.integration.disable()


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return attach.integration.is_on


def report() -> Report:
    """Return the calls since `reset_stats`, and in `models` a line for each model that was built while enabled."""
    return attach.integration.report()


def seams() -> Sequence[Seam]:
    """Return every function of torch's that is replaced while enabled."""
    return attach.integration.patchset.seams
