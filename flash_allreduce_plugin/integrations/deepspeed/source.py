"""The decorator of seams in DeepSpeed's own source (see patches/).

    @flash_allreduce.seam("deepspeed.engine.bucket")
    def allreduce_bucket(self, bucket, dp_group, dp_world_size=None): ...

With the constructor's seam the section works as soon as DeepSpeed is imported, without entry point and import. The
other functions stay DeepSpeed's own on every engine without a configuration. On an engine with one the seam of that
name replaces them, as at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flash_allreduce_plugin.integrations.deepspeed import attention, engine, experts, gathering, tensor_parallel
from flash_allreduce_plugin.integrations.patching import in_source


def seam(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the place of the seam `name`.

    The seam is verified like any other: PatchError if the function no longer fits.
    """
    if name == engine.CONSTRUCTOR:
        engine.attached_by_source()
    others = (
        *gathering.of_process(),
        *attention.of_process(),
        *experts.of_process(),
        *tensor_parallel.of_process(),
    )
    of_process = {one.id: one for one in (engine.constructor(), *others)}
    if name not in of_process:
        return in_source(name, lambda original, owner, *_: engine.replacements(owner).get(name))
    replaced = functools.cache(of_process[name].replacement)
    return in_source(name, lambda original, *_: replaced(original) if engine.is_attached() else None)
