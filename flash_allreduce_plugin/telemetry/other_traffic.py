"""Count the traffic of torch.distributed outside the plugin, by collective and group, while an integration is attached.

All functions of torch.distributed end in a method of ProcessGroup, under every imported name. Those methods are
replaced on the class, and restored when the last integration is disabled. The package's own calls use them too, inside
`ours`, and are counted at their decision. Calls of ProcessGroup from C++ are not seen: DDP's own reducer and its
broadcasts of buffers, functional collectives and with them DTensor, compiled regions.

Traffic that a field would quantize, if it was set, is counted at its site (`counted_at`, `exchanges_of`).

Bytes are those that a rank sends, in a ring where a collective has one, as telemetry counts them: 2 (n - 1) / n of an
all-reduce, (n - 1) / n of the whole of an all-gather, a reduce-scatter or an all-to-all; of a broadcast the root's
tensor, of a reduction to one rank the tensors of the others.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment, policy
from flash_allreduce_plugin.telemetry import counters

if TYPE_CHECKING:
    from flash_allreduce_plugin.config import FlashConfig
    from flash_allreduce_plugin.policy import Site

Volume = Callable[[Any, dist.ProcessGroup, int], int]
Served = tuple["Site", "FlashConfig"]  # where a call is counted, and the configuration that would quantize it


class _Ours(threading.local):
    """`with ours:` around a call of torch.distributed's that is counted elsewhere. Each thread has its own."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


ours = _Ours()


class _Served(threading.local):
    """The site of a thread's calls inside `counted_at`."""

    at: Served | None = None


_served = _Served()
_exchanges: WeakKeyDictionary[dist.ProcessGroup, Callable[[], Served | None]] = WeakKeyDictionary()


@contextmanager
def counted_at(site: Site, config: FlashConfig) -> Iterator[None]:
    """Inside, all that torch.distributed sends is counted at `site`, which `config` keeps in full precision."""
    before, _served.at = _served.at, (site, config)
    try:
        yield
    finally:
        _served.at = before


def exchanges_of(group: dist.ProcessGroup, served: Callable[[], Served | None]) -> None:
    """Count all-to-alls over `group` where `served` says at each of them; None: they are outside the plugin.

    For exchanges of layers, which autograd repeats in the backward pass, outside of any function of the framework's.
    """
    _exchanges[group] = served


_lock = threading.RLock()  # the end of an owner may come in the middle of anything
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_owners: WeakSet[Any] = WeakSet()
_replaced: dict[str, tuple[Any, Any]] = {}  # method -> (original, replacement)


def attach(owner: Any) -> None:
    """Count from now on, for as long as `owner` lives and is not detached.

    Does nothing with FLASH_ALLREDUCE_COUNT_BESIDE=0 or FLASH_ALLREDUCE_DISABLE=1, or without torch.distributed.
    """
    off = not environment.is_on(environment.COUNT_BESIDE, unset=True) or environment.is_on(environment.DISABLE)
    if off or not dist.is_available():
        return
    with _lock:
        if owner not in _owners:
            _owners.add(owner)
            weakref.finalize(owner, _update).atexit = False
        _update()


def detach(owner: Any) -> None:
    """Stop counting for `owner`; the last one gives ProcessGroup its own methods back."""
    with _lock:
        _owners.discard(owner)
        _update()


def _update() -> None:
    with _lock:
        wanted = any(True for _ in _owners)
        if wanted and not _replaced:
            for method, (name, volume) in _METHODS.items():
                if method in vars(dist.ProcessGroup):
                    new = _counting(getattr(dist.ProcessGroup, method), name, volume)
                    _replaced[method] = vars(dist.ProcessGroup)[method], new
                    setattr(dist.ProcessGroup, method, new)
        elif not wanted:
            for method, (before, new) in _replaced.items():
                # Another wrapper around ours stays, and ours in it counts nothing.
                if vars(dist.ProcessGroup)[method] is new:
                    setattr(dist.ProcessGroup, method, before)
            _replaced.clear()


def _counting(original: Callable[..., Any], name: str, volume: Volume) -> Callable[..., Any]:
    known: WeakKeyDictionary[dist.ProcessGroup, tuple[int, str]] = WeakKeyDictionary()

    @functools.wraps(original)
    def method(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if ours.depth or not _replaced:
            return original(self, *args, **kwargs)
        try:
            world, what = known.get(self) or known.setdefault(self, _described(name, self))
            if world > 1:
                bytes_ = volume([*args, *kwargs.values()] if kwargs else args, self, world)
                served = _served.at
                if served is None and name == "all_to_all" and self in _exchanges:
                    served = _exchanges[self]()
                if served is None:
                    counters.record_beside(what, bytes_)
                else:
                    _record(*served, name, bytes_, world)
        except Exception:  # of arguments that torch will refuse: the training is not to fail here
            pass
        with ours:  # else counted twice, if another wrapper lies between two of ours
            return original(self, *args, **kwargs)

    return method


def _record(site: Site, config: FlashConfig, name: str, bytes_: int, world: int) -> None:
    """Count a call at a site that policy.make_plan was not asked about, with the reason that it would have given."""
    whole = bytes_ if name == "send" else bytes_ * world // (world - 1)
    answer = policy.bits_of(site.role, config)
    if not config.enabled:
        reason = policy.DISABLED
    elif name != "all_to_all" and whole < config.min_bytes:
        reason = policy.SMALL
    else:
        reason = answer.reason if isinstance(answer, policy.FullPrecision) else counters.OUTSIDE
    counters.record_full_precision(site, reason, bytes_, message=whole)


def _described(name: str, group: dist.ProcessGroup) -> tuple[int, str]:
    world = group.size()
    described = "a group" if group.group_desc in ("", "undefined") else group.group_desc
    return world, f"{name}, {described} of {world} ranks"


# ---- bytes that a rank sends, from a method's arguments


def _size(tensors: Any) -> int:
    """Bytes of a tensor, or of all in a list, or in a list of lists."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_size, tensors))


def _root(arguments: Sequence[Any]) -> int:
    found = next((one.rootRank for one in arguments if hasattr(one, "rootRank")), None)
    return int(arguments[-1] if found is None else found)


def _all_reduce(given: Any, group: dist.ProcessGroup, world: int) -> int:
    return 2 * (_size(given[0]) * (world - 1) // world)


def _of_first(given: Any, group: dist.ProcessGroup, world: int) -> int:
    return _size(given[0]) * (world - 1) // world


def _of_second(given: Any, group: dist.ProcessGroup, world: int) -> int:
    return _size(given[1]) * (world - 1) // world


def _at_root(given: Any, group: dist.ProcessGroup, world: int) -> int:
    return _size(given[0]) if group.rank() == _root(given) else 0


def _scatter(given: Any, group: dist.ProcessGroup, world: int) -> int:
    return _of_second(given, group, world) if group.rank() == _root(given) else 0


def _reduce(given: Any, group: dist.ProcessGroup, world: int) -> int:
    return 0 if group.rank() == _root(given) else _size(given[0])


def _gather(given: Any, group: dist.ProcessGroup, world: int) -> int:
    return 0 if group.rank() == _root(given) else _size(given[1])


def _all_to_all(given: Any, group: dist.ProcessGroup, world: int) -> int:
    whole = _size(given[1])
    if not isinstance(given[1], Tensor):
        return whole - _size(given[1][group.rank()])
    splits = given[3]
    if not splits:
        return whole - whole // world
    return whole - whole * splits[group.rank()] // max(sum(splits), 1)


def _whole(given: Any, group: dist.ProcessGroup, world: int) -> int:
    return _size(given[0])


_METHODS: dict[str, tuple[str, Volume]] = {
    "allreduce": ("all_reduce", _all_reduce),
    "allreduce_coalesced": ("all_reduce", _all_reduce),
    "allgather": ("all_gather", _of_first),
    "allgather_coalesced": ("all_gather", _of_first),
    "allgather_into_tensor_coalesced": ("all_gather", _of_first),
    "_allgather_base": ("all_gather", _of_first),
    # The names from torch 2.13 on.
    "all_gather_single": ("all_gather", _of_first),
    "all_gather_single_coalesced": ("all_gather", _of_first),
    "reduce_scatter": ("reduce_scatter", _of_second),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _of_second),
    "_reduce_scatter_base": ("reduce_scatter", _of_second),
    "reduce_scatter_single": ("reduce_scatter", _of_second),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _of_second),
    "alltoall": ("all_to_all", _all_to_all),
    "alltoall_base": ("all_to_all", _all_to_all),
    "all_to_all_single": ("all_to_all", _all_to_all),
    "broadcast": ("broadcast", _at_root),
    "reduce": ("reduce", _reduce),
    "gather": ("gather", _gather),
    "scatter": ("scatter", _scatter),
    "send": ("send", _whole),
}
