"""Gradients and parameters of Megatron-FSDP in real trainings on two ranks: ZeRO 1, 2 and 3."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from fsdp_training import SERVED, Training, sent, start, trained

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import ConfigError
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.telemetry import counters

pytestmark = pytest.mark.skipif(not SERVED, reason="Megatron-FSDP of this megatron-core has other functions")

EIGHT = FlashConfig(grad_bits=8, param_bits=8, min_bytes=0)
CONFIGS = {
    "stock": None,
    "full": FlashConfig(min_bytes=0),
    "8": EIGHT,
    "off": EIGHT.model_copy(update={"enabled": False}),
    "feedback": FlashConfig(grad_bits=4, error_feedback=True, param_bits=8, min_bytes=0),
}
WAYS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "ZeRO 1": ("optim", {}, ("stock", "8")),
    "ZeRO 1, no overlap": ("optim", {"overlap_grad_reduce": False, "overlap_param_gather": False}, ("stock", "8")),
    "ZeRO 2": ("optim_grads", {}, ("stock", "8", "feedback")),
    "ZeRO 3": ("optim_grads_params", {}, tuple(CONFIGS)),
}
STEPS, MICRO_BATCHES = 4, 2
SITES = {"ZeRO 3": "parameters"}  # else parameter_differences


def observe() -> dict[str, Any]:
    start()
    seen: dict[str, Any] = {}
    for way, (strategy, options, names) in WAYS.items():
        for name in names:
            with trained(CONFIGS[name], strategy, **options) as training:
                training.run(0, STEPS, MICRO_BATCHES)
                seen[way, name] = {
                    "losses": training.losses,
                    "masters": training.masters(),
                    "sent": sent(),
                    "sites": counters.stats()["sites"],
                    "steps": megatron.step(),
                    "feedback": feedback.nbytes() if (feedback := megatron.feedback()) else None,
                    "in flight": in_flight(training),
                }
    seen["resumed"] = resumed()
    seen["refused"] = refused()
    return seen


def in_flight(training: Training) -> list[str]:
    """Return the states of the gathers before the first forward pass of a step, each once."""
    training.fsdp.start_param_sync()
    pipeline = training.fsdp.module.all_gather_pipeline
    found = sorted({status.name for status in pipeline.bucket_status.values()})
    training.fsdp.module.synchronize_param_gather()
    return found


def resumed() -> tuple[list[float], list[float], list[float]]:
    """Train on, with the state of a checkpoint and without."""
    config, found = CONFIGS["feedback"], []
    with trained(config, "optim_grads_params") as training:
        training.run(0, 2)
        state = copy.deepcopy(fap.state_dict())  # residuals are updated in place
        training.run(2, 4)
        found.append(training.losses[2:])
    for load in (True, False):
        with trained(config, "optim_grads_params") as training:
            training.run(0, 2)
            feedback = megatron.feedback()
            assert feedback is not None
            feedback.reset()
            if load:
                fap.load_state_dict(state)
            training.run(2, 4)
            found.append(training.losses[2:])
    return found[0], found[1], found[2]


def refused() -> str:
    with trained(EIGHT, "no_shard") as training:
        try:
            training.run(0, 1)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, observe, preload=MEGATRON)


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_that_of_full_precision(ranks: list[dict[str, Any]], way: str) -> None:
    for seen in ranks:
        for name in WAYS[way][2][1:]:
            assert seen[way, name]["losses"] == pytest.approx(seen[way, "stock"]["losses"], rel=0.01), name
            assert seen[way, name]["losses"][-1] < seen[way, name]["losses"][0]


@pytest.mark.parametrize("way", WAYS)
def test_at_8_bits_both_ways_at_most_four_tenths_of_the_bytes(ranks: list[dict[str, Any]], way: str) -> None:
    """Compare with the bytes of the same calls in full precision. The first gathers send whole values."""
    for seen in ranks:
        sites = {name: site for name, site in seen[way, "8"]["sites"].items() if ".fsdp." in name}
        assert set(sites) == {"megatron.fsdp.gradients", f"megatron.fsdp.{SITES.get(way, 'parameter_differences')}"}
        plain = sum(site["bytes_full_precision"] for site in sites.values())
        share = sum(site["bytes_sent"] for site in sites.values()) / plain
        print(f"{way}: {share:.3f} of {plain / 1e6:.2f} MB")
        assert share <= 0.40


def test_full_precision_and_disabled_have_stocks_bits(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        for name in ("full", "off"):
            assert torch.equal(seen["ZeRO 3", name]["masters"], seen["ZeRO 3", "stock"]["masters"])


def test_every_reduction_is_counted(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        for way in WAYS:
            gradients = seen[way, "8"]["sites"]["megatron.fsdp.gradients"]
            assert gradients["quantized"] == gradients["calls"] > 0
            assert seen[way, "8"]["steps"] == STEPS


def test_gathers_are_in_flight_as_in_stock(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        for way in WAYS:
            assert seen[way, "8"]["in flight"] == seen[way, "stock"]["in flight"]
        assert "COMMUNICATING" in seen["ZeRO 3", "8"]["in flight"]


def test_error_feedback_keeps_residuals_and_a_resumed_run_its_losses(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["ZeRO 3", "feedback"]["feedback"] > 0 and seen["ZeRO 3", "8"]["feedback"] is None
        straight, with_state, without = seen["resumed"]
        assert straight == with_state != without


def test_param_bits_without_gathers_is_refused(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["refused"] == (
            "param_bits has no effect with data_parallel_sharding_strategy no_shard, where no parameters are "
            "gathered; leave it at full."
        )
