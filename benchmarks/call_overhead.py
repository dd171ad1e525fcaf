"""What a call in full precision costs in Python, beside torch.distributed's own: nothing is sent, in one process.

    python -m benchmarks.call_overhead

torch's "fake" process group of two ranks returns at once; what is left is the caller's side. Calls in a row, both in
turn, the least of the rounds. Between calls that wait, as real ones do, the same code is slower for both: it is not in
the caches any more.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.collectives import transport


def microseconds(call: Callable[[], object], calls: int = 300) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - begin) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")  # the fake group's
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    config = fap.FlashConfig(check_ranks=False)  # there is nobody to compare with
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
