"""Rank 0's lines about the first steps in Megatron: every field that would have quantized a traffic of a step."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from test_data_parallel import start_megatron
from test_megatron_parameters import trained

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.telemetry import counters
from flash_allreduce_plugin.telemetry.notices import in_python
from tests.integrations.megatron import test_groups

STEPS = 4
ALL = {"bits": 8, "backward_bits": 8, "sequence_parallel_gather_bits": 8, "grad_bits": 8, "min_bytes": 0}


def noticed(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the lines about sites while `run` runs; the report; other traffic of torch.distributed."""
    counters.reset_stats()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        run()
    lines = [line.removeprefix("flash all-reduce: ") for line in text.getvalue().splitlines() if "has quan" in line]
    return {"lines": lines, "report": str(megatron.report()), "beside": sorted(fap.stats()["beside"])}


def dense() -> dict[str, Any]:
    """Train at TP 2 x DP 2 with the distributed optimizer in bfloat16, with the default fields."""
    start_megatron(2)
    with trained(FlashConfig(min_bytes=0), tp=2) as training:
        seen = noticed(lambda: training.run(0, STEPS))
    with trained(FlashConfig(min_bytes=0, param_bits=8), tp=2, dtype=torch.float32) as training:
        seen["float32"] = noticed(lambda: training.run(0, STEPS))["beside"]
    return seen


def test_the_default_fields_of_tensor_and_data_parallelism() -> None:
    first, *others = run_ranks(4, dense, timeout=200, preload=MEGATRON)
    assert all(other["lines"] == [] for other in others)
    named = {line.partition(" ")[0]: line.partition("calls: ")[2] for line in first["lines"]}
    assert named == {
        "megatron.embedding.forward": f"embedding (set {in_python('quantize_embedding')})",
        "megatron.linear.dgrad": f"backward_bits is full (set {in_python('backward_bits')})",
        "megatron.data_parallel.gradients": f"grad_bits is full (set {in_python('grad_bits')})",
        "megatron.data_parallel.parameters": f"param_bits is full (set {in_python('param_bits')})",
    }
    assert not any(name.startswith(("all_gather, DATA", "reduce_scatter")) for name in first["beside"])
    assert first["report"].splitlines()[0].startswith("megatron.g.forward: ")
    assert "in place, nothing sent: megatron.f.backward, " in first["report"]


def experts(dispatcher: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Train on four ranks, TP 2, EP 4: the parts of an expert are on one rank. SGD counts the steps."""
    layer = test_groups.moe_layer(dispatcher, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    x = torch.randn(8, test_groups.BATCH, test_groups.HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))

    def run() -> None:
        for _ in range(STEPS):
            with test_groups.CpuForCuda():
                layer(x.clone().requires_grad_())[0].square().sum().backward()
            optimizer.step()

    megatron.enable(FlashConfig.from_dict(fields))
    seen = noticed(run)
    megatron.disable()
    return seen


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_experts_with_everything_on_print_nothing(dispatcher: str) -> None:
    """Check that neither routing maps nor groups of one rank get a line."""
    first, *_ = run_ranks(4, experts, dispatcher, {**ALL, "expert_bits": 8}, timeout=200, preload=MEGATRON)
    assert first["lines"] == []


def test_an_exchange_of_experts_is_named_with_all_its_fields() -> None:
    first, *_ = run_ranks(4, experts, "alltoall", {"min_bytes": 0, "expert_bits": 8}, timeout=200, preload=MEGATRON)
    named = {line.partition(" calls: ")[0]: line.partition(" calls: ")[2] for line in first["lines"]}
    for way in ("dispatch", "combine"):
        said = named[f"megatron.expert.all_to_all.{way} has quantized 3 of its 6"]
        assert said == f"backward_bits is full (set {in_python('backward_bits')})"


def alone() -> dict[str, Any]:
    """Train on one rank: tensor parallelism of size 1."""
    test_groups.start(tensor_model_parallel_size=1)
    model = test_groups.gpt(test_groups.transformer_config(tensor_model_parallel_size=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run() -> None:
        for step in range(STEPS):
            tokens, positions, mask, labels = test_groups.batch(step)
            model(tokens, positions, mask, labels=labels).mean().backward()
            optimizer.step()

    megatron.enable(FlashConfig(min_bytes=0))
    seen = noticed(run)
    megatron.disable()
    return seen


def test_nothing_is_printed_where_nothing_could_be_sent() -> None:
    (seen,) = run_ranks(1, alone, timeout=200, preload=MEGATRON)
    assert seen["lines"] == []
    assert all(line.startswith("in place, nothing sent: ") for line in seen["report"].splitlines())


def inference(fields: dict[str, Any]) -> dict[str, Any]:
    test_groups.start(tensor_model_parallel_size=2)
    model = test_groups.gpt(test_groups.transformer_config()).eval()

    def run() -> None:
        tokens, positions, mask, _ = test_groups.batch(0)
        with torch.no_grad():
            for _ in range(210):  # an embedding and two layers of two sums each
                model(tokens, positions, mask)

    megatron.enable(FlashConfig.from_dict(fields))
    seen = noticed(run)
    megatron.disable()
    return seen


def test_a_process_that_only_infers_gets_the_notice() -> None:
    first, second = run_ranks(2, inference, {"bits": 8, "min_bytes": 1 << 20}, timeout=200, preload=MEGATRON)
    small = f"message below min_bytes (largest 4 KiB, min_bytes 1 MiB; set {in_python('min_bytes')}"
    assert first["lines"] == [
        f"megatron.embedding.forward has quantized none of its 200 calls: {small} and "
        f"{in_python('quantize_embedding')})",
        f"megatron.g.forward has quantized none of its 800 calls: {small})",
    ]
    assert second["lines"] == []
