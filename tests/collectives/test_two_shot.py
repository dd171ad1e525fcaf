"""The fused all-reduce, block by block on the host, against the codec; and which calls take it.

csrc/cuda/two_shot.h is one text for the device and the host: in tests/host/two_shot.cpp every block of every rank is a
thread, and nothing orders the ranks but the kernel's own protocol. Not tested here: the device's memory model,
the launch, and torch's symmetric memory.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from flash_allreduce_plugin.collectives import two_shot
from flash_allreduce_plugin.collectives.transport import Label
from flash_allreduce_plugin.errors import CollectiveError, ConfigError, MismatchError
from flash_allreduce_plugin.policy import Plan
from flash_allreduce_plugin.policy.topology import neighbours
from tests.codecs import BITS, CODEBOOK, DTYPES, GROUP_SIZES, LAYOUTS, fits, gaussian, hard_values
from tests.distributed import GROUP_TIMEOUT, Ranks
from tests.queued import queued

SOURCE = Path(__file__).parents[1] / "host" / "two_shot.cpp"
RANKS = two_shot.MOST_RANKS
OPTIONS = [
    {**layout, "spikes": spikes, "hadamard": hadamard, **last}
    for layout, spikes, hadamard in itertools.product(LAYOUTS, (False, True), (False, True))
    for last in ({}, {"mse": True}, {"stochastic": True})
] + [
    {**CODEBOOK, "spikes": spikes, "hadamard": hadamard, "mse": mse}
    for spikes, hadamard, mse in itertools.product((False, True), repeat=3)
]
PLAIN = Format(4, 128)
PLAN = Plan(PLAIN, PLAIN, chunk_bytes=1 << 20)


class HostCall(ctypes.Structure):
    _fields_ = [
        ("inputs", ctypes.c_void_p), ("expected", ctypes.c_void_p), ("numel", ctypes.c_int64),
        ("type", ctypes.c_int32), ("bits", ctypes.c_int32), ("gather_bits", ctypes.c_int32),
        ("group_size", ctypes.c_int32), ("options", ctypes.c_int32), ("offset", ctypes.c_int32),
        ("one_shot", ctypes.c_int32), ("staged", ctypes.c_int32),
        ("factor", ctypes.c_float), ("gather_key", ctypes.c_uint64), ("reduce_keys", ctypes.c_uint64 * RANKS),
    ]  # fmt: skip


class HostRun(ctypes.Structure):
    _fields_ = [
        ("world", ctypes.c_int32), ("blocks", ctypes.c_int32), ("half", ctypes.c_int64), ("count", ctypes.c_uint32),
        ("seed", ctypes.c_uint32), ("slow_rank", ctypes.c_int32), ("dead_rank", ctypes.c_int32),
        ("broken", ctypes.c_int32), ("multicast", ctypes.c_int32), ("timeout", ctypes.c_uint64),
        ("reports", ctypes.c_uint32 * RANKS), ("lost", ctypes.c_int64),
    ]  # fmt: skip


@dataclass
class Call:
    """One call: inputs [ranks, numel], and the codec's result for them."""

    inputs: Tensor
    reduce: Format
    gather: Format
    factor: float = 1.0
    offset: int = 0  # elements between the tensor and an address that 16 divides
    key: int = 7
    one_shot: bool = False
    staged: bool = False

    def __post_init__(self) -> None:
        world, numel = self.inputs.shape
        self.expected = torch.empty(1, numel, dtype=self.inputs.dtype)
        if numel == 0:
            return
        payloads = torch.empty(world, self.reduce.payload_bytes(numel), dtype=torch.uint8)
        for rank, (row, payload) in enumerate(zip(self.inputs, payloads, strict=True)):
            draw = Draw(rows.draw_key(self.key, 0, rank))
            rows.encode(row.view(1, -1), payload.view(1, -1), self.reduce, draw)
        sums = torch.empty(self.gather.payload_bytes(numel), dtype=torch.uint8)
        draw = Draw(rows.draw_key(self.key, 1))
        rows.decode_sum_encode(payloads, sums, self.reduce, self.gather, self.factor, draw)
        rows.decode(sums.view(1, -1), self.expected, self.gather)

    @property
    def half_bytes(self) -> int:
        return two_shot.half_bytes(self.inputs.shape[1], len(self.inputs), self.one_shot, self.reduce, self.gather)

    def host(self) -> HostCall:
        keys = [two_shot.draw_keys(self.key, rank) for rank in range(len(self.inputs))]
        return HostCall(
            self.inputs.data_ptr(), self.expected.data_ptr(), self.inputs.shape[1], DTYPES.index(self.inputs.dtype),
            self.reduce.bits, self.gather.bits, self.reduce.group_size, self.reduce.options, self.offset, self.one_shot,
            self.staged, self.factor, keys[0][1], (ctypes.c_uint64 * RANKS)(*(reduce for reduce, _ in keys)),
        )  # fmt: skip


def make(world: int, numel: int, i: int, seed: int = 0) -> Call:
    """Return the i-th of many kinds of calls."""
    options = OPTIONS[i % len(OPTIONS)]
    sizes = [g for g in GROUP_SIZES if fits(g, options)]
    group_size, dtype = sizes[i % len(sizes)], DTYPES[i % 3]
    inputs = gaussian(world, numel, seed=seed + i)
    if i % 5 == 4 and numel:
        values = list(hard_values(numel).values())
        inputs = torch.stack([values[(i + rank) % len(values)] for rank in range(world)])
    return Call(
        inputs.to(dtype).contiguous(),
        Format(BITS[i % len(BITS)], group_size, **options),
        Format(BITS[(i // 2 + 3) % len(BITS)], group_size, **options),
        (1.0, 1 / world)[i % 2],
        offset=(0, 0, 1)[i % 3],
        key=i,
        one_shot=i % 4 in (1, 2),
        staged=i % 5 in (0, 3),
    )


class Host:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.two_shot_run.restype = ctypes.c_int64
        library.two_shot_half_bytes.restype = ctypes.c_int64

    def run(self, calls: Sequence[Call], order: Sequence[int] | None = None, **how: Any) -> tuple[int, HostRun]:
        """Return the number of wrong results (-1: memory outside of its place was touched) and the state of the run."""
        order = range(len(calls)) if order is None else order
        half = max(call.half_bytes for call in calls)
        fields = {
            "world": len(calls[0].inputs), "blocks": 3, "half": half, "slow_rank": -1, "dead_rank": -1,
            "timeout": 60 * 10**9,
        }  # fmt: skip
        run = HostRun(**{**fields, **how})
        wrong = self.library.two_shot_run(
            ctypes.byref(run), (HostCall * len(calls))(*(call.host() for call in calls)),
            (ctypes.c_int32 * len(order))(*order), ctypes.c_int64(len(order)),
        )  # fmt: skip
        return wrong, run


def compile_host(output: Path, *flags: str) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to compile the two-shot kernel with")
    always = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread"]
    subprocess.run([compiler, *always, *flags, str(SOURCE), "-o", str(output)], check=True, timeout=240)
    return output


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    library = compile_host(tmp_path_factory.mktemp("host") / "two_shot.so", "-shared", "-fPIC")
    return Host(ctypes.CDLL(str(library)))


@pytest.mark.parametrize("world", range(2, RANKS + 1))
def test_every_world_has_the_codecs_bits(host: Host, world: int) -> None:
    """Check lengths around a group, a piece of 1024 and a stripe; all options, widths and group sizes."""
    lengths = (0, 1, 33, 1023, 1024, 1025, 1024 * world, 1024 * world + 1, 9000)
    calls = [make(world, numel, 9 * world + i) for i, numel in enumerate(lengths)]
    for blocks, order in ((1, range(len(calls))), (3, [*range(len(calls))][::-1])):
        for multicast in (0, 1):
            assert host.run(calls, order, blocks=blocks, seed=world, multicast=multicast)[0] == 0


@pytest.mark.parametrize("world", [2, 5, 8])
def test_every_option(host: Host, world: int) -> None:
    calls = [make(world, 1500, i) for i in range(len(OPTIONS))]
    assert host.run(calls)[0] == 0
    for call in calls:
        call.one_shot = not call.one_shot
    assert host.run(calls)[0] == 0


def small_calls(world: int) -> list[Call]:
    """Return calls of one block and of several, in one shot and in two, one after the other."""
    lengths = (1, 5000, 64, 0, 1024, 4100, 33, 2049, 0, 7000, 2000, 3, 3 * 1024 * world)
    return [
        Call(gaussian(world, n, seed=n), PLAIN, Format(8, 128), key=n, one_shot=i % 3 == 1, staged=i % 2 == 1)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(("world", "slow_rank", "count"), [(2, -1, 5000), (4, 1, 500), (8, -1, 1000)])
def test_thousands_of_calls_of_changing_sizes(host: Host, world: int, slow_rank: int, count: int) -> None:
    """Run so many calls that the count of meetings wraps around."""
    calls = small_calls(world)
    order = random.Random(world).choices(range(len(calls)), k=count)
    start = (1 << 32) - count // 2 * 2
    wrong, run = host.run(calls, order, seed=1, slow_rank=slow_rank, count=start)
    assert wrong == 0 and not any(run.reports)


@pytest.mark.parametrize(
    "broken", [1, 2, 4, 8, 16], ids=["first meeting", "second meeting", "one half", "no count", "a count each"]
)
def test_a_broken_protocol_is_noticed(host: Host, broken: int) -> None:
    """Check that the tests above can fail."""
    calls = small_calls(3)
    order = random.Random(3).choices(range(len(calls)), k=200)
    assert host.run(calls, order, seed=1, slow_rank=1, broken=broken, timeout=10**9)[0] != 0


@pytest.mark.slow
def test_no_access_is_unordered(tmp_path: Path) -> None:
    """Run a race detector that knows no order but the protocol's; with a broken protocol it finds a race."""
    program = compile_host(tmp_path / "race", "-fsanitize=thread", "-g", "-DTWO_SHOT_MAIN")
    done = subprocess.run([str(program), "200"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[:3000]
    for broken in ("1", "2", "4", "8", "16"):
        done = subprocess.run([str(program), "20", broken], capture_output=True, text=True, timeout=240)
        assert "data race" in done.stderr


def test_a_wrong_sum_is_noticed(host: Host) -> None:
    calls = small_calls(2)
    calls[1].inputs[1, 4000] += 1
    assert host.run(calls)[0] == 2  # on both ranks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_peer_that_does_not_come(host: Host, dtype: torch.dtype) -> None:
    """Check that the result is NaN throughout, the report names the peer, and later calls do not wait again."""
    calls = [Call(gaussian(3, n).to(dtype), PLAIN, PLAIN, one_shot=n == 3000) for n in (5000, 3000, 1)]
    wrong, run = host.run(calls, [0, 1, 2] * 20, dead_rank=1, timeout=6 * 10**8)
    assert wrong == 120 and run.lost == 2 * 20 * 8001
    for rank in (0, 2):
        word = two_shot.MissingPeer(run.reports[rank])
        assert word.peer == 1 and word.block < 3 and word.half == "sum"
    assert run.reports[1] == 0


def test_sizes_are_those_of_the_kernel(host: Host) -> None:
    assert host.library.two_shot_header_bytes() == two_shot.HEADER_BYTES
    assert host.library.two_shot_most_blocks() == two_shot.MOST_BLOCKS
    for i, (world, numel, one_shot) in enumerate(itertools.product((2, 3, 8), (0, 1, 1024, 5000, 1 << 20), (0, 1))):
        options = OPTIONS[i % len(OPTIONS)]
        reduce, gather = Format(BITS[i % 7], 1024, **options), Format(8, 1024, **options)
        ours = two_shot.half_bytes(numel, world, bool(one_shot), reduce, gather)
        widths = (reduce.bits, gather.bits, 1024, reduce.options)
        assert host.library.two_shot_half_bytes(ctypes.c_int64(numel), world, one_shot, *widths) == ours


def test_a_workspace_serves_every_codec() -> None:
    limits = [two_shot.Limits(*both) for both in ((1, 1), (9000, 1 << 20), (4 << 20, 4 << 20), (1 << 30, 5000))]
    for world, of_group in itertools.product((2, 3, 8), (*limits, two_shot.NVLINK[8], two_shot.PCIE[3])):
        half = (two_shot.workspace_bytes(of_group, world) - two_shot.HEADER_BYTES) // 2
        for bits, group_size, options in itertools.product(BITS[::3], GROUP_SIZES, OPTIONS[::5]):
            if not fits(group_size, options):
                continue
            wire = Format(bits, group_size, **options)
            assert two_shot.half_bytes(of_group.fused // 2, world, False, wire, wire) <= half
            assert two_shot.half_bytes(min(of_group) // 2, world, True, wire, wire) <= half


@pytest.mark.parametrize(("processors", "blocks"), [([132] * 8, 44), ([132, 108], 36), ([2], 1), ([400], 64)])
def test_the_blocks_of_several_kernels_are_resident_together(processors: list[int], blocks: int) -> None:
    assert two_shot.blocks_of(processors) == blocks and (blocks == 1 or 3 * blocks <= min(processors))


def test_which_calls_take_it() -> None:
    def refusal(nbytes: int = 1 << 16, plan: Plan = PLAN, world: int = 8, limit: int = 1 << 20, **how: bool) -> Any:
        return two_shot.refusal(nbytes, plan, world, limit, **how)

    assert refusal() is None and refusal(1 << 20) is None and refusal(world=2) is None
    assert refusal(limit=0) == two_shot.OFF
    assert refusal(world=9) == two_shot.WORLD
    assert refusal((1 << 20) + 1) == two_shot.LARGE
    assert refusal(feedback=True) == two_shot.FEEDBACK
    assert refusal(measured=True) == two_shot.MEASURED
    levels = Plan(PLAIN, PLAIN, 1 << 20, inside=PLAIN, nodes=neighbours(8, 4))
    assert refusal(plan=levels) == two_shot.LEVELS


def two_ranks(**second: Any) -> list[dict[str, Any]]:
    """Return the facts that two ranks report; second: the second rank's differences."""
    first = {
        "limits": [5, 7], "refuses": "", "processors": 99, "host": "a", "index": 0, "overlapping": False,
        "uuid": "x", "linked": ["y"], "blocked": [],
    }  # fmt: skip
    return [first, {**first, "index": 1, "uuid": "y", "linked": ["x"], **second}]


def test_which_groups_have_a_workspace() -> None:
    assert two_shot.common_refusal(two_ranks()) is None
    assert two_shot.common_refusal(two_ranks(refuses=two_shot.NOT_BUILT)) == two_shot.NOT_BUILT
    assert two_shot.common_refusal(two_ranks(host="b")) == two_shot.HOSTS
    assert two_shot.common_refusal(two_ranks(index=0)) == two_shot.SHARED
    assert two_shot.common_refusal(two_ranks(blocked=["z"])) is None
    assert two_shot.common_refusal(two_ranks(blocked=["x"])) == two_shot.NO_ACCESS
    shared = two_ranks(index=0, overlapping=True)
    shared[0]["overlapping"] = True
    assert two_shot.common_refusal(shared) is None
    for other in ([5, -1], [6, 7]):
        with pytest.raises(MismatchError, match=two_shot.LIMIT):
            two_shot.common_refusal(two_ranks(limits=other))


def test_the_schedule_and_the_limits_follow_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def rank(self) -> int:
            return 0

        def _get_backend(self, device: Any) -> Any:
            return SimpleNamespace()

    def workspace(**second: Any) -> two_shot.Workspace:
        return two_shot.Workspace(Group(), torch.device("cpu"), two_ranks(**second))  # type: ignore[arg-type]

    monkeypatch.setenv(two_shot.LIMIT, "auto")
    nvlink, pcie = workspace(processors=60), workspace(linked=[])
    assert not nvlink.staged and nvlink.auto == two_shot.NVLINK[2] and nvlink.blocks == 20
    assert pcie.staged and pcie.auto == two_shot.PCIE[2] and pcie.blocks == 33
    assert nvlink.nbytes == two_shot.workspace_bytes(two_shot.NVLINK[2], 2) > pcie.nbytes
    assert not workspace(uuid="x", linked=[]).staged  # two ranks of one GPU
    assert two_shot._links(0) == []  # torch has no links to report here


def test_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = two_shot.Limits(3, 4)
    assert two_shot.limits_of_environment(auto) == (3, 0)
    assert two_shot.limits_of_environment().fused == 0
    for text, limit in (("0", 0), (" 65536 ", 65536), ("", 0), ("auto", 4)):
        monkeypatch.setenv(two_shot.LIMIT, text)
        assert two_shot.limits_of_environment(auto) == (3, limit)
        assert fap.FlashConfig.from_env() == fap.FlashConfig()  # a known variable without a field
    monkeypatch.setenv(two_shot.ONE_SHOT, "12")
    assert two_shot.limits_of_environment(auto) == (12, 4)
    for variable, text in itertools.product((two_shot.ONE_SHOT, two_shot.LIMIT), ("64k", "-1", str((1 << 30) + 1))):
        monkeypatch.setenv(variable, text)
        with pytest.raises(ConfigError, match=variable):
            two_shot.limits_of_environment()
        monkeypatch.delenv(variable)


class Group:
    """A rank of a group, with the methods that this test needs."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 4


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> two_shot.Workspace:
    """Return a workspace without a GPU, which `_workspace` finds."""
    w = object.__new__(two_shot.Workspace)
    w.rank, w.device, w.nbytes, w.timeout_ms = 1, torch.device("cpu"), 4096, 1500
    w.addresses, w.report_address, w._word = [16, 32, 48, 64], 80, ctypes.c_uint32(0)
    w.multicast, w.blocks, w.staged, w.auto = 160, 7, True, two_shot.Limits(128, 300)
    w.stream = SimpleNamespace()
    monkeypatch.setattr(two_shot, "_workspace", lambda *_: w)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: w.stream)
    monkeypatch.setattr(two_shot, "counts", type(two_shot.counts)())
    monkeypatch.setenv(two_shot.LIMIT, "65536")
    return w


def test_arguments_of_the_operator(monkeypatch: pytest.MonkeyPatch, workspace: two_shot.Workspace) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(two_shot, "_op", SimpleNamespace(two_shot_all_reduce=lambda *a: calls.append(a)))
    label = Label("all_reduce", "here", Group())  # type: ignore[arg-type]
    plan = Plan(Format(5, 64, spikes=True), Format(8, 64, spikes=True), 1 << 20)
    keys = rows.draw_key(9, 0, 1), rows.draw_key(9, 1)  # as collectives.all_reduce
    for limit, numel, one_shot in (("65536", 100, False), ("65536", 32, True), ("auto", 75, False), ("auto", 76, None)):
        monkeypatch.setenv(two_shot.LIMIT, limit)
        calls.clear()
        tensor = torch.zeros(numel)
        taken = two_shot.all_reduce(tensor, 0.25, plan, label, 9)
        assert taken == (one_shot is not None) == bool(calls)
        if taken:
            of_group = ([16, 32, 48, 64], 4096, 160, 80, 1, 7, True, one_shot, 0.25)
            assert calls == [(tensor, *of_group, 5, 8, 64, plan.reduce.options, *keys, 1500)]
    assert not two_shot.all_reduce(tensor, 0.25, plan, label, 9, feedback=True)
    assert two_shot.counts == {two_shot.TWO_SHOT: 3, two_shot.LARGE: 1, two_shot.FEEDBACK: 1}


@pytest.mark.parametrize("connections", ["1", "8"])
def test_an_asynchronous_call_runs_on_the_stream_of_its_group(
    workspace: two_shot.Workspace, monkeypatch: pytest.MonkeyPatch, connections: str
) -> None:
    """Run behind the current stream's work, with one hardware queue too; wait() holds up no more than a stream."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    config = fap.FlashConfig(bits=4, min_bytes=0, check_ranks=False)
    with queued(4, rank=1) as queue:
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
        launch = SimpleNamespace(two_shot_all_reduce=lambda *_: queue.note("launch", "two_shot"))
        monkeypatch.setattr(two_shot, "_op", launch)
        workspace.stream = torch.cuda.current_stream()
        handle = fap.all_reduce(torch.empty(100), config=config, async_op=True)
        own = next(one.on for one in queue.issued if one.what == "launch")
        assert own != "current" and queue.count("launch", "two_shot") == 1 == queue.count("launch")
        kinds = [(one.what, one.on) for one in queue.issued if one.what != "record_stream"]
        before = [("wait_stream", own)] * 2  # as every asynchronous call, and behind the workspace's last call
        assert kinds[:3] == [*before, ("launch", own)]
        queue.clear()
        assert handle is not None and handle.wait()
        assert queue.issued[-1].what == "wait_event" and queue.issued[-1].on == "current"
        assert queue.count("synchronize") == 0
        queue.clear()
        fap.all_reduce(torch.empty(100), config=config)  # the next call, on another stream, queues behind it
        assert [(one.what, one.name, one.on) for one in queue.issued] == [
            ("wait_stream", own, "current"), ("launch", "two_shot", "current")
        ]  # fmt: skip
    assert two_shot.counts == {two_shot.TWO_SHOT: 2}


def test_a_report_is_an_error_of_the_next_call(host: Host, workspace: two_shot.Workspace) -> None:
    _, run = host.run([Call(gaussian(4, 300), PLAIN, PLAIN)], dead_rank=3, timeout=6 * 10**8)
    workspace._word.value = run.reports[1]
    label = Label("all_reduce", "here", Group())  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match=r"'here', rank 1 of 4.*rank 3 did not come to the sum within 1500 ms"):
        two_shot.all_reduce(torch.zeros(100), 1.0, PLAN, label)


def test_calls_of_several_streams_are_ordered(workspace: two_shot.Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    first, second = workspace.stream, SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: second)
    workspace.order()
    workspace.order()
    assert waited == [first] and workspace.stream is second


def set_up_without_a_gpu(limit_of_1: int, fails: str, refuses: str) -> list[str]:
    """Return the outcome of two calls on this rank: rank 1 has another limit, fails at a step, or refuses."""
    rank, made = dist.get_rank(), []

    class Workspace:
        def __init__(self, *_: Any) -> None:
            made.append(self)

        def allocate(self) -> None:
            if fails == "allocate" and rank == 1:
                raise torch.OutOfMemoryError("no memory " + "x" * 5000)

        def rendezvous(self, group: dist.ProcessGroup) -> None:
            dist.barrier(group)  # like torch's rendezvous: each rank waits for all
            if fails == "rendezvous" and rank == 1:
                raise RuntimeError("no handle")

    def describe(device: torch.device) -> dict[str, Any]:
        return {
            "limits": limit_of_1 if rank == 1 else 5, "refuses": refuses if rank == 1 else "", "host": "a",
            "index": rank, "overlapping": False, "uuid": str(rank), "blocked": [],
        }  # fmt: skip

    label, cpu, found = Label("all_reduce", "here", dist.group.WORLD), torch.device("cpu"), []
    with (
        mock.patch.multiple(two_shot, _describe=describe, Workspace=Workspace, _workspaces={}),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        for _ in range(2):
            try:
                answer = two_shot._workspace(label, cpu)
            except MismatchError:
                found.append("mismatch")
            else:
                found.append(answer if isinstance(answer, str) else f"workspace {made.index(answer)} of {len(made)}")
    return found


def test_ranks_agree_about_the_workspace(ranks: Callable[[int], Ranks]) -> None:
    """Let a rank fail to allocate: the others do not begin the rendezvous, in which they would wait for it."""
    for case, expected in (
        ((5, "", ""), "workspace 0 of 1"),
        ((5, "allocate", ""), two_shot.NO_MEMORY),
        ((5, "rendezvous", ""), two_shot.NO_RENDEZVOUS),
        ((5, "", two_shot.NOT_BUILT), two_shot.NOT_BUILT),
        ((6, "", ""), "mismatch"),
    ):
        assert ranks(2).run(set_up_without_a_gpu, *case, timeout=30) == [[expected] * 2] * 2


def timeout_of_this_group() -> int:
    return two_shot.timeout_ms(dist.group.WORLD, torch.device("cpu"))


def test_a_kernel_gives_up_before_the_group_does(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(timeout_of_this_group) == [int(0.9 * GROUP_TIMEOUT / timedelta(milliseconds=1))] * 2
    fake = SimpleNamespace(_get_backend=lambda _: SimpleNamespace())
    assert two_shot.timeout_ms(fake, torch.device("cpu")) == 9 * 60 * 1000  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("user", "nvls", "capability", "during", "multicast"),
    [
        (None, "0", (9, 0), "1", 0), ("0", "0", (9, 0), "0", 0),
        (None, "1", (9, 0), None, 256), ("1", "1", (9, 0), "1", 256), (None, "1", (8, 0), "1", 0),
    ],
)  # fmt: skip
def test_a_multicast_mapping_is_made_on_request(
    workspace: two_shot.Workspace, monkeypatch: pytest.MonkeyPatch, user: Any, nvls: str, capability: Any, during: Any,
    multicast: int,
) -> None:  # fmt: skip
    """Check that the variable, which torch reads at the rendezvous, is set there alone, and not against the user."""
    symmetric_memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    seen = []

    def rendezvous(memory: Any, group: Any) -> Any:
        seen.append(os.environ.get(two_shot.MULTICAST_OFF))
        return SimpleNamespace(buffer_ptrs=[16, memory.data_ptr(), 48, 64], multicast_ptr=256)

    monkeypatch.setenv(two_shot.NVLS, nvls)
    monkeypatch.delenv(two_shot.MULTICAST_OFF, raising=False)
    if user is not None:
        monkeypatch.setenv(two_shot.MULTICAST_OFF, user)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    workspace._memory = torch.zeros(64)
    workspace.rendezvous(Group())  # type: ignore[arg-type]
    assert seen == [during] and os.environ.get(two_shot.MULTICAST_OFF) == user
    assert workspace.addresses == [16, workspace._memory.data_ptr(), 48, 64] and workspace.multicast == multicast


def only_on_gpus() -> bool:
    """All-reduce a CPU tensor with the two-shot kernel's function broken."""
    x = gaussian(3000, seed=dist.get_rank())
    with mock.patch.object(two_shot, "all_reduce", side_effect=AssertionError):
        fap.all_reduce(x, config=fap.FlashConfig(min_bytes=0))
    return bool(x.isfinite().all())


def test_cpu_tensors_never_take_it(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(only_on_gpus) == [True, True]


def test_nothing_is_set_up_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(two_shot, "_workspaces", {})
    label = Label("all_reduce", "here", Group())  # type: ignore[arg-type]
    assert two_shot._workspace(label, torch.device("cpu")) == two_shot.CAPTURED
