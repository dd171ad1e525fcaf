"""min_sqnr_db in Megatron: a training that cannot reach its floor changes to full precision and prints a line."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from test_data_parallel import SITE, WAYS, enabled, start_megatron, train

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.policy import LOW_SQNR

# Nothing at 8 bits has 200 dB.
OUT_OF_REACH = FlashConfig(bits=7, backward_bits=8, grad_bits=8, min_bytes=0, quality_interval=1, min_sqnr_db=200.0)
TENSOR_PARALLEL = ("megatron.g.forward", "megatron.linear.dgrad")


class Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def trains(tensor_parallel: int, ways: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, for every way, counts and losses of a guarded training, and losses of a training without the plugin."""
    start_megatron(tensor_parallel)
    handler, logger = Logged(), logging.getLogger("flash_allreduce_plugin")
    logger.addHandler(handler)
    seen = []
    for way in ways:
        guarded = train(OUT_OF_REACH, tensor_parallel, **way)
        with enabled(OUT_OF_REACH):
            report = str(megatron.report())
        stock = train(None, tensor_parallel, **way)
        near = torch.allclose(torch.tensor(guarded["losses"]), torch.tensor(stock["losses"]), rtol=1e-2)
        seen.append({"counts": guarded["counts"], "equal": guarded["replicas equal"], "near": near, "report": report})
    logger.removeHandler(handler)
    return {"seen": seen, "logged": [message for message in handler.messages if "floor" in message]}


def test_tensor_parallel_reductions_go_to_full_precision() -> None:
    outcomes = run_ranks(2, trains, 2, WAYS[:1], preload=MEGATRON)
    for rank, outcome in enumerate(outcomes):
        (seen,) = outcome["seen"]
        assert seen["near"]
        for site, at_first in zip(TENSOR_PARALLEL, (7, 8), strict=True):
            quantized, full = seen["counts"][site]
            assert quantized == 2 * (9 - at_first) and full[LOW_SQNR] >= 16, (site, quantized, full)
            line = f"{site}: {quantized + full[LOW_SQNR]} calls, {quantized} quantized, in full precision: "
            assert f"{line}{full[LOW_SQNR]} {LOW_SQNR}" in seen["report"]
            said = [
                message for message in outcome["logged"] if message.startswith(f"{site} changes from 8 bits to full")
            ]
            assert len(said) == (rank == 0)


def test_data_parallel_gradients_change_to_full_precision() -> None:
    for outcome in run_ranks(2, trains, 1, WAYS[:1], preload=MEGATRON):
        for seen in outcome["seen"]:
            quantized, full = seen["counts"][SITE]
            assert seen["near"] and seen["equal"] and quantized >= 2 and full[LOW_SQNR] >= 1, seen
