"""Fewer KV heads than tensor-parallel ranks: the gather of QKV along the last dimension, and its reduce-scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from flash_allreduce_plugin import policy
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations.megatron import grouped_queries, tensor_parallel
from flash_allreduce_plugin.telemetry import counters
from tests.integrations.megatron.test_groups import (
    BATCH,
    HIDDEN,
    LAYERS,
    SEQUENCE,
    batch,
    gpt,
    start,
    transformer_config,
)

FORWARD, BACKWARD = grouped_queries.FORWARD.name, grouped_queries.BACKWARD.name
WIDTH = HIDDEN + 2 * HIDDEN // 4  # of QKV: four heads of queries, one of keys and one of values


def observe() -> dict[str, Any]:
    from flash_allreduce_plugin.integrations import megatron

    start(tensor_model_parallel_size=2)
    model = gpt(transformer_config(num_query_groups=1))
    found: dict[str, Any] = {}
    for name, config in {
        "stock": None,
        "forward": FlashConfig(bits=8, min_bytes=0),
        "both": FlashConfig(bits=8, backward_bits=8, min_bytes=0),
    }.items():
        counters.reset_stats()
        if config is not None:
            megatron.enable(config)
        try:
            tokens, positions, mask, labels = batch(0)
            model.zero_grad()
            loss = model(tokens, positions, mask, labels=labels).mean()
            loss.backward()
        finally:
            megatron.disable()
        weights = {key: one.grad.tolist() for key, one in model.named_parameters() if one.grad is not None}
        found[name] = {"loss": float(loss), "gradients": weights, "sites": counters.stats()["sites"]}
    return found


def test_the_gather_of_qkv_and_its_reduce_scatter_are_quantized() -> None:
    try:
        transformer_config(num_query_groups=1)
    except ValueError as refused:
        pytest.skip(f"this megatron-core refuses fewer KV heads than tensor-parallel ranks: {refused}")
    first, second = run_ranks(2, observe, timeout=200, preload=MEGATRON)
    for found in (first, second):
        stock, both = found["stock"], found["both"]
        assert both["loss"] == pytest.approx(stock["loss"], rel=1e-2)
        for key, expected in stock["gradients"].items():
            exact, ours = torch.tensor(expected), torch.tensor(both["gradients"][key])
            assert (ours - exact).norm() <= 0.05 * exact.norm(), key
        for site in (FORWARD, BACKWARD):
            counted = both["sites"][site]
            assert (counted["calls"], counted["quantized"]) == (LAYERS, LAYERS)
            assert counted["bytes_full_precision"] == LAYERS * SEQUENCE * BATCH * WIDTH * 4 // 2
            assert counted["bytes_sent"] < 0.3 * counted["bytes_full_precision"]
        assert found["forward"]["sites"][BACKWARD]["full_precision"] == {policy.is_full("backward_bits"): LAYERS}
        assert both["sites"][tensor_parallel.G_FORWARD.name]["quantized"] == 2 * LAYERS
    copies = [key for key in first["both"]["gradients"] if "layernorm" in key]
    assert copies and all(first["both"]["gradients"][key] == second["both"]["gradients"][key] for key in copies)
