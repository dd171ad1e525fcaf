"""The handle of a call in flight, and the thread in which it progresses.

A call has three stages (Stage), which run once each, in this order:

    START                PROGRESS                           FINISH
    encode,              receive, sum, send, write the      note the measured error and the residual,
    first sends          result                             in the order of the waits

START runs in the call and FINISH in wait(). Over gloo the PROGRESS of a quantized call runs in a thread of the group
(Helper), as torch's calls progress in a thread of gloo: the caller may wait for handles in any order and issue other
collectives between. Over NCCL all stages are on a stream of the GPU (StreamWork). Over other backends PROGRESS issues
collectives, which are matched by their order, so it runs in wait().
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

_NO_LIMIT = timedelta(0)  # as in torch: the group's timeout is the limit
_GRACE = 2.0  # seconds that the program waits at its end for calls in flight

Future = torch.futures.Future[list[Tensor]]


class Stage(IntEnum):
    """The next stage of a call. A call yields it before each stage but the first; DONE is never yielded."""

    START = 0
    PROGRESS = 1
    FINISH = 2
    DONE = 3


class Work:
    """A collective in flight. `stages` keeps its buffers alive while they are on the wire."""

    def __init__(
        self,
        stages: Iterator[Stage],
        label: str,
        outputs: Sequence[Tensor] = (),
        helper: Helper | None = None,
        at_once: bool = False,
    ) -> None:
        """outputs: the value of get_future(). helper: may make the call progress; at_once: immediately."""
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
        """Block until the result is in place, and return True. May be called again and from any thread.

        timeout: 0 for the group's timeout. It limits this wait, not the call.

        Raises:
            CollectiveError: a peer failed or the group's timeout passed; every later wait raises it too. Or `timeout`
                passed first: the call continues, and wait() may be called again.
        """
        if timeout and self._progressed is None:
            with self._lock:
                self._delegate()
        progressed = self._progressed
        if progressed is not None and not progressed.wait(timeout.total_seconds() or None):
            raise CollectiveError(
                f"{self._label} is not done after {timeout}; it continues, and wait() may be called again"
            )
        with self._lock:
            self._finish()
        return True

    def is_completed(self) -> bool:
        """True if the result is in place or the call has failed."""
        if self._progressed is None and self._lock.acquire(blocking=False):  # not free: a wait makes the call progress
            try:
                self._delegate()
            finally:
                self._lock.release()
        return self._next > Stage.PROGRESS if self._progressed is None else self._progressed.is_set()

    def get_future(self) -> Future:
        """Return a future of the written tensors, as torch does. Waits first over backends without progress."""
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
            if not isinstance(error, Exception):  # Ctrl-C: raised by this wait, not by later waits of a clean-up
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
        """Hand the progress to the helper, if there is one and the stage is due."""
        if self._helper is not None and self._progressed is None and self._next is Stage.PROGRESS:
            self._progressed = threading.Event()
            self._helper.submit(self)

    def progress(self) -> None:
        """Run PROGRESS in the helper's thread. Raises nothing: wait() raises the error."""
        assert self._progressed is not None
        try:
            with torch.no_grad(), torch.inference_mode(self._inference):
                self._advance()
        except BaseException:  # self._error has it
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
    """A thread in which the asynchronous calls of one group progress, in the order of the calls.

    Each group has one, because two ranks may call two groups in different orders. The thread starts with the first call
    and ends with this object.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        if self._thread is None:
            # A daemon: the program's end does not wait for dead peers.
            self._thread = threading.Thread(target=_serve, args=(self._calls,), name="flash_allreduce", daemon=True)
            self._thread.start()
            _serving[self._thread] = self._calls
            weakref.finalize(self, self._calls.put, None).atexit = False
        self._calls.put(work)


_serving: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Work | None]] = weakref.WeakKeyDictionary()


def _serve(calls: SimpleQueue[Work | None]) -> None:
    while (work := calls.get()) is not None:
        work.progress()
        del work  # frees the call before the next get()


def _at_exit() -> None:
    """End the threads: one that wakes up while the interpreter shuts down would abort the process."""
    threads = list(_serving.items())
    for _, calls in threads:
        calls.put(None)
    deadline = time.monotonic() + _GRACE
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_serving.clear)


class StreamWork(Work):
    """A call over a backend that queues its work on the GPU (NCCL): a wait blocks a stream, not the caller.

    The call is issued on a stream of its group, behind the present work of the current stream:

        current stream   ... | gradient      | other work, which overlaps     | wait(): continues behind the event
        the group's stream                   | encode | sum | decode | event
        NCCL's stream                                 | all-to-all | all-gather

    With one hardware queue (has_one_queue) kernels run in the order of their launches, on any stream: a sum that waits
    for the wire would block everything that the program issues after the call. There the call issues the encoding and
    the first all-to-alls, and wait() issues the rest, as over gloo.
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
        """tensors: the caller's tensors in the call; their memory is not reused before the call has ended.

        looks: True if the stages after START wait on the host for received data. wait() runs them then.
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
        """Make the current stream wait for the result, and return True. The caller is not blocked."""
        torch.cuda.current_stream(self._device).wait_event(self._issue())
        return True

    def is_completed(self) -> bool:
        """True if the result is in place."""
        return self._issue().query()

    def _issue(self) -> torch.cuda.Event:
        """Issue the rest of the call, and return the event of its end."""
        with self._lock:
            if self._event is None:
                with torch.cuda.stream(self._stream):
                    self._finish()
                    self._event = self._stream.record_event()
            return self._event

    def _new_future(self) -> Future:
        return Future(devices=[self._device])

    def _complete(self, future: Future) -> None:
        with torch.cuda.stream(self._stream):  # a wait for the future waits for this stream
            super()._complete(future)


@cache
def has_one_queue(device: torch.device) -> bool:
    """True if the GPU runs all streams from one hardware queue: Megatron's CUDA_DEVICE_MAX_CONNECTIONS=1.

    Kernels then start in the order of their launches. Blackwell ignores the variable.
    """
    alone = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return alone and torch.cuda.get_device_capability(device) < (10, 0)
