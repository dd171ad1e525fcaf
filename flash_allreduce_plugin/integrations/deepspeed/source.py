"""For sources of DeepSpeed that carry the seams themselves (see patches/): what their lines call.

    @flash_allreduce.seam("deepspeed.engine.bucket")
    def allreduce_bucket(self, bucket, dp_group, dp_world_size=None): ...

With the constructor's seam the section counts as soon as DeepSpeed is imported, without entry point and import. The
other functions are DeepSpeed's own on every engine without a configuration; on one with it they are what the seam of
that name makes of them, as if they had been replaced at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flash_allreduce_plugin.integrations.deepspeed import attention, engine, experts, gathering, tensor_parallel
from flash_allreduce_plugin.integrations.patching import in_source


def seam(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the place of the seam `name`.

    It is checked like any other and raises PatchError if the function no longer fits.
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
