"""Record a rank's operations over a backend that queues: launches, collectives, streams and events. No GPU.

The group is torch's fake one, of any size: its collectives move nothing here; the codec's operators compute nothing.
CPU tensors stand for those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.collectives import transport, work

LAUNCHES = ("encode", "decode", "decode_sum", "decode_sum_encode", "encode_feedback", "decode_sum_encode_feedback")


@dataclass(frozen=True)
class Issued:
    """One operation: launch, collective, wait_stream, record_event or wait_event; on: the stream; of: its tensors.

    messages: of a collective, each piece of memory that is sent to or received from one rank.
    """

    what: str
    name: str
    on: str
    messages: tuple[Tensor, ...] = ()


@dataclass(eq=False)
class Stream:
    """A stream that records its operations."""

    name: str
    queue: Queue
    priority: int = 0
    cuda_stream: int = field(init=False)

    def __post_init__(self) -> None:
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        self.queue.note("wait_stream", other.name, on=self.name)

    def wait_event(self, event: Event) -> None:
        self.queue.note("wait_event", event.name, on=self.name)

    def record_event(self) -> Event:
        self.queue.events += 1
        event = Event(f"event {self.queue.events}")
        self.queue.note("record_event", event.name, on=self.name)
        return event

    def synchronize(self) -> None:
        self.queue.note("synchronize", self.name)


@dataclass(frozen=True)
class Event:
    name: str

    def query(self) -> bool:
        return True


class Queue:
    """Everything that was issued, in order; `capturing`: a CUDA graph records it."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self.streams = [Stream("current", self)]
        self.made = self.events = 0
        self.capturing = False
        self.capability = (9, 0)

    def note(self, what: str, name: str, on: str | None = None, messages: Sequence[Tensor] = ()) -> None:
        self.issued.append(Issued(what, name, on or self.streams[-1].name, tuple(messages)))

    def clear(self) -> None:
        self.issued.clear()

    def count(self, what: str, name: str | None = None) -> int:
        return sum(one.what == what and name in (None, one.name) for one in self.issued)

    def messages(self) -> Iterator[Tensor]:
        for one in self.issued:
            yield from one.messages

    def _new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        self.made += 1
        return Stream(f"stream {self.made}", self, priority)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()


class _Handle:
    def wait(self) -> bool:
        return True


def _pieces(tensor: Tensor, sizes: Sequence[int] | None) -> Sequence[Tensor]:
    return tensor.split(list(sizes) if sizes else len(tensor) // dist.get_world_size())


@contextmanager
def queued(world_size: int, rank: int = 0) -> Iterator[Queue]:
    """Make the default group a fake one of so many ranks, over a backend that queues."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    queue = Queue()

    def launch(name: str) -> Any:
        return lambda *_: queue.note("launch", name)

    def all_to_all_single(output: Tensor, input: Tensor, outs: Any = None, ins: Any = None, **_: Any) -> _Handle:
        queue.note("collective", "all_to_all", messages=[*_pieces(output, outs), *_pieces(input, ins)])
        return _Handle()

    def all_to_all(outputs: list[Tensor], inputs: list[Tensor], **_: Any) -> _Handle:
        queue.note("collective", "all_to_all", messages=[*outputs, *inputs])
        return _Handle()

    def all_gather_single(output: Tensor, input: Tensor, **_: Any) -> _Handle:
        queue.note("collective", "all_gather", messages=[*_pieces(output, None), input])
        return _Handle()

    def all_gather(outputs: list[Tensor], input: Tensor, **_: Any) -> _Handle:
        queue.note("collective", "all_gather", messages=[*outputs, input])
        return _Handle()

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    work.has_one_queue.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in LAUNCHES:
                patch.setattr(rows, name, launch(name))
            patch.setattr(dist, "all_to_all_single", all_to_all_single)
            patch.setattr(dist, "all_to_all", all_to_all)
            patch.setattr(dist, "all_gather", all_gather)
            patch.setattr(transport, "all_gather_single", all_gather_single)
            patch.setattr(transport, "queues", lambda group, device: True)
            patch.setattr(transport, "_is_captured", lambda device: queue.capturing)
            patch.setattr(torch.cuda, "Stream", queue._new_stream)
            patch.setattr(torch.cuda, "current_stream", lambda device=None: queue.streams[-1])
            patch.setattr(torch.cuda, "stream", queue._on)
            patch.setattr(torch.cuda, "get_device_capability", lambda device=None: queue.capability)
            patch.setattr(torch.cuda, "synchronize", lambda device=None: queue.note("synchronize", "device"))
            patch.setattr(Tensor, "record_stream", lambda tensor, stream: queue.note("record_stream", stream.name))
            patch.setattr(Tensor, "item", _refused)
            patch.setattr(Tensor, "__bool__", _refused)
            yield queue
    finally:
        work.has_one_queue.cache_clear()
        dist.destroy_process_group()


def _refused(tensor: Tensor) -> Any:
    raise AssertionError("the host waits for a tensor's value")
