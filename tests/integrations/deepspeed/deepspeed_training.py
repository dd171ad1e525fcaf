"""A small model on a DeepSpeed engine, for the tests of this folder. Functions that build an engine run in a rank."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import os
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flash_allreduce_plugin as fap

EIGHT = {"bits": 8, "min_bytes": 0}
OFF = {"enabled": False, "min_bytes": 0}
STEPS = 3


def deepspeed() -> Any:
    """Return the package, on the CPU, with the plugin attached to engines that have a section."""
    theirs = package()
    from flash_allreduce_plugin.integrations.deepspeed import engine

    engine.attach()
    return theirs


def package() -> Any:
    """Return the package, on the CPU."""
    first = "deepspeed" not in sys.modules
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as theirs

    if first:  # its see_memory_usage collects garbage, ten times an engine, and would look at all modules each time
        gc.freeze()
    # Training does not need these shared-memory operators, and compiling them takes a minute.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    theirs.utils.logging.logger.setLevel("ERROR")
    return theirs


def release() -> tuple[int, ...]:
    """Return the release of the installed DeepSpeed."""
    return tuple(int(number) for number in importlib.metadata.version("deepspeed").split(".")[:3])


#: Of tests that no older release has run yet.
NEWEST = pytest.mark.skipif(release() < (0, 19, 8), reason="tried on DeepSpeed 0.19.8 alone")


def skip_if_nothing_is_reduced(zero: dict[str, Any]) -> None:
    """Skip on a defect of DeepSpeed that only the CPU shows, with the plugin and without."""
    if not zero.get("contiguous_gradients", True) and release() < (0, 19, 8):
        pytest.skip("DeepSpeed before 0.19.8 reduces nothing on a CPU without contiguous_gradients")


def model(width: int = 48) -> nn.Module:
    """Return a model of odd sizes: partitions of parameters that no world divides, and buckets with two owners."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(width, 97), nn.Tanh(), nn.Linear(97, 65, bias=False), nn.Tanh(), nn.Linear(65, width)
    )


def configuration(options: dict[str, Any], flash: dict[str, Any] | str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # with offload; DeepSpeed's own would have to be compiled
        "steps_per_print": 10**9,
        **copy.deepcopy(options),
    }
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3:
        zero.setdefault("stage3_param_persistence_threshold", 0)
        groups = sys.modules.get("deepspeed.utils.groups")
        if groups is not None and "zero_hpz_partition_size" not in zero:  # an earlier engine's would count here too
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # type: ignore[attr-defined]
    if flash is not None:
        config["flash_allreduce"] = flash
    return config


def engine(options: dict[str, Any], flash: dict[str, Any] | None, net: nn.Module | None = None, lr: float = 0.5) -> Any:
    """Build an engine with SGD without momentum: an update is proportional to its gradient, divisor included."""
    net = model() if net is None else net
    parameters = [p for p in net.parameters() if p.requires_grad]
    built, *_ = deepspeed().initialize(
        model=net, optimizer=torch.optim.SGD(parameters, lr=lr), config=configuration(options, flash)
    )
    return built


def batch(engine: Any, number: int, rows: int = 8, width: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(rows, width, generator=generator).to(next(engine.module.parameters()).dtype)


def step(engine: Any, number: int) -> float:
    """Run one optimizer step over every micro-batch and return the mean loss of this rank."""
    losses = []
    for micro in range(engine.gradient_accumulation_steps()):
        x = batch(engine, 100 * number + micro)
        loss = (engine(x) - x.flip(1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def weights(engine: Any) -> torch.Tensor:
    """Return every whole parameter in float32, 1-D."""
    whole = []
    for parameter in engine.module.parameters():  # one by one: 0.17.6 mixes up the buffers of several
        with deepspeed().zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            whole.append(parameter.detach().to(torch.float32, copy=True).flatten())
    return torch.cat(whole)


def stats() -> dict[str, Any]:
    """Return fap.stats() without the gathers of parameters that no width quantizes."""
    found = fap.stats()
    sites = {name: one for name, one in found["sites"].items() if ".parameters" not in name or one["quantized"]}
    totals: dict[str, Any] = {key: sum(one[key] for one in sites.values()) for key in found if "bytes" in key}
    reasons: Counter[str] = Counter()
    for one in sites.values():
        reasons.update(one["full_precision"])
    quantized = sum(one["quantized"] for one in sites.values())
    totals.update(calls=quantized + reasons.total(), quantized=quantized, full_precision=dict(reasons))
    return {**found, **totals, "sites": sites}


def train(options: dict[str, Any], flash: dict[str, Any] | None, steps: int = STEPS) -> dict[str, Any]:
    """Train. `moved` is the change of the parameters."""
    fap.reset_stats()
    built = engine(options, flash)
    before = weights(built)
    losses = [step(built, number) for number in range(steps)]
    after = weights(built)
    result = {
        "losses": losses,
        "weights": after,
        "moved": after - before,
        "optimizer": type(built.optimizer).__name__,
        "comm_bytes": built.communication_data_type.itemsize,
        **(fap.stats() if flash is not None and "param_" in str(flash) else stats()),
    }
    built.destroy()
    return result


def compare(options: dict[str, Any], eight: dict[str, Any] = EIGHT) -> list[dict[str, Any]]:
    """Train with the engine left alone, with a section that is switched off, and at 8 bits."""
    return [train(options, flash) for flash in (None, OFF, eight)]


def sparse(flash: dict[str, Any] | str | None) -> dict[str, Any]:
    """Run two steps with an embedding that has sparse gradients."""
    fap.reset_stats()
    torch.manual_seed(2)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(x))  # type: ignore[no-any-return]

    built = engine({}, flash, Words())
    for number in range(2):
        x = torch.arange(8) + 3 * number + dist.get_rank()
        built.backward(nn.functional.cross_entropy(built(x), x))
        built.step()
    return {"weights": weights(built), **fap.stats()}
