"""apex, present or absent, makes no difference: gradient accumulation fusion on and off, stock and quantized.

With fusion a column-parallel layer adds its weight's gradient to `weight.main_grad` in a CUDA kernel of apex
(`fused_weight_gradient_mlp_cuda`), between the start of the input gradient's collective and the wait for it. A
stand-in with the kernel's functions and their parameters does the same sum in torch.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_ranks

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    # not importorskip: Megatron looks for apex when it is imported, and a rank has the stand-in only then
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.cli.demo.model import ModelSize, build_model, finish_gradients, loss_of, prepare_cpu
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import sequence_parallel, tensor_parallel
from flash_allreduce_plugin.telemetry import counters

WORLD = 2
KERNELS = "fused_weight_gradient_mlp_cuda"
SIZE = ModelSize(hidden=64, layers=1, heads=4, sequence=32, batch=2)
CONFIG = FlashConfig(bits=8, backward_bits=8, sequence_parallel_gather_bits=8, min_bytes=0)
DATA = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(5))

calls: list[str] = []


def kernels() -> types.ModuleType:
    """Return apex's extension: d_weight [out, in] += d_output [n, out]^T x input [n, in], in place."""
    module = types.ModuleType(KERNELS)

    def accumulate(name: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        def kernel(input_2d: torch.Tensor, d_output_2d: torch.Tensor, d_weight: torch.Tensor) -> None:
            calls.append(name)
            d_weight.add_(d_output_2d.t().matmul(input_2d))

        return kernel

    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(module, name, accumulate(name))
    return module


def gpt(with_sequence_parallel: bool, fused: bool) -> torch.nn.Module:
    model = build_model(SIZE, tensor_parallel=WORLD, sequence_parallel=with_sequence_parallel, seed=3)
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = fused
    return model


def train(model: torch.nn.Module, fused: bool, group: Any) -> list[float]:
    """Return losses of three steps; main_grad stands in for Megatron's buffer and is added to autograd's gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        loss = loss_of(model, DATA, torch.tensor([0, 1000]) + 40 * step, SIZE.sequence)
        loss.backward()
        for parameter in model.parameters():
            if fused:
                rest = 0 if parameter.grad is None else parameter.grad
                parameter.grad = parameter.main_grad + rest
            else:
                assert not parameter.main_grad.any()
        finish_gradients(model, group, clip=1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.mm.default:
            self.lines.append("product")
        return function(*args, **(kwargs or {}))


def order(model: torch.nn.Module, collective: str) -> list[str]:
    """Log the operations of a column-parallel layer's backward, while the plugin is enabled."""
    layer = model.decoder.layers[0].mlp.linear_fc1
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x = torch.randn(16, 2, SIZE.hidden, requires_grad=True)
    log, real = Log(), getattr(reductions, collective)

    class Handle:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def wait(self) -> Any:
            log.lines.append("wait")
            return self.handle.wait()

    def logged(*tensors: Any, **keywords: Any) -> Handle:
        log.lines.append("start")
        return Handle(real(*tensors, **keywords))

    output = layer(x)[0]
    setattr(reductions, collective, logged)
    try:
        with log:
            output.sum().backward()
    finally:
        setattr(reductions, collective, real)
    return log.lines


def observe(with_apex: bool) -> bytes:
    if with_apex:
        sys.modules[KERNELS] = kernels()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=WORLD)
    prepare_cpu()
    group = parallel_state.get_tensor_model_parallel_group()
    seen: dict[Any, Any] = {"found": layers._grad_accum_fusion_available}
    for with_sequence_parallel in (False, True):
        for fused in (False, True) if with_apex else (False,):
            for quantized in (False, True):
                if quantized:
                    megatron.enable(CONFIG)
                counters.reset_stats()
                calls.clear()
                losses = train(gpt(with_sequence_parallel, fused), fused, group)
                sites = counters.stats()["sites"]
                seen[with_sequence_parallel, fused, quantized] = losses, list(calls), sites
                if quantized:
                    collective = "reduce_scatter" if with_sequence_parallel else "all_reduce"
                    seen["order", with_sequence_parallel, fused] = order(gpt(with_sequence_parallel, fused), collective)
                    megatron.disable()
    return pickle.dumps(seen)


@pytest.fixture(scope="module")
def absent() -> list[dict[Any, Any]]:
    if importlib.util.find_spec(KERNELS) is not None:
        pytest.skip("apex is installed: how Megatron does without it cannot be seen here")
    return [pickle.loads(seen) for seen in run_ranks(WORLD, observe, False)]


@pytest.fixture(scope="module")
def present() -> list[dict[Any, Any]]:
    return [pickle.loads(seen) for seen in run_ranks(WORLD, observe, True)]


BOTH_WAYS = pytest.mark.parametrize("with_sequence_parallel", [False, True])


@BOTH_WAYS
def test_fusion_on_and_off_give_the_same_bits(present, with_sequence_parallel):
    for seen in present:
        assert seen["found"]
        (stock, _, fired), (quantized, _, sites) = (seen[with_sequence_parallel, False, q] for q in (False, True))
        assert stock != quantized and fired == {}
        for way, losses in ((False, stock), (True, quantized)):
            fused, kernel_calls, fused_sites = seen[with_sequence_parallel, True, way]
            assert fused == losses
            # three steps, two column-parallel and two row-parallel layers in a block, and the LM head
            assert kernel_calls == ["wgrad_gemm_accum_fp32"] * 3 * (4 * SIZE.layers + 1)
            assert fused_sites == (sites if way else {})
        dgrad = sequence_parallel.LINEAR_DGRAD if with_sequence_parallel else tensor_parallel.LINEAR_DGRAD
        assert sites[dgrad.name]["quantized"] == 3 * (2 * SIZE.layers + 1)


@BOTH_WAYS
def test_the_input_gradient_is_sent_during_the_weights_product_either_way(present, with_sequence_parallel):
    for seen in present:
        for fused in (False, True):
            assert seen["order", with_sequence_parallel, fused] == ["product", "start", "product", "wait"]


@BOTH_WAYS
def test_without_apex_everything_is_the_same(absent, present, with_sequence_parallel):
    for ours, theirs in zip(absent, present, strict=True):
        assert not ours["found"]
        for quantized in (False, True):
            losses, kernel_calls, _ = ours[with_sequence_parallel, False, quantized]
            assert losses == theirs[with_sequence_parallel, False, quantized][0] and kernel_calls == []
