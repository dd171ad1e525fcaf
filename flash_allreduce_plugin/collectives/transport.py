"""Bytes over a process group: torch.distributed's asynchronous collectives, their errors, and buffers.

torch.distributed matches the collectives of a group by the order in which each rank issues them: they are called from
the caller's own thread, in an order that depends on nothing but the call. On gloo the quantized collectives are made
of point-to-point messages, which are matched by tags. A call draws its tags when it is made (Label.reserve), in the
caller's thread; then any thread may post and wait for them, in any order (work.py).
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

PLAINLY = "sending in full precision"  # what an error says of the plain collectives

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


Sizes = list[int] | None
# The tag of a message of ours, n being the number of its exchange in the group:
#
#     bit 30: ours   bits 12-29: the call's signature + n / 4096 + the message's size, spread   bits 0-11: n % 4096
#
# Messages that are in flight together have tags of their own as long as they are fewer than 4096 exchanges apart. And
# messages of two calls that are not alike do not meet, nor does what is left of a call that was given up meet the next
# one: a rank that calls something else than its peers runs into the timeout, and nobody takes its bytes for anything.
_OURS, _SIGNATURES, _NUMBERS = 1 << 30, 1 << 18, 1 << 12
# And of one from one rank to another, which gloo matches in the order in which they are posted:
#
#     bit 29: between two   bit 28: a header   bits 12-27: the caller's tag   bits 0-11: of the header's digest
_BETWEEN_TWO, _HEADER, _DIGESTS = 1 << 29, 1 << 28, 1 << 12
MOST_TAG = (1 << 16) - 1
_numbers = itertools.count()


class _Messages:
    """Of one group on gloo: how many exchanges were numbered, and those that nobody has waited for yet.

    gloo stops serving a peer whose message finds no receiver: a receive that nobody waits for is kept, with its buffer,
    as long as the group.
    """

    __slots__ = ("exchanges", "unfinished")

    def __init__(self) -> None:
        self.exchanges = 0
        self.unfinished: dict[int, list[Any]] = {}


_messages: WeakKeyDictionary[dist.ProcessGroup, _Messages] = WeakKeyDictionary()


class Label:
    """Names a call in error messages, and tells its messages from those of other calls."""

    __slots__ = ("_by_messages", "_next", "_reserved", "collective", "group", "signature", "site")

    def __init__(self, collective: str, site: str, group: dist.ProcessGroup) -> None:
        self.collective = collective
        self.site = site
        self.group = group
        self.signature = 0  # until `sign`: what ranks say to each other before they know that their calls are alike
        self._next = self._reserved = 0  # numbers of exchanges
        self._by_messages: bool | None = None

    def reserve(self, exchanges: int) -> None:
        """The call will make so many exchanges from now on: their tags are drawn here, in the caller's thread."""
        messages = self.messages()
        self._next = messages.exchanges
        self._reserved = messages.exchanges = messages.exchanges + exchanges

    def tag(self) -> int:
        """Of the call's next exchange."""
        if self._next == self._reserved:  # an agreement of the ranks, which is made before the call has begun
            self.reserve(1)
        number = self._next
        self._next += 1
        return _OURS | (self.signature + number // _NUMBERS) % _SIGNATURES * _NUMBERS | number % _NUMBERS

    def by_messages(self, device: torch.device) -> bool:
        """by_messages of the group, asked once a call."""
        if self._by_messages is None:
            self._by_messages = by_messages(self.group, device)
        return self._by_messages

    def messages(self) -> _Messages:
        """Those of the group."""
        messages = _messages.get(self.group)
        if messages is None:
            messages = _messages[self.group] = _Messages()
        return messages

    def sign(self, *what: object) -> None:
        """what: everything in which the ranks' calls have to be alike, with a repr that is the same on all of them."""
        self.signature = zlib.crc32(repr((self.collective, self.site, what)).encode())

    def refused(self, doing: str, cause: BaseException) -> CollectiveError:
        """The call could not be posted: its group is broken, or the backend lacks its dtype or operator."""
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
    """A collective on the wire. Its tensors are kept alive until it is done."""

    __slots__ = ("_doing", "_label", "_number", "_works")

    def __init__(self, issue: Callable[[], Any], label: Label, doing: str) -> None:
        """issue: starts it and returns torch's handle, a list of them for messages, None if it is done."""
        self._label = label
        self._doing = doing
        try:
            with ours:
                works = issue()
        except RuntimeError as error:
            raise label.refused(doing, error) from error
        self._number: int | None = None
        if isinstance(works, list):  # messages; a collective is kept by its group
            self._works = works
            self._number = next(_numbers)
            label.messages().unfinished[self._number] = works
        else:
            self._works = [] if works is None else [works]

    def source(self) -> int:
        """The rank in the group that has sent a message which may come from anybody, once it is there."""
        return int(self._works[0]._source_rank())

    def wait(self) -> None:
        """Raises CollectiveError where torch.distributed reports a failure or the group's timeout."""
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
    """Part j of input goes to rank j, part j of output comes from it: equal parts, or parts of the given sizes."""
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
    """sent[j] goes to rank j, received[j] comes from it; tensors of their own, some of them empty."""
    group = label.group
    if not label.by_messages(sent[0].device):
        return Pending(lambda: dist.all_to_all(received, sent, group=group, async_op=True), label, doing)
    return Pending(lambda: _exchange(received, sent, label), label, doing)


def all_gather(output: Tensor, input: Tensor, label: Label, doing: str, sizes: Sizes = None) -> Pending:
    """input of every rank, in rank order, to output: equal parts, or parts of the given sizes.

    input may be this rank's own part of output.
    """
    group = label.group
    if label.by_messages(input.device):
        parts = output.split(sizes or len(output) // group.size())
        return Pending(lambda: _exchange(parts, [input] * group.size(), label), label, doing)
    if sizes is None:
        # Flat: gloo, which carries CUDA tensors too, compares the parts' shapes.
        flat = output.view(-1), input.view(-1)
        return Pending(lambda: all_gather_single(*flat, group=group, async_op=True), label, doing)
    uneven = list(output.split(sizes))
    return Pending(lambda: dist.all_gather(uneven, input, group=group, async_op=True), label, doing)


def broadcast(tensor: Tensor, root: int, label: Label, doing: str) -> Pending:
    """tensor of rank `root` of the group to all others, in place, by the backend's own collective."""
    return Pending(lambda: dist.broadcast(tensor, group_src=root, group=label.group, async_op=True), label, doing)


def queues(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether waiting for a collective holds up a stream of the device and not the caller."""
    return device.type == "cuda" and _backend(group, device) == "nccl"


def by_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the quantized collectives are made of messages, which any thread may post and wait for."""
    return device.type == "cpu" and _backend(group, device) == "gloo"


_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of what serves the group's tensors of a device; asked for with every chunk."""
    names = _backends.setdefault(group, {})
    if device.type not in names:
        names[device.type] = group._get_backend(device).name()
    return names[device.type]


def _exchange(received: Sequence[Tensor], sent: Sequence[Tensor], label: Label) -> list[Any]:
    """gloo's all-to-all, with every receive posted before the first send.

    In gloo a rank sends once its peer has said that it is ready to receive. gloo's own all-to-all posts its sends
    first, and a rank that is called later than its peer then says so behind its own data: the peer's data waits
    until that is through, and the link serves one direction after the other (measured: 60 % of it).
    """
    group = label.group
    rank, world = group.rank(), group.size()
    # The neighbours after this rank first, and those before it: no rank is everybody's first.
    others = [(rank + step) % world for step in range(1, world)]
    tag = label.tag()
    works = [dist.irecv(r, group=group, group_src=j, tag=_sized(tag, r)) for j in others if (r := received[j]).numel()]
    works += [dist.isend(s, group=group, group_dst=j, tag=_sized(tag, s)) for j in others if (s := sent[j]).numel()]
    if received[rank].data_ptr() != sent[rank].data_ptr():
        received[rank].copy_(sent[rank])
    return works


def _sized(tag: int, message: Tensor) -> int:
    """The tag with the message's size in its signature: two ends that expect different sizes do not meet.

    gloo would take a message that is too short, and fail in a thread of its own at one that is too long.
    """
    spread = message.numel() * message.element_size() * 0x9E3779B1 >> 8
    return tag & (_OURS | _NUMBERS - 1) | (tag // _NUMBERS + spread) % _SIGNATURES * _NUMBERS


class Post(NamedTuple):
    """A piece of a message between two ranks. peer: in the group; None: whoever sends first."""

    part: Tensor
    outgoing: bool
    peer: int | None
    tag: int
    doing: str


def between_two(tag: int, digest: bytes | None) -> int:
    """Return the tag on gloo of a piece of a message with the caller's tag.

    digest: of all that both ends have to agree about, sizes among it: pieces of ends that do not agree do not meet, but
    for one pair in 4096. None: the piece is the header, and a header meets every header.
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
    """Pieces that a backend which matches them by their order sends and receives at once."""

    def __init__(self) -> None:
        self._posts: list[Post] = []
        self._works: list[Any] = []

    def add(self, one: Post, label: Label) -> Pending:
        """Its wait() is that of the whole batch."""
        self._posts.append(one)
        return Pending(lambda: self._works, label, one.doing)

    def post(self, label: Label) -> None:
        """Start them all."""
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
    """A framework's own collective. issue: starts it and returns its handle, or, if it is done, anything else."""

    def started() -> Any:
        handle = issue()
        return handle if hasattr(handle, "wait") else None

    return Pending(started, label, PLAINLY)


def all_reduce(tensor: Tensor, op: Any, label: Label) -> Pending:
    """The plain collective, in place."""
    return Pending(lambda: dist.all_reduce(tensor, op, group=label.group, async_op=True), label, PLAINLY)


def reduce_scatter(output: Tensor, input: Tensor, op: Any, label: Label) -> Pending:
    """The plain collective."""
    return Pending(
        lambda: reduce_scatter_single(output, input, op, group=label.group, async_op=True),
        label,
        PLAINLY,
    )


def all_gather_plainly(output: Tensor, input: Tensor, label: Label) -> Pending:
    """The plain collective: over gloo faster than all_gather for small tensors, slower for large ones."""
    return Pending(
        lambda: all_gather_single(output, input, group=label.group, async_op=True),
        label,
        PLAINLY,
    )


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is recording what is issued now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


Parts = TypeVar("Parts")
_CUTS = 64  # of a buffer that are remembered


@dataclass(slots=True)
class Cut(Generic[Parts]):
    """A buffer of a pool, and what it was cut into; ways: that and what it was cut into before, by size and how."""

    buffer: Tensor
    parts: Parts
    ways: dict[Hashable, Any]


class BufferPool:
    """uint8 buffers of one group on one device, used again from call to call.

    It holds as many buffers as were ever in use at once, each as large as the largest call that it served:
    a training loop allocates in its first step only.

    A call that a CUDA graph captures gets buffers of its own, which the graph's memory pool keeps for its replays:
    a buffer of this pool might be let go, or be in use by an eager call, while the graph writes to its address.
    """

    def __init__(self, device: torch.device, windows: Allocate | None = None) -> None:
        """windows: makes the buffers, which are never let go (windows.py); None: torch's allocator."""
        self._device = device
        self._windows = windows
        self._free: list[Tensor] = []
        self._ways: dict[int, dict[Hashable, Any]] = {}  # Cut.ways of free buffers, by their ids
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """A 1-D uint8 buffer of exactly nbytes, the smallest free one that holds them cut to size."""
        chosen = self._take(nbytes)
        self._ways.pop(id(chosen), None)  # parts keep a buffer alive, even one that a failed call never gives back
        return chosen if chosen.numel() == nbytes else chosen[:nbytes]

    def take_cut(self, nbytes: int, how: Callable[[Tensor], Parts]) -> Cut[Parts]:
        """A buffer and its parts, how(buffer[:nbytes]).

        A view costs the host about a microsecond: a later call that gets the buffer, of the same size and with an equal
        `how`, has the parts of this one.
        """
        buffer, way = self._take(nbytes), (nbytes, how)
        ways = self._ways.pop(id(buffer), {})
        if way not in ways:
            if len(ways) == _CUTS:
                ways.clear()
            ways[way] = how(buffer[:nbytes])
        return Cut(buffer, ways[way], ways)

    def _take(self, nbytes: int) -> Tensor:
        """The smallest free buffer that holds nbytes."""
        if _is_captured(self._device):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with self._lock:
            fitting = [b for b in self._free if b.numel() >= nbytes]
            # A free buffer that is too small is let go for a larger one, so that their number does not grow.
            chosen = min(fitting or (self._free if self._windows is None else ()), key=Tensor.numel, default=None)
            if chosen is not None:
                self._free = [b for b in self._free if b is not chosen]
                if not fitting:
                    self._ways.pop(id(chosen), None)
        if chosen is None or not fitting:
            chosen = self._windows(nbytes) if self._windows is not None else None
        if chosen is None:
            # One made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                chosen = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return chosen

    def give(self, *buffers: Tensor | Cut[Any]) -> None:
        """Return buffers that nothing reads or writes any more."""
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
        """Bytes held and not in use."""
        with self._lock:
            return sum(b.numel() for b in self._free)
