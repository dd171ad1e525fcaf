"""Our scalars in Megatron-LM's monitors, TensorBoard and Weights & Biases.

The seam is `training_log` of its training package, on the rank that has the writer (the last one), every
--tensorboard-log-interval iterations.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any

from flash_allreduce_plugin.integrations.patching import Function, Seam
from flash_allreduce_plugin.telemetry.tensorboard import Scalars

TRAINING = "megatron.training.training"
_GLOBALS = "megatron.training.global_vars"


def seams() -> list[Seam]:
    """The seam, if Megatron-LM's training package is loaded; a script without it has no monitors of Megatron's."""
    if TRAINING not in sys.modules:
        return []
    return [
        Seam(
            "megatron.monitor",
            TRAINING,
            "training_log",
            (
                ("loss_dict", "total_loss_dict", "learning_rate", "iteration", ...),
                # Up to 0.15.
                ("loss_dict", "total_loss_dict", "learning_rate", "decoupled_learning_rate", "iteration", ...),
            ),
            _with_ours,
            "gives Megatron-LM's TensorBoard and Weights & Biases writers our scalars along with its own",
        )
    ]


def _with_ours(original: Function) -> Function:
    signature, scalars = inspect.signature(original), Scalars()

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        _write(scalars, signature.bind(*args, **kwargs).arguments["iteration"])
        return answer

    return training_log


def _write(scalars: Scalars, iteration: int) -> None:
    theirs = importlib.import_module(_GLOBALS)
    writer = theirs.get_tensorboard_writer()
    if not writer or iteration % theirs.get_args().tensorboard_log_interval:
        return
    values = scalars.take()
    for tag, value in values:
        writer.add_scalar(tag, value, iteration)
    other = theirs.get_wandb_writer()
    if other and values:
        other.log(dict(values), iteration)
