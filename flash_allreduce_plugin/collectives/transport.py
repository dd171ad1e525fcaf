"""Bytes over a process group: torch.distributed's asynchronous collectives, their errors, and buffers.

torch.distributed matches the collectives of a group by the order in which each rank issues them. So the caller's thread
issues them, in an order that depends on the call alone. On gloo the quantized collectives consist of point-to-point
messages, which are matched by tags. A call draws its tags in the caller's thread when it starts (Label.reserve). After
that any thread may post the messages and wait for them, in any order (work.py).
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin.collectives.windows import Allocate
from flash_allreduce_plugin.errors import CollectiveError
from flash_allreduce_plugin.telemetry.other_traffic import ours

PLAINLY = "sending in full precision"  # the words of an error for a collective in full precision

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


Sizes = list[int] | None
# The tag of a message of a collective. n is the number of its exchange in the group:
#
#     bit 30: ours   bits 12-29: the call's signature + n / 4096 + the message's size, spread   bits 0-11: n % 4096
#
# Messages in flight have different tags while they are fewer than 4096 exchanges apart. Messages of different calls do
# not match, and neither do messages left by an abandoned call. A rank that makes another call than its peers runs into
# the timeout, and no rank decodes its bytes.
_OURS, _SIGNATURES, _NUMBERS = 1 << 30, 1 << 18, 1 << 12
# The tag of a message between two ranks. gloo matches equal tags in the order in which they are posted:
#
#     bit 29: between two   bit 28: a header   bits 12-27: the caller's tag   bits 0-11: of the header's digest
_BETWEEN_TWO, _HEADER, _DIGESTS = 1 << 29, 1 << 28, 1 << 12
MOST_TAG = (1 << 16) - 1
_numbers = itertools.count()


class _Messages:
    """The messages of one group on gloo: the number of exchanges so far, and the exchanges without a wait.

    gloo closes the connection to a peer whose message finds no receiver. So a receive without a wait is kept, with its
    buffer, for the life of the group.
    """

    __slots__ = ("exchanges", "unfinished")

    def __init__(self) -> None:
        self.exchanges = 0
        self.unfinished: dict[int, list[Any]] = {}


_messages: WeakKeyDictionary[dist.ProcessGroup, _Messages] = WeakKeyDictionary()


class Label:
    """The name of a call in error messages, and the tags of its messages."""

    __slots__ = ("_by_messages", "_next", "_reserved", "collective", "group", "signature", "site")

    def __init__(self, collective: str, site: str, group: dist.ProcessGroup) -> None:
        self.collective = collective
        self.site = site
        self.group = group
        self.signature = 0  # until `sign`: messages by which the ranks compare their calls
        self._next = self._reserved = 0  # numbers of exchanges
        self._by_messages: bool | None = None

    def reserve(self, exchanges: int) -> None:
        """Draw the tags of the call's next `exchanges` exchanges, in the caller's thread."""
        messages = self.messages()
        self._next = messages.exchanges
        self._reserved = messages.exchanges = messages.exchanges + exchanges

    def tag(self) -> int:
        """Return the tag of the call's next exchange."""
        if self._next == self._reserved:  # an agreement of the ranks before the call starts
            self.reserve(1)
        number = self._next
        self._next += 1
        return _OURS | (self.signature + number // _NUMBERS) % _SIGNATURES * _NUMBERS | number % _NUMBERS

    def by_messages(self, device: torch.device) -> bool:
        """Return by_messages of the group, computed once a call."""
        if self._by_messages is None:
            self._by_messages = by_messages(self.group, device)
        return self._by_messages

    def messages(self) -> _Messages:
        """Return the messages of the group."""
        messages = _messages.get(self.group)
        if messages is None:
            messages = _messages[self.group] = _Messages()
        return messages

    def sign(self, *what: object) -> None:
        """Set the signature. what: all facts that must be equal on all ranks; their reprs must be equal too."""
        self.signature = zlib.crc32(repr((self.collective, self.site, what)).encode())

    def refused(self, doing: str, cause: BaseException) -> CollectiveError:
        """Build the error of a call that was not posted: the group is broken, or the backend lacks its dtype or op."""
        return CollectiveError(
            f"{self.collective} at site {self.site!r}, rank {self.group.rank()} of {self.group.size()}, failed "
            f"while {doing}: it could not be started, because a peer died or the backend does not take it ({cause})"
        )

    def error(self, doing: str, cause: BaseException) -> CollectiveError:
        return CollectiveError(
            f"{self.collective} at site {self.site!r}, rank {self.group.rank()} of {self.group.size()}, failed "
            f"while {doing}: a peer died, did not answer within the group's timeout, or issued another "
            f"collective, or one of another site, size, dtype or operator ({cause})"
        )


class Pending:
    """A collective on the wire. It keeps its tensors alive until it is done."""

    __slots__ = ("_doing", "_label", "_number", "_works")

    def __init__(self, issue: Callable[[], Any], label: Label, doing: str) -> None:
        """issue: starts the collective and returns torch's handle, a list of them for messages, None if it is done."""
        self._label = label
        self._doing = doing
        try:
            with ours:
                works = issue()
        except RuntimeError as error:
            raise label.refused(doing, error) from error
        self._number: int | None = None
        if isinstance(works, list):  # messages; the group keeps a collective alive
            self._works = works
            self._number = next(_numbers)
            label.messages().unfinished[self._number] = works
        else:
            self._works = [] if works is None else [works]

    def source(self) -> int:
        """Return the sender's rank in the group, of a received message that any rank could have sent."""
        return int(self._works[0]._source_rank())

    def wait(self) -> None:
        """Wait. Raises CollectiveError where torch.distributed reports a failure or the group's timeout."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._label.error(self._doing, error) from error
        if self._number is not None:
            self._label.messages().unfinished.pop(self._number, None)


def all_to_all(
    output: Tensor, input: Tensor, label: Label, doing: str, output_sizes: Sizes = None, input_sizes: Sizes = None
) -> Pending:
    """Send part j of input to rank j and receive part j of output from it: equal parts, or parts of the given sizes."""
    group = label.group
    if not label.by_messages(input.device):
        return Pending(
            lambda: dist.all_to_all_single(output, input, output_sizes, input_sizes, group=group, async_op=True),
            label,
            doing,
        )
    received = output.split(output_sizes or len(output) // group.size())
    sent = input.split(input_sizes or len(input) // group.size())
    return Pending(lambda: _exchange(received, sent, label), label, doing)


def exchange(received: list[Tensor], sent: list[Tensor], label: Label, doing: str) -> Pending:
    """Send sent[j] to rank j and receive received[j] from it. The tensors share no memory; some may be empty."""
    group = label.group
    if not label.by_messages(sent[0].device):
        return Pending(lambda: dist.all_to_all(received, sent, group=group, async_op=True), label, doing)
    return Pending(lambda: _exchange(received, sent, label), label, doing)


def all_gather(output: Tensor, input: Tensor, label: Label, doing: str, sizes: Sizes = None) -> Pending:
    """Gather input of every rank into output, in rank order: equal parts, or parts of the given sizes.

    input may be this rank's part of output.
    """
    group = label.group
    if label.by_messages(input.device):
        parts = output.split(sizes or len(output) // group.size())
        return Pending(lambda: _exchange(parts, [input] * group.size(), label), label, doing)
    if sizes is None:
        # 1-D parts: gloo, which also sends CUDA tensors, compares the parts' shapes.
        flat = output.view(-1), input.view(-1)
        return Pending(lambda: all_gather_single(*flat, group=group, async_op=True), label, doing)
    uneven = list(output.split(sizes))
    return Pending(lambda: dist.all_gather(uneven, input, group=group, async_op=True), label, doing)


def broadcast(tensor: Tensor, root: int, label: Label, doing: str) -> Pending:
    """Broadcast tensor from rank `root` of the group, in place, by the backend's collective."""
    return Pending(lambda: dist.broadcast(tensor, group_src=root, group=label.group, async_op=True), label, doing)


def queues(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if a wait for a collective blocks a stream of the device instead of the caller."""
    return device.type == "cuda" and _backend(group, device) == "nccl"


def by_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the quantized collectives consist of messages, which any thread may post and wait for."""
    return device.type == "cpu" and _backend(group, device) == "gloo"


_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the group's backend for a device. Cached: every chunk asks."""
    names = _backends.setdefault(group, {})
    if device.type not in names:
        names[device.type] = group._get_backend(device).name()
    return names[device.type]


def _exchange(received: Sequence[Tensor], sent: Sequence[Tensor], label: Label) -> list[Any]:
    """Run gloo's all-to-all, with every receive posted before the first send.

    A gloo rank sends after its peer has announced a receive. gloo's own all-to-all posts its sends first. A rank that
    starts later than its peer then queues its announcement behind its own data, and the link works in one direction at
    a time (measured: 60 % of its bandwidth).
    """
    group = label.group
    rank, world = group.rank(), group.size()
    # The neighbours after this rank first: no rank is the first destination of all others.
    others = [(rank + step) % world for step in range(1, world)]
    tag = label.tag()
    works = [dist.irecv(r, group=group, group_src=j, tag=_sized(tag, r)) for j in others if (r := received[j]).numel()]
    works += [dist.isend(s, group=group, group_dst=j, tag=_sized(tag, s)) for j in others if (s := sent[j]).numel()]
    if received[rank].data_ptr() != sent[rank].data_ptr():
        received[rank].copy_(sent[rank])
    return works


def _sized(tag: int, message: Tensor) -> int:
    """Return the tag with the message's size in its signature: ends that expect different sizes do not match.

    gloo accepts a message that is too short, and fails in its own thread at one that is too long.
    """
    spread = message.numel() * message.element_size() * 0x9E3779B1 >> 8
    return tag & (_OURS | _NUMBERS - 1) | (tag // _NUMBERS + spread) % _SIGNATURES * _NUMBERS


class Post(NamedTuple):
    """A piece of a message between two ranks. peer: rank in the group; None: any sender, the first one to send."""

    part: Tensor
    outgoing: bool
    peer: int | None
    tag: int
    doing: str


def between_two(tag: int, digest: bytes | None) -> int:
    """Return the tag on gloo of a piece of a message with the caller's tag.

    digest: of all facts that must be equal at both ends, sizes among them. Pieces of ends that differ do not match,
    except for one pair in 4096. None: the piece is a header, and every header matches every other.
    """
    if digest is None:
        return _BETWEEN_TWO | _HEADER | tag * _DIGESTS
    return _BETWEEN_TWO | tag * _DIGESTS | int.from_bytes(digest[:2], "little") % _DIGESTS


def post(one: Post, label: Label) -> Pending:
    """Send or receive a piece."""

    def issue() -> list[Any]:
        if one.outgoing:
            return [dist.isend(one.part, group=label.group, group_dst=one.peer, tag=one.tag)]
        return [dist.irecv(one.part, group=label.group, group_src=one.peer, tag=one.tag)]

    return Pending(issue, label, one.doing)


class Batch:
    """Pieces that are sent and received in one call, for a backend that matches messages by their order."""

    def __init__(self) -> None:
        self._posts: list[Post] = []
        self._works: list[Any] = []

    def add(self, one: Post, label: Label) -> Pending:
        """Add a piece. The wait() of the result waits for the whole batch."""
        self._posts.append(one)
        return Pending(lambda: self._works, label, one.doing)

    def post(self, label: Label) -> None:
        """Start all pieces."""
        operations = [
            dist.P2POp(dist.isend if one.outgoing else dist.irecv, one.part, None, label.group, one.tag, one.peer)
            for one in self._posts
        ]
        try:
            with ours:
                self._works += dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise label.refused("starting a batch", error) from error


def plainly(issue: Callable[[], Any], label: Label) -> Pending:
    """Run a framework's own collective. issue: starts it and returns its handle, or any other value if it is done."""

    def started() -> Any:
        handle = issue()
        return handle if hasattr(handle, "wait") else None

    return Pending(started, label, PLAINLY)


def all_reduce(tensor: Tensor, op: Any, label: Label) -> Pending:
    """All-reduce in full precision, in place."""
    return Pending(lambda: dist.all_reduce(tensor, op, group=label.group, async_op=True), label, PLAINLY)


def reduce_scatter(output: Tensor, input: Tensor, op: Any, label: Label) -> Pending:
    """Reduce-scatter in full precision."""
    return Pending(
        lambda: reduce_scatter_single(output, input, op, group=label.group, async_op=True),
        label,
        PLAINLY,
    )


def all_gather_plainly(output: Tensor, input: Tensor, label: Label) -> Pending:
    """All-gather in full precision: over gloo faster than all_gather for small tensors, slower for large ones."""
    return Pending(
        lambda: all_gather_single(output, input, group=label.group, async_op=True),
        label,
        PLAINLY,
    )


def _is_captured(device: torch.device) -> bool:
    """True if a CUDA graph captures the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


Parts = TypeVar("Parts")
_CUTS = 64  # cached cuts of one buffer


@dataclass(slots=True)
class Cut(Generic[Parts]):
    """A buffer of a pool and its views. ways: the views of earlier calls too, by size and `how`."""

    buffer: Tensor
    parts: Parts
    ways: dict[Hashable, Any]


class BufferPool:
    """The uint8 buffers of one group on one device, reused from call to call.

    The pool holds as many buffers as were ever in use together, each as large as its largest call. A training loop
    allocates in its first step only.

    A call inside a CUDA graph gets new buffers, which the graph's memory pool keeps for its replays. A buffer of this
    pool could be freed, or be used by an eager call, while the graph writes to its address.
    """

    def __init__(self, device: torch.device, windows: Allocate | None = None) -> None:
        """windows: allocates the buffers, which are never freed (windows.py). None: torch's allocator."""
        self._device = device
        self._windows = windows
        self._free: list[Tensor] = []
        self._ways: dict[int, dict[Hashable, Any]] = {}  # Cut.ways of free buffers, by their ids
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Return a 1-D uint8 buffer of nbytes: a view of the smallest free buffer that is large enough."""
        chosen = self._take(nbytes)
        self._ways.pop(id(chosen), None)  # views keep a buffer alive, even one that a failed call never returns
        return chosen if chosen.numel() == nbytes else chosen[:nbytes]

    def take_cut(self, nbytes: int, how: Callable[[Tensor], Parts]) -> Cut[Parts]:
        """Return a buffer and its views, how(buffer[:nbytes]).

        A view costs the host about a microsecond. So the views are cached: a later call that gets this buffer with the
        same size and an equal `how` gets the same views.
        """
        buffer, way = self._take(nbytes), (nbytes, how)
        ways = self._ways.pop(id(buffer), {})
        if way not in ways:
            if len(ways) == _CUTS:
                ways.clear()
            ways[way] = how(buffer[:nbytes])
        return Cut(buffer, ways[way], ways)

    def _take(self, nbytes: int) -> Tensor:
        """Return the smallest free buffer of at least nbytes, or a new one."""
        if _is_captured(self._device):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with self._lock:
            fitting = [b for b in self._free if b.numel() >= nbytes]
            # A larger buffer replaces a free one that is too small, so that their number does not grow.
            chosen = min(fitting or (self._free if self._windows is None else ()), key=Tensor.numel, default=None)
            if chosen is not None:
                self._free = [b for b in self._free if b is not chosen]
                if not fitting:
                    self._ways.pop(id(chosen), None)
        if chosen is None or not fitting:
            chosen = self._windows(nbytes) if self._windows is not None else None
        if chosen is None:
            # A tensor of inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                chosen = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return chosen

    def give(self, *buffers: Tensor | Cut[Any]) -> None:
        """Return buffers to the pool. Nothing may read or write them any more."""
        if _is_captured(self._device):
            return
        with self._lock:
            for one in buffers:
                if isinstance(one, Cut):
                    self._free.append(one.buffer)
                    self._ways[id(one.buffer)] = one.ways
                else:
                    self._free.append(one._base if one._base is not None else one)

    def free_bytes(self) -> int:
        """Return the bytes of the free buffers."""
        with self._lock:
            return sum(b.numel() for b in self._free)
