"""DeepSpeed: quantized gradient reduction at ZeRO stages 0 to 3, gathers of parameters, and the sums of AutoTP, from a
section of the JSON configuration.

    "flash_allreduce": {"bits": 4}

The section suffices if torch calls the entry point (autoload.py). If that is off, add one import:
`import flash_allreduce_plugin.deepspeed.attach`. From Python, for engines without a section:

    fap.deepspeed.enable(fap.FlashConfig(bits=4))

`disable` restores every engine's functions, `report` returns the counts of each site. The import of this module changes
nothing and does not import DeepSpeed. Every rank must have the same configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flash_allreduce_plugin.collectives.error_feedback import Feedback
from flash_allreduce_plugin.config import FlashConfig, refusals
from flash_allreduce_plugin.integrations.deepspeed import engine, engine_seams, section
from flash_allreduce_plugin.integrations.patching import Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.telemetry.report import Report, of_sites


def enable(config: FlashConfig | None = None) -> None:
    """Quantize the gradients of engines that are built from now on, with or without a section.

    With tensor parallelism also the sums of activations, and those of deepspeed.init_inference.

    config: for engines without a section, default `FlashConfig.from_env()`. A section overrides it. A second call
    changes only the configuration of later engines.
    Raises PatchError, changing nothing, if this DeepSpeed does not have the functions this version knows, and
    ConfigError for keys that have no effect there. Keys without an effect on an engine are refused when it is built.
    """
    by_environment = config is None
    config = refusals.serve(config, "DeepSpeed", section.LACKS, BY_NAME["deepspeed"].acts)
    engine.verify()
    engine.attach(config, by_environment=by_environment)


def disable() -> None:
    """Restore every engine's functions, and stop attaching to new ones. Does nothing if not enabled.

    Raises PatchError, changing nothing, if DeepSpeedEngine.__init__, or a function on an engine, was replaced since.
    """
    engine.detach()


def is_enabled() -> bool:
    """Return True if new engines are quantized: after `enable`, or attached by the entry point."""
    return engine.is_attached()


def feedback(served: Any) -> Feedback | None:
    """Return the residuals of an engine, or None without `error_feedback`. Its checkpoints have them too.

    Raises ValueError if the engine has no configuration of ours.
    """
    return engine.reduction_of(served).feedback


def report() -> Report:
    """Return the coverage and the counts of each site since `reset_stats`; empty counts without a call."""
    in_place = engine.sites_in_place()
    return of_sites(
        {
            site: {"target": target, "covers": covers, "in_place": site in in_place}
            for site, (target, covers) in engine_seams.SITES.items()
        }
    )


def seams() -> Sequence[Seam]:
    """Return DeepSpeed's functions that are replaced in the process; others are replaced on an engine."""
    return engine.seams()
