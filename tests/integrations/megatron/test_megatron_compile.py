"""torch.compile over Megatron's parallel layers under fap.megatron.enable(): the bits of the layer as it is."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import pytest
import torch

from tests.distributed import Ranks

pytest.importorskip("megatron.core")

import flash_allreduce_plugin as fap

BACKENDS = ("eager", "aot_eager", "inductor")
CONFIG = fap.FlashConfig(bits=4, backward_bits=8, sequence_parallel_gather_bits=8, min_bytes=0)


def step(layer: torch.nn.Module, run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    output, _ = run(x)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def layers(folder: str) -> dict[str, tuple[bool, int, int]]:
    """Return for every layer and backend: True if the bits equal those without a graph; quantized calls of both."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    import torch._inductor.config
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flash_allreduce_plugin.cli.demo.model import prepare_cpu

    torch._inductor.config.compile_threads = 1
    warnings.simplefilter("ignore")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    prepare_cpu()
    fap.megatron.enable(CONFIG)
    found = {}
    for sequence_parallel in (False, True):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        how = {"config": config, "init_method": torch.nn.init.normal_, "bias": False}
        row = RowParallelLinear(64, 32, input_is_parallel=True, skip_bias_add=False, **how)
        column = ColumnParallelLinear(32, 64, gather_output=False, **how)
        for name, layer in (("row", row), ("column", column)):
            torch.manual_seed(5 + (torch.distributed.get_rank() if name == "row" or sequence_parallel else 0))
            x = torch.randn(8, 4, 32)
            fap.reset_stats()
            expected = step(layer, layer, x)
            plain = fap.stats()["quantized"]
            for backend in BACKENDS:
                torch._dynamo.reset()
                fap.reset_stats()
                result = step(layer, torch.compile(layer, backend=backend), x)
                same = all(map(torch.equal, result, expected))
                parallel = "sequence" if sequence_parallel else "tensor"
                found[f"{name}, {parallel} parallel, {backend}"] = same, plain, fap.stats()["quantized"]
    fap.megatron.disable()
    return found


def test_compiled_and_eager_layers_have_the_same_bits() -> None:
    with tempfile.TemporaryDirectory() as folder, Ranks(2) as ranks:
        for found in ranks.run(layers, folder):
            assert len(found) == 12
            for name, (same, plain, graph) in found.items():
                assert same and plain == graph > 0, name
