"""Error feedback in the data-parallel gradients of megatron-core: every way to reduce them, and training."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import MEGATRON, run_ranks

pytest.importorskip("megatron.core")

from test_data_parallel import WAYS, enabled, start_megatron, train, wrapped

from flash_allreduce_plugin.collectives import error_feedback
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.config.presets import PRESETS
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.telemetry import counters

OFF = FlashConfig(grad_bits=3, min_bytes=0)
ON = FlashConfig(grad_bits=3, min_bytes=0, error_feedback=True, error_feedback_momentum=0.0)
PASSES = 16


def average(way: dict[str, Any], config: FlashConfig) -> dict[str, Any]:
    """Return the relative error of the mean over PASSES of one bucket's gradients; the third pass has a NaN between."""
    ddp = wrapped(**way)
    (group,) = ddp.bucket_groups
    world, rank = dist.get_world_size(), dist.get_rank()
    gradients, exact, means = [], [], []
    for number, bucket in enumerate(group.buckets):
        each = [
            torch.randn(bucket.grad_data.shape, generator=torch.Generator().manual_seed(10 * number + r))
            .to(bucket.grad_data.dtype)
            .float()
            for r in range(world)
        ]
        gradients.append(each[rank])
        exact.append(sum(each) / world)
        means.append(torch.zeros_like(each[rank]))
    counters.reset_stats()
    with enabled(config):
        for number in range(PASSES + 1):
            for bucket, gradient in zip(group.buckets, gradients, strict=True):
                bucket.grad_data.copy_(gradient)
                if number == 2 and rank == 1:
                    bucket.grad_data[3] = math.nan
            if way["overlap_grad_reduce"]:
                group.start_grad_sync()
            ddp.finish_grad_sync()
            if number != 2:
                for bucket, mean in zip(group.buckets, means, strict=True):
                    mean += bucket.grad_data.float() / PASSES
        owner = megatron.feedback()
        keys = [] if owner is None else owner.keys()
    errors = []
    for mean, whole in zip(means, exact, strict=True):
        if way["use_distributed_optimizer"]:
            mean, whole = (x.chunk(world)[rank] for x in (mean, whole))
        errors.append(float((mean - whole).norm() / whole.norm()))
    return {"errors": errors, "keys": keys, "dropped": counters.stats()["residuals_dropped"]}


def forgotten() -> list[list[str]]:
    """Return the keys while one model lives, after it is freed, and after `disable`."""
    seen = []
    with enabled(ON):
        owner = megatron.feedback()
        assert owner is not None
        for _ in range(2):
            ddp = wrapped(use_distributed_optimizer=False, overlap_grad_reduce=False)
            ddp.finish_grad_sync()
            seen.append(owner.keys())
            del ddp
            gc.collect()
            seen.append(owner.keys())
    assert megatron.feedback() is None
    return seen


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with enabled(FlashConfig(error_feedback=True)):
            pass
        with enabled(FlashConfig(preset="int4", grad_bits="full")):  # the user has not asked for feedback
            pass
    return [str(warning.message) for warning in caught if "error_feedback" in str(warning.message)]


def observe() -> dict[str, Any]:
    start_megatron()
    seen: dict[str, Any] = {"averages": [[average(way, config) for config in (OFF, ON)] for way in WAYS]}
    seen["forgotten"] = forgotten()
    seen["warned"] = warned()
    seen["training"] = [train(config, 1, **WAYS[3]) for config in (OFF, ON)]
    # An explicit setting of these would be refused here.
    refused = ("pipeline_bits", "pipeline_backward_bits", "attention_bits", "expert_bits")
    fields = {key: value for key, value in PRESETS["thin"].items() if key not in refused}
    spelled_out = FlashConfig(**{**fields, "bits": 6, "param_bits": 4, "min_bytes": 0})
    seen["preset"] = [train(c, 1, **WAYS[3]) for c in (FlashConfig(preset="thin", min_bytes=0), spelled_out)]
    return seen


@pytest.fixture(scope="module")
def observed() -> list[dict[str, Any]]:
    return run_ranks(2, observe, timeout=200, preload=MEGATRON)


@pytest.mark.parametrize("way", range(len(WAYS)), ids=str)
def test_the_average_converges_in_every_bucket(observed, way):
    for rank, seen in enumerate(observed):
        off, on = seen["averages"][way]
        assert off["keys"] == [] and off["dropped"] == {}
        assert [key.split(".")[1] for key in on["keys"]] == ["0", "1"]
        for without, with_feedback in zip(off["errors"], on["errors"], strict=True):
            assert with_feedback < 0.25 * without
        # All see the NaN of an all-reduce, the owner that of a reduce-scatter.
        sees = rank == 0 or not WAYS[way]["use_distributed_optimizer"]
        assert on["dropped"] == ({error_feedback.NOT_FINITE: 2} if sees else {})


def test_residuals_die_with_their_buckets(observed):
    for seen in observed:
        living, gone, again, gone_again = seen["forgotten"]
        assert len(living) == len(again) == 2
        assert gone == gone_again == []


def test_training_uses_them_and_replicas_agree(observed):
    for seen in observed:
        off, on = seen["training"]
        assert on["replicas equal"]
        assert not torch.equal(on["parameters"], off["parameters"])
        assert on["losses"][0] == off["losses"][0]


def test_a_preset_trains_as_its_fields_do(observed):
    for seen in observed:
        preset, spelled_out = seen["preset"]
        assert preset["replicas equal"]
        assert torch.equal(preset["parameters"], spelled_out["parameters"])
        assert not torch.equal(preset["parameters"], seen["training"][0]["parameters"])


def test_without_grad_bits_there_is_a_warning(observed):
    for seen in observed:
        (message,) = seen["warned"]
        assert "set grad_bits" in message
