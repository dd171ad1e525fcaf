"""The seams on Transformer Engine's own sources: where TRANSFORMER_ENGINE_PATH names a folder that holds them.

    pip download --no-deps --only-binary=:all: --platform=any transformer_engine==2.18.0
    unzip -d te transformer_engine-2.18.0-py3-none-any.whl
    TRANSFORMER_ENGINE_PATH=te pytest tests/integrations/megatron/test_transformer_engine_sources.py

TE's Linear and LayerNormLinear run on CPU with the products and the layer norm in torch (te_shim.py, written for the
sources of 2.18; those of other releases import other parts of TE's extension).
"""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import attention, scopes, transformer_engine
from flash_allreduce_plugin.integrations.patching import Patchset
from flash_allreduce_plugin.telemetry import counters
from tests.distributed import run_ranks
from tests.integrations.megatron import te_shim
from tests.integrations.megatron.test_transformer_engine import (
    DGRAD,
    GATHER,
    REGATHER,
    SP_DGRAD,
    SP_G,
    SP_G_BACKWARD,
    G,
    error,
)

FOLDER = os.environ.get("TRANSFORMER_ENGINE_PATH")
if FOLDER is None:
    pytest.skip("TRANSFORMER_ENGINE_PATH names no folder with Transformer Engine's sources", allow_module_level=True)

CONFIG = FlashConfig(bits=8, backward_bits=8, sequence_parallel_gather_bits=8, min_bytes=0)
LAYERS = [("Linear", "column"), ("Linear", "row"), ("LayerNormLinear", "column")]  # a row-parallel one has no norm


def observe(folder: str) -> bytes:
    torch.set_num_threads(1)
    engine = te_shim.install(Path(folder))
    transformer_engine.left_alone = lambda group, scope: scope.full_precision  # type: ignore[attr-defined]
    seen = {}
    for sequence_parallel in (False, True):
        for kind, mode in LAYERS:
            torch.manual_seed(3)
            layer = getattr(engine, kind)(
                *(64, 64),
                sequence_parallel=sequence_parallel,
                tp_group=dist.group.WORLD,
                tp_size=2,
                parallel_mode=mode,
                device="cpu",
            )
            torch.nn.init.normal_(layer.weight, std=0.1)
            seen[sequence_parallel, kind, mode] = layer_runs(layer, sequence_parallel)
    return pickle.dumps(seen)


def layer_runs(layer: Any, sequence_parallel: bool) -> Any:
    torch.manual_seed(7 + dist.get_rank() * sequence_parallel)
    x = torch.randn(16, 2, layer.weight.shape[1])

    def run() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        output = layer(leaf)
        output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
        return [output.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]

    stock = run()
    patchset = Patchset("transformer engine", transformer_engine.seams(lambda: CONFIG))
    patchset.apply()
    counters.reset_stats()
    quantized = run()
    sites = {name: (site["quantized"], site["full_precision"]) for name, site in counters.stats()["sites"].items()}
    with torch.no_grad():
        inference = layer(x)
    patchset.restore()
    return stock, quantized, sites, inference, run()


@pytest.fixture(scope="module")
def seen() -> list[dict[Any, Any]]:
    return [pickle.loads(rank) for rank in run_ranks(2, observe, str(FOLDER), timeout=300)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("kind", "mode"), LAYERS)
def test_the_layers_of_transformer_engine(
    seen: list[dict[Any, Any]], kind: str, mode: str, sequence_parallel: bool
) -> None:
    same: Callable[..., bool] = lambda ours, theirs: all(map(torch.equal, ours, theirs))  # noqa: E731
    expected = {
        ("column", False): {DGRAD},
        ("row", False): {G},
        ("column", True): {GATHER, REGATHER, SP_DGRAD},
        ("row", True): {SP_G, SP_G_BACKWARD},
    }[mode, sequence_parallel]
    for rank in seen:
        stock, quantized, sites, inference, afterwards = rank[sequence_parallel, kind, mode]
        assert sites == dict.fromkeys(expected, (1, {}))
        errors = [error(found, exact) for found, exact in zip(quantized, stock, strict=True)]
        assert 0 < max(errors) < 0.05
        assert torch.equal(inference, quantized[0]), "without gradients TE calls forward with no ctx"
        assert same(afterwards, stock)


def exchanges(folder: str) -> dict[str, Any]:
    """Run TE's own function before and after attention. It is cut out of a file with imports that need CUDA."""
    torch.set_num_threads(1)
    path = next(
        path for name in attention.TE_MODULES if (path := Path(folder, *name.split(".")).with_suffix(".py")).exists()
    )
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in EXCHANGED]
    for one in functions:
        one.decorator_list, one.returns = [], None
        for argument in one.args.args:
            argument.annotation = None
    module = types.ModuleType("attention_of_transformer_engine")
    module.torch = torch  # type: ignore[attr-defined]
    exec(compile(ast.Module(functions, []), str(path), "exec"), vars(module))
    sys.modules[module.__name__] = module
    world, group = dist.get_world_size(), dist.group.WORLD
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda: SimpleNamespace(wait_stream=lambda _: None)  # type: ignore[assignment]
    chunks = torch.arange(2 * world)
    local, whole = torch.randn(2, 2, 8, 4, 32), torch.randn(2, 2 * world, 8, 4 // world, 32)
    call: Any = module.flash_attn_a2a_communicate  # type: ignore[attr-defined]
    names = "a2a_input_names" in inspect.signature(call).parameters

    def run() -> list[torch.Tensor]:
        how = {"a2a_input_names": ["q", "k", "v"]} if names else {}
        there = module.flash_attn_a2a_communicate(  # type: ignore[attr-defined]
            [local.flatten(1, 2).clone() for _ in range(3)], chunks, 1, world, group, None, True, **how
        )
        how = {"a2a_input_names": ["out"]} if names else {}
        back = module.flash_attn_a2a_communicate(  # type: ignore[attr-defined]
            whole.flatten(1, 2).clone(), chunks, 1, world, group, None, False, **how
        )
        return [*there, back]

    seam = attention.of_transformer_engine(module.__name__, lambda: EXCHANGING)[0]
    patchset = Patchset("transformer engine", [seam])
    stock = run()
    patchset.apply()
    counters.reset_stats()
    token = scopes._pass.set("forward")
    quantized = run()
    scopes._pass.reset(token)
    sites = {name: (site["quantized"], site["full_precision"]) for name, site in counters.stats()["sites"].items()}
    patchset.restore()
    return {"stock": stock, "quantized": quantized, "sites": sites, "afterwards": run()}


EXCHANGED = ("get_bsh_dims", "reorder_seq_chunks_for_a2a_before_attn", "reorder_seq_chunks_for_a2a_after_attn")
EXCHANGED += (
    "reorder_seq_chunks_for_a2a",
    "flash_attn_a2a_communicate",
)
EXCHANGING = FlashConfig(attention_bits=8, min_bytes=0)


def test_the_exchanges_of_its_attention() -> None:
    for rank in run_ranks(2, exchanges, str(FOLDER)):
        assert rank["sites"] == {attention.TE_EXCHANGE.name: (4, {})}
        assert all(map(torch.equal, rank["stock"], rank["afterwards"]))
        for ours, theirs in zip(rank["quantized"], rank["stock"], strict=True):
            assert ours.shape == theirs.shape and 0 < error(ours, theirs) < 0.02
