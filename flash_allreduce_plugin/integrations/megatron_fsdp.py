"""The package megatron-fsdp (`megatron_fsdp.fully_shard`): gradients and parameters of its buckets.

    fap.megatron_fsdp.enable(fap.FlashConfig(preset="int8"))

    reductions of gradients          grad_bits
    gathers of parameters            param_bits: differences where buckets stay whole, values elsewhere

The seams are those of Megatron-FSDP inside of megatron-core, which fap.megatron serves (megatron/fsdp.py).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from flash_allreduce_plugin.collectives.error_feedback import Feedback
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import for_megatron
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.contract import Integration
from flash_allreduce_plugin.integrations.megatron import fsdp_gradients, fsdp_parameters, fsdp_seams
from flash_allreduce_plugin.integrations.megatron.data_parallel import Residuals
from flash_allreduce_plugin.integrations.megatron.fsdp import Host
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.integrations.patching import Patchset, Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.runtime import checkpoint
from flash_allreduce_plugin.telemetry import notices
from flash_allreduce_plugin.telemetry.report import Report

_ROW = BY_NAME["megatron_fsdp"]


def enable(config: FlashConfig | None = None) -> None:
    """Quantize the collectives of Megatron-FSDP from the next call on, the same on every rank.

    config: default `FlashConfig.from_env()`. Enabled already: only the configuration changes.
    Raises TypeError where config is no FlashConfig; ConfigError for keys that have no effect here, or if grad_bits and
    param_bits are "full"; PatchError, changing nothing, if the package is not as this version knows it.
    """
    integration.enable(config)


def by_environment() -> None:
    """Enable by FLASH_ALLREDUCE_ATTACH. A configuration that is refused ends the program."""
    integration.by_environment()


def disable() -> None:
    """Put the package's own functions back. Raises PatchError, changing nothing, if one was replaced since."""
    integration.disable()


def is_enabled() -> bool:
    """Return True between enable and disable."""
    return integration.is_on


def report() -> Report:
    """Return the coverage and the counts of each site since `reset_stats`; empty counts if there were no calls."""
    return integration.report()


def seams() -> list[Seam]:
    """Return every function of the package that is replaced; reads nothing of it."""
    return fsdp_seams.every(host)


class _State:
    """The state that a checkpoint has."""

    @property
    def feedback(self) -> Feedback | None:
        return residuals.feedback

    def numbers(self) -> dict[str, float]:
        return {checkpoint.STEP: optimizer_steps.finished}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        optimizer_steps.finished = int(numbers.get(checkpoint.STEP, optimizer_steps.finished))


class _MegatronFSDP(Integration):
    def check(self, config: FlashConfig) -> None:
        if not self.wanted(for_megatron(config)):
            raise ConfigError(
                'grad_bits and param_bits are "full": megatron_fsdp would quantize nothing; set one of them.'
            )
        super().check(config)

    def wanted(self, config: FlashConfig) -> bool:
        return {config.grad_bits, config.param_bits} != {"full"}

    def started(self, config: FlashConfig) -> None:
        super().started(config)
        self.config = for_megatron(config)
        residuals.configure(self.config)
        fsdp_parameters.configure(self.config)
        checkpoint.register(_ROW.name, state)
        self.watch(self.config)
        gradients, parameters = (
            "exactly" if bits == "full" else f"in {bits} bits" for bits in (config.grad_bits, config.param_bits)
        )
        gives = f"gradients {gradients}, parameters {parameters}"
        notices.say(notices.attached("megatron-fsdp", gives, self.config, said=("bits", "grad_bits", "param_bits")))

    def stopped(self) -> None:
        residuals.configure(None)
        fsdp_parameters.configure(None)
        fsdp_gradients.reduced.forget()
        checkpoint.unregister(_ROW.name, state)

    def served(self) -> FlashConfig:
        """Return the configuration of the calls."""
        assert self.config is not None, "a seam is in place only between enable and disable"
        return self.config

    def step(self) -> int:
        """Return the finished steps, and print the notice after the first ones."""
        if self.first_steps is not None:
            self.first_steps.at(optimizer_steps.finished)
        return optimizer_steps.finished


def _patchset() -> Patchset:
    try:
        installed = importlib.metadata.version("megatron-fsdp")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        installed = "of unknown version"
    return Patchset(_ROW.name, seams(), f"{_ROW.fits} (installed: {installed})")


state = _State()
residuals = Residuals(lambda: optimizer_steps.finished)
host = Host(
    "megatron_fsdp",
    _ROW.name,
    lambda: integration.served(),
    lambda: integration.step(),
    lambda: None,
    lambda: None,
    residuals,
)
integration: _MegatronFSDP = _MegatronFSDP(_ROW.name, _patchset, fsdp_seams.covers(host))
