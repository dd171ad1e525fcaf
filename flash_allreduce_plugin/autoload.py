"""The `torch.backends` entry point, for unmodified programs. It adds the launch flags to Megatron-LM, the section of
the JSON configuration to DeepSpeed, and attaches the integrations in FLASH_ALLREDUCE_ATTACH.

torch calls `load` at the end of `import torch`, in every program of the environment, so `load` does little. It adds two
finders to sys.meta_path, one for Megatron-LM's training package and one for DeepSpeed's engine. If the environment sets
fields, the end of a training checks that some code has read them. `load` never raises, and FLASH_ALLREDUCE_AUTOLOAD=0
turns it off. But if an integration in FLASH_ALLREDUCE_ATTACH cannot be attached, it ends a rank of torchrun before the
training. The module imports the standard library and the table of the integrations only, so that `import torch` works
where parts of this package are missing. Strings name the other modules, which load with the framework.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flash_allreduce_plugin.integrations import registry

if TYPE_CHECKING:
    import types
    from importlib.machinery import ModuleSpec

PREFIX = "FLASH_ALLREDUCE_"  # as in environment.py
SWITCH = f"{PREFIX}AUTOLOAD"
MEGATRON_LM = ("megatron.training.arguments", "megatron.training.global_vars")
LAUNCH_FLAGS = "flash_allreduce_plugin.integrations.megatron.arguments"
# Not deepspeed itself: if deepspeed imports torch, it is already half imported here.
DEEPSPEED = ("deepspeed.runtime.engine",)
JSON_SECTION = "flash_allreduce_plugin.integrations.deepspeed.engine"
ATTACH = f"{PREFIX}ATTACH"
UNSEEN = "flash_allreduce_plugin.integrations.unseen"
CONFIG, ENVIRONMENT = "flash_allreduce_plugin.config", "flash_allreduce_plugin.environment"

_log = logging.getLogger("flash_allreduce_plugin")
_waiting: dict[str, AfterImport] = {}  # by the module that is to be attached


def load() -> None:
    """Run the entry point. An error is one line of the log; only ATTACH may end torchrun or a rank."""
    try:
        off = os.environ.get(SWITCH, "").strip().lower() in ("0", "false", "no", "off")
        _attach_named(off)
        if not off:
            install()
            _attach_after(DEEPSPEED, JSON_SECTION)
            if any(name.startswith(PREFIX) for name in os.environ):
                atexit.unregister(_say_what_nobody_read)  # torch may not be the only one that calls this
                atexit.register(_say_what_nobody_read)
    except Exception as error:
        _warn(error)


def attached(named: str | None = None) -> set[str]:
    """Return the names in FLASH_ALLREDUCE_ATTACH. named: its value; None: the environment's.

    Raises ValueError, one sentence, for an unknown name.
    """
    named = os.environ.get(ATTACH, "") if named is None else named
    names = {name.strip().lower() for name in named.split(",")} - {""}
    unknown = sorted(names - {*registry.ATTACHABLE, "all"})
    if unknown:
        known = f"expected all, or names with commas: {', '.join(registry.ATTACHABLE)}"
        raise ValueError(f"{ATTACH}={named} cannot be served: {known}; {', '.join(unknown)} is none of them.")
    return set(registry.ATTACHABLE) if "all" in names else names


def _attach_named(off: bool) -> None:
    """Attach the integrations in ATTACH, each after the program has imported its framework."""
    try:
        names = attached()
        if names and off:
            value = os.environ[ATTACH]
            raise ValueError(f"{ATTACH}={value}, and {SWITCH} is off, which attaches nothing; unset one of the two.")
        if names and (_is_rank() or _is_torchrun()):
            importlib.import_module(CONFIG).FlashConfig.from_env()
    except ValueError as error:  # or a ConfigError, which is one
        return _refuse(str(error))
    if names:
        _attach_after(("torch.optim.optimizer",), UNSEEN, "expect")
    for name, row in registry.ATTACHABLE.items():
        if name in names:
            _attach_after(row.waits_for, row.attach_module, "by_environment")


def _refuse(why: str) -> None:
    """End torchrun, or a rank of another launcher. A process that may be another program gets a message only."""
    if not _is_torchrun() and not _is_rank():
        _log.warning("flash_allreduce_plugin is not attached: %s", why)
        return
    if _is_torchrun() or os.environ["RANK"] == "0":
        print(f"flash all-reduce: {why}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _is_torchrun() -> bool:
    # The command line of Python: `python .../torchrun`, or `python -m torch.distributed.run`.
    return any(os.path.basename(word) in ("torchrun", "torch.distributed.run") for word in sys.orig_argv[:4])


def _is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _say_what_nobody_read() -> None:
    """Print, on rank 0 at the end of a program of several ranks, the settings that no code has read."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    contract: Any = sys.modules.get("flash_allreduce_plugin.integrations.contract")
    # The arguments of init_process_group outlive destroy_process_group.
    if c10d is None or not (c10d.is_initialized() or getattr(c10d, "_default_pg_init_method", None)):
        return
    if contract is not None and contract.refused:  # it has printed why
        return
    config, environment = importlib.import_module(CONFIG), importlib.import_module(ENVIRONMENT)
    fields = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in environment.VARIABLES)
    rank = c10d.get_rank() if c10d.is_initialized() else int(os.environ.get("RANK") or 0)
    named = os.environ.get(ATTACH, "").strip()
    saving: Any = sys.modules.get("flash_allreduce_plugin.integrations.autosave")
    if os.environ.get(environment.AUTOSAVE, "").strip() and rank == 0 and not (saving and saving.has_resumed()):
        print(
            f"flash all-reduce: {environment.AUTOSAVE} is set, and has saved nothing: no attached model of DDP, FSDP2 "
            "or Megatron has reduced gradients on rank 0 (scripts of Megatron-LM: its checkpoints have the state)",
            flush=True,
        )
    unseen: Any = sys.modules.get(UNSEEN)
    if unseen is not None and unseen.said:
        return
    if named and rank == 0 and unseen is not None and (line := unseen.line()):
        print(f"flash all-reduce: {line}", flush=True)
    elif named and rank == 0 and not _anything_built():
        print(
            f"flash all-reduce: {ATTACH}={named}, and {_why_nothing(named)} on rank 0; nothing was "
            'quantized (DeepSpeed\'s engines: the section "flash_allreduce")',
            flush=True,
        )
    elif fields and rank == 0 and not config.FlashConfig.from_env_was_called:
        print(
            f"flash all-reduce: set, and read by nothing in this program: {', '.join(fields)}; flash_allreduce was "
            'attached to nothing (Megatron: --flash-allreduce; DeepSpeed: the section "flash_allreduce"; DDP, FSDP: '
            f"{ATTACH}=all, or a hook of your own)",
            flush=True,
        )


def _why_nothing(named: str) -> str:
    """Say why the integrations in `named` have attached nothing."""
    names = {name.strip().lower() for name in named.split(",")}
    modules = [module for name, row in registry.ATTACHABLE.items() if name in names for module in row.waits_for]
    if modules and not any(module in sys.modules for module in modules):
        return f"this program has not imported {' or '.join(modules)}"
    return "this program has built no such model"


def _anything_built() -> bool:
    """Return True if an integration of ATTACH has seen a model, or DeepSpeed or a hook has quantized anything."""
    rooms = [sys.modules.get(f"flash_allreduce_plugin.integrations.{name}.attach") for name in ("ddp", "fsdp")]
    megatron: Any = sys.modules.get("flash_allreduce_plugin.integrations.megatron")
    groups: Any = sys.modules.get("flash_allreduce_plugin.integrations.megatron.attach")
    counters: Any = sys.modules.get("flash_allreduce_plugin.telemetry.counters")
    return (
        any(room is not None and room.integration.built for room in rooms)
        or (megatron is not None and megatron.is_enabled())
        or (groups is not None and groups.has_begun())
        or (counters is not None and bool(counters.totals()))
    )


def install() -> None:
    """Add the launch flags as soon as Megatron-LM's training package is imported, now if it already is.

    The launcher (`python -m flash_allreduce_plugin.megatron`) calls it for every FLASH_ALLREDUCE_AUTOLOAD.
    """
    _attach_after(MEGATRON_LM, LAUNCH_FLAGS)


def _attach_after(modules: Sequence[str], ours: str, function: str = "attach") -> None:
    """Import our module named `ours` and call its `function`, when `modules` are imported."""
    if ours not in _waiting:
        _waiting[ours] = AfterImport(modules, lambda: getattr(importlib.import_module(ours), function)())
        _waiting[ours].install()


class AfterImport:
    """A finder that calls `action` once, after all `modules` have been executed, and then removes itself.

    The finder takes the module's spec from the finders behind it and does not change it: the loader keeps its type, and
    its `exec_module` is shadowed on the instance for one execution. A failing `action` is one line of the log; the
    import that triggered it succeeds. A later importlib.reload of a module is not observed.
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
        """Return the spec of the finders behind this one, with its loader watched; None for all other modules."""
        if self not in sys.meta_path:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        self._notice_executed()
        watched = name in self._missing
        # importlib iterates over the live list: after removing itself, this finder must answer for its neighbour too.
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
        # A loader that is a class (built-in, frozen) belongs to many modules; _notice_executed handles those.
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
        except AttributeError:  # no attributes allowed: _notice_executed handles it
            return

    def _notice_executed(self) -> None:
        """Handle modules that were imported, or being imported, before this finder existed."""
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
    _log.warning("flash_allreduce_plugin is not attached: %s: %s", type(error).__name__, text)
