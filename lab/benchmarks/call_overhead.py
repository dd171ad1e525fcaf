"""The cost of a call in Python, in one process, with nothing sent.

    python -m lab.benchmarks.call_overhead               # in full precision, against torch.distributed's own
    python -m lab.benchmarks.call_overhead --quantized   # over a backend that queues: a call, and each chunk of it

--quantized: the codec's operators and torch's collectives return immediately, so the time is the package's alone. A GPU
adds three launches and two NCCL calls a chunk, 5 to 15 us each.

In full precision torch's "fake" process group of two ranks returns immediately, and the rest is the caller's side. Both
run alternately, several calls in a row; the least of the rounds counts. Real calls wait, and the same code is slower
for both then, because it has left the caches.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import transport


def microseconds(call: Callable[[], object], calls: int = 300) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - begin) / calls


class _Done:
    def wait(self) -> bool:
        return True


def _nothing(*_: Any, **__: Any) -> _Done:
    return _Done()


def quantized(rounds: int) -> None:
    """8 ranks; calls of one chunk and of eight, in turn."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    names = ("encode", "decode", "decode_sum", "decode_sum_encode")
    rows._compiled = SimpleNamespace(**dict.fromkeys(names, _nothing))  # type: ignore[assignment]
    dist.all_to_all_single = transport.all_gather_single = _nothing
    transport.queues = lambda group, device: True
    config = fap.FlashConfig(check_ranks=False, min_bytes=0)
    sizes = {1: 1 << 20, 8: 1 << 26}  # elements of a call of so many chunks
    whole = {count: torch.empty(numel, dtype=torch.bfloat16) for count, numel in sizes.items()}
    shard = {count: torch.empty(numel // 8, dtype=torch.bfloat16) for count, numel in sizes.items()}
    calls: dict[str, Callable[[int], object]] = {
        "all_reduce": lambda n: fap.all_reduce(whole[n], config=config),
        "reduce_scatter": lambda n: fap.reduce_scatter(shard[n], whole[n], config=config),
        "all_gather": lambda n: fap.all_gather(whole[n], shard[n], config=config),
    }
    print(f"{'us':18}{'a call':>8}{'a chunk':>9}")
    for name, call in calls.items():
        times = [[microseconds(partial(call, n), 100) for n in sizes] for _ in range(rounds)]
        one, eight = (min(column) for column in zip(*times, strict=True))
        print(f"{name:18}{one:8.1f}{(eight - one) / 7:9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quantized", action="store_true", help="quantized calls, as over NCCL")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    warnings.simplefilter("ignore")  # the fake group's
    if arguments.quantized:
        quantized(rounds)
        return
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    config = fap.FlashConfig(check_ranks=False)  # there is no other rank
    x, half, twice = torch.randn(256), torch.empty(128), torch.empty(512)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (lambda: dist.all_reduce(x), lambda: fap.all_reduce(x, config=config)),
        "reduce_scatter": (
            lambda: transport.reduce_scatter_single(half, x),
            lambda: fap.reduce_scatter(half, x, config=config),
        ),
        "all_gather": (
            lambda: transport.all_gather_single(twice, x),
            lambda: fap.all_gather(twice, x, config=config),
        ),
    }
    print(f"{'1 KiB, us a call':18}{'torch':>8}{'ours':>8}{'more':>8}")
    for name, pair in pairs.items():
        times = [[microseconds(call) for call in pair] for _ in range(rounds)]
        plain, ours = (min(column) for column in zip(*times, strict=True))
        print(f"{name:18}{plain:8.1f}{ours:8.1f}{ours - plain:8.1f}")


if __name__ == "__main__":
    main()
