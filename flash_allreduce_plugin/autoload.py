"""The `torch.backends` entry point: adds the launch flags to an unmodified Megatron-LM script.

torch calls `load` at the end of `import torch`, in every program of the environment, so it does next to nothing:
it puts a finder on sys.meta_path that waits for Megatron-LM's own training package. `load` never raises, and
FLASH_ALLREDUCE_AUTOLOAD=0 turns it off. Only the standard library is imported here; the rest of the package is
named by strings and loaded when Megatron-LM is.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import types
    from importlib.machinery import ModuleSpec

SWITCH = "FLASH_ALLREDUCE_AUTOLOAD"
MEGATRON_LM = ("megatron.training.arguments", "megatron.training.global_vars")
LAUNCH_FLAGS = "flash_allreduce_plugin.megatron.arguments"

_log = logging.getLogger("flash_allreduce_plugin")
_waiting: AfterImport | None = None


def load() -> None:
    """The entry point. Never raises: what goes wrong is one line of the log."""
    try:
        if os.environ.get(SWITCH, "").strip().lower() not in ("0", "false", "no", "off"):
            install()
    except Exception as error:
        _warn(error)


def install() -> None:
    """Add the launch flags as soon as Megatron-LM's training package is imported, now if it already is.

    The launcher (`python -m flash_allreduce_plugin.megatron`) calls it whatever FLASH_ALLREDUCE_AUTOLOAD says.
    """
    global _waiting
    if _waiting is None:
        _waiting = AfterImport(MEGATRON_LM, _add_launch_flags)
        _waiting.install()


def _add_launch_flags() -> None:
    importlib.import_module(LAUNCH_FLAGS).attach()


class AfterImport:
    """Calls `action` once, when every one of `modules` has been executed; a finder until then, gone after.

    The finder asks those behind it for the module's spec and changes nothing in it: the loader keeps its type,
    and its `exec_module` is shadowed on the instance for one execution. A failing `action` is one line of the log;
    the import that triggered it succeeds. importlib.reload of a module afterwards is importlib's own affair.
    """

    def __init__(self, modules: Iterable[str], action: Callable[[], None]) -> None:
        self._missing = set(modules)
        self._action = action

    def install(self) -> None:
        """Start waiting."""
        sys.meta_path.insert(0, self)
        self._notice_executed()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the finders behind this one give, its loader watched; None for all other modules."""
        if self not in sys.meta_path:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        self._notice_executed()
        watched = name in self._missing
        # importlib walks the live list: having left it just now, this finder answers for its neighbour too.
        if not watched and self in sys.meta_path:
            return None
        for finder in behind:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if watched:
                    self._watch(name, spec.loader)
                return spec
        return None

    def _watch(self, name: str, loader: Any) -> None:
        # A loader that is a class (built-in, frozen) is shared by many modules; _notice_executed serves those.
        if loader is None or isinstance(loader, type) or not hasattr(loader, "exec_module"):
            return
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            if module.__name__ != name:  # a loader that serves several modules
                execute(module)
                return
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
            execute(module)
            self._executed(name)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # no room for attributes: _notice_executed serves it
            return

    def _notice_executed(self) -> None:
        """Modules that were imported, or being imported, before this finder was there."""
        for name in tuple(self._missing):
            module = sys.modules.get(name)
            if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                self._executed(name)

    def _executed(self, name: str) -> None:
        if name not in self._missing:
            return
        self._missing.discard(name)
        if self._missing:
            return
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            self._action()
        except Exception as error:
            _warn(error)


def _warn(error: Exception) -> None:
    # Not warnings.warn: a filter may turn that into an exception.
    text = " ".join(str(error).split())
    _log.warning("the launch flags of flash_allreduce_plugin are not available: %s: %s", type(error).__name__, text)
