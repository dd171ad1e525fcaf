"""Megatron-LM / megatron-core: quantized tensor-parallel and sequence-parallel reductions.

    import flash_allreduce_plugin as fap
    fap.megatron.enable(fap.FlashConfig(bits=8, backward_bits=8))

`enable` replaces functions of megatron-core in this process (docs/megatron.md lists them), `disable` puts
them back, `report` says what each has done. Importing this module changes nothing and does not import
Megatron. Every rank must enable the same thing.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from flash_allreduce_plugin import telemetry
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.megatron import data_parallel, expert_parallel, modules, sequence_parallel, tensor_parallel
from flash_allreduce_plugin.megatron.modules import full_precision as full_precision
from flash_allreduce_plugin.megatron.modules import set_step as set_step
from flash_allreduce_plugin.megatron.modules import step as step
from flash_allreduce_plugin.patching import Patchset, Seam

_config: FlashConfig | None = None


class Report(dict[str, dict[str, Any]]):
    """Per seam: `target`, `covers`, `in_place`, `calls`, `quantized`, `full_precision` {reason: count};
    prints as a table.
    """

    def __str__(self) -> str:
        lines = []
        for seam, entry in self.items():
            reasons = ", ".join(f"{count} {reason}" for reason, count in entry["full_precision"].items())
            state = "" if entry["in_place"] else " (not in place)"
            lines.append(f"{seam}{state}: {entry['calls']} calls, {entry['quantized']} quantized")
            if reasons:
                lines[-1] += f", in full precision: {reasons}"
            lines.append(f"    {entry['covers']} [{entry['target']}]")
        return "\n".join(lines)


def enable(config: FlashConfig | None = None) -> None:
    """Quantize Megatron's tensor-parallel reductions from the next call on.

    config: default `FlashConfig.from_env()`. Enabled already: only the configuration changes.
    Raises PatchError, changing nothing, if this megatron-core does not have the functions this version knows.
    """
    global _config
    if config is not None and not isinstance(config, FlashConfig):
        raise TypeError(
            f"config must be a FlashConfig, got {type(config).__name__}; FlashConfig.from_dict reads a dict"
        )
    config = FlashConfig.from_env() if config is None else config
    _patchset().apply()
    modules.start(config)
    _config = config


def disable() -> None:
    """Put Megatron's own functions back. Does nothing if not enabled.

    Raises PatchError, changing nothing, if somebody has replaced one of them since.
    """
    global _config
    _patchset().restore()
    modules.stop()
    _config = None


def is_enabled() -> bool:
    return _config is not None


def report() -> Report:
    """What each seam covers and how often it was called since `reset_stats`; empty counts if it never was."""
    sites = telemetry.stats()["sites"]
    entries = Report()
    helpers = {helper.id for helper in _helpers()}  # they move nothing that could be counted
    for seam, entry in _patchset().report().items():
        if seam in helpers:
            continue
        counts = sites.get(seam, {"calls": 0, "quantized": 0, "full_precision": {}})
        entries[seam] = {**entry, **{key: counts[key] for key in ("calls", "quantized", "full_precision")}}
    return entries


def seams() -> tuple[Seam, ...]:
    """Every place in Megatron that `enable` replaces; reads nothing of Megatron."""
    return _patchset().seams


@functools.cache
def _patchset() -> Patchset:
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        installed = "of unknown version"
    seams = tensor_parallel.seams(_current_config) + sequence_parallel.seams(_current_config)
    seams += data_parallel.seams(_current_config)
    seams += expert_parallel.seams() + _helpers()
    return Patchset("megatron", seams, f"megatron-core 0.13 to 0.19 (installed: {installed})")


def _helpers() -> list[Seam]:
    return tensor_parallel.helpers() + sequence_parallel.helpers() + expert_parallel.helpers(_current_config)


def _current_config() -> FlashConfig:
    assert _config is not None, "a seam is in place only between enable and disable"
    return _config
