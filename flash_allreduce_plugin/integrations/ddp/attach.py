"""Attach a hook to every DistributedDataParallel that is built while `fap.ddp.enable` is on.

The constructor registers the hook. If the program registers another, ours calls it, because torch accepts one hook a
model, for good. A copy of a model (copy.deepcopy, torch.load) gets a new hook, and a saved file has none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import autosave
from flash_allreduce_plugin.integrations.contract import ModelIntegration, described, unknown_group
from flash_allreduce_plugin.integrations.ddp.hook import Hook, started
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME

MODULE = "torch.nn.parallel.distributed"
DDP = f"{MODULE}.DistributedDataParallel"
# The settings of torch's reducer in C++, and the same in Python.
_BUILTIN = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}

_hooks: WeakKeyDictionary[DistributedDataParallel, Hook] = WeakKeyDictionary()


class _DDP(ModelIntegration):
    def stopped(self) -> None:
        """Make attached models reduce in full precision."""
        for hook in _hooks.values():
            reduction = hook.reduction
            reduction.config = reduction.config.model_copy(update={"enabled": False})
        _hooks.clear()


def _patchset() -> Patchset:
    methods: list[tuple[str, Any, Callable[[Function], Function], str]] = [
        ("__init__", ("self", "module", ...), _with_hook, "registers a hook"),
        ("register_comm_hook", ("self", "state", "hook"), _giving_way, "lets the program's hook go first"),
        ("_register_builtin_comm_hook", ("self", "comm_hook_type"), _giving_way_to_builtin, "the same"),
        ("__getstate__", ("self",), _without_hook, "leaves the hook out of copies and files"),
        ("__setstate__", ("self", "state"), _with_hook, "registers a hook with a copy"),
    ]
    seams = [
        Seam(f"ddp.{name.strip('_')}", MODULE, f"DistributedDataParallel.{name}", signature, replacement, covers)
        for name, signature, replacement, covers in methods
    ]
    return Patchset("ddp", seams, f"{BY_NAME['ddp'].fits} (installed: {torch.__version__})")


integration = _DDP(
    "ddp",
    _patchset,
    {"ddp.gradients": (f"{DDP}.register_comm_hook", "the gradients' buckets of every model that is attached")},
)


def _with_hook(original: Function) -> Function:
    @functools.wraps(original)
    def build(self: DistributedDataParallel, *arguments: Any, **keywords: Any) -> None:
        config = integration.for_a_model()
        original(self, *arguments, **keywords)
        _serve(self, config)

    return build


def _without_hook(original: Function) -> Function:
    @functools.wraps(original)
    def __getstate__(self: DistributedDataParallel) -> dict[str, Any]:
        state: dict[str, Any] = original(self)
        ours = _hooks.get(self)
        if ours is not None:
            state["_comm_hooks"] = [(hook, other) for hook, other in self._comm_hooks if hook is not ours]
        return state

    return __getstate__


def _serve(ddp: DistributedDataParallel, config: FlashConfig) -> None:
    model = f"DistributedDataParallel ({described(type(ddp.module).__name__, ddp.module.parameters())})"
    why = _why_not(ddp, config)
    if why is not None:
        integration.note(f"{model} is left alone: {why}")
        return
    alive = weakref.ref(ddp.module)
    autosave.watch(lambda: _parameters(alive()), dist.get_world_size(ddp.process_group))
    hook = Hook(config, [], model)
    ddp.register_comm_hook(None, hook)
    _hooks[ddp] = started(hook)
    integration.models.append(f"attached to {model}")


def _parameters(module: torch.nn.Module | None) -> Iterable[torch.Tensor]:
    return () if module is None else module.parameters()


def _why_not(model: DistributedDataParallel, config: FlashConfig) -> str | None:
    """Return why a model cannot be quantized as a whole, or None."""
    if model._comm_hooks:
        return "it has a hook already (torch's mixed precision registers one)"
    if model._use_python_reducer and (config.warmup_steps or config.error_feedback):
        return "warmup_steps and error_feedback need buckets, and torch's Python reducer (optimize_ddp) has none"
    why = unknown_group([model.process_group], next(iter(model.module.parameters())).device)
    if why is not None:
        return why
    ranks, all_ranks = dist.get_world_size(model.process_group), dist.get_world_size()
    if ranks < all_ranks and not any(hasattr(parameter, "_st_info") for parameter in model.module.parameters()):
        return (
            f"its group has {ranks} of {all_ranks} ranks, and nothing says which parameters the others have copies of; "
            "register fap.ddp_hook(config, replicated=...) by hand"
        )
    return None


def _gives_way(model: DistributedDataParallel, state: Any, hook: Any, name: str) -> bool:
    """Return True if `model` had our hook, and make it the program's hook."""
    ours = _hooks.pop(model, None)
    if ours is None:
        return False
    ours.give_way(state, hook)
    model._comm_hooks[:] = [(hook, state)]
    assert model.logger is not None
    model.logger._set_comm_hook_name(name)
    line = f"DistributedDataParallel ({type(model.module).__name__}): the program's own hook {name} replaces ours"
    integration.note(line)
    return True


def _giving_way(original: Function) -> Function:
    @functools.wraps(original)
    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        if self in _hooks:
            self._check_comm_hook(hook)
        if not _gives_way(self, state, hook, getattr(hook, "__qualname__", "hook")):
            original(self, state, hook)

    return register_comm_hook


def _giving_way_to_builtin(original: Function) -> Function:
    @functools.wraps(original)
    def _register_builtin_comm_hook(self: DistributedDataParallel, comm_hook_type: Any) -> None:
        same = _BUILTIN.get(comm_hook_type)
        if same is None or not _gives_way(self, self.process_group, same, str(comm_hook_type)):
            original(self, comm_hook_type)

    return _register_builtin_comm_hook
