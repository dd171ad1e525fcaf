"""A preset in Megatron: settings that cannot act are left out, with a line."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace

import pytest

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from test_data_parallel import start_megatron
from test_megatron_parameters import trained

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.integrations.megatron import parameters, refusals
from flash_allreduce_plugin.telemetry import counters


def left_out() -> tuple[list[bool], bool, bool, list[str]]:
    """Train where parameters are not supported. Return quantized gradients and parameters, copies, and lines."""
    start_megatron()
    config, said = FlashConfig(preset="int8", min_bytes=0), io.StringIO()
    with trained(config) as training, contextlib.redirect_stdout(said):
        training.optimizer.config.use_precision_aware_optimizer = True
        pieces = [parameters._pieces(one, megatron.current_config()) for one in training.optimizer.chained_optimizers]
        again = [parameters._pieces(one, megatron.current_config()) for one in training.optimizer.chained_optimizers]
        counters.reset_stats()
        for group in training.ddp.bucket_groups:
            group.start_param_sync(force_sync=True)
        sites = counters.stats()["sites"]
        gathered = sites.get(parameters.PARAMETERS.name, {"quantized": 0})["quantized"]
        training.optimizer.config.use_precision_aware_optimizer = False
    lines = [line for line in said.getvalue().splitlines() if "without param_bits" in line]
    return [one is None for one in pieces + again], gathered == 0, training.replicas(), lines


def test_unsupported_fields_are_left_out() -> None:
    for rank, (unserved, exactly, same, lines) in enumerate(run_ranks(2, left_out, preload=MEGATRON)):
        assert all(unserved) and exactly and same
        assert len(lines) == (rank == 0), "once, on rank 0"
        assert all("use_precision_aware_optimizer and param_bits exclude each other" in line for line in lines)


def test_a_preset_prints_that_the_flex_dispatcher_is_not_supported(capsys: pytest.CaptureFixture[str]) -> None:
    settings = SimpleNamespace(moe_token_dispatcher_type="flex")
    refusals._said.clear()
    for _ in range(2):
        assert refusals.of_experts(settings, FlashConfig(preset="int8"), refusals.field) == []
    said = capsys.readouterr().out
    assert said.count("preset int8 without expert_bits: moe_token_dispatcher_type='flex' moves tokens") == 1
    given = FlashConfig(preset="int8", expert_bits=8)
    [line] = refusals.of_experts(settings, given, refusals.field)
    assert line.startswith("expert_bits has no effect"), "a given key is refused, though the preset has that value too"
