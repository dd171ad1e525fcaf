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
# Of the group's timeout: a kernel that gives up reports which peer is missing before NCCL ends the process.
PATIENCE = 0.9

# csrc/cuda/two_shot.h; tests/collectives/test_two_shot.py holds the two together.
MOST_RANKS = 8
MOST_BLOCKS = 64
HEADER_BYTES = 4096
_PIECE_ELEMENTS = 1024
_LARGEST = Format(8, 32, spikes=True)  # records of an element


class Limits(NamedTuple):
    """Bytes of the largest tensor that goes in one shot, and of the largest that takes the kernel at all."""

    one_shot: int
    fused: int


def _by_ranks(one_shot_kib: Sequence[int], fused_kib: int) -> dict[int, Limits]:
    return {ranks: Limits(kib << 10, fused_kib << 10) for ranks, kib in enumerate(one_shot_kib, 2)}


#: What `auto` stands for with 2, 3, ... 8 ranks: an unmeasured estimate (lab/planning/fused_estimate.py).
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

#: All-reduces of CUDA tensors that were quantized: TWO_SHOT, or why not.
counts: Counter[str] = Counter()

_SETTING_UP = "setting up symmetric memory"
_log = logging.getLogger("flash_allreduce_plugin")
_op: Any = torch.ops.flash_allreduce
_workspaces: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Workspace | str]] = WeakKeyDictionary()


def refusal(
    nbytes: int, plan: Plan, world_size: int, limit: int, *, feedback: bool = False, measured: bool = False
) -> str | None:
    """Why a call does not take the two-shot kernel, or None; whether its group has a workspace is another question.

    nbytes: of the tensor. measured: from payloads, which the kernel keeps to itself.
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
    """What the two variables say; auto: what that word stands for, by default the most. Raises ConfigError."""
    return Limits(_limit(ONE_SHOT, AUTO, auto.one_shot), _limit(LIMIT, "0", auto.fused))


def _limit(variable: str, default: str, auto: int) -> int:
    given = os.environ.get(variable, "").strip() or default
    if given == AUTO:
        return auto
    if not given.isdecimal() or int(given) > 1 << 30:
        raise ConfigError(f"{variable}={given!r} is not valid; expected {AUTO}, or bytes, 0 (never) to {1 << 30}.")
    return int(given)


def half_bytes(numel: int, world_size: int, one_shot: bool, reduce: Format, gather: Format) -> int:
    """The bytes that a call uses of one half of a workspace."""
    pieces, width = -(-numel // _PIECE_ELEMENTS), 1 if one_shot else world_size
    return -(-pieces // width) * (world_size * _piece_bytes(reduce) + width * _piece_bytes(gather))


def _piece_bytes(wire: Format) -> int:
    return -(-(_PIECE_ELEMENTS // wire.group_size * wire.record_bytes) // 16) * 16


def workspace_bytes(limits: Limits, world_size: int) -> int:
    """The size of a workspace for every tensor within the limits, whatever the configuration."""
    largest = (limits.fused, False), (min(limits), True)
    return HEADER_BYTES + 2 * max(half_bytes(n // 2, world_size, one, _LARGEST, _LARGEST) for n, one in largest)


def blocks_of(processors: Sequence[int]) -> int:
    """The most blocks of a call, of GPUs with so many multiprocessors, each of which holds one.

    A block waits for its peers', and so do the kernels of other groups and NCCL's on other streams. On a third of the
    GPU three of them are resident together: none waits for one that has found no place.
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
    """tensor [numel] on a GPU, contiguous, in place: as flat.all_reduce, in the order of the current stream.

    Returns False, the tensor untouched, if the call is to take flat.all_reduce. Kernels of a group's workspace must not
    overlap: calls from several streams are ordered here, replayed graphs by their user.

    Raises:
        CollectiveError: a peer did not come within the group's timeout, in an earlier call; that call's result is NaN.
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
    """For stochastic rounding, of both halves, as flat.all_reduce has them."""
    return rows.draw_key(key, 0, rank), rows.draw_key(key, 1)


class MissingPeer:
    """The report word of a kernel, decoded: which peer did not come, to which half, and which block waited."""

    def __init__(self, word: int) -> None:
        self.peer, self.block = word >> 8 & 0xFF, word >> 16 & 0xFF
        self.half = ("sum", "gather")[word >> 24]


class Workspace:
    """This rank's part of a group's symmetric memory and, after the rendezvous, the addresses of all parts."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, ranks: Sequence[dict[str, Any]]) -> None:
        """ranks: what each says of itself (_describe)."""
        self.rank = group.rank()
        self.device = device
        #: pieces of one owner after those of another: two_shot.h
        self.staged = not on_nvlink(ranks)
        self.auto = (PCIE if self.staged else NVLINK)[len(ranks)]
        self.nbytes = workspace_bytes(limits_of_environment(self.auto), len(ranks))
        self.blocks = blocks_of([rank["processors"] for rank in ranks])
        self.timeout_ms = timeout_ms(group, device)
        self.addresses: list[int] = []
        #: of all workspaces at once; 0: it is not used
        self.multicast = 0

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

        wanted = environment.is_on(NVLS) and torch.cuda.get_device_capability(self.device) >= (9, 0)
        with torch.cuda.device(self.device), torch.inference_mode(False), _multicast(wanted):
            self._handle = rendezvous(self._memory, group)
        self.multicast = int(self._handle.multicast_ptr) if wanted else 0
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


def _workspace(label: Label, device: torch.device) -> Workspace | str:
    """The group's workspace, made at the first call; or why it has none, the same on all ranks."""
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
    limits = [rank["limits"] for rank in ranks]
    if any(one != limits[0] for one in limits):
        raise MismatchError(
            f"the ranks of a group have different {ONE_SHOT}, {LIMIT}: {limits} (-1: {AUTO}); set alike."
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
    """Whether NVLink connects every GPU of the group with every other, from what each rank says of itself."""
    return all(ours["uuid"] == other["uuid"] or other["uuid"] in ours["linked"] for ours in ranks for other in ranks)


def _describe(device: torch.device) -> dict[str, Any]:
    """The facts about this rank that the others need.

    linked, blocked: of the GPUs seen here those that this one has NVLink to, and those that it has no access to.
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
    """How many NVLinks GPU `index` has to each GPU that is seen here; empty where torch cannot tell."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        links: list[int] = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[index]
    except (ImportError, RuntimeError):
        return []
    return links


def timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    """How long a kernel waits for a peer: PATIENCE of the group's timeout; torch's default where it does not say."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    whole = timeout if isinstance(timeout, timedelta) else timedelta(minutes=10)
    return max(int(PATIENCE * whole / timedelta(milliseconds=1)), 1)


@contextmanager
def _multicast(wanted: bool) -> Iterator[None]:
    """Whether torch's rendezvous maps a multicast address, at which it fails on some machines.

    torch reads the variable at every rendezvous (CUDASymmetricMemoryUtils.cpp); what is set already stays.
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
    # It returns nothing and allocates nothing: a fake has nothing to make.
    torch.library.register_fake("flash_allreduce::two_shot_all_reduce", lambda *_: None)
