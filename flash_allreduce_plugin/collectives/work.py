"""The handle of a call in flight, and the thread that brings it on.

A call has three stages (Stage), each of which runs once, in this order:

    START                PROGRESS                           FINISH
    encode,              receive, sum, send, write the      note the measured error and the residual,
    first sends          result                             in the order of the waits

START runs when the call is made and FINISH in wait(). Over gloo the PROGRESS of a quantized call runs in a thread of
the group (Helper), as torch's own calls progress in a thread of gloo's: handles may be waited for in any order, and
other collectives may come in between. Over NCCL all of it is on a stream of the GPU (StreamWork). Over other backends
PROGRESS issues collectives, which are matched by their order, and so it runs in wait().
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from functools import cache
from queue import SimpleQueue

import torch
from torch import Tensor

from flash_allreduce_plugin.errors import CollectiveError

_NO_LIMIT = timedelta(0)  # torch's: the group's timeout is the limit
_GRACE = 2.0  # seconds that the end of the program waits for calls in flight

Future = torch.futures.Future[list[Tensor]]


class Stage(IntEnum):
    """The stage of a call that comes next. A call yields it before each stage but the first; DONE is never yielded."""

    START = 0
    PROGRESS = 1
    FINISH = 2
    DONE = 3


class Work:
    """A collective that has been started. `stages` holds its buffers as long as the wire reads them."""

    def __init__(
        self,
        stages: Iterator[Stage],
        label: str,
        outputs: Sequence[Tensor] = (),
        helper: Helper | None = None,
        at_once: bool = False,
    ) -> None:
        """outputs: what get_future() gives. helper: may make the call progress; at_once: from now on."""
        self._stages = stages
        self._label = label
        self._outputs = list(outputs)
        self._helper = helper
        self._inference = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()
        self._next = Stage.START
        self._error: BaseException | None = None
        self._future: Future | None = None
        self._progressed: threading.Event | None = None  # once the helper has the call
        self._advance()
        if at_once:
            self._delegate()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until the result is in place; True. May be called again and from any thread.

        timeout: 0 for the group's own. It bounds this wait, of a call that progresses by itself, and not the call.

        Raises:
            CollectiveError: a peer failed or the group's timeout passed; every later wait raises it too. Or `timeout`
                passed first; then the call goes on and may be waited for again.
        """
        if timeout and self._progressed is None:
            with self._lock:
                self._delegate()
        progressed = self._progressed
        if progressed is not None and not progressed.wait(timeout.total_seconds() or None):
            raise CollectiveError(f"{self._label} is not done after {timeout}; it goes on, and may be waited for again")
        with self._lock:
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place, or the call has failed."""
        if self._progressed is None and self._lock.acquire(blocking=False):  # else somebody waits, and brings it on
            try:
                self._delegate()
            finally:
                self._lock.release()
        return self._next > Stage.PROGRESS if self._progressed is None else self._progressed.is_set()

    def get_future(self) -> Future:
        """Done with the result, as torch's: the tensors written. Over backends that do not progress it waits first."""
        with self._lock:
            if self._future is None:
                self._future = self._new_future()
                self._delegate()
                if self._progressed is None or self._progressed.is_set():
                    self._complete(self._future)
            return self._future

    def _advance(self) -> None:
        """Run the next stage."""
        try:
            self._next = next(self._stages, Stage.DONE)
        except BaseException as error:
            self._next = Stage.DONE
            self._error = error
            if not isinstance(error, Exception):  # Ctrl-C: for this wait, not for those of the cleaning up
                self._error = CollectiveError(
                    f"{self._label} was interrupted by {type(error).__name__}: its result will not come, and the group "
                    "is not to be used any more"
                )
            raise

    def _finish(self) -> None:
        while self._next is not Stage.DONE:
            self._advance()
        if self._error is not None:
            raise self._error

    def _delegate(self) -> None:
        """Leave the progress to the helper, if there is one and anything to do."""
        if self._helper is not None and self._progressed is None and self._next is Stage.PROGRESS:
            self._progressed = threading.Event()
            self._helper.submit(self)

    def progress(self) -> None:
        """The helper's part. Raises nothing: wait() does."""
        assert self._progressed is not None
        try:
            with torch.no_grad(), torch.inference_mode(self._inference):
                self._advance()
        except BaseException:  # it is in self._error
            pass
        with self._lock:
            self._progressed.set()
            if self._future is not None:
                self._complete(self._future)

    def _new_future(self) -> Future:
        return Future()

    def _complete(self, future: Future) -> None:
        try:
            self._finish()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong
        else:
            future.set_result(self._outputs)


class Helper:
    """A thread that makes the asynchronous calls of one group progress, in the order in which they were made.

    One for each group, because two ranks may make calls of two groups in different orders. It starts with the first
    call and ends with this object.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        if self._thread is None:
            # A daemon: the end of the program does not wait for peers that are gone.
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name="flash_allreduce", daemon=True)
            self._thread.start()
            _serving[self._thread] = self._calls
            weakref.finalize(self, self._calls.put, None).atexit = False
        self._calls.put(work)


_serving: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Work | None]] = weakref.WeakKeyDictionary()


def _serve(calls: SimpleQueue[Work | None]) -> None:
    while (work := calls.get()) is not None:
        work.progress()
        del work  # nothing of a call outlives it here


def _at_exit() -> None:
    """Let the threads end: one that wakes up while the interpreter is taken down would abort the process."""
    threads = list(_serving.items())
    for _, calls in threads:
        calls.put(None)
    deadline = time.monotonic() + _GRACE
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_serving.clear)


class StreamWork(Work):
    """A call over a backend that queues its work on the GPU (NCCL), where waiting holds up a stream and not the caller.

    It is issued on a stream of its group's own, behind what the current stream has to do by now:

        current stream   ... | gradient      | other work, which overlaps     | wait(): goes on behind the event
        the group's stream                   | encode | sum | decode | event
        NCCL's stream                                 | all-to-all | all-gather

    With one hardware queue (has_one_queue) what is issued later runs later, on whatever stream: a sum that waits for
    the wire would hold up all that the program issues after the call. There only the encoding and the first
    all-to-alls are issued at once, and the rest by wait(), as over gloo.
    """

    def __init__(
        self,
        stages: Iterator[Stage],
        label: str,
        outputs: Sequence[Tensor],
        tensors: Sequence[Tensor],
        stream: torch.cuda.Stream,
        device: torch.device,
        looks: bool = False,
    ) -> None:
        """tensors: of the caller's stream, which the call reads or writes: their memory is not given away before.

        looks: what is left of the call once it is on the wire waits on the host for what has come: wait() does that.
        """
        self._device, self._stream = device, stream
        self._event: torch.cuda.Event | None = None
        stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in tensors:
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            super().__init__(stages, label, outputs)
        if not (looks or has_one_queue(device)):
            self._issue()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Have the current stream wait for the result; the caller goes on. True."""
        torch.cuda.current_stream(self._device).wait_event(self._issue())
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place."""
        return self._issue().query()

    def _issue(self) -> torch.cuda.Event:
        """What is left of the call; the event of its end."""
        with self._lock:
            if self._event is None:
                with torch.cuda.stream(self._stream):
                    self._finish()
                    self._event = self._stream.record_event()
            return self._event

    def _new_future(self) -> Future:
        return Future(devices=[self._device])

    def _complete(self, future: Future) -> None:
        with torch.cuda.stream(self._stream):  # what waits for the future waits for it
            super()._complete(future)


@cache
def has_one_queue(device: torch.device) -> bool:
    """Whether the GPU takes all streams from one hardware queue: Megatron's CUDA_DEVICE_MAX_CONNECTIONS=1.

    Kernels then start in the order in which they were launched. Blackwell does not look at it.
    """
    alone = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return alone and torch.cuda.get_device_capability(device) < (10, 0)
