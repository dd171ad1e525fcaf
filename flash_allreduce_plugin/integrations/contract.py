"""One integration between enable and disable: the steps that all of them take, in this order.

enable     1. Refuse fields that have no effect (registry.Row) and whatever else does not fit (`check`).
           2. Apply all seams or none, and count the steps of the optimizer.
           3. Keep the configuration; start the log of the run and the notices (`started`).
disable    Put back exactly the functions that were found, or raise and change nothing; then forget (`stopped`).

The module of an integration has enable, disable, is_enabled, report and seams (Contract). torch's and apex's are an
`Integration`, or a `ModelIntegration` where models are served one by one as they are built. Megatron's and DeepSpeed's
have steps of their own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.config import FlashConfig, refusals
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations import registry
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.integrations.patching import Patchset, Seam
from flash_allreduce_plugin.telemetry import notices, other_traffic, run_log
from flash_allreduce_plugin.telemetry.notices import FirstSteps
from flash_allreduce_plugin.telemetry.report import Report, of_sites

_PATIENCE = 2.0  # seconds

refused = False  # the program has been ended by `refuse`


class Contract(Protocol):
    """The functions that the module of every integration has."""

    def enable(self, config: FlashConfig | None = None) -> None:
        """Quantize from the next call, or the next model, on. Raises ConfigError and PatchError, changing nothing."""

    def disable(self) -> None:
        """Put the framework's own functions back. Raises PatchError, changing nothing, if one was replaced since."""

    def is_enabled(self) -> bool:
        """Return True between enable and disable."""

    def report(self) -> Report:
        """Return the target, the coverage and the counts of each site since `reset_stats`."""

    def seams(self) -> Sequence[Seam]:
        """Return every function that is replaced; reads nothing of the framework."""


def serve(config: FlashConfig | None, row: registry.Row, who: str | None = None) -> FlashConfig:
    """Return the configuration of an integration: `config`, or the environment's if it is None.

    who: the name in errors, by default the row's title.
    Raises TypeError where config is no FlashConfig, and ConfigError with one line for each field without effect.
    """
    lacks = without_effect(row) if row.why and config is not None else row.refused
    return refusals.serve(config, who or row.title, lacks, row.acts)


def without_effect(row: registry.Row) -> dict[str, str]:
    """Return the fields that a configuration given by hand may not set, each with its reason."""
    others = [name for name in refusals.OF_MEGATRON if name not in row.acts]
    return {**dict.fromkeys((*others, *row.elsewhere), row.why or refusals.AT_BITS), **row.refused}


class Integration:
    """The functions of one integration, and its state.

    name: of its row in the registry. patchset: makes the seams; nothing of the framework is imported before.
    sites: site -> (the replaced function, the tensors of the site), for the report.
    """

    counts_steps = True  # of torch's optimizers, for warmup_steps

    def __init__(self, name: str, patchset: Callable[[], Patchset], sites: Mapping[str, tuple[str, str]]) -> None:
        self.row = registry.BY_NAME[name]
        self.config: FlashConfig | None = None
        self.first_steps: FirstSteps | None = None
        self.models: list[str] = []  # a line for each model
        self._make, self._sites = patchset, sites
        self._patchset: Patchset | None = None

    @property
    def patchset(self) -> Patchset:
        if self._patchset is None:
            self._patchset = self._make()
        return self._patchset

    @property
    def is_on(self) -> bool:
        return self.config is not None

    def enable(self, config: FlashConfig | None = None) -> None:
        """Enable, or change the configuration. Raises TypeError, ConfigError and PatchError, changing nothing."""
        served = serve(config, self.row)
        self.check(served)
        self.apply()
        self.config = served
        self.started(served)

    def disable(self) -> None:
        """Disable. Raises PatchError, changing nothing, if a replaced function was replaced again since."""
        if self.patchset.applied:
            self.patchset.restore()
            other_traffic.detach(self.patchset)
            if self.counts_steps:
                optimizer_steps.stop()
        self.config = self.first_steps = None
        self.models = []
        self.stopped()

    def by_environment(self) -> None:
        """Enable with the environment's configuration, by FLASH_ALLREDUCE_ATTACH. One that fails ends the program."""
        try:
            if self.row.name in os.environ.get(environment.ATTACH, "") or self.wanted(FlashConfig.from_env()):
                self.enable(None)
        except (ConfigError, PatchError) as error:
            refuse(error)

    def report(self) -> Report:
        """Return the sites, and a line for each model."""
        found, applied = self.patchset.report(), self.patchset.applied
        entries = {
            site: {"target": target, "covers": covers, "in_place": found.get(site, {}).get("in_place", applied)}
            for site, (target, covers) in self._sites.items()
        }
        return of_sites(entries, self.models)

    def apply(self) -> None:
        """Put the seams in place, and count steps. Does nothing if they are. Raises PatchError, changing nothing."""
        if not self.patchset.applied:
            self.patchset.apply()
            if self.counts_steps:
                optimizer_steps.start()

    def watch(self, config: FlashConfig, known: Iterable[str] = ()) -> None:
        """Print a notice after the first steps about sites that quantize nothing.

        known: reasons that no field changes.
        """
        self.first_steps = self.first_steps or FirstSteps(config, framework=self.row.name, known=known)
        self.first_steps.config = config

    def check(self, config: FlashConfig) -> None:
        """Raise ConfigError or PatchError for a configuration or an installation that does not fit. Start the log."""
        run_log.start(config, (lambda: optimizer_steps.finished) if self.counts_steps else None)

    def wanted(self, config: FlashConfig) -> bool:
        """Return True if FLASH_ALLREDUCE_ATTACH=all enables the integration with this configuration."""
        return True

    def started(self, config: FlashConfig) -> None:
        """Count other traffic, and print the line about the attached model."""
        other_traffic.attach(self.patchset)

    def stopped(self) -> None:
        """Forget the state of models and calls."""


class ModelIntegration(Integration):
    """A configuration for every model that is built from now on, and a line about each model.

    Attached by FLASH_ALLREDUCE_ATTACH, a configuration that fails ends the program when the first model is built, on
    every rank, with one sentence on rank 0: in a program without such a model it is not used.
    """

    def __init__(self, name: str, patchset: Callable[[], Patchset], sites: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(name, patchset, sites)
        self.built = 0  # models, in the life of the process
        self.told = False  # a line about one of them was printed
        self._refused: ConfigError | None = None

    def check(self, config: FlashConfig) -> None:
        """Accept the configuration. The log starts with the first model."""

    def started(self, config: FlashConfig) -> None:
        """Forget the environment's mistake. Notices and other traffic start with the first model."""
        self._refused = None

    def by_environment(self) -> None:
        """Enable with the environment's configuration, which is refused when a model is built."""
        try:
            self.enable(None)
        except ConfigError as error:
            self.apply()
            self.config, self._refused = FlashConfig(), error

    def for_a_model(self) -> FlashConfig:
        """Return the configuration of a model that is being built. End the program if the environment's is refused."""
        assert self.config is not None, "a seam is in place only between enable and disable"
        self.built += 1
        if self._refused is not None:
            refuse(self._refused)
        run_log.start(self.config, lambda: optimizer_steps.finished)
        return self.config

    def note(self, line: str) -> None:
        """Print a line about a model, on rank 0, and keep it for the report."""
        self.models.append(line)
        self.told = True
        notices.say(line)


def refuse(error: ConfigError | PatchError) -> NoReturn:
    """End the program before it trains: exit status 2 on every rank, the sentence on rank 0."""
    global refused
    refused = True
    ranks = run_log.rank_and_world()
    if ranks is None or ranks[0] == 0:
        print(f"flash all-reduce: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(_PATIENCE)  # a launcher ends all ranks when the first has ended: rank 0 gets to say why
    raise SystemExit(2)


def unknown_group(groups: Iterable[dist.ProcessGroup], device: torch.device) -> str | None:
    """Why models over these groups are left alone: groups that a program has written itself, or none for the device."""
    for group in groups:
        try:
            group._get_backend(device)
        except RuntimeError:
            return f"its process group ({type(group).__name__}) has no backend of torch's for {device.type} tensors"
    return None


def described(name: str, parameters: Iterable[torch.Tensor]) -> str:
    """Return a model's class and its trained parameters: "GPT, 22.4 M parameters in float32"."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trained)
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
    size = f"{count / 1e6:.4g} M" if count >= 1e6 else f"{count}"
    return f"{name}, {size} parameters in {' and '.join(dtypes)}"
