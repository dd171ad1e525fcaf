"""Backward passes, counted by the modules that are reduced."""

from __future__ import annotations

from collections.abc import Hashable


class Passes:
    """Backward passes, counted without autograd: a pipeline's stage reduces its gradients outside of them.

    A pass begins with the reduction of a module that the pass before has reduced.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._reduced: set[Hashable] = set()

    def begins(self, module: Hashable) -> bool:
        """Note the reduction of `module`; return True if a pass begins with it."""
        begins = module in self._reduced or not self._reduced
        if begins:
            self.begun += 1
            self._reduced.clear()
        self._reduced.add(module)
        return begins
