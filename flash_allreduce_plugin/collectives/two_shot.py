"""All-reduce in one kernel over torch's symmetric memory: small calls of ranks that reach each other's memory.

csrc/cuda/two_shot.h draws the kernel. Its results have the bits of flat.all_reduce. This file decides which calls take
it and makes the workspaces, one a group and device, at the first call that may use one. Every other call takes
flat.all_reduce, and `counts` says why. The ranks decide alike: they gather what only one of them can know when the
workspace is made.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment, topology
from flash_allreduce_plugin.codec import ops, rows
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import messages
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.errors import ConfigError, MismatchError
from flash_allreduce_plugin.policy import Plan

LIMIT = environment.TWO_SHOT_BYTES
# Of a tensor: off, until the kernel has run on a GPU. Large tensors gain little from fewer launches, and their codec
# hides behind the wire in chunks: 4 MiB is a guess to begin with.
DEFAULT_LIMIT = 0
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# Of the group's timeout: a kernel that gives up reports which peer is missing before NCCL ends the process.
PATIENCE = 0.9

# csrc/cuda/two_shot.h; tests/collectives/test_two_shot.py holds the two together.
MOST_RANKS = 8
BLOCKS = 32
HEADER_BYTES = 2048
_PIECE_ELEMENTS = 1024
_LARGEST = Format(8, 32, spikes=True)  # records of an element

# Keys of counts: short, and the same from call to call.
TWO_SHOT = "two-shot"
OFF = f"{LIMIT} is 0"
LARGE = f"message above {LIMIT}"
WORLD = f"more than {MOST_RANKS} ranks"
ASYNCHRONOUS = "asynchronous"
FEEDBACK = "error feedback"
MEASURED = "measured"
LEVELS = "two-level"
CAPTURED = "captured before the group's first call"
NOT_BUILT = "built without CUDA"
FEW_BLOCKS = f"a GPU with fewer than {BLOCKS} multiprocessors"
HOSTS = "several hosts"
SHARED = f"two ranks on GPUs of one index, and {OVERLAPPING} is not set"
NO_ACCESS = "no peer access"
NO_MEMORY = "no symmetric memory on a rank"
NO_RENDEZVOUS = "no rendezvous in symmetric memory"

#: All-reduces of CUDA tensors that were quantized: TWO_SHOT, or why not.
counts: Counter[str] = Counter()

_SETTING_UP = "setting up symmetric memory"
_log = logging.getLogger("flash_allreduce_plugin")
_op: Any = torch.ops.flash_allreduce
_workspaces: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Workspace | str]] = WeakKeyDictionary()


def refusal(
    nbytes: int,
    plan: Plan,
    world_size: int,
    limit: int,
    *,
    asynchronous: bool = False,
    feedback: bool = False,
    measured: bool = False,
) -> str | None:
    """Why a call does not take the two-shot kernel, or None; whether its group has a workspace is another question.

    nbytes: of the tensor. asynchronous: such a call is to overlap with computation, and the kernel would keep the
    caller's stream busy while it waits. measured: from payloads, which the kernel keeps to itself.
    """
    if limit == 0:
        return OFF
    if not 2 <= world_size <= MOST_RANKS:
        return WORLD
    if plan.nodes is not None:
        return LEVELS
    if feedback:
        return FEEDBACK
    if measured:
        return MEASURED
    if asynchronous:
        return ASYNCHRONOUS
    return LARGE if nbytes > limit else None


def limit_of_environment() -> int:
    """Bytes of the largest tensor that takes the two-shot kernel. Raises ConfigError."""
    given = os.environ.get(LIMIT, "").strip()
    if not given:
        return DEFAULT_LIMIT
    if not given.isdecimal() or int(given) > 1 << 30:
        raise ConfigError(f"{LIMIT}={given!r} is not valid; expected bytes, 0 (never) to {1 << 30}.")
    return int(given)


def half_bytes(numel: int, world_size: int, reduce: Format, gather: Format) -> int:
    """The bytes that a call uses of one half of a workspace."""
    pieces = -(-numel // _PIECE_ELEMENTS)
    return -(-pieces // world_size) * world_size * (_piece_bytes(reduce) + _piece_bytes(gather))


def _piece_bytes(wire: Format) -> int:
    return -(-(_PIECE_ELEMENTS // wire.group_size * wire.record_bytes) // 16) * 16


def workspace_bytes(limit: int, world_size: int) -> int:
    """The size of a workspace for every tensor of up to `limit` bytes, whatever the configuration."""
    return HEADER_BYTES + 2 * half_bytes(limit // 2, world_size, _LARGEST, _LARGEST)


def all_reduce(
    tensor: Tensor,
    factor: float,
    plan: Plan,
    label: Label,
    key: int = 0,
    *,
    asynchronous: bool = False,
    feedback: bool = False,
    measured: bool = False,
) -> bool:
    """tensor [numel] on a GPU, contiguous, in place: as flat.all_reduce, in the order of the current stream.

    Returns False, the tensor untouched, if the call is to take flat.all_reduce. Kernels of a group's workspace must not
    overlap: calls from several streams are ordered here, replayed graphs by their user.

    Raises:
        CollectiveError: a peer did not come within the group's timeout, in an earlier call; that call's result is NaN.
        MismatchError: the ranks have different limits.
    """
    limit = limit_of_environment()
    how = {"asynchronous": asynchronous, "feedback": feedback, "measured": measured}
    reason = refusal(tensor.nbytes, plan, label.group.size(), limit, **how)
    workspace = reason or _workspace(label, tensor.device, limit)
    if isinstance(workspace, str):
        counts[workspace] += 1
        return False
    counts[TWO_SHOT] += 1
    workspace.check(label)
    workspace.order()
    _op.two_shot_all_reduce(
        tensor,
        workspace.addresses,
        workspace.nbytes,
        workspace.report_address,
        workspace.rank,
        factor,
        plan.reduce.bits,
        plan.gather.bits,
        plan.reduce.group_size,
        plan.reduce.options,
        *draw_keys(key, workspace.rank),
        workspace.timeout_ms,
    )
    return True


def draw_keys(key: int, rank: int) -> tuple[int, int]:
    """For stochastic rounding, of both halves, as flat.all_reduce has them."""
    return rows.draw_key(key, 0, rank), rows.draw_key(key, 1)


class MissingPeer:
    """The report word of a kernel, decoded: which peer did not come, to which half, and which block waited."""

    def __init__(self, word: int) -> None:
        self.peer, self.block = word >> 8 & 0xFF, word >> 16 & 0xFF
        self.half = ("sum", "gather")[word >> 24]


class Workspace:
    """This rank's part of a group's symmetric memory and, after the rendezvous, the addresses of all parts."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
        self.rank = group.rank()
        self.device = device
        self.nbytes = nbytes
        self.timeout_ms = timeout_ms(group, device)
        self.addresses: list[int] = []

    def allocate(self) -> None:
        """What a rank does alone. Raises RuntimeError, or ImportError where torch has no symmetric memory."""
        from torch._C._distributed_c10d import _SymmetricMemory

        with torch.cuda.device(self.device), torch.inference_mode(False):
            self.stream = torch.cuda.current_stream()
            # An allocation of its own: in the pool of torch's empty() ranks may get different places (pytorch 198024).
            self._memory = _SymmetricMemory.empty_strided_p2p((self.nbytes,), (1,), torch.uint8, self.device)
            # Before anybody knows the address: torch leaves the memory as it was.
            self._memory[:HEADER_BYTES].zero_()
            torch.cuda.synchronize()
            self._report = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            # CUDA loads a kernel at its first launch, which may wait for what runs: a kernel that waits for this rank.
            _op.load_two_shot(self._memory)
        self.report_address = int(_op.device_address(self._report))
        self._word = ctypes.c_uint32.from_address(self._report.data_ptr())

    def rendezvous(self, group: dist.ProcessGroup) -> None:
        """Collective, once every rank has its part. Raises RuntimeError."""
        from torch.distributed._symmetric_memory import rendezvous

        with torch.cuda.device(self.device), torch.inference_mode(False), _without_multicast():
            self._handle = rendezvous(self._memory, group)
        self.addresses = list(self._handle.buffer_ptrs)
        if not all(self.addresses) or self.addresses[self.rank] != self._memory.data_ptr():
            raise RuntimeError("a peer's memory has no address here")

    def check(self, label: Label) -> None:
        """Raises CollectiveError if a call has failed, as far as the host knows: it does not wait for the GPU."""
        word = self._word.value
        if word:
            missing = MissingPeer(word)
            raise label.error(
                "waiting for a peer in the two-shot kernel, in an earlier call of the group",
                TimeoutError(
                    f"rank {missing.peer} did not come to the {missing.half} within {self.timeout_ms} ms, "
                    f"block {missing.block}"
                ),
            )

    def order(self) -> None:
        """Behind the calls of other streams. A captured stream is ordered by the user of its graph."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if stream != self.stream:
            stream.wait_stream(self.stream)
            self.stream = stream


def _workspace(label: Label, device: torch.device, limit: int) -> Workspace | str:
    """The group's workspace, made at the first call; or why it has none, the same on all ranks."""
    of_group = _workspaces.setdefault(label.group, {})
    workspace = of_group.get(device)
    if workspace is None:
        if torch.cuda.is_current_stream_capturing():
            return CAPTURED
        workspace = of_group[device] = _set_up(label, device, limit)
    return workspace


def _set_up(label: Label, device: torch.device, limit: int) -> Workspace | str:
    ranks = messages.gather_json(_describe(device, limit), label, _SETTING_UP, device)
    reason = common_refusal(ranks)
    if reason is not None:
        return reason
    workspace = Workspace(label.group, device, workspace_bytes(limit, len(ranks)))
    if not _all_succeed(workspace.allocate, label, device):
        return NO_MEMORY
    met = _all_succeed(lambda: workspace.rendezvous(label.group), label, device)
    return workspace if met else NO_RENDEZVOUS


def _all_succeed(step: Callable[[], None], label: Label, device: torch.device) -> bool:
    """Run the step on every rank of the group and tell each other: nobody goes on to wait for a rank that failed."""
    failure = ""
    try:
        step()
    except Exception as error:  # whatever it is: the others wait for the answer
        failure = f"{type(error).__name__}: {error}"[:200]
    everyone = messages.gather_json({"failure": failure}, label, _SETTING_UP, device)
    failures = [f"rank {rank}: {said['failure']}" for rank, said in enumerate(everyone) if said["failure"]]
    if failures and label.group.rank() == 0:
        _log.warning("the two-shot kernel is not used: %s", "; ".join(failures))
    return not failures


def common_refusal(ranks: Sequence[dict[str, Any]]) -> str | None:
    """Why a group has no workspace, from what each rank says of itself (_describe); None: it may have one.

    Raises MismatchError where their limits differ.
    """
    limits = [rank["limit"] for rank in ranks]
    if len(set(limits)) > 1:
        raise MismatchError(f"the ranks of a group have different values of {LIMIT}: {limits}; set it alike on all.")
    for rank in ranks:
        if rank["refuses"]:
            return str(rank["refuses"])
    if len({rank["host"] for rank in ranks}) > 1:
        return HOSTS
    if len({rank["index"] for rank in ranks}) < len(ranks) and not all(rank["overlapping"] for rank in ranks):
        return SHARED
    blocked = {uuid for rank in ranks for uuid in rank["blocked"]}
    return NO_ACCESS if any(rank["uuid"] in blocked for rank in ranks) else None


def _describe(device: torch.device, limit: int) -> dict[str, Any]:
    """The facts about this rank that the others need. blocked: the GPUs seen here that this one has no access to."""
    properties = torch.cuda.get_device_properties(device)
    refuses = ""
    if not hasattr(_op, "two_shot_all_reduce"):
        refuses = NOT_BUILT
    elif properties.multi_processor_count < BLOCKS:
        refuses = FEW_BLOCKS
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    blocked = [i for i in others if not torch.cuda.can_device_access_peer(device, i)]
    return {
        "limit": limit,
        "refuses": refuses,
        "host": topology.host(),
        "index": device.index,
        "overlapping": os.environ.get(OVERLAPPING) == "1",
        "uuid": str(properties.uuid),
        "blocked": [str(torch.cuda.get_device_properties(i).uuid) for i in blocked],
    }


def timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    """How long a kernel waits for a peer: PATIENCE of the group's timeout; torch's default where it does not say."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    whole = timeout if isinstance(timeout, timedelta) else timedelta(minutes=10)
    return max(int(PATIENCE * whole / timedelta(milliseconds=1)), 1)


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Torch's rendezvous maps no multicast address inside: on some machines it fails at that.

    torch reads the variable at every rendezvous (CUDASymmetricMemoryUtils.cpp); what is set already stays.
    """
    ours = MULTICAST_OFF not in os.environ
    os.environ.setdefault(MULTICAST_OFF, "1")
    try:
        yield
    finally:
        if ours:
            del os.environ[MULTICAST_OFF]


if ops.unavailable is None and hasattr(_op, "two_shot_all_reduce"):
    # It returns nothing and allocates nothing: a fake has nothing to make.
    torch.library.register_fake("flash_allreduce::two_shot_all_reduce", lambda *_: None)
