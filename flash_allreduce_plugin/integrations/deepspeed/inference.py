"""deepspeed.init_inference: its exchanges are not quantized, and rank 0 says so after `enable`."""

from __future__ import annotations

import functools
from typing import Any

from flash_allreduce_plugin.integrations.patching import Function, Seam
from flash_allreduce_plugin.telemetry import notices


def seam() -> Seam:
    """The constructor of the engine that init_inference builds."""
    return Seam(
        "deepspeed.inference",
        "deepspeed.inference.engine",
        "InferenceEngine.__init__",
        ("self", "model", "config"),
        _says,
        "says that exchanges of init_inference stay in full precision",
    )


def _says(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, model: Any, config: Any) -> None:
        original(self, model, config)
        if (ranks := config.tensor_parallel.tp_size) > 1:
            notices.say(
                f"deepspeed.init_inference is not served: the exchanges of its {ranks} tensor-parallel ranks stay in "
                "full precision. fap.deepspeed.enable serves engines of deepspeed.initialize."
            )

    return __init__
