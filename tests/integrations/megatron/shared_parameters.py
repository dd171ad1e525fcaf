"""Writes the digests of all parameters at the end of a training by Megatron-LM. For tests only.

A rank writes parameters_<rank>.json into its folder. A key names the parameter and the part of the model that the rank
has. Ranks with the same key have copies of one parameter. A test compares their digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch

from flash_allreduce_plugin.autoload import AfterImport


def digests(chunks: list[torch.nn.Module]) -> dict[str, str]:
    from megatron.core import parallel_state as groups

    found = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            tied = getattr(parameter, "shared_embedding", False)  # the first and the last stage have a copy
            key = "embedding" if tied else f"stage {groups.get_pipeline_model_parallel_rank()}, chunk {number}, {name}"
            if getattr(parameter, "tensor_model_parallel", False):
                key += f", tensor rank {groups.get_tensor_model_parallel_rank()}"
            if not getattr(parameter, "allreduce", True):
                key += f", expert rank {groups.get_expert_model_parallel_rank()}"
            found[key] = hashlib.sha256(parameter.detach().float().numpy().tobytes()).hexdigest()
    return found


def write_after_training() -> None:
    training: Any = sys.modules["megatron.training.training"]
    own = training.train

    def train(forward_step_func: Any, model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
        answer = own(forward_step_func, model, *args, **kwargs)
        with open(f"parameters_{os.environ['RANK']}.json", "w") as file:
            json.dump(digests(model), file)
        return answer

    training.train = train


if "RANK" in os.environ:
    AfterImport(["megatron.training.training"], write_after_training).install()
