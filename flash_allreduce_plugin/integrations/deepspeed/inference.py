"""deepspeed.init_inference: the sums of its split layers (tensor_parallel.py), after `enable` or by
FLASH_ALLREDUCE_ATTACH.

Its configuration forbids unknown keys, so there is no section. Kernel injection has all-reduces of its own, which stay
in full precision. Rank 0 prints a line for each engine of several tensor-parallel ranks.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError, PatchError
from flash_allreduce_plugin.integrations import contract
from flash_allreduce_plugin.integrations.deepspeed import tensor_parallel
from flash_allreduce_plugin.integrations.deepspeed.reduction import LOGITS
from flash_allreduce_plugin.integrations.patching import Function, Patchset, Seam
from flash_allreduce_plugin.telemetry import notices, other_traffic, run_log
from flash_allreduce_plugin.telemetry.notices import FirstSteps

_config: FlashConfig | None = None
_served: WeakKeyDictionary[Any, tensor_parallel.Sums] = WeakKeyDictionary()


def configure(config: FlashConfig | None) -> None:
    """Quantize engines that are built from now on with `config`. None: restore the sums of all engines."""
    global _config
    _config = config
    if config is None:
        for engine, sums in list(_served.items()):
            sums.disown()
            other_traffic.detach(engine)
        _served.clear()


def by_environment() -> None:
    """Quantize engines of init_inference with the environment's configuration, by FLASH_ALLREDUCE_ATTACH.

    End the program if that configuration is refused.
    """
    from flash_allreduce_plugin.integrations.deepspeed import engine

    try:
        engine.attach_inference(FlashConfig.from_env())
    except (ConfigError, PatchError) as error:
        contract.refuse(error)


def is_served() -> bool:
    """Return True if a living engine is quantized."""
    return bool(_served)


def seam(tensors: Patchset) -> Seam:
    """Return the seam of the constructor of the engine that init_inference builds. tensors: the seams of its layers."""
    return Seam(
        "deepspeed.inference",
        "deepspeed.inference.engine",
        "InferenceEngine.__init__",
        ("self", "model", "config"),
        functools.partial(_serves, tensors),
        "quantizes the sums of the layers that init_inference has split",
    )


def _serves(tensors: Patchset, original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, model: Any, config: Any) -> None:
        original(self, model, config)
        if _config is None or (ranks := config.tensor_parallel.tp_size) < 2:
            return
        if tensor_parallel.layers(self.module):
            tensors.apply()
            _serve(self, _config, ranks)
        else:
            notices.say(
                f"deepspeed.init_inference is not served: the model has no layers of AutoTP, and what its {ranks} "
                "tensor-parallel ranks exchange stays in full precision (kernel injection has sums of its own)."
            )

    return __init__


def _serve(engine: Any, config: FlashConfig, ranks: int) -> None:
    run_log.start(config)
    first_steps = FirstSteps(config, known=(LOGITS,))
    sums = tensor_parallel.Sums(engine, config, first_steps.of, lambda: None)
    # A model in evaluation mode is the purpose here: quantize_evaluation does not count.
    sums.own(engine.module, evaluates=False)
    _served[engine] = sums
    other_traffic.attach(engine)
    gives = f"sums of {ranks} tensor-parallel ranks in {sums.config.bits} bits"
    for line in (notices.attached("deepspeed.init_inference", gives, sums.config), *sums.unmatched()):
        notices.say(line)
