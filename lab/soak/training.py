"""Long trainings with Megatron, DeepSpeed, DDP and FSDP2, with the plugin on, in every rank.

megatron: two small GPTs, one after the other in each step, tensor parallel over pairs of ranks and data parallel over
the rest. One has g and f and all-reduced gradients, the other sequence parallelism and the distributed optimizer with
overlap: every quantized site except Transformer Engine's and the experts'. deepspeed: the transformer of
examples/deepspeed, ZeRO 2, with and without parameters gathered by differences. ddp, fsdp: the transformer of
examples/fsdp, a model for each preset.
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
from flash_allreduce_plugin.cli.demo.data import corpus, split
from flash_allreduce_plugin.cli.ranks import Say
from lab.benchmarks import megatron_on_cpu
from lab.soak import watch

SAMPLES = 100
PRESETS = ("int8", "int4", "thin")
SEQUENCE, BATCH = 32, 4  # of the transformers
COMPARED = 10  # comparisons of the replicas, besides the one at the end
#: The configurations of Megatron and DeepSpeed.
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


def ddp(settings: dict[str, Any], say: Say) -> dict[str, Any]:
    """In every rank. settings: steps, seed, patience (seconds)."""
    return _guarded(_start_ddp, settings, say)


def fsdp(settings: dict[str, Any], say: Say) -> dict[str, Any]:
    """In every rank. settings: steps, seed, patience (seconds)."""
    return _guarded(_start_fsdp, settings, say)


def _guarded(
    start: Callable[[dict[str, Any]], tuple[Step, Drifted]], settings: dict[str, Any], say: Say
) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        step, drifted = start(settings)
        with watch.Watchdog(dist.get_rank(), settings["patience"]) as watchdog:
            return _train(step, drifted, settings, say, watchdog)
    except BaseException:
        watch.end()


def _train(
    step: Step, drifted: Drifted, settings: dict[str, Any], say: Say, watchdog: watch.Watchdog
) -> dict[str, Any]:
    """Train. step(i): runs a step and returns the loss of each model. drifted(): returns names of unequal replicas."""
    steps = settings["steps"]
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
            samples.append(watch.sample(done, _world()))
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
    """Return True if all ranks of the group have the same bits."""
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

    from flash_allreduce_plugin.cli.demo.model import ModelSize, loss_of, replicas_equal
    from flash_allreduce_plugin.integrations import megatron

    size, tensor_parallel = ModelSize(hidden=64, layers=1, heads=4, sequence=32, batch=2), 2
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    megatron_on_cpu.prepare()
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
    """Return a model, its DistributedDataParallel and its optimizer; a distributed one with sequence parallelism."""
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

    import flash_allreduce_plugin.integrations.deepspeed.attach  # noqa: F401
    from lab.benchmarks.deepspeed_training import build_model, configuration

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # a minute's compilation
    deepspeed.utils.logging.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo")
    arguments = argparse.Namespace(width=64, layers=1, sequence=SEQUENCE, batch=BATCH, lr=1e-3, steps=settings["steps"])
    engines = {}
    for name, config in {"ZeRO 2": CONFIG, "ZeRO 2, parameters": {**CONFIG, "param_bits": 4}}.items():
        model = build_model(arguments, settings["seed"])
        engines[name], *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=configuration(arguments, 2, config)
        )
    batch = _batches(settings["seed"])

    def step(number: int) -> dict[str, float]:
        losses = {}
        for name, engine in engines.items():
            loss = engine(batch(number))
            engine.backward(loss)
            engine.step()
            losses[name] = float(loss.detach())
        return losses

    def drifted() -> list[str]:
        return [name for name, engine in engines.items() if not _same(engine.module.parameters(), _world())]

    return step, drifted


def _batches(seed: int) -> Callable[[int], torch.Tensor]:
    """Return a function of this rank's rows of a step, each with the following byte."""
    text, _ = split(corpus(None), SEQUENCE)

    def batch(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) * 1000 + dist.get_rank())
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=generator)
        return torch.stack([text[start : start + SEQUENCE + 1] for start in starts])

    return batch


def _transformer(seed: int) -> Any:
    from lab.benchmarks.deepspeed_training import example

    module = example("fsdp")
    module.SEQUENCE, module.WIDTH = SEQUENCE, 64
    torch.manual_seed(seed)
    return module.Model()


def _config(preset: str) -> fap.FlashConfig:
    return fap.FlashConfig.from_dict({"preset": preset, "min_bytes": 0, "quality_interval": 100})


def _of_torch(models: dict[str, torch.nn.Module], seed: int, drifted: Drifted) -> tuple[Step, Drifted]:
    """Return the steps of AdamW on each model, one after another."""
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}
    batch = _batches(seed)

    def step(number: int) -> dict[str, float]:
        losses = {}
        for name, model in models.items():
            optimizers[name].zero_grad()
            loss = model(batch(number))
            loss.backward()
            optimizers[name].step()
            losses[name] = float(loss.detach())
        return losses

    return step, drifted


def _start_ddp(settings: dict[str, Any]) -> tuple[Step, Drifted]:
    models: dict[str, torch.nn.Module] = {}
    for preset in PRESETS:
        model = torch.nn.parallel.DistributedDataParallel(_transformer(settings["seed"]), bucket_cap_mb=0.05)
        model.register_comm_hook(None, fap.ddp_hook(_config(preset)))
        models[preset] = model

    def drifted() -> list[str]:
        return [name for name, model in models.items() if not _same(model.parameters(), _world())]

    return _of_torch(models, settings["seed"], drifted)


def _start_fsdp(settings: dict[str, Any]) -> tuple[Step, Drifted]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    models: dict[str, torch.nn.Module] = {}
    for preset in PRESETS:
        model = models[preset] = _transformer(settings["seed"])
        for module in (*model.layers.layers, model):
            fully_shard(module)
            module.set_custom_reduce_scatter(fap.FlashReduceScatter(_config(preset)))
            module.set_custom_all_gather(fap.FlashAllGather(_config("int8")))

    def drifted() -> list[str]:
        """Return the names of unequal gathered parameters."""
        found = []
        for name, model in models.items():
            wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
            for module in wrapped:
                module.unshard()
            weights = [weight.detach().clone() for weight in model.parameters()]  # numpy would keep FSDP's memory
            if not _same(weights, _world()):
                found.append(name)
            for module in wrapped:
                module.reshard()
        return found

    return _of_torch(models, settings["seed"], drifted)
