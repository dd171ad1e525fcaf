"""The handle of a call in flight."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from flash_allreduce_plugin.errors import CollectiveError


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
            if not isinstance(error, Exception):  # Ctrl-C: for this wait, not for those of the cleaning up
                self._error = CollectiveError(
                    f"{self._label} was interrupted by {type(error).__name__}: its result will not come, and the group "
                    "is not to be used any more"
                )
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


class StreamWork(Work):
    """A call over a backend that queues its work on the GPU (NCCL), where waiting holds up a stream and not the caller.

    All of it is issued at once, on a stream of its own, behind what the current stream has to do by now:

        current stream   ... | gradient      | other work, which overlaps     | wait(): goes on behind the event
        our stream                           | encode | sum | decode | event
        NCCL's stream                                 | all-to-all | all-gather
    """

    def __init__(self, steps: Iterator[None], label: str, device: torch.device, tensors: Sequence[Tensor]) -> None:
        """tensors: of the caller's stream, which the call reads or writes: their memory is not given away before."""
        stream = _stream_of(device)
        self._device = device
        stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in tensors:
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            super().__init__(steps, label)
            super().wait()
            self._event = stream.record_event()

    def wait(self) -> bool:
        """Have the current stream wait for the result; the caller goes on. True."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place."""
        return self._event.query()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of asynchronous calls, one a device: calls of a group follow one another on the wire as it is."""
    return torch.cuda.Stream(device)
