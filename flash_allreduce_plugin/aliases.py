"""Old names of modules, for checkpoints, forks and programs that name them.

`import flash_allreduce_plugin.megatron` gives the module integrations.megatron itself, not a second copy. The package
adds the finder to sys.meta_path.
"""

from __future__ import annotations

import importlib
import importlib.machinery
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_PACKAGE = __package__
#: Old name -> name. A module of an old package has the new package's name before its own.
MOVED = {
    "attachment": "integrations.contract",
    "autosave": "integrations.autosave",
    "checkpoint": "runtime.checkpoint",
    "checks": "api.checks",
    "collectives.copies": "collectives.replicated_params",
    "collectives.differences": "collectives.weight_differences",
    "collectives.presence": "collectives.missing_ranks",
    "collectives.runs": "collectives.all_to_all",
    "decision": "runtime.decision",
    "deepspeed.places": "integrations.deepspeed.engine_seams",
    "dispatch": "api.reductions",
    "groups": "runtime.groups",
    "patching": "integrations.patching",
    "quality.meter": "collectives.meter",
    "quality.sample": "collectives.sample",
    "rooted": "api.one_to_many",
    "running": "runtime.stages",
    "sends": "api.sends",
    "shapes": "collectives.state_shapes",
    "steps": "integrations.optimizer_steps",
    "telemetry.beside": "telemetry.other_traffic",
    "tensors": "api.tensors",
    "topology": "policy.topology",
    "traced": "runtime.traced",
    **{
        name: f"integrations.{name}"
        for name in ("apex", "context_parallel", "ddp", "deepspeed", "fsdp", "megatron", "pipelining")
    },
}


class Finder:
    """Finds modules by their old names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(name)
        if new is None:
            return None
        if name.endswith(".__main__"):  # for python -m, which asks the loader for code
            from importlib import util

            found = util.find_spec(new)
            return None if found is None else util.spec_from_file_location(name, found.origin)
        try:
            module = importlib.import_module(new)
        except ModuleNotFoundError as error:
            if error.name == new:
                return None
            raise
        return importlib.machinery.ModuleSpec(
            name, cast("Any", _Loader(module)), origin=module.__file__, is_package=hasattr(module, "__path__")
        )


class _Loader:
    """Gives a module that has been imported, and leaves it as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has written the old name's


def new_name(name: str) -> str | None:
    """Return the name of the module that had this one (both with the package's name), or None."""
    package, _, inner = name.partition(".")
    if package != _PACKAGE:
        return None
    parts = inner.split(".")
    for count in range(len(parts), 0, -1):
        new = MOVED.get(".".join(parts[:count]))
        if new is not None:
            return ".".join([package, new, *parts[count:]])
    return None
