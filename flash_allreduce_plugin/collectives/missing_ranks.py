"""Which ranks use this package on a process group: every rank says so in the group's store before its first exchange.

A rank without the plugin, or without its flag, calls something else, and its peers would wait for it in silence until
the group's timeout. So a rank that waits for more than a few seconds asks the store and says once which ranks are
missing; the error at the end names them.

The keys are the group's: one of a few bytes for each rank, beside torch's own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist

from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.errors import CollectiveError

GRACE = 5.0  # seconds that a first exchange may take before anything is said
_SECONDS = 5.0  # seconds that the store has for an answer: its host may be what died
_MOST = 8  # ranks that a sentence names

_Answer = TypeVar("_Answer")

_log = logging.getLogger("flash_allreduce_plugin")


@contextmanager
def first_use(label: Label) -> Iterator[None]:
    """Around the first exchange of a group: says that this rank is there, and, if it takes long, which ranks are
    missing.

    Raises CollectiveError that names the missing ranks, in place of one from inside.
    """
    store = _store(label.group)
    if store is None:
        yield
        return
    key = _watcher.begin(store, label)
    try:
        yield
    except CollectiveError as error:
        missing = _asked(store, label.group)
        if not missing:
            raise
        raise CollectiveError(f"{error}; {_sentence(missing, label.group)}") from error.__cause__
    finally:
        _watcher.end(key)


def shown(ranks: Sequence[int]) -> str:
    """Ranks in a sentence: a few of them."""
    more = ", ..." if len(ranks) > _MOST else ""
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(map(str, ranks[:_MOST])) + more


def leave(group: dist.ProcessGroup, key: str, text: str) -> None:
    """Leave `text` for another rank of the group, where `left` finds it, if the group has a store."""
    try:
        group.get_group_store().set(f"flash_allreduce/{key}", text)
    except Exception:  # as in _store
        return


def left(group: dist.ProcessGroup, key: str) -> str | None:
    """What another rank has left, which is gone then; None: nothing, or the store does not answer."""

    def ask(store: Any) -> list[str]:
        name = f"flash_allreduce/{key}"
        if not store.check([name]):
            return []
        text = store.get(name).decode(errors="replace")
        store.delete_key(name)
        return [text]

    try:
        return next(iter(_answer(group.get_group_store(), ask)), None)
    except Exception:  # as in _store
        return None


def _store(group: dist.ProcessGroup) -> Any:
    """The group's store, in which this rank has said that it is there; None: it has none that answers."""
    try:
        store = group.get_group_store()
        store.set(_key(group.rank()), "")
    except Exception:  # whatever a store of somebody's own may raise: it only serves a better error
        return None
    return store


def _key(rank: int) -> str:
    return f"flash_allreduce/{rank}"


def _missing(store: Any, ranks: range) -> Iterator[int]:
    """Those of `ranks` that have not said so: log2(ranks) questions for each, and one if none is missing."""
    if not ranks or store.check([_key(rank) for rank in ranks]):
        return
    if len(ranks) == 1:
        yield ranks[0]
        return
    half = len(ranks) // 2
    yield from _missing(store, ranks[:half])
    yield from _missing(store, ranks[half:])


def _asked(store: Any, group: dist.ProcessGroup) -> list[int]:
    """Ranks of the group that are missing, a few of them; none if the store does not answer."""
    return _answer(store, lambda own: list(islice(_missing(own, range(group.size())), _MOST + 1)))


def _answer(store: Any, ask: Callable[[Any], list[_Answer]]) -> list[_Answer]:
    """What `ask` has from the store; nothing if that does not answer.

    By a connection of its own, for torch uses the group's at the same time; opened now, because it takes milliseconds.
    """
    found: list[_Answer] = []

    def asking() -> None:
        try:
            found.extend(ask(store.clone()))
        except Exception:
            found.clear()

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return [] if thread.is_alive() else found


class _Watcher:
    """Looks after the exchanges that are going on, in one thread, which ends when there are none.

    Not a timer for each: starting a thread takes a quarter of the time of the whole exchange.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[object, tuple[float, Any, Label]] = {}  # since when
        self._running = False

    def begin(self, store: Any, label: Label) -> object:
        """Returns the argument for `end`."""
        key = object()
        with self._lock:
            self._waiting[key] = time.monotonic(), store, label
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="flash_allreduce_presence", daemon=True).start()
        return key

    def end(self, key: object) -> None:
        with self._lock:
            self._waiting.pop(key, None)

    def _run(self) -> None:
        while True:
            time.sleep(GRACE / 5)
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                now = time.monotonic()
                late = [key for key, (since, _, _) in self._waiting.items() if now - since >= GRACE]
                found = [self._waiting.pop(key)[1:] for key in late]
            for store, label in found:
                _say_who_is_missing(store, label)


_watcher = _Watcher()


def _forked() -> None:
    global _watcher
    _watcher = _Watcher()  # the thread is the parent's, and maybe the lock


os.register_at_fork(after_in_child=_forked)


def _say_who_is_missing(store: Any, label: Label) -> None:
    """Once, on the rank of the group that comes first."""
    missing = _asked(store, label.group)
    if missing and _is_first(store):
        _log.warning(
            "%s at site %r, rank %d, has waited for %g seconds: %s",
            *(label.collective, label.site, label.group.rank(), GRACE, _sentence(missing, label.group)),
        )


def _is_first(store: Any) -> bool:
    try:
        return bool(store.clone().add("flash_allreduce/told", 1) == 1)
    except Exception:  # as in _store
        return True


def _sentence(missing: list[int], group: dist.ProcessGroup) -> str:
    ranks = [dist.get_global_rank(group, rank) for rank in missing]
    have = "have" if len(ranks) > 1 else "has"
    return (
        f"{shown(ranks)} {have} never said that it uses flash_allreduce in this group: is the plugin installed there, "
        "and the same flag, JSON or environment given? Or is it late, or dead?"
    )
