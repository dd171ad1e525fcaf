"""The watch of a long run: the memory of a rank, and a thread that ends a rank that does not advance."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

WARM_UP = 0.1  # of the calls or steps
MIB = 1 << 20
_STATUS = Path("/proc/self/status")


class _Mallinfo2(ctypes.Structure):
    """The struct of glibc 2.33 and later, malloc.h: sums over all arenas, in bytes."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def occupied() -> dict[str, int]:
    """Return the memory of this process, after a garbage collection and malloc_trim.

    rss: VmRSS in bytes. blocks: of Python's allocator. malloc: bytes allocated from the C library and not freed (glibc
    2.33). Growth of rss without growth of malloc is fragmentation.
    """
    gc.collect()
    library, found = ctypes.CDLL(None), {}
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _Mallinfo2
        info = library.mallinfo2()
        found["malloc"] = info.uordblks + info.hblkhd
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return {"rss": int(line.split()[1]) << 10, "blocks": sys.getallocatedblocks(), **found}


def sample(done: int, group: dist.ProcessGroup, **more: int) -> dict[str, Any]:
    """Return the memory of every rank of the group after `done` calls or steps, and `more`."""
    here = {**occupied(), **more}
    everybodys = [torch.empty(len(here), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(everybodys, torch.tensor(list(here.values())), group=group)
    return {"done": done, **dict(zip(here, torch.stack(everybodys).t().tolist(), strict=True))}


def growth(done: list[int], occupied: list[int], of: int) -> dict[str, float]:
    """Return the growth from the first to the last fifth of the samples after the warm-up, by medians.

    Args:
        done: calls or steps before each sample, of `of` in all.
        occupied: at each sample.
    """
    after = [i for i, count in enumerate(done) if count >= WARM_UP * of] or [len(done) - 1]
    fifth = max(1, len(after) // 5)
    first, last = after[:fifth], after[-fifth:]
    before, end = (statistics.median(occupied[i] for i in part) for part in (first, last))
    calls = statistics.median(done[i] for i in last) - statistics.median(done[i] for i in first)
    return {"before": before, "end": end, "growth": end - before, "per call": (end - before) / calls if calls else 0.0}


class Watchdog:
    """Ends this rank, with a message and every thread's stack, after `patience` seconds without a call of `advance`.

    A context manager: it watches inside of the block only.
    """

    def __init__(self, rank: int, patience: float) -> None:
        self._rank = rank
        self._patience = patience
        self._seen = time.monotonic()
        self._doing: dict[str, Any] = {}
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def advance(self, who: str, doing: Any) -> None:
        """Note progress. who: a thread of the rank. doing: its next step; the message has its repr."""
        self._doing[who] = doing
        self._seen = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self._seen < self._patience:
            if self._over.wait(min(1.0, self._patience / 10)):
                return
        faulthandler.dump_traceback(all_threads=True)
        doing = "".join(f"\n  {who}: {what!r}" for who, what in self._doing.items())
        print(
            f"rank {self._rank}: nothing has advanced for {self._patience:g} s. What each thread began last:{doing}",
            file=sys.stderr,
        )
        end()


def end() -> NoReturn:
    """End the process immediately, with the exception if there is one: other threads may wait for missing ranks."""
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
