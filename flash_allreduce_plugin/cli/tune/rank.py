"""`tune` in every rank: time full precision and quantized calls alternately, choose, and check the choice.

Times are medians over rounds of the slowest rank's times. They are equal on all ranks, so all ranks choose the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.api import reductions
from flash_allreduce_plugin.cli.bench.rank import plain
from flash_allreduce_plugin.cli.ranks import Say
from flash_allreduce_plugin.cli.timing import interleaved
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.policy import Collective

FULL_PRECISION, CONTROL, TUNED = "full precision", "full precision again", "tuned"

_ROUND = 0.02  # least seconds of a round's calls, up to _MOST_CALLS of them
_MOST_CALLS = 50
_ROUNDS = (5, 200)
_AGAIN = 2  # further measurements of a size that seems too slow, each with three times the rounds


def measure(settings: dict[str, Any], say: Say) -> dict[str, Any]:
    """Measure, choose and check.

    settings: collectives, sizes (bytes), datatype, device, configs {name: fields} (the choice is for the first),
    chunks (candidates of chunk_bytes), chunk_sizes, seconds (for a size), limit.

    Returns {"chunk_bytes": {candidate: {size: seconds}}, "sweep": rows, "pays_from": {collective: {name: size or
    None}}, "config": fields, "check": rows}.
    """
    configs = {name: FlashConfig.from_dict(fields) for name, fields in settings["configs"].items()}
    first, base = next(iter(configs.items()))
    collectives, sizes = settings["collectives"], settings["sizes"]
    total = len(settings["chunk_sizes"]) + 2 * len(collectives) * len(sizes)
    bench = _Bench(settings, say, total)

    chunks: dict[int, dict[int, float]] = {candidate: {} for candidate in settings["chunks"]}
    for size in settings["chunk_sizes"]:
        candidates = {str(c): base.model_copy(update={"chunk_bytes": c}) for c in settings["chunks"]}
        for name, seconds in bench.times(collectives[0], size, candidates, control=None).items():
            chunks[int(name)][size] = statistics.median(seconds)
    chunk = {"chunk_bytes": best_chunk(chunks, base.chunk_bytes)}
    configs = {name: config.model_copy(update=chunk) for name, config in configs.items()}

    sweep = []
    for collective in collectives:
        for size in sizes:
            times = bench.times(collective, size, configs)
            sweep.append({"collective": collective, "size": size, "seconds": _medians(times)})
    pays = {
        collective: {
            name: pays_from(
                (row["size"], row["seconds"][FULL_PRECISION] / row["seconds"][name])
                for row in sweep
                if row["collective"] == collective
            )
            for name in configs
        }
        for collective in collectives
    }
    config = choose(configs[first], [pays[collective][first] for collective in collectives])
    check = [bench.check(c, size, config, settings["limit"]) for c in collectives for size in sizes]
    return {"chunk_bytes": chunks, "sweep": sweep, "pays_from": pays, "config": config.to_dict(), "check": check}


def best_chunk(times: Mapping[int, Mapping[int, float]], default: int) -> int:
    """Return the candidate with the least geometric mean of times; the default if none is 2 % better."""
    if not any(times.values()):
        return default
    means = {c: math.exp(statistics.fmean(map(math.log, of_sizes.values()))) for c, of_sizes in times.items()}
    best = min(means, key=means.__getitem__)
    return default if means.get(default, math.inf) <= 1.02 * means[best] else best


def pays_from(speedups: Iterable[tuple[int, float]]) -> int | None:
    """Return the smallest size from which on every measured size is faster quantized; None: the largest is not.

    speedups: (size, time in full precision / time quantized).
    """
    found = None
    for size, speedup in sorted(speedups, reverse=True):
        if speedup < 1:
            break
        found = size
    return found


def choose(base: FlashConfig, pays: list[int | None]) -> FlashConfig:
    """Return the configuration with min_bytes at which all collectives pay; enabled false if one never does."""
    sizes = [size for size in pays if size is not None]
    if len(sizes) < len(pays):
        default = FlashConfig.model_fields["min_bytes"].default
        return base.model_copy(update={"enabled": False, "min_bytes": default})
    return base.model_copy(update={"min_bytes": max(sizes)})


class _Bench:
    """Times the calls of one rank, and sends the progress."""

    def __init__(self, settings: Mapping[str, Any], say: Say, total: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.group = group
        self.device = torch.device(settings["device"])
        self.dtype: torch.dtype = getattr(torch, settings["datatype"])
        self.seconds: float = settings["seconds"]
        self.say, self.total, self.done = say, total, 0

    def check(self, collective: Collective, size: int, config: FlashConfig, limit: float) -> dict[str, Any]:
        """Time full precision, full precision again as a control, and the tuned configuration.

        A size that seems slower than the limit is measured further, and all of its rounds count.
        """
        times = self.times(collective, size, {TUNED: config}, CONTROL)
        for _ in range(_AGAIN):
            if _medians(times)[TUNED] <= limit * _medians(times)[FULL_PRECISION]:
                break
            more = self.times(collective, size, {TUNED: config}, CONTROL, 3 * self.seconds, counts=False)
            times = {name: times[name] + more[name] for name in times}
        medians = _medians(times)
        return {
            "collective": collective,
            "size": size,
            "seconds": medians,
            "rounds": len(times[TUNED]),
            "ratio": medians[TUNED] / medians[FULL_PRECISION],
            "control": medians[CONTROL] / medians[FULL_PRECISION],
            "quantized": config.enabled and size >= config.min_bytes,
        }

    def times(
        self,
        collective: Collective,
        size: int,
        configs: Mapping[str, FlashConfig],
        control: str | None = "",
        seconds: float | None = None,
        counts: bool = True,
    ) -> dict[str, list[float]]:
        """Return the seconds of a call in each round, of every configuration and in full precision.

        control: None: without full precision; a name: full precision a second time under that name.
        """
        self.say(done=self.done, of=self.total, doing=f"{collective} of {size} bytes")
        output, input, fresh = self._tensors(collective, size)
        variants: dict[str, Callable[[], object]] = {}
        if control is not None:
            variants[FULL_PRECISION] = partial(plain, collective, output, input)
        for name, config in configs.items():
            variants[name] = partial(_flash, collective, output, input, config)
        if control:
            variants[control] = partial(plain, collective, output, input)
        first = interleaved(variants, 1, 1, self.group, before=lambda: fresh(1))
        call = max(min(t) for t in first.values())
        calls = max(1, min(_MOST_CALLS, int(_ROUND / call)))
        budget = self.seconds if seconds is None else seconds
        rounds = int(budget / (calls * sum(min(t) for t in first.values())))
        rounds = min(_ROUNDS[1], max(_ROUNDS[0], rounds))
        found = interleaved(variants, rounds, calls, self.group, before=lambda: fresh(calls))
        self.done += counts
        return found

    def _tensors(self, collective: Collective, size: int) -> tuple[Tensor, Tensor, Callable[[int], None]]:
        """Return output, input, and a function that prepares them for a number of calls: sums in place grow."""
        world = self.group.size()
        count = size // self.dtype.itemsize // world * world
        generator = torch.Generator().manual_seed(self.group.rank())
        whole = torch.randn(count, generator=generator).to(self.dtype).to(self.device)
        shard = whole.new_empty(count // world)
        if collective == "reduce_scatter":
            return shard, whole, lambda calls: None
        if collective == "all_gather":
            return whole, shard.normal_(), lambda calls: None
        output = torch.empty_like(whole)

        def fresh(calls: int) -> None:
            torch.mul(whole, float(world) ** (-calls / 2), out=output)

        return output, whole, fresh


def _flash(collective: Collective, output: Tensor, input: Tensor, config: FlashConfig) -> None:
    if collective == "all_reduce":
        reductions.all_reduce(output, config=config)
    elif collective == "reduce_scatter":
        reductions.reduce_scatter(output, input, config=config)
    else:
        reductions.all_gather(output, input, config=config)


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in times.items()}
