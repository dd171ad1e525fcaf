"""All-reduce in one kernel over torch's symmetric memory: small calls of ranks that reach each other's memory.

csrc/cuda/two_shot.h draws the kernel. Its results have the bits of flat.all_reduce. This file decides which calls use
the kernel, and creates one workspace a group and device at the first call that may use it. Every other call runs
flat.all_reduce, and `counts` has the reason. All ranks decide the same: they gather the facts of each rank when the
workspace is created.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.codec import ops, rows
from flash_allreduce_plugin.codec.format import Format
from flash_allreduce_plugin.collectives import messages
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.errors import ConfigError, MismatchError
from flash_allreduce_plugin.policy import Plan, topology

LIMIT, ONE_SHOT, NVLS = environment.TWO_SHOT_BYTES, environment.ONE_SHOT_BYTES, environment.NVLS
AUTO = "auto"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
# Share of the group's timeout: the kernel reports the missing peer before NCCL ends the process.
PATIENCE = 0.9

# As in csrc/cuda/two_shot.h; tests/collectives/test_two_shot.py compares the two.
MOST_RANKS = 8
MOST_BLOCKS = 64
HEADER_BYTES = 4096
_PIECE_ELEMENTS = 1024
_LARGEST = Format(8, 32, spikes=True)  # records of an element


class Limits(NamedTuple):
    """Bytes of the largest tensor for one shot, and of the largest tensor for the kernel."""

    one_shot: int
    fused: int


def _by_ranks(one_shot_kib: Sequence[int], fused_kib: int) -> dict[int, Limits]:
    return {ranks: Limits(kib << 10, fused_kib << 10) for ranks, kib in enumerate(one_shot_kib, 2)}


#: The values of `auto` for 2, 3, ... 8 ranks: an unmeasured estimate (lab/planning/fused_estimate.py).
NVLINK = _by_ranks((512, 256, 256, 128, 128, 128, 128), fused_kib=4096)
PCIE = _by_ranks((256, 128, 128, 128, 128, 128, 128), fused_kib=1024)
_MOST = max(*NVLINK.values(), *PCIE.values(), key=lambda limits: limits.fused)

# Keys of counts: short, and the same from call to call.
TWO_SHOT = "two-shot"
OFF = f"{LIMIT} is 0"
LARGE = f"message above {LIMIT}"
WORLD = f"more than {MOST_RANKS} ranks"
FEEDBACK = "error feedback"
MEASURED = "measured"
LEVELS = "two-level"
CAPTURED = "captured before the group's first call"
NOT_BUILT = "built without CUDA"
HOSTS = "several hosts"
SHARED = f"two ranks on GPUs of one index, and {OVERLAPPING} is not set"
NO_ACCESS = "no peer access"
NO_MEMORY = "no symmetric memory on a rank"
NO_RENDEZVOUS = "no rendezvous in symmetric memory"

#: Quantized all-reduces of CUDA tensors, by TWO_SHOT or the reason against it.
counts: Counter[str] = Counter()

_SETTING_UP = "setting up symmetric memory"
_log = logging.getLogger("flash_allreduce_plugin")
_op: Any = torch.ops.flash_allreduce
_workspaces: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Workspace | str]] = WeakKeyDictionary()


def refusal(
    nbytes: int, plan: Plan, world_size: int, limit: int, *, feedback: bool = False, measured: bool = False
) -> str | None:
    """Return why a call cannot use the two-shot kernel, or None. The group may still lack a workspace.

    nbytes: of the tensor. measured: the call's error is measured from its payloads, which the kernel does not return.
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
    return LARGE if nbytes > limit else None


def limits_of_environment(auto: Limits = _MOST) -> Limits:
    """Return the limits of the two variables. auto: the value of that word. Raises ConfigError."""
    return Limits(_limit(ONE_SHOT, AUTO, auto.one_shot), _limit(LIMIT, "0", auto.fused))


def _limit(variable: str, default: str, auto: int) -> int:
    given = os.environ.get(variable, "").strip() or default
    if given == AUTO:
        return auto
    if not given.isdecimal() or int(given) > 1 << 30:
        raise ConfigError(f"{variable}={given!r} is not valid; expected {AUTO}, or bytes, 0 (never) to {1 << 30}.")
    return int(given)


def half_bytes(numel: int, world_size: int, one_shot: bool, reduce: Format, gather: Format) -> int:
    """Return the bytes that a call uses of one half of a workspace."""
    pieces, width = -(-numel // _PIECE_ELEMENTS), 1 if one_shot else world_size
    return -(-pieces // width) * (world_size * _piece_bytes(reduce) + width * _piece_bytes(gather))


def _piece_bytes(wire: Format) -> int:
    return -(-(_PIECE_ELEMENTS // wire.group_size * wire.record_bytes) // 16) * 16


def workspace_bytes(limits: Limits, world_size: int) -> int:
    """Return the size of a workspace for every tensor within the limits and every configuration."""
    largest = (limits.fused, False), (min(limits), True)
    return HEADER_BYTES + 2 * max(half_bytes(n // 2, world_size, one, _LARGEST, _LARGEST) for n, one in largest)


def blocks_of(processors: Sequence[int]) -> int:
    """Return the most blocks of a call, one a multiprocessor. processors: multiprocessors of each rank's GPU.

    A block waits for the blocks of its peers; kernels of other groups and of NCCL wait in the same way. Each takes a
    third of the GPU, so that three are resident together and none waits for one that cannot start.
    """
    return max(1, min(MOST_BLOCKS, min(processors) // 3))


def all_reduce(
    tensor: Tensor,
    factor: float,
    plan: Plan,
    label: Label,
    key: int = 0,
    *,
    feedback: bool = False,
    measured: bool = False,
) -> bool:
    """All-reduce tensor [numel], contiguous, on a GPU, in place, as flat.all_reduce does, on the current stream.

    Returns False, with the tensor untouched, if the caller must run flat.all_reduce. Kernels of one workspace must not
    overlap: calls from several streams are ordered here, replayed graphs by their user.

    Raises:
        CollectiveError: a peer was missing at the group's timeout, in an earlier call. The result of that call is NaN.
        MismatchError: the ranks have different limits.
    """
    most = limits_of_environment().fused
    reason = refusal(tensor.nbytes, plan, label.group.size(), most, feedback=feedback, measured=measured)
    workspace = reason or _workspace(label, tensor.device)
    if isinstance(workspace, str):
        counts[workspace] += 1
        return False
    limits = limits_of_environment(workspace.auto)
    if tensor.nbytes > limits.fused:
        counts[LARGE] += 1
        return False
    counts[TWO_SHOT] += 1
    workspace.check(label)
    workspace.order()
    _op.two_shot_all_reduce(
        tensor,
        workspace.addresses,
        workspace.nbytes,
        workspace.multicast,
        workspace.report_address,
        workspace.rank,
        workspace.blocks,
        workspace.staged,
        tensor.nbytes <= limits.one_shot,
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
    """Return the keys of stochastic rounding for both halves, as flat.all_reduce draws them."""
    return rows.draw_key(key, 0, rank), rows.draw_key(key, 1)


class MissingPeer:
    """The report word of a kernel, decoded: the missing peer, the half, and the block that waited."""

    def __init__(self, word: int) -> None:
        self.peer, self.block = word >> 8 & 0xFF, word >> 16 & 0xFF
        self.half = ("sum", "gather")[word >> 24]


class Workspace:
    """This rank's part of a group's symmetric memory and, after the rendezvous, the addresses of all parts."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, ranks: Sequence[dict[str, Any]]) -> None:
        """ranks: the facts of each rank (_describe)."""
        self.rank = group.rank()
        self.device = device
        #: True if the pieces of one owner follow those of another: two_shot.h
        self.staged = not on_nvlink(ranks)
        self.auto = (PCIE if self.staged else NVLINK)[len(ranks)]
        self.nbytes = workspace_bytes(limits_of_environment(self.auto), len(ranks))
        self.blocks = blocks_of([rank["processors"] for rank in ranks])
        self.timeout_ms = timeout_ms(group, device)
        self.addresses: list[int] = []
        #: multicast address of all workspaces; 0: not used
        self.multicast = 0

    def allocate(self) -> None:
        """Allocate this rank's part, without the others. Raises RuntimeError; ImportError without symmetric memory."""
        from torch._C._distributed_c10d import _SymmetricMemory

        with torch.cuda.device(self.device), torch.inference_mode(False):
            self.stream = torch.cuda.current_stream()
            # A separate allocation: in the pool of torch's empty() ranks may get different offsets (pytorch 198024).
            self._memory = _SymmetricMemory.empty_strided_p2p((self.nbytes,), (1,), torch.uint8, self.device)
            # Before any peer has the address: torch does not clear the memory.
            self._memory[:HEADER_BYTES].zero_()
            torch.cuda.synchronize()
            self._report = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            # CUDA loads a kernel at its first launch. The load may wait for a running kernel that waits for this rank.
            _op.load_two_shot(self._memory)
        self.report_address = int(_op.device_address(self._report))
        self._word = ctypes.c_uint32.from_address(self._report.data_ptr())

    def rendezvous(self, group: dist.ProcessGroup) -> None:
        """Exchange the addresses, after every rank has its part; collective. Raises RuntimeError."""
        from torch.distributed._symmetric_memory import rendezvous

        wanted = environment.is_on(NVLS) and torch.cuda.get_device_capability(self.device) >= (9, 0)
        with torch.cuda.device(self.device), torch.inference_mode(False), _multicast(wanted):
            self._handle = rendezvous(self._memory, group)
        self.multicast = int(self._handle.multicast_ptr) if wanted else 0
        self.addresses = list(self._handle.buffer_ptrs)
        if not all(self.addresses) or self.addresses[self.rank] != self._memory.data_ptr():
            raise RuntimeError("a peer's memory has no address here")

    def check(self, label: Label) -> None:
        """Raise CollectiveError if the host has the report of a failed call. Does not wait for the GPU."""
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
        """Order the current stream behind the calls of other streams. A graph's user orders the captured stream."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if stream != self.stream:
            stream.wait_stream(self.stream)
            self.stream = stream


def _workspace(label: Label, device: torch.device) -> Workspace | str:
    """Return the group's workspace, created at the first call, or the reason against it: the same on all ranks."""
    of_group = _workspaces.setdefault(label.group, {})
    workspace = of_group.get(device)
    if workspace is None:
        if torch.cuda.is_current_stream_capturing():
            return CAPTURED
        workspace = of_group[device] = _set_up(label, device)
    return workspace


def _set_up(label: Label, device: torch.device) -> Workspace | str:
    ranks = messages.gather_json(_describe(device), label, _SETTING_UP, device)
    reason = common_refusal(ranks)
    if reason is not None:
        return reason
    workspace = Workspace(label.group, device, ranks)
    if not _all_succeed(workspace.allocate, label, device):
        return NO_MEMORY
    met = _all_succeed(lambda: workspace.rendezvous(label.group), label, device)
    return workspace if met else NO_RENDEZVOUS


def _all_succeed(step: Callable[[], None], label: Label, device: torch.device) -> bool:
    """Run the step on every rank and exchange the outcome, so that no rank waits for one that failed."""
    failure = ""
    try:
        step()
    except Exception as error:  # any exception: the others wait for the outcome
        failure = f"{type(error).__name__}: {error}"[:200]
    everyone = messages.gather_json({"failure": failure}, label, _SETTING_UP, device)
    failures = [f"rank {rank}: {said['failure']}" for rank, said in enumerate(everyone) if said["failure"]]
    if failures and label.group.rank() == 0:
        _log.warning("the two-shot kernel is not used: %s", "; ".join(failures))
    return not failures


def common_refusal(ranks: Sequence[dict[str, Any]]) -> str | None:
    """Return why a group has no workspace, from the facts of each rank (_describe), or None.

    Raises MismatchError if the limits of the ranks differ.
    """
    limits = [rank["limits"] for rank in ranks]
    if any(one != limits[0] for one in limits):
        raise MismatchError(
            f"the ranks of a group have different {ONE_SHOT}, {LIMIT}: {limits} (-1: {AUTO}); set equal ones."
        )
    for rank in ranks:
        if rank["refuses"]:
            return str(rank["refuses"])
    if len({rank["host"] for rank in ranks}) > 1:
        return HOSTS
    if len({rank["index"] for rank in ranks}) < len(ranks) and not all(rank["overlapping"] for rank in ranks):
        return SHARED
    blocked = {uuid for rank in ranks for uuid in rank["blocked"]}
    return NO_ACCESS if any(rank["uuid"] in blocked for rank in ranks) else None


def on_nvlink(ranks: Sequence[dict[str, Any]]) -> bool:
    """True if NVLink connects every GPU of the group with every other, from the facts of each rank."""
    return all(ours["uuid"] == other["uuid"] or other["uuid"] in ours["linked"] for ours in ranks for other in ranks)


def _describe(device: torch.device) -> dict[str, Any]:
    """Return the facts about this rank that the others need.

    linked, blocked: the visible GPUs that this one has an NVLink to, and those that it cannot access.
    """
    properties = torch.cuda.get_device_properties(device)
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    blocked = [i for i in others if not torch.cuda.can_device_access_peer(device, i)]
    links = _links(device.index)
    return {
        "limits": limits_of_environment(Limits(-1, -1)),
        "refuses": "" if hasattr(_op, "two_shot_all_reduce") else NOT_BUILT,
        "processors": properties.multi_processor_count,
        "host": topology.host(),
        "index": device.index,
        "overlapping": os.environ.get(OVERLAPPING) == "1",
        "uuid": str(properties.uuid),
        "linked": [_uuid(i) for i in others if i < len(links) and links[i]],
        "blocked": [_uuid(i) for i in blocked],
    }


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _links(index: int) -> list[int]:
    """Return the number of NVLinks from GPU `index` to each visible GPU; empty if torch cannot detect them."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        links: list[int] = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[index]
    except (ImportError, RuntimeError):
        return []
    return links


def timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return how long a kernel waits for a peer: PATIENCE of the group's timeout, or of torch's default timeout."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    whole = timeout if isinstance(timeout, timedelta) else timedelta(minutes=10)
    return max(int(PATIENCE * whole / timedelta(milliseconds=1)), 1)


@contextmanager
def _multicast(wanted: bool) -> Iterator[None]:
    """Set whether torch's rendezvous maps a multicast address, which fails on some machines.

    torch reads the variable at every rendezvous (CUDASymmetricMemoryUtils.cpp). A value of the user's stays.
    """
    if wanted:
        yield
        return
    ours = MULTICAST_OFF not in os.environ
    os.environ.setdefault(MULTICAST_OFF, "1")
    try:
        yield
    finally:
        if ours:
            del os.environ[MULTICAST_OFF]


if ops.unavailable is None and hasattr(_op, "two_shot_all_reduce"):
    # The op returns nothing and allocates nothing, so its fake has nothing to create.
    torch.library.register_fake("flash_allreduce::two_shot_all_reduce", lambda *_: None)
