"""What `fap.ddp.enable` and `fap.fsdp.enable` have in common: a configuration for every model that is built from now
on, the seams that notice such a model, and the lines that say what became of each.

Attached by the environment (FLASH_ALLREDUCE_ATTACH), a configuration that cannot be served ends the program when the
first model is built, on every rank, with one sentence on rank 0: a model of another kind is none of its business.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist

from flash_allreduce_plugin.config import FlashConfig, refusals
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.integrations.patching import Patchset
from flash_allreduce_plugin.telemetry import notices, run_log

_PATIENCE = 2.0  # seconds


class Attachment:
    """config: of the models to come, None while nothing is attached. models: a line for each that was built since."""

    def __init__(self, who: str, patchset: Callable[[], Patchset], lacks: Mapping[str, str]) -> None:
        """who: in errors. patchset: makes the seams, of which nothing is imported before. lacks: as refusals.serve."""
        self.config: FlashConfig | None = None
        self.models: list[str] = []
        self.built = 0  # models, in the life of the process
        self._refused: ConfigError | None = None
        self._who, self._make, self._lacks = who, patchset, lacks
        self._patchset: Patchset | None = None

    @property
    def is_on(self) -> bool:
        return self._patchset is not None

    def enable(self, config: FlashConfig | None) -> None:
        """Raises TypeError, ConfigError and PatchError, changing nothing. On already: only the configuration changes,
        of the models to come."""
        served = refusals.serve(config, self._who, self._lacks)
        self._on()
        self.config, self._refused = served, None

    def by_environment(self) -> None:
        """Enable with the environment's configuration, which is refused when a model is built."""
        try:
            self.enable(None)
        except ConfigError as error:
            self._on()
            self.config, self._refused = FlashConfig(), error

    def disable(self) -> None:
        """Raises PatchError, changing nothing, if somebody has replaced one of the functions since."""
        if self._patchset is not None:
            self._patchset.restore()
            self._patchset = None
            optimizer_steps.stop()
        self.config, self._refused = None, None
        self.models = []

    def for_a_model(self) -> FlashConfig:
        """The configuration of a model that is being built; ends the program where the environment's is no good."""
        assert self.config is not None, "a seam is in place only between enable and disable"
        self.built += 1
        if self._refused is not None:
            refuse(self._refused)
        run_log.start(self.config, lambda: optimizer_steps.finished)
        return self.config

    def note(self, line: str) -> None:
        """Print a line about a model, on rank 0, and keep it for the report."""
        self.models.append(line)
        notices.say(line)

    def _on(self) -> None:
        if self._patchset is None:
            patchset = self._make()
            patchset.apply()
            self._patchset = patchset
            optimizer_steps.start()


def refuse(error: ConfigError | PatchError) -> NoReturn:
    """End the program before it trains: exit status 2 on every rank, the sentence on rank 0."""
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
    """A model's class and the size of what is trained: "GPT, 22.4 M parameters in float32"."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trained)
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
    size = f"{count / 1e6:.4g} M" if count >= 1e6 else f"{count}"
    return f"{name}, {size} parameters in {' and '.join(dtypes)}"
