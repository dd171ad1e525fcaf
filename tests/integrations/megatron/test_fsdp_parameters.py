"""Megatron-FSDP on four ranks: hybrid sharding (HSDP), and copies on tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from fsdp_training import SERVED, Training, same_everywhere, start, trained

from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.refusals import for_megatron
from flash_allreduce_plugin.integrations.megatron import fsdp, fsdp_parameters
from flash_allreduce_plugin.telemetry import counters

pytestmark = pytest.mark.skipif(not SERVED, reason="Megatron-FSDP of this megatron-core has other functions")

EIGHT = FlashConfig(grad_bits=8, param_bits=8, min_bytes=0)
STEPS = 4


def record(training: Training) -> dict[str, Any]:
    return {"losses": training.losses, "sites": counters.stats()["sites"], "masters": training.masters()}


def hybrid() -> dict[str, Any]:
    start(instances=2)
    seen: dict[str, Any] = {}
    for outer in ("no_shard", "optim"):
        for name, config in {"stock": None, "8": EIGHT, "off": EIGHT.model_copy(update={"enabled": False})}.items():
            options = {"outer_dp_sharding_strategy": outer, "num_distributed_optimizer_instances": 2}
            with trained(config, "optim_grads_params", **options) as training:
                training.run(0, STEPS, micro_batches=2)
                seen[outer, name] = record(training)
    return seen


def tensor_parallel() -> dict[str, Any]:
    from megatron.core import parallel_state

    start(tensor_parallel_size=2)
    seen: dict[str, Any] = {}
    group = parallel_state.get_tensor_model_parallel_group()
    for strategy in ("optim", "optim_grads_params"):
        for name, config in {"stock": None, "8": EIGHT}.items():
            with trained(config, strategy, tp=2) as training:
                training.run(0, STEPS)
                seen[strategy, name] = {
                    **record(training),
                    "copies": {kind: same_everywhere(one, group) for kind, one in copies(training).items()},
                }
    return seen


def copies(training: Training) -> dict[str, torch.Tensor]:
    """Return the copies that tensor-parallel ranks have, as the optimizer and as the next forward pass have them."""
    buffers = training.fsdp.param_and_grad_buffer
    training.fsdp.start_param_sync()
    found: dict[str, list[torch.Tensor]] = {"exact": [], "gathered": []}
    for number, group in enumerate(buffers.parameter_groups):
        training.fsdp.module.all_gather_pipeline.all_gather_params(group.params)
        training.fsdp.module.all_gather_pipeline.wait_bucket_ready(number, False)
        weights = group.model_weight_buffer.fetch_bucket().data
        kept = fsdp.copies(buffers.dist_index, group, group.model_weight_buffer, lambda one: True)
        found["gathered"] += [weights[first:last].float() for (first, last), _ in kept]
        exact = group.main_weight_buffer
        index = exact.shard_bucket_index
        own = (index.bucket_data_index, index.bucket_data_index + index.size)
        shard = exact.get_shard_from_local_buffer()
        found["exact"] += [shard[first:last] for first, last in fsdp.clipped((place for place, _ in kept), own)]
    training.fsdp.module.synchronize_param_gather()
    nothing = torch.empty(0)  # of copies that lie outside of this rank's part
    return {kind: torch.cat([nothing, *pieces]) for kind, pieces in found.items()}


@pytest.fixture(scope="module")
def instances() -> list[dict[str, Any]]:
    return run_ranks(4, hybrid, preload=MEGATRON)


@pytest.fixture(scope="module")
def split() -> list[dict[str, Any]]:
    return run_ranks(4, tensor_parallel, preload=MEGATRON)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_hybrid_sharding_reaches_the_loss_of_full_precision(instances: list[dict[str, Any]], outer: str) -> None:
    for seen in instances:
        assert seen[outer, "8"]["losses"] == pytest.approx(seen[outer, "stock"]["losses"], rel=0.01)
        assert torch.equal(seen[outer, "off"]["masters"], seen[outer, "stock"]["masters"])
        sites = {name: site for name, site in seen[outer, "8"]["sites"].items() if ".fsdp." in name}
        gradients = sites["megatron.fsdp.gradients"]
        assert gradients["quantized"] == gradients["calls"]
        share = sum(one["bytes_sent"] for one in sites.values()) / sum(
            one["bytes_full_precision"] for one in sites.values()
        )
        print(f"HSDP, {outer}: {share:.3f}")
        assert share <= 0.40
        assert ("megatron.fsdp.parameter_differences" in sites) == (outer == "optim")


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_copies_on_tensor_parallel_ranks_stay_equal(split: list[dict[str, Any]], strategy: str) -> None:
    for seen in split:
        assert seen[strategy, "8"]["losses"] == pytest.approx(seen[strategy, "stock"]["losses"], rel=0.01)
        assert seen[strategy, "stock"]["copies"] == seen[strategy, "8"]["copies"] == {"exact": True, "gathered": True}
        assert seen[strategy, "8"]["sites"]["megatron.fsdp.gradients"]["quantized"] > 0


def test_gathers_of_values_have_the_bits_that_a_preset_has_for_values() -> None:
    preset = for_megatron(FlashConfig(preset="int4"))
    assert preset.param_bits == 4 and fsdp_parameters._of_values(preset).param_bits == 8
    for given in (FlashConfig(param_bits=6), for_megatron(FlashConfig(preset="int4", param_bits=4))):
        assert fsdp_parameters._of_values(given) is given
    # The same after the copies that a training makes of its configuration.
    assert fsdp_parameters._of_values(preset.model_copy(update={"min_bytes": 0})).param_bits == 8
