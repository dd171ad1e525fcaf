"""What a long run is watched by: the memory of a rank, and a thread that ends the rank when nothing advances."""

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
    """Of glibc 2.33 and later, malloc.h: over all its arenas, in bytes."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def occupied() -> dict[str, int]:
    """rss: VmRSS of this process in bytes. blocks: of Python's own allocator. malloc: bytes that somebody has asked
    the C library for and not given back, where it tells (glibc 2.33); what grows in rss and not there is memory between
    what is in use.

    Garbage is collected, and whole pages that the C library holds in reserve are given back, before.
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
    """After `done` calls or steps: what is occupied, and `more`, of every rank of the group."""
    here = {**occupied(), **more}
    everybodys = [torch.empty(len(here), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(everybodys, torch.tensor(list(here.values())), group=group)
    return {"done": done, **dict(zip(here, torch.stack(everybodys).t().tolist(), strict=True))}


def growth(done: list[int], occupied: list[int], of: int) -> dict[str, float]:
    """From the first to the last fifth of the samples after the warm-up, by their medians.

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
    """Ends this rank, with a message and every thread's stack, when `advance` was not called for `patience` seconds.

    Use as a context manager: it watches inside of it, and a rank lives on after it.
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
        """who: a thread of the rank. doing: what it begins now; its repr is shown."""
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
    """Leave at once with what there is of an exception: other threads may be waiting for ranks that will not come."""
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
