"""FLASH_ALLREDUCE_ATTACH=megatron: programs on megatron-core that nobody edits and that know no flags of ours, such as
those of NeMo and Megatron-Bridge.

Each of them calls `megatron.core.parallel_state.initialize_model_parallel` on every rank before it builds a model, or
builds a model with groups of its own. The first of the two enables the seams with the configuration of the
environment, once. Megatron-LM's own scripts are served before, by arguments.py, as if they had been given
--flash-allreduce. A program that calls `fap.megatron.enable` itself keeps its configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import for_megatron
from flash_allreduce_plugin.config.wording import variable
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations import autosave, megatron
from flash_allreduce_plugin.integrations.contract import refuse
from flash_allreduce_plugin.integrations.megatron import arguments, autosaved, refusals, scopes
from flash_allreduce_plugin.integrations.patching import Patchset, Seam
from flash_allreduce_plugin.integrations.registry import BY_NAME
from flash_allreduce_plugin.telemetry import notices

_SUPPORTED = BY_NAME["megatron"].fits
# megatron-core's wrappers whose gradients do not pass through the buffers of its DistributedDataParallel.
_SHARDED = ("TorchFullyShardedDataParallel", "FullyShardedDataParallel")  # the latter is Megatron-FSDP

_SOURCE = scopes.Source(variable, variable, f"{environment.ATTACH}=megatron", refuse)

_asked = False  # the first groups, or the first model, have been served


def by_environment() -> None:
    """Wrap initialize_model_parallel and the constructor of models, once their modules are imported.

    Raises PatchError, changing nothing, if they are not as this version knows them.
    """
    _start().apply()


def has_begun() -> bool:
    """Return True if groups or a model of megatron-core were seen: the program may have disabled the seams since."""
    return _asked


@functools.cache
def _start() -> Patchset:
    groups = Seam(
        "megatron.attach.start",
        "megatron.core.parallel_state",
        "initialize_model_parallel",
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", ...),
        _with_start,
        f"enables the seams where {environment.ATTACH} names megatron",
    )
    # A configuration may be older than the seams, whose own check of it (refusals.helpers) has then not seen it.
    modules = Seam(
        "megatron.attach.modules",
        "megatron.core.transformer.module",
        "MegatronModule.__init__",  # every model and every wrapper around one passes here
        ("self", "config", ...),
        _checked,
        "enables the seams, and refuses options that bypass the collectives",
    )
    return Patchset("megatron attach", [groups, modules], _SUPPORTED)


def _with_start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_model_parallel(*positional: Any, **keywords: Any) -> Any:
        result = original(*positional, **keywords)
        _enable()
        return result

    return initialize_model_parallel


def _enable() -> None:
    global _asked
    if _asked or arguments.started:
        return
    _asked = True  # whoever disables it later means it, and groups may be made again
    if megatron.is_enabled():
        notices.say(f"the program has enabled Megatron's seams itself; {environment.ATTACH} changes nothing there")
        return
    saves = autosave.watch(autosaved.owned, 0, scopes.step)
    try:
        config = for_megatron(FlashConfig.from_env())
        megatron.enable_from(config, _SOURCE)
        if saves:
            autosaved.patchset(_SUPPORTED).apply()
    except (ConfigError, PatchError) as error:
        refuse(error)
    notices.say(f"attached to megatron-core, {arguments.in_place()} seams, {arguments.settings(config)}")


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, config: Any, *positional: Any, **keywords: Any) -> None:
        _enable()
        original(self, config, *positional, **keywords)
        if megatron.is_enabled():
            source = scopes.source()
            lines = refusals.refusals(config, refusals.field, source.plugin) + _of_wrapper(type(self).__name__, source)
            if lines:
                source.refuse(ConfigError("\n".join(lines)))
            if type(self).__name__ in _SHARDED:
                autosave.watch(None, 0)

    return __init__


def _of_wrapper(name: str, source: scopes.Source) -> list[str]:
    """Return why the configuration excludes a wrapper of this class. For a preset it is only printed."""
    config = megatron.current_config()
    served = name == "FullyShardedDataParallel" and megatron.serves_fsdp()
    if name not in _SHARDED or served or config.grad_bits == "full":
        return []
    why = f"the gradients of {name} do not pass through Megatron's own data-parallel buffers"
    if "grad_bits" in config.given():
        return [f"{source.spelled('grad_bits')} has no effect here: {why}; leave it at full."]
    notices.say(f"{why}: they go in full precision")
    return []
