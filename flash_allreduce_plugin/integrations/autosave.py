"""FLASH_ALLREDUCE_AUTOSAVE=FOLDER:STEPS: the state of attached models, for programs that do not save it.

    step 500: rank r writes FOLDER/rank_r/500-<sum over its weights' bits>.pt     its last two files are kept
    a later run, first reduction: rank r looks for a file of its present weights; all ranks load one, or none does

So the weights identify a state, independent of the names of the program's checkpoints, and a run with other weights
starts again. runtime/checkpoint.py has the states. megatron/autosaved.py handles Megatron's models, and counts steps
itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from flash_allreduce_plugin.collectives import messages
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.collectives.weight_differences import digest_of
from flash_allreduce_plugin.environment import AUTOSAVE
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations.contract import refuse
from flash_allreduce_plugin.integrations.optimizer_steps import optimizer_steps
from flash_allreduce_plugin.runtime import checkpoint
from flash_allreduce_plugin.telemetry import notices

KEPT = 2
_NAME = re.compile(r"\d+-[0-9a-f]{16}\.pt")

Weights = Callable[[], Iterable[torch.Tensor]]


class _Saver:
    def __init__(self, folder: Path, every: int, finished: Callable[[], int] | None) -> None:
        self.folder, self.every = folder, every
        self.models: list[Weights] = []
        self.resumed = False
        self.finished = finished or (lambda: optimizer_steps.finished)
        if finished is None:
            optimizer_steps.after.append(self.stepped)  # until nothing is attached any more

    def stepped(self) -> None:
        """Write the state. With several optimizers each one does; the last write has the saved weights."""
        if not self.resumed or self.finished() % self.every:
            return
        path = self.mine() / f"{self.finished()}-{self.digest()}.pt"
        try:
            checkpoint.write(path, checkpoint.registered())
            ours = [file for file in self.mine().iterdir() if _NAME.fullmatch(file.name)]
            for old in sorted(ours, key=lambda file: file.stat().st_mtime_ns)[:-KEPT]:
                os.unlink(old)
        except OSError as error:
            warnings.warn(f"flash_allreduce: {AUTOSAVE}: {path}: {error.strerror}; training continues.", stacklevel=2)

    def resume(self) -> None:
        """Load the state of these weights; collective, once."""
        self.resumed = True
        group = dist.group.WORLD
        assert group is not None
        path = next(self.mine().glob(f"*-{self.digest()}.pt"), None)
        step = None if path is None else int(path.name.partition("-")[0])
        label = Label("all_gather", "autosave", group)
        found = [told["step"] for told in messages.gather_json({"step": step}, label, "looking for a saved state")]
        known = [count for count in found if count is not None]
        if not known:
            if self.mine().exists():
                notices.say(f"{AUTOSAVE}: no state in {self.folder} is of these weights; residuals start again")
        elif checkpoint.load_file(path, checkpoint.registered(), str(self.folder), step=max(known)):
            optimizer_steps.finished = max(known)
            notices.say(f"{AUTOSAVE}: resumes from the state of step {max(known)} in {self.folder}")

    def mine(self) -> Path:
        return self.folder / f"rank_{dist.get_rank():05d}"

    def digest(self) -> str:
        """Return the digest of this rank's weights of all models."""
        sums = [digest_of(one) for weights in self.models for one in weights()]
        return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


_saver: _Saver | None = None


def watch(weights: Weights | None, ranks: int, finished: Callable[[], int] | None = None) -> bool:
    """Watch an attached model. Return True if its state is saved.

    weights: returns this rank's part of its parameters; None if it has no state. ranks: number of ranks of its sums.
    finished: the framework's count of steps, if the framework calls `after_step` itself; None: torch's optimizers.

    Ends the program before it trains where FLASH_ALLREDUCE_AUTOSAVE is no FOLDER:STEPS, or cannot serve the model.
    """
    global _saver
    text = os.environ.get(AUTOSAVE, "").strip()
    if not text:
        return False
    folder, _, steps = text.rpartition(":")
    if not folder or not steps.isdecimal() or int(steps) == 0:
        refuse(ConfigError(f"{AUTOSAVE}={text} is not valid; expected FOLDER:STEPS, such as run/flash:500."))
    if weights is None or (finished is None and ranks < dist.get_world_size()):
        world = dist.get_world_size()
        kind = "of another kind" if weights is None else f"reduced over {ranks} of {world} ranks"
        refuse(
            ConfigError(
                f"{AUTOSAVE} serves Megatron's DistributedDataParallel, torch's, and FSDP2 over all ranks, and this "
                f"model is {kind}; unset it, and save fap.state_dict() with the program's checkpoint."
            )
        )
    if _saver is None or (finished is None and _saver.stepped not in optimizer_steps.after):
        _saver = _Saver(Path(folder), int(steps), finished)
    _saver.models.append(weights)
    return True


def after_step() -> None:
    """A step of a framework that counts its own is finished, with its weights."""
    if _saver is not None:
        _saver.stepped()


def has_resumed() -> bool:
    """Return True if an attached model has reduced anything, so that its state is saved."""
    return _saver is not None and _saver.resumed


def before_reduction() -> None:
    """Load a saved state of the weights, if there is one, before a run's first reduction. Collective, on all ranks."""
    if _saver is not None and not _saver.resumed:
        _saver.resume()
