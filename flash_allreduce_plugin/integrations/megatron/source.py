"""The decorator of seams in Megatron's own source (see patches/).

    @flash_allreduce.seam("megatron.g.forward")
    def forward(ctx, input_, group): ...

A marked function is Megatron's own before `enable` and after `disable`. Between them the seam of that name replaces it,
as at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.patching import in_source


def seam(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the place of the seam `name`.

    `enable` checks it like any other seam and raises PatchError if the function no longer fits.
    """

    @functools.cache
    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        return next(seam for seam in megatron.seams() if seam.id == name).replacement(original)

    return in_source(name, lambda original, *_: replaced(original) if megatron.is_enabled() else None)
