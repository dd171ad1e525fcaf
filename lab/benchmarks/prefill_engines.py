"""Three ways to share the layers of a Llama among ranks for inference: torch's tensor parallelism, DeepSpeed's AutoTP
and Megatron's static engine.

Each is called with token ids [1, sequence] and returns logits [1, 1 or sequence, vocabulary], the last token's last.
`active(variant)` puts a variant in place: "no collectives", "bf16" (the engine's own), or a FlashConfig as JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.integrations.patching import Patchset, Seam
from lab.benchmarks import ranks, step_time, steps
from lab.benchmarks.llama import Layer, Llama, pretrained
from lab.benchmarks.smollm2 import Pretrained

NO_COLLECTIVES, EXACT = "no collectives", "bf16"
#: The sum of one token stays in full precision.
MIN_BYTES = 1 << 16
COLUMNS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
ROWS = ("attn_output", "ffn_down")


def config_of(variant: str) -> fap.FlashConfig:
    return fap.FlashConfig.from_dict({"min_bytes": MIN_BYTES, **json.loads(variant)})


def _in_place(variant: str, silent: Patchset, integration: Any) -> AbstractContextManager[None]:
    """Put a variant in place. silent: leaves the sums out. integration: enables ours."""
    if variant == NO_COLLECTIVES:
        return steps.patched(silent)
    return contextlib.nullcontext() if variant == EXACT else steps.enabled(integration, config_of(variant))


class Torch:
    """parallelize_module with ColwiseParallel and RowwiseParallel."""

    def __init__(self, weights: Pretrained, length: int, variants: Sequence[str]) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
        plan |= {name: RowwiseParallel() for name in ROWS}
        self.model = pretrained(weights).bfloat16()
        for layer in self.model.blk:
            parallelize_module(layer, mesh, plan)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.model.logits(ids)

    def active(self, variant: str) -> AbstractContextManager[None]:
        module, signature = "torch.distributed.tensor.placement_types", ("self", "tensor", "mesh", "mesh_dim")
        unsummed = lambda original: lambda self, tensor, mesh, mesh_dim: tensor  # noqa: E731
        seam = Seam("benchmark.sum", module, "Partial._reduce_value", signature, unsummed, "nothing is sent")
        return _in_place(variant, Patchset("no collectives", [seam]), fap.tensor_parallel)


class AutoTP:
    """deepspeed.init_inference. An engine keeps its sums for life: there is one for each configuration."""

    def __init__(self, weights: Pretrained, length: int, variants: Sequence[str]) -> None:
        self.engines = {EXACT: self._engine(pretrained(weights))}
        for variant in variants:
            if variant not in (NO_COLLECTIVES, EXACT):
                fap.deepspeed.enable(config_of(variant))
                self.engines[variant] = self._engine(pretrained(weights))
        self.running = self.engines[EXACT]

    def _engine(self, model: Llama) -> Any:
        import deepspeed

        for layer in model.blk:
            for name in ROWS:  # AutoTP cuts nn.Linear, and no class derived from it
                row = getattr(layer, name)
                linear = nn.Linear(row.in_features, row.out_features, bias=False)
                linear.weight = row.weight
                setattr(layer, name, linear)
        # Without transformers installed: AutoTP compares the class of a block with that of GPT-2's.
        absent: Any = ModuleType("transformers")
        absent.models = SimpleNamespace(gpt2=SimpleNamespace(modeling_gpt2=SimpleNamespace(GPT2Block=None)))
        there = {} if importlib.util.find_spec("transformers") else {"transformers": absent}
        with mock.patch.dict(sys.modules, there):
            return deepspeed.init_inference(
                model,
                tensor_parallel={"tp_size": dist.get_world_size(), "tp_grain_size": 1},
                dtype=torch.bfloat16,
                injection_policy={Layer: tuple(f".{name}" for name in ROWS)},
            ).eval()

    def __call__(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.running.module.logits(ids)
        return logits

    @contextlib.contextmanager
    def active(self, variant: str) -> Iterator[None]:
        from deepspeed import comm

        silent = variant == NO_COLLECTIVES
        self.running = self.engines[EXACT if silent else variant]
        unsummed = mock.patch.object(comm, "inference_all_reduce", lambda tensor, **_: tensor)
        with unsummed if silent else contextlib.nullcontext():
            yield


class Megatron:
    """StaticInferenceContext and GPTInferenceWrapper: the forward step of megatron-core's StaticInferenceEngine.

    The engine itself asks for CUDA events. The embedding is cut too, and its sum is one more of the same size.
    """

    def __init__(self, weights: Pretrained, length: int, variants: Sequence[str]) -> None:
        from lab.benchmarks import megatron_llama

        model = megatron_llama.build(weights.config, length)
        megatron_llama.load(model, weights)
        from megatron.core.inference.contexts import StaticInferenceContext
        from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
        from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
        from megatron.core.transformer.enums import AttnBackend

        settings: Any = model.bfloat16().config
        settings.params_dtype, settings.attention_backend = torch.bfloat16, AttnBackend.local
        given = InferenceWrapperConfig(weights.config.hidden, torch.bfloat16, -1, weights.config.vocabulary, 1, length)
        self.wrapper = GPTInferenceWrapper(model, given, StaticInferenceContext(1, length))

    def __call__(self, ids: Tensor) -> Tensor:
        self.wrapper.prep_model_for_inference()
        given = self.wrapper.prep_inference_input(ids)
        logits: Tensor = self.wrapper.run_one_forward_step(
            self.wrapper.get_batch_for_context_window(given, 0, ids.shape[1])
        )
        return logits

    def active(self, variant: str) -> AbstractContextManager[None]:
        return _in_place(variant, step_time.without_collectives(), fap.megatron)


class Engine(Protocol):
    """A model that is shared by all ranks, and its variants."""

    def __init__(self, weights: Pretrained, length: int, variants: Sequence[str]) -> None: ...

    def __call__(self, ids: Tensor) -> Tensor: ...

    def active(self, variant: str) -> AbstractContextManager[None]: ...


ENGINES: dict[str, type[Engine]] = {"torch": Torch, "autotp": AutoTP, "megatron": Megatron}


def start(engine: str) -> None:
    """Start the process group in a rank, by DeepSpeed for its engine."""
    if engine == "autotp":
        ranks.start_deepspeed(attach=False)
    else:
        ranks.start()
