"""A line on rank 0, once, when Muon steps on gradients of fewer than 8 bits.

Muon gives all singular directions of a matrix the same size. The rounding errors of the small directions grow with them
(docs/decide/accuracy_controls.md#muon).
"""

from __future__ import annotations

from flash_allreduce_plugin.config.wording import variable
from flash_allreduce_plugin.telemetry import counters, notices

_BITS = 8

_said = False


def stepped(optimizer: object) -> None:
    """An optimizer has made a step on reduced gradients."""
    global _said
    if _said or not any("muon" in one.__name__.lower() for one in type(optimizer).__mro__):
        return
    few = {
        site: one["bits"]
        for site, one in counters.stats()["sites"].items()
        if "gradients" in site and one["bits"] is not None and one["bits"] < _BITS
    }
    if few:
        _said = True
        keys = sorted({"grad_bits" if site.startswith("megatron") else "bits" for site in few})
        notices.say(
            f"{type(optimizer).__name__} steps on gradients of "
            f"{', '.join(f'{bits} bits ({site})' for site, bits in sorted(few.items()))}, and Muon enlarges their "
            "rounding errors (validation loss at 4 bits +2.71 %, preset int4 +0.85 %, 8 bits +0.06 %); set "
            f"{' and '.join(f'{key} to {_BITS} ({variable(key)}={_BITS}, or the JSON)' for key in keys)}"
        )
