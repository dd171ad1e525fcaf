"""Windows of NCCL, with a backend that records its calls: nothing here has run on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin import environment
from flash_allreduce_plugin.collectives import windows
from flash_allreduce_plugin.collectives.transport import BufferPool
from flash_allreduce_plugin.runtime.groups import state_of
from tests.distributed import Ranks
from tests.queued import queued

CPU = torch.device("cpu")
CONFIG = fap.FlashConfig(bits=4, min_bytes=0, check_ranks=False)


class Backend:
    """The backend of a group, with the tensors that the ranks have registered, in order."""

    mem_allocator = "NCCL's"

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        self.asked.append(("register", pool, symm))


@contextmanager
def on(backend: Any) -> Iterator[list[Any]]:
    """Give the default group this backend. Yield the calls of the backend and of torch."""
    asked: list[Any] = backend.asked if isinstance(backend, Backend) else []

    @contextmanager
    def use(pool: Any) -> Iterator[None]:
        asked.append(("allocate in", pool))
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(dist.group.WORLD), "_get_backend", lambda group, device: backend)
        patch.setattr(dist, "all_reduce", lambda *_, **__: asked.append("all_reduce"))
        patch.setattr(dist, "barrier", lambda *_, **__: asked.append("barrier"))
        patch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
        patch.setattr(torch.cuda, "use_mem_pool", use)
        yield asked


def test_a_pool_is_registered_once_after_the_ranks_have_met() -> None:
    pool = "pool of NCCL's"
    with queued(4), on(Backend()) as asked:
        allocate = windows.open(dist.group.WORLD, CPU)
        assert asked == ["all_reduce", "barrier", ("register", pool, True)]
        assert allocate is not None
        sizes = [allocate(n).numel() for n in (1, 2 << 20, (2 << 20) + 1, 5 << 20)]
        assert sizes == [2 << 20, 2 << 20, 4 << 20, 8 << 20]
        assert asked[3:] == [("allocate in", pool)] * 4


def test_a_backend_without_support_is_reported() -> None:
    with queued(4), on(object()), pytest.warns(RuntimeWarning, match="FLASH_ALLREDUCE_NCCL_WINDOWS has no effect"):
        assert windows.open(dist.group.WORLD, CPU) is None


def test_windows_are_used_again_and_never_let_go() -> None:
    """Check that the sizes of earlier calls, the same on all ranks, decide which windows a call takes."""
    made: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        made.append(nbytes)
        return torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)

    pool = BufferPool(CPU, allocate)
    for size in (100, 1000, 100, 500, 5000, 100):
        buffers = pool.take(size), pool.take(size // 2)
        assert [b.numel() for b in buffers] == [size, size // 2]
        pool.give(*buffers)
    assert made == [100, 50, 1000, 500, 5000, 2500]  # 500 and 250 fit into existing windows
    assert len(pool._free) == len(made)


def taken(call: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes that a call takes from windows, as the pool of a GPU would."""
    sizes: list[int] = []

    def allocate(nbytes: int) -> Tensor:
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    state = state_of(dist.group.WORLD)
    plain, opened = BufferPool(CPU), BufferPool(CPU, allocate)
    monkeypatch.setattr(state, "pool", lambda device, windows_of=None: plain if windows_of is None else opened)
    call()
    return sizes


def test_all_ranks_allocate_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check even and uneven parts; a call takes none if its ranks' buffers have different sizes."""
    sizes = [1000, 60_000, 0, 129]
    levels = CONFIG.model_copy(
        update={"hierarchical": fap.FlashConfig(hierarchical={"intra_bits": 8, "inter_bits": 4, "ranks_per_node": 2})
                .hierarchical}
    )  # fmt: skip

    def calls(rank: int) -> list[Any]:
        parts, own = [torch.empty(size) for size in sizes], torch.empty(sizes[rank])
        return [
            lambda: fap.all_reduce(torch.empty(70_001), config=CONFIG),
            lambda: fap.reduce_scatter(torch.empty(5003), torch.empty(4 * 5003), config=CONFIG),
            lambda: fap.all_gather(torch.empty(4 * 5003), torch.empty(5003), config=CONFIG),
            lambda: fap.reduce_scatter(own, parts, config=CONFIG),
            lambda: fap.all_gather(torch.empty(sum(sizes)), own, config=CONFIG, output_split_sizes=sizes),
            lambda: fap.all_reduce(torch.empty(70_001), config=levels),
            lambda: fap.all_to_all(torch.empty(4), torch.empty(4), [1] * 4, [1] * 4, config=CONFIG),
        ]

    of_ranks = []
    for rank in range(4):
        with queued(4, rank):
            of_ranks.append([taken(call, monkeypatch) for call in calls(rank)])
    assert of_ranks[1:] == of_ranks[:1] * 3
    assert all(of_ranks[0][:5]) and not any(of_ranks[0][5:])


def differing(variable: str) -> str:
    if dist.get_rank() == 1:
        os.environ[variable] = "1"
    try:
        fap.all_reduce(torch.ones(20_000), group=dist.new_group(), config=fap.FlashConfig(bits=4, min_bytes=0))
    except fap.MismatchError as error:
        return str(error)
    finally:
        os.environ.pop(variable, None)
    return ""


def test_ranks_that_differ_in_it_are_refused(ranks: Callable[[int], Ranks]) -> None:
    said = f"{environment.NCCL_WINDOWS} is false on rank 0; true on rank 1"
    assert all(said in message for message in ranks(2).run(differing, environment.NCCL_WINDOWS))
