"""DeepSpeed: quantized gradient reduction at ZeRO stages 0 to 3, gathers of parameters, and the sums of AutoTP, from a
section of the JSON configuration.

    "flash_allreduce": {"bits": 4}

The section is all that is needed where torch calls the entry point (autoload.py); where that is off, one import does
it: `import flash_allreduce_plugin.deepspeed.attach`. From Python, for engines whose configuration has no section:

    fap.deepspeed.enable(fap.FlashConfig(bits=4))

`disable` gives every engine its own functions back, `report` says what each place has done. Importing this module
changes nothing and does not import DeepSpeed. Every rank must have the same configuration.
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
    """Quantize the gradients of engines that are built from now on, also of those without a section.

    With tensor parallelism the sums of activations too, and those of deepspeed.init_inference.

    config: for engines without a section, default `FlashConfig.from_env()`; a section goes before it. Enabled already:
    only the configuration for coming engines changes.
    Raises PatchError, changing nothing, if this DeepSpeed does not have the functions this version knows, and
    ConfigError for keys that have no effect there. Keys without an effect on an engine are refused when it is built.
    """
    by_environment = config is None
    config = refusals.serve(config, "DeepSpeed", section.LACKS, BY_NAME["deepspeed"].acts)
    engine.verify()
    engine.attach(config, by_environment=by_environment)


def disable() -> None:
    """Give every engine its own functions back, and leave coming ones alone. Does nothing if not enabled.

    Raises PatchError, changing nothing, if somebody has replaced DeepSpeedEngine.__init__, or what is on an engine,
    since.
    """
    engine.detach()


def is_enabled() -> bool:
    """Return True if engines are served when they are built: after `enable`, or attached by the entry point."""
    return engine.is_attached()


def feedback(served: Any) -> Feedback | None:
    """The residuals of an engine, None without `error_feedback`; its checkpoints have them too.

    Raises ValueError if the engine has no configuration of ours.
    """
    return engine.reduction_of(served).feedback


def report() -> Report:
    """What each site covers and how often it was called since `reset_stats`; empty counts if it never was."""
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
