"""A line on rank 0 when an optimizer steps on and the gradients of its model are reduced no more.

After an error in a backward pass FSDP2 reduces nothing, silently (pytorch#196996). `no_sync` may be left on.

1. An integration makes a `Reductions` for each model and notes every reduction.
2. torch's hook on all optimizers counts the steps of each since the last reduction.
3. At the third step in a row rank 0 prints a line, once for each model, if the optimizer holds parameters of the model
   and these have gradients.

Gradient accumulation, skipped steps, alternating models and frozen models do not lead to the line: there a reduction
comes before each step, or the gradients are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from flash_allreduce_plugin.telemetry import muon, notices

_STEPS = 3

steps = 0  # of all optimizers, while any reductions are noted

_models: WeakSet[Reductions] = WeakSet()
_hook: Any = None


class Reductions:
    """The optimizer's steps since the last reduction of one model's gradients."""

    def __init__(
        self,
        model: str,
        with_gradients: Callable[[], Iterable[torch.Tensor]] | None = None,
        finished_steps: Callable[[], int] | None = None,
    ) -> None:
        """model: its name in the line.

        with_gradients: returns the model's parameters that have gradients now; None: every optimizer is the model's.
        finished_steps: the framework's count, where one step calls an optimizer several times.
        """
        self._model, self._with_gradients, self._finished_steps = model, with_gradients, finished_steps
        self._silent: dict[int, int] | None = None  # steps of each optimizer; None: nothing was reduced yet
        self._last = -1
        self._said = False

    def noted(self) -> None:
        """A gradient of the model is reduced."""
        global _hook
        if self._silent is None:
            _models.add(self)
            if _hook is None:
                _hook = register_optimizer_step_post_hook(_stepped)
        if self._silent is None or self._silent:
            self._silent = {}

    def forget(self) -> None:
        """Reductions are noted no more: do not expect any."""
        self._silent = None
        _models.discard(self)
        _unhook()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        if self._silent is None or self._said:
            return
        if self._finished_steps is not None:
            finished = self._finished_steps()
            if finished == self._last:
                return
            self._last = finished
        count = self._silent[id(optimizer)] = self._silent.get(id(optimizer), 0) + 1
        if count >= _STEPS and self._concerns(optimizer):
            self._said = True
            notices.say(
                f"{self._model}: {count} steps of the optimizer in a row had no reduction of gradients, and steps "
                "before them had. Look for a no_sync that is left on; after an error in a backward pass torch may "
                "reduce nothing until the model is built again (pytorch#196996)."
            )

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer steps on gradients of this model that no wrapper of its module has reduced."""
        if self._with_gradients is None:
            return True
        held = {id(one) for group in optimizer.param_groups for one in group["params"]} & self._identities()
        for other in _models:
            if other is not self and other._silent is not None and other._silent.get(id(optimizer), 0) <= 1:
                held -= other._identities()
        return bool(held)

    def _identities(self) -> set[int]:
        return set() if self._with_gradients is None else set(map(id, self._with_gradients()))


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global steps
    steps += 1
    muon.stepped(optimizer)
    for model in list(_models):
        model.stepped(optimizer)
    # torch iterates over the hooks: removing one of them raises RuntimeError if another one follows.
    if _hook is not None and next(reversed(_global_optimizer_post_hooks)) == _hook.id:
        _unhook()


def _unhook() -> None:
    global _hook
    if not _models and _hook is not None:
        _hook.remove()
        _hook = None
