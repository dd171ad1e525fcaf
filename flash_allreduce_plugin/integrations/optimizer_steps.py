"""Optimizer steps of this process, for warmup_steps of attached models without a framework's count.

Counted by torch's own hook on all optimizers (`register_optimizer_step_post_hook`). Of several optimizers the one with
the most steps counts. One with a `step` of a checkpoint in its state (Adam) continues from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from flash_allreduce_plugin.integrations import patching


class OptimizerSteps:
    """finished: steps so far; those of a loaded state may be written to it. after: called when one was counted."""

    def __init__(self) -> None:
        self.finished = 0
        self.after: list[Callable[[], None]] = []
        self._most = 0
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._users = 0
        self._handle: Any = None

    def start(self) -> None:
        """Count, until `stop` has been called as often."""
        self._users += 1
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._stepped)

    def stop(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._handle.remove()
            self._handle = None
            self.after.clear()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if patching.locals_of("_init_optim_state") is not None:
            return  # torch.distributed.checkpoint makes a step with zeros, so that there is a state to load into
        before = self._counts.get(optimizer)
        count = 1 + (restored(optimizer) if before is None else before)
        self._counts[optimizer] = count
        if count > self._most:
            self._most = count
            self.finished = max(self.finished + 1, count)
        for call in self.after:
            call()


def restored(optimizer: torch.optim.Optimizer) -> int:
    """Return the steps before the one that has just been made, by the optimizer's own count; 0 if it keeps none."""
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    steps += [group["step"] for group in optimizer.param_groups if "step" in group]  # apex, Transformer Engine
    return max(int(max(steps, key=float)) - 1, 0) if steps else 0


#: Of this process.
optimizer_steps = OptimizerSteps()
