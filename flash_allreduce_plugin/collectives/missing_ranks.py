"""The ranks that use this package on a process group: each writes a key to the group's store before its first exchange.

A rank without the plugin, or without its flag, makes another call, and its peers would wait in silence until the
group's timeout. So a rank that waits for more than a few seconds reads the store and logs the missing ranks once. The
error at the timeout names them too.

A group has one key of a few bytes a rank, next to torch's keys.
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

GRACE = 5.0  # seconds of a first exchange before the missing ranks are logged
_SECONDS = 5.0  # seconds that the store has for an answer: its host may have died
_MOST = 8  # ranks that a sentence names

_Answer = TypeVar("_Answer")

_log = logging.getLogger("flash_allreduce_plugin")


@contextmanager
def first_use(label: Label) -> Iterator[None]:
    """Register this rank around the first exchange of a group, and log the missing ranks if the exchange is slow.

    Raises CollectiveError with the missing ranks, in place of the error from inside.
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
    """Return the ranks as words, at most a few of them."""
    more = ", ..." if len(ranks) > _MOST else ""
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(map(str, ranks[:_MOST])) + more


def leave(group: dist.ProcessGroup, key: str, text: str) -> None:
    """Leave `text` for another rank of the group, where `left` finds it, if the group has a store."""
    try:
        group.get_group_store().set(f"flash_allreduce/{key}", text)
    except Exception:  # as in _store
        return


def left(group: dist.ProcessGroup, key: str) -> str | None:
    """Return and delete the text that another rank left; None if there is none or the store does not answer."""

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
    """Return the group's store after registering this rank in it; None if no store answers."""
    try:
        store = group.get_group_store()
        store.set(_key(group.rank()), "")
    except Exception:  # a user's store may raise anything; the store only improves an error message
        return None
    return store


def _key(rank: int) -> str:
    return f"flash_allreduce/{rank}"


def _missing(store: Any, ranks: range) -> Iterator[int]:
    """Yield the ranks without a key: log2(ranks) reads for each, and one read if no rank is missing."""
    if not ranks or store.check([_key(rank) for rank in ranks]):
        return
    if len(ranks) == 1:
        yield ranks[0]
        return
    half = len(ranks) // 2
    yield from _missing(store, ranks[:half])
    yield from _missing(store, ranks[half:])


def _asked(store: Any, group: dist.ProcessGroup) -> list[int]:
    """Return a few of the missing ranks of the group; none if the store does not answer."""
    return _answer(store, lambda own: list(islice(_missing(own, range(group.size())), _MOST + 1)))


def _answer(store: Any, ask: Callable[[Any], list[_Answer]]) -> list[_Answer]:
    """Return the answers of the store to `ask`; an empty list if the store does not answer.

    Opens another connection, because torch uses the group's at the same time. That takes milliseconds.
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
    """Watches the exchanges in flight, in one thread, which ends when there are none.

    One timer an exchange would be slow: the start of a thread takes a quarter of the time of the exchange.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[object, tuple[float, Any, Label]] = {}  # start, store, label
        self._running = False

    def begin(self, store: Any, label: Label) -> object:
        """Start to watch an exchange. Returns the argument for `end`."""
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
    _watcher = _Watcher()  # after a fork: the parent has the thread, and may hold the lock


os.register_at_fork(after_in_child=_forked)


def _say_who_is_missing(store: Any, label: Label) -> None:
    """Log the missing ranks once, on the first rank of the group that gets here."""
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
