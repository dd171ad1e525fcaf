"""One rank of the demo: train all variants in lock-step, so that a change of the machine's speed affects all of them.

Step k of every variant runs before step k + 1 of any, in an order that rotates, on the same bytes and from the same
seed. Full precision is stock Megatron without a patch.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flash_allreduce_plugin.cli.demo.data import corpus, split
from flash_allreduce_plugin.cli.demo.model import (
    ModelSize,
    build_model,
    finish_gradients,
    loss_of,
    prepare_cpu,
    replicas_equal,
)
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.integrations import megatron
from flash_allreduce_plugin.telemetry import counters

# Low enough to tell variants apart: at 6e-4 after 20 steps and with betas 0.9 and 0.999, noise of 3 % on g's output
# moved the validation loss by 0.6 %.
LEARNING_RATE = 3e-4
WARM_UP_STEPS = 50
BETAS = (0.9, 0.95)
CLIP = 1.0
VALIDATION_BATCHES = 64
STEPS_PER_MEASUREMENT = 50
COLLECTIVE_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train: full precision, with `preset`, at `bits` in both directions, or with `noise` on g's output."""

    name: str
    bits: int | None = None
    noise: float = 0.0
    preset: str | None = None

    @property
    def quantized(self) -> bool:
        return self.bits is not None or self.preset is not None

    def config(self, *, measure: bool, options: Mapping[str, Any]) -> FlashConfig:
        """Return the configuration. Calls of every size are quantized: the demo shows numerics and bytes."""
        assert self.quantized
        values: dict[str, Any] = {"preset": self.preset, "bits": self.bits, "backward_bits": self.bits}
        values = {key: value for key, value in values.items() if value is not None} | {"min_bytes": 0}
        values |= {"quality_interval": int(measure), "quality_measure": "exact"}
        return FlashConfig.from_dict({**values, **options})


@dataclass(frozen=True, slots=True)
class Settings:
    variants: tuple[Variant, ...]
    tensor_parallel: int = 2
    sequence_parallel: bool = False
    steps: int = 300
    seed: int = 1234
    size: ModelSize = field(default_factory=ModelSize)
    data: Path | None = None
    threads: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)  # further fields of the quantized variants' FlashConfig


@dataclass(slots=True)
class _Run:
    """A variant in training and its results so far. Times and bytes of steps that measure the error are skipped."""

    variant: Variant
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    bytes_full_precision: list[int] = field(default_factory=list)
    sites: dict[str, dict[str, Any]] = field(default_factory=dict)
    sqnr_db: dict[str, list[float]] = field(default_factory=dict)
    validation_loss: float = math.nan


def train(
    rank: int, settings: Settings, store: str, on_step: Callable[[int, dict[str, float]], None]
) -> dict[str, Any]:
    """Train and validate all variants. Call it on every rank with the same settings, in a separate process.

    store: path of a new file for the rendezvous. on_step: receives the step and every variant's loss.
    Returns {"variants": {name: results}, "corpus": sizes}, equal on all ranks except for the times.
    """
    torch.set_num_threads(settings.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=settings.tensor_parallel,
        timeout=COLLECTIVE_TIMEOUT,
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=settings.tensor_parallel)
    group = parallel_state.get_tensor_model_parallel_group()
    prepare_cpu()
    training, validation = split(corpus(settings.data), settings.size.sequence)
    runs = [_start(variant, settings) for variant in settings.variants]
    measured = _measured_steps(settings.steps)
    for step in range(settings.steps):
        starts = _starts(training, settings, step)
        turn = step % len(runs)
        for run in runs[turn:] + runs[:turn]:
            _step(run, step, step in measured, training, starts, settings, group)
        on_step(step, {run.variant.name: run.losses[-1] for run in runs})
    for run in runs:
        run.validation_loss = _validate(run, validation, settings)
    results = {run.variant.name: _results(run, group) for run in runs}
    dist.destroy_process_group()
    return {
        "variants": results,
        "corpus": {"training_bytes": len(training), "validation_bytes": len(validation)},
    }


def _start(variant: Variant, settings: Settings) -> _Run:
    model = build_model(
        settings.size,
        tensor_parallel=settings.tensor_parallel,
        sequence_parallel=settings.sequence_parallel,
        seed=settings.seed,
    )
    return _Run(variant, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0))


def _measured_steps(steps: int) -> set[int]:
    """Return the steps in which all calls are compared with the exact sum: evenly spread, at least one."""
    count = max(1, steps // STEPS_PER_MEASUREMENT)
    return {int(steps * (i + 0.5) / count) for i in range(count)}


def _starts(data: torch.Tensor, settings: Settings, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    return torch.randint(len(data) - settings.size.sequence, (settings.size.batch,), generator=generator)


def _step(
    run: _Run,
    step: int,
    measure: bool,
    data: torch.Tensor,
    starts: torch.Tensor,
    settings: Settings,
    group: dist.ProcessGroup,
) -> None:
    with _active(run.variant, settings, step, measure):
        counters.reset_stats()
        dist.barrier(group)
        begin = time.perf_counter()
        run.optimizer.zero_grad()
        loss = loss_of(run.model, data, starts, settings.size.sequence)
        loss.backward()
        finish_gradients(run.model, group, CLIP)
        for parameters in run.optimizer.param_groups:
            parameters["lr"] = learning_rate(step, settings.steps)
        run.optimizer.step()
        seconds = time.perf_counter() - begin
        stats = counters.stats()
    run.losses.append(float(loss.detach()))
    if not measure:
        run.seconds.append(seconds)
        run.bytes_sent.append(stats["bytes_sent"])
        run.bytes_full_precision.append(stats["bytes_full_precision"])
    for name, site in stats["sites"].items():
        total = run.sites.setdefault(
            name,
            {
                "calls": 0,
                "quantized": 0,
                "full_precision": Counter(),
                "bytes_sent": 0,
                "bytes_full_precision": 0,
            },
        )
        for key in total:
            if key == "full_precision":
                total[key].update(site[key])
            else:
                total[key] += site[key]
        if site["sqnr_db"] is not None:
            run.sqnr_db.setdefault(name, []).append(site["sqnr_db"])


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate: warm-up, then a cosine down to 0.

    At a constant rate the loss of the last step varies randomly, in every precision.
    """
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    warm_up = max(1, min(WARM_UP_STEPS, steps // 4))
    return LEARNING_RATE * min(1.0, (step + 1) / warm_up) * cosine


def _validate(run: _Run, data: torch.Tensor, settings: Settings) -> float:
    """Return the mean loss over held-out batches, equal for all variants, with the variant's forward reductions."""
    losses = []
    with torch.no_grad(), _active(run.variant, settings, settings.steps, measure=False):
        for index in range(VALIDATION_BATCHES):
            starts = _starts(data, settings, -1 - index)
            losses.append(float(loss_of(run.model, data, starts, settings.size.sequence)))
    return statistics.fmean(losses)


@contextlib.contextmanager
def _active(variant: Variant, settings: Settings, step: int, measure: bool) -> Iterator[None]:
    """Apply the variant's patches in the block. The reductions of full precision are Megatron's own."""
    if variant.quantized:
        megatron.enable(variant.config(measure=measure, options=settings.options))
        try:
            yield
        finally:
            megatron.disable()
    elif variant.noise:
        from lab.benchmarks.noise import noise_patchset  # only in a checkout, which run_demo has checked

        patchset = noise_patchset(variant.noise, settings.seed * 1_000_003 + step)
        patchset.apply()
        try:
            yield
        finally:
            patchset.restore()
    else:
        yield


def _results(run: _Run, group: dist.ProcessGroup) -> dict[str, Any]:
    return {
        "quantized": run.variant.quantized,
        "preset": run.variant.preset,
        "noise": run.variant.noise,
        "losses": run.losses,
        "validation_loss": run.validation_loss,
        "replicas_equal": replicas_equal(run.model, group),
        "seconds_per_step": statistics.median(run.seconds) if run.seconds else None,
        "bytes_sent_per_step": statistics.median(run.bytes_sent) if run.bytes_sent else None,
        "bytes_full_precision_per_step": statistics.median(run.bytes_full_precision) if run.bytes_sent else None,
        "sites": {
            name: {
                **site,
                "full_precision": dict(site["full_precision"]),
                "sqnr_db": statistics.fmean(run.sqnr_db[name]) if name in run.sqnr_db else None,
            }
            for name, site in run.sites.items()
        },
    }
