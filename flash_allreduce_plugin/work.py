"""The handle of a call in flight."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator


class Work:
    """A collective that has been started.

    It is a generator that runs to its one `yield` when the call is made (encoding and putting the first chunks
    on the wire) and to its end in wait(). The generator holds the call's buffers, so a handle that is dropped
    takes nothing away that the wire still reads.

    The second half of a call issues collectives of its own. Handles may therefore be waited on in any order,
    as long as it is the same order, relative to other collectives of the group, on all ranks.
    """

    def __init__(self, steps: Iterator[None], label: str) -> None:
        self._steps = steps
        self._label = label
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._advance()

    def _advance(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._done = True
        except BaseException as error:
            self._done = True
            self._error = error
            raise

    def wait(self) -> bool:
        """Block until the result is in place; True. May be called again and from any thread.

        Raises:
            CollectiveError: a peer failed or the group's timeout passed; every later wait raises it too.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._done:
                self._advance()
                assert self._done
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place, that is whether wait() has returned or failed."""
        return self._done

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            warnings.warn(
                f"{self._label} was started and never waited on: the other ranks wait for its second half.",
                ResourceWarning,
                stacklevel=2,
            )
