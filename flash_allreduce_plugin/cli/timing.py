"""Times of collectives for a comparison: measured alternately, in rounds; the slowest rank's time counts.

A machine that drifts changes all variants of a round, so compare the ratio of medians, or the median of ratios. The
calls of a round follow each other without a barrier between them, as in a training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

Variants = Mapping[str, Callable[[], object]]


def interleaved(
    variants: Variants,
    rounds: int,
    calls: int,
    group: dist.ProcessGroup | None = None,
    *,
    warmup: int = 1,
    before: Callable[[], object] = lambda: None,
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, list[float]]:
    """Time every variant once a round, `calls` calls in a row. Each round starts with another variant.

    Call it on every rank of the group with the same names in the same order. A call that enqueues work on a GPU is
    timed until the GPU has finished.

    Args:
        warmup: calls of each variant before the first round.
        before: runs before the calls of each variant, outside of the timed part: restores the input.
        on_round: receives the number of finished rounds, on this rank.

    Returns:
        {name: seconds of one call in each round, the slowest rank's}, equal on all ranks.
    """
    names = list(variants)
    seconds = torch.zeros(rounds, len(names), dtype=torch.float64)
    for name in names:
        before()
        for _ in range(warmup):
            variants[name]()
    for round_ in range(rounds):
        for turn in range(len(names)):
            i = (round_ + turn) % len(names)
            variant = variants[names[i]]
            before()
            _synchronize()
            dist.barrier(group)
            begin = time.perf_counter()
            for _ in range(calls):
                variant()
            _synchronize()
            seconds[round_, i] = (time.perf_counter() - begin) / calls
        on_round(round_ + 1)
    if seconds.numel():
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
    return {name: seconds[:, i].tolist() for i, name in enumerate(names)}


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
