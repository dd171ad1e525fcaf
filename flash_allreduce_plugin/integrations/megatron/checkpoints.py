"""Megatron-LM's checkpoints: each rank's state is in the folder of the iteration, next to Megatron-LM's files.

The seams are `save_checkpoint` and `load_checkpoint` of its training package. A script that saves with megatron-core's
dist_checkpointing, or with its own code, calls fap.state_dict and fap.load_state_dict.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from flash_allreduce_plugin.collectives.error_feedback import Feedback
from flash_allreduce_plugin.integrations.megatron import data_parallel, parameters, scopes
from flash_allreduce_plugin.integrations.patching import Function, Seam
from flash_allreduce_plugin.runtime import checkpoint

CHECKPOINTING = "megatron.training.checkpointing"
_TRAINING = "megatron.training.training"  # imports the two functions by name
_GLOBALS = "megatron.training.global_vars"


class _Gradients:
    """The state of Megatron in this process that a checkpoint has."""

    @property
    def feedback(self) -> Feedback | None:
        return data_parallel.residuals.feedback

    def numbers(self) -> dict[str, float]:
        return {checkpoint.STEP: scopes.step(), **parameters.buckets.numbers()}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        scopes.set_step(int(numbers.get(checkpoint.STEP, scopes.step())))
        parameters.buckets.set_numbers(numbers)


_gradients = _Gradients()


def start() -> None:
    """Add Megatron's state to fap.state_dict from now on."""
    checkpoint.register("megatron", _gradients)


def stop() -> None:
    checkpoint.unregister("megatron", _gradients)


def seams() -> list[Seam]:
    """The seams, if Megatron-LM's training package is loaded."""
    theirs = sys.modules.get(CHECKPOINTING)
    if theirs is None:
        return []
    found = []
    for module in (CHECKPOINTING, _TRAINING):
        for name, signature, replacement, covers in (
            (
                "save_checkpoint",
                ("iteration", "model", "optimizer", "opt_param_scheduler", ...),
                _saves,
                "writes the state of a resumed run into a checkpoint's folder",
            ),
            (
                "load_checkpoint",
                ("ddp_model", "optimizer", "opt_param_scheduler", "load_arg", ...),
                _loads,
                "reads the state of a resumed run in a checkpoint's folder",
            ),
        ):
            function = vars(sys.modules.get(module, theirs)).get(name)
            if module == CHECKPOINTING or (function is vars(theirs).get(name) and module in sys.modules):
                found.append(Seam(f"{module}.{name}", module, name, signature, replacement, covers))
    return found


def _saves(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        # After Megatron-LM, which warns of a folder that is not empty.
        given = signature.bind(*args, **kwargs).arguments
        if not given.get("release"):
            _save(int(given["iteration"]), bool(given.get("non_persistent_ckpt")))
        return answer

    return save_checkpoint


def _save(iteration: int, non_persistent: bool) -> None:
    owners, args = checkpoint.registered(), _arguments()
    kind = args.non_persistent_ckpt_type if non_persistent else "global"
    if not owners or kind != "global":
        return
    folder = _folder(_non_persistent(args, args.save) if non_persistent else args.save, iteration)
    if "://" in folder:
        if dist.get_rank() == 0:
            warnings.warn(
                f"flash_allreduce: {folder} is no folder of a file system; the plugin's state is not saved there.",
                stacklevel=3,
            )
        return
    checkpoint.save(folder, owners)


def _loads(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        given, theirs = signature.bind(*args, **kwargs).arguments, _arguments()
        resumes = given["optimizer"] is not None and not theirs.finetune and not theirs.no_load_optim
        if answer[0] > 0 and resumes and given.get("load_arg", "load") == "load":
            _load(theirs, int(answer[0]))
        return answer

    return load_checkpoint


def _load(args: Any, iteration: int) -> None:
    """All ranks together."""
    owners, folder = checkpoint.registered(), _folder(args.load, iteration)
    if not owners:
        return
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        rival = _folder(_non_persistent(args, args.load), iteration)
        folder = rival if os.path.isdir(rival) else folder
    checkpoint.load(folder, owners, step=iteration)


def _arguments() -> Any:
    return importlib.import_module(_GLOBALS).get_args()


def _non_persistent(args: Any, folder: str) -> str:
    """Return Megatron-LM's folder of checkpoints that it deletes later."""
    given: str | None = args.non_persistent_global_ckpt_dir
    return given or os.path.join(folder, "non_persistent")


def _folder(folder: str, iteration: int) -> str:
    return os.path.join(folder, f"iter_{iteration:07d}")
