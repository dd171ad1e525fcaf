"""Long trainings with Megatron and DeepSpeed, the plugin on: what soak.py does in every rank.

megatron: two small GPTs in turn, tensor parallel over pairs of ranks and data parallel over what is left. One has g and
f and all-reduced gradients, the other sequence parallelism and the distributed optimizer with overlap: every quantized
site that is not Transformer Engine's or an expert's. deepspeed: the transformer of examples/deepspeed, ZeRO 2.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import flash_allreduce_plugin as fap
from benchmarks import soak_watch
from benchmarks.megatron_on_cpu import CudaIsCpu
from flash_allreduce_plugin.cli.demo.data import corpus, split
from flash_allreduce_plugin.cli.ranks import Say

SAMPLES = 100
COMPARED = 10  # times that the replicas are compared, and at the end
#: What both train with.
CONFIG: dict[str, Any] = {
    "bits": 8,
    "min_bytes": 0,
    "error_feedback": True,
    "quality_interval": 100,
    "min_sqnr_db": 20.0,
}

Step = Callable[[int], dict[str, float]]
Drifted = Callable[[], list[str]]


def megatron(settings: dict[str, Any], say: Say) -> dict[str, Any]:
    """In every rank. settings: steps, seed, patience (seconds)."""
    return _guarded(_start_megatron, settings, say)


def deepspeed(settings: dict[str, Any], say: Say) -> dict[str, Any]:
    """In every rank. settings: steps, seed, patience (seconds)."""
    return _guarded(_start_deepspeed, settings, say)


def _guarded(
    start: Callable[[dict[str, Any]], tuple[Step, Drifted]], settings: dict[str, Any], say: Say
) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        return _train(*start(settings), settings, say)
    except BaseException:
        soak_watch.end()


def _train(step: Step, drifted: Drifted, settings: dict[str, Any], say: Say) -> dict[str, Any]:
    """step(i) takes a step and gives the loss of each model; drifted() names what is not the same on all its ranks."""
    steps, watchdog = settings["steps"], soak_watch.Watchdog(dist.get_rank(), settings["patience"])
    losses: dict[str, array[float]] = {}  # no Python objects, which would be counted as growth
    samples, compared = [], 0
    for i in range(steps):
        watchdog.advance("training", f"step {i}")
        for name, loss in step(i).items():
            if not math.isfinite(loss):
                raise AssertionError(f"{name}: the loss of step {i} is {loss}")
            losses.setdefault(name, array("d")).append(loss)
        done = i + 1
        if done == steps or done % max(1, steps // COMPARED) == 0:
            compared += 1
            if different := drifted():
                raise AssertionError(f"after step {done} the replicas differ: {', '.join(different)}")
        if done == steps or done % max(1, steps // SAMPLES) == 0:
            samples.append(soak_watch.sample(done, _world()))
            say(**samples[-1], losses={name: values[-1] for name, values in losses.items()})
    part = max(1, steps // 20)
    ends = {name: (statistics.fmean(v[:part]), statistics.fmean(v[-part:])) for name, v in losses.items()}
    for name, (first, last) in ends.items():
        if not last < first:
            raise AssertionError(f"{name}: the loss was {first:.4f} at first and is {last:.4f} at the end")
    sites = fap.stats()["sites"]
    return {
        "steps": steps,
        "replicas compared": compared,
        "loss": {name: [round(loss, 4) for loss in both] for name, both in ends.items()},
        "quantized": {name: site["quantized"] for name, site in sites.items()},
        "full precision": {name: site["full_precision"] for name, site in sites.items() if site["full_precision"]},
        "SQNR dB": {name: round(site["sqnr_db"], 1) for name, site in sites.items() if site["sqnr_db"] is not None},
        "samples": samples,
    }


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _same(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Whether all ranks of the group have the same bits of them."""
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybodys, mine, group=group)
    return all(torch.equal(one, mine) for one in everybodys)


def _start_megatron(settings: dict[str, Any]) -> tuple[Step, Drifted]:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from flash_allreduce_plugin import megatron
    from flash_allreduce_plugin.cli.demo.model import ModelSize, loss_of, prepare_cpu, replicas_equal

    size, tensor_parallel = ModelSize(hidden=64, layers=1, heads=4, sequence=32, batch=2), 2
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    prepare_cpu()
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
    CudaIsCpu().__enter__()
    megatron.enable(
        fap.FlashConfig(
            backward_bits=8, grad_bits=8, sequence_parallel_gather_bits=8, quantize_embedding=True, **CONFIG
        )
    )
    models = {
        "g and f": _megatron_model(size, tensor_parallel, settings["seed"], sequence_parallel=False),
        "sequence parallel": _megatron_model(size, tensor_parallel, settings["seed"], sequence_parallel=True),
    }
    replica = parallel_state.get_data_parallel_rank()
    replicas, ranks_of_a_model = (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    )
    text, _ = split(corpus(None), size.sequence)

    def step(number: int) -> dict[str, float]:
        losses = {}
        generator = torch.Generator().manual_seed((settings["seed"] * 1_000_003 + number) * 1000 + replica)
        starts = torch.randint(len(text) - size.sequence, (size.batch,), generator=generator)
        for name, (_, ddp, optimizer) in models.items():
            ddp.zero_grad_buffer()
            loss = loss_of(ddp, text, starts, size.sequence)
            loss.backward()
            finalize_model_grads([ddp])
            optimizer.step()
            losses[name] = float(loss.detach())
        return losses

    def drifted() -> list[str]:
        found = []
        for name, (model, _, _) in models.items():
            if not _same(model.parameters(), replicas):
                found.append(f"{name}, over the data-parallel ranks")
            if not replicas_equal(model, ranks_of_a_model):
                found.append(f"{name}, what is not split over the tensor-parallel ranks")
        return found

    return step, drifted


def _megatron_model(size: Any, tensor_parallel: int, seed: int, *, sequence_parallel: bool) -> tuple[Any, Any, Any]:
    """A model, its DistributedDataParallel and its optimizer, with sequence parallelism a distributed one."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from flash_allreduce_plugin.cli.demo.model import build_model

    model = build_model(size, tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel, seed=seed)
    distributed = DistributedDataParallelConfig(
        use_distributed_optimizer=sequence_parallel, overlap_grad_reduce=sequence_parallel, bucket_size=20_000
    )
    ddp = DistributedDataParallel(model.config, distributed, model)
    ddp.broadcast_params()
    adam = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=sequence_parallel)
    return model, ddp, get_megatron_optimizer(adam, [ddp])


def _start_deepspeed(settings: dict[str, Any]) -> tuple[Step, Drifted]:
    import deepspeed

    import flash_allreduce_plugin.deepspeed.attach  # noqa: F401
    from benchmarks.deepspeed_training import build_model, configuration

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # a minute's compilation
    deepspeed.utils.logging.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo")
    arguments = argparse.Namespace(width=64, layers=1, sequence=32, batch=4, lr=1e-3, steps=settings["steps"])
    model = build_model(arguments, settings["seed"])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=configuration(arguments, 2, CONFIG)
    )
    text, _ = split(corpus(None), arguments.sequence)
    rank = dist.get_rank()

    def step(number: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed((settings["seed"] * 1_000_003 + number) * 1000 + rank)
        starts = torch.randint(len(text) - arguments.sequence, (arguments.batch,), generator=generator)
        loss = engine(torch.stack([text[start : start + arguments.sequence + 1] for start in starts]))
        engine.backward(loss)
        engine.step()
        return {"ZeRO 2": float(loss.detach())}

    def drifted() -> list[str]:
        return [] if _same(model.parameters(), _world()) else ["the parameters, over the ranks"]

    return step, drifted
