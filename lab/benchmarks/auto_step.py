"""enabled "auto" against the better of full precision and quantized: the cost of its trial, and its decision.

    python -m lab.benchmarks.auto_step                        needs root: makes hosts with netlab; 20 minutes
    python -m lab.benchmarks.auto_step --rates loopback       two ranks of this machine, without root
    python -m lab.benchmarks.auto_step --rates 1gbit --then none --interval 60       the links change half way

The frameworks are DistributedDataParallel, DeepSpeed stage 2 and Megatron's tensor parallelism. Full precision, the
preset and the preset with "auto" take their steps in turn, from the first step on, so that a machine that drifts drifts
for all of them. The clock of "auto" stands still in the steps of the others. "total" is the sum of all steps against
that in full precision: the trial is in it. "after" is the median of the last third of the steps against the better of
the two others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.cli.demo.model import ModelSize, prepare_cpu
from flash_allreduce_plugin.runtime import auto
from lab.benchmarks import command, netlab, ranks, step_time, steps

FULL_PRECISION, QUANTIZED, AUTO = "full precision", "quantized", "auto"
LOOPBACK = "loopback"
Step = Callable[[str], None]


class Stopwatch:
    """The clock of "auto"."""

    def __init__(self) -> None:
        self._stopped, self._since = 0.0, 0.0

    def __call__(self) -> float:
        return self._stopped + (time.perf_counter() - self._since if self._since else 0.0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._since = time.perf_counter()
        yield
        self._stopped, self._since = self(), 0.0


def section(variant: str, preset: str, interval: int) -> dict[str, Any]:
    """Return the fields of a variant."""
    enabled = {FULL_PRECISION: False, QUANTIZED: True}.get(variant, AUTO)
    return {
        "preset": preset,
        "enabled": enabled,
        **({"auto_interval": interval} if variant == AUTO and interval else {}),
    }


def layers(arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(1)
    width = arguments.width
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(arguments.layers)])


def ddp(arguments: argparse.Namespace) -> Step:
    """Steps of a model a variant, without a hook in full precision."""
    models = {variant: DistributedDataParallel(layers(arguments)) for variant in (FULL_PRECISION, QUANTIZED, AUTO)}
    for variant in (QUANTIZED, AUTO):
        models[variant].register_comm_hook(
            None, fap.ddp_hook(fap.FlashConfig(**section(variant, arguments.preset, arguments.interval)))
        )
    optimizers = {variant: torch.optim.SGD(model.parameters(), lr=1e-3) for variant, model in models.items()}
    x = torch.randn(arguments.rows, arguments.width)

    def step(variant: str) -> None:
        models[variant](x).square().mean().backward()
        optimizers[variant].step()
        optimizers[variant].zero_grad()

    return step


def zero2(arguments: argparse.Namespace) -> Step:
    """Steps of an engine a variant, without our section in full precision."""
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.rows,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2},
    }
    engines = {}
    for variant in (FULL_PRECISION, QUANTIZED, AUTO):
        ours = (
            {}
            if variant == FULL_PRECISION
            else {"flash_allreduce": section(variant, arguments.preset, arguments.interval)}
        )
        model = layers(arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engines[variant], *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**config, **ours})
    x = torch.randn(arguments.rows, arguments.width).bfloat16()

    def step(variant: str) -> None:
        engines[variant].backward(engines[variant](x).float().square().mean())
        engines[variant].step()

    return step


def megatron(arguments: argparse.Namespace) -> Step:
    """Return the steps of one model, with seams applied in the steps of quantized variants."""
    from megatron.core import parallel_state

    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    prepare_cpu()
    size = ModelSize(hidden=512, layers=2, heads=8, sequence=256, batch=8)
    training_step = step_time.training_step(size, parallel_state.get_tensor_model_parallel_group())
    finished = dict.fromkeys((QUANTIZED, AUTO), 0)

    def step(variant: str) -> None:
        training_step()
        if variant in finished:
            finished[variant] += 1

    def active(variant: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if variant not in finished else enabled(variant)

    @contextlib.contextmanager
    def enabled(variant: str) -> Iterator[None]:
        fap.megatron.enable(fap.FlashConfig(**section(variant, arguments.preset, arguments.interval)))
        fap.megatron.set_step(finished[variant])
        yield
        fap.megatron.disable()

    step.active = active  # type: ignore[attr-defined]
    return step


FRAMEWORKS: dict[str, Callable[[argparse.Namespace], Step]] = {"ddp": ddp, "zero2": zero2, "megatron": megatron}


def in_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    ranks.start_engine(arguments.framework)
    step = FRAMEWORKS[arguments.framework](arguments)
    watch = Stopwatch()
    auto.clock = watch
    decided = None

    @contextlib.contextmanager
    def active(variant: str) -> Iterator[None]:
        with getattr(step, "active", lambda _: contextlib.nullcontext())(variant):
            yield

    def timed(variant: str) -> None:
        with watch.running() if variant == AUTO else contextlib.nullcontext():
            step(variant)

    times = steps.Times((FULL_PRECISION, QUANTIZED, AUTO))
    for number in range(arguments.steps):
        if arguments.then and number == arguments.steps // 2:
            dist.barrier()
            netlab.set_rate(arguments.then)
        for variant in steps.rotated((FULL_PRECISION, QUANTIZED, AUTO), number):
            with active(variant):
                times.take(variant, timed, warm=True)
        if decided is None and auto.decision() is not None:
            decided = number
    decision = auto.decision()
    return {
        "seconds": times.seconds,
        "decided": decided,
        "decision": None if decision is None else decision.said(),
    }


def row(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a training."""
    seconds = found["seconds"]
    last = {variant: statistics.median(times[-len(times) // 3 :]) for variant, times in seconds.items()}
    total = {variant: sum(times) for variant, times in seconds.items()}
    best = min(last[FULL_PRECISION], last[QUANTIZED])
    return {
        **{f"{variant}, seconds": round(took, 6) for variant, took in last.items()},
        "total": round(total[AUTO] / total[FULL_PRECISION], 4),
        "total, quantized": round(total[QUANTIZED] / total[FULL_PRECISION], 4),
        "after": round(last[AUTO] / best, 4),
        "decided": found["decided"],
        "decision": found["decision"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", nargs="+", default=[LOOPBACK, "1gbit"])
    parser.add_argument("--then", help="the rate of the links from half of the steps on")
    parser.add_argument("--interval", type=int, default=0, help="auto_interval: measure again after so many steps")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--preset", default="int8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=1800)


def measure(arguments: argparse.Namespace, keep: command.Keep) -> None:
    rows = []
    print(f"{'':10}{'link':10}{'full':>9}{'quantized':>11}{'auto':>9}{'total':>8}{'after':>8}  decided", flush=True)
    for framework in arguments.frameworks:
        for rate in arguments.rates:
            more = {"framework": framework}
            if rate == LOOPBACK:
                found = ranks.torchrun(in_rank, arguments.hosts, arguments, **more)
            else:
                found = steps.over_links(in_rank, rate, arguments, **more)
            name = f"{rate}, {arguments.then}" if arguments.then else rate
            rows.append({"framework": framework, "rate": name, **row(found)})
            one = rows[-1]
            milliseconds = [f"{one[f'{variant}, seconds'] * 1e3:.1f}" for variant in (FULL_PRECISION, QUANTIZED, AUTO)]
            print(
                f"{framework:10}{name:10}{milliseconds[0]:>9}{milliseconds[1]:>11}{milliseconds[2]:>9}"
                f"{one['total']:>8.3f}{one['after']:>8.3f}  step {one['decided']}: {json.dumps(one['decision'])}",
                flush=True,
            )
            keep({"rows": rows})


if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, measure))
