"""The seams of Megatron-FSDP in one list: of megatron-core's, and of the package megatron-fsdp (fsdp.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flash_allreduce_plugin.integrations.megatron import fsdp, fsdp_gradients, fsdp_parameters
from flash_allreduce_plugin.integrations.megatron.fsdp import Host
from flash_allreduce_plugin.integrations.patching import Seam

#: Megatron-FSDP inside of megatron-core.
CORE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_DIFFERENCES = "all-gather of Megatron-FSDP's parameter buckets that stay whole, and between the instances of HSDP"


def every(host: Host) -> list[Seam]:
    """Return all seams."""
    found = fsdp_gradients.seams(host) + fsdp_parameters.seams(host)
    return found + fsdp_gradients.helpers(host) + fsdp_parameters.helpers(host) + fsdp.version_2(host)


def covers(host: Host) -> dict[str, tuple[str, str]]:
    """Return the function that is replaced, and a sentence on its traffic, by site."""
    found = {seam.id: (seam.target, seam.covers) for seam in fsdp_gradients.seams(host) + fsdp_parameters.seams(host)}
    target, _ = found[host.parameters.name]
    return {**found, host.differences.name: (target, _DIFFERENCES)}


def rows(report: Mapping[str, dict[str, Any]], host: Host) -> dict[str, dict[str, Any]]:
    """Return the sites for a report of an integration. report: of a Patchset."""
    if host.parameters.name not in report:
        return {}
    gathers = report[host.parameters.name]
    return {
        host.gradients.name: report[host.gradients.name],
        host.parameters.name: gathers,
        host.differences.name: {**gathers, "covers": _DIFFERENCES},
    }
