"""Streams, CUDA graphs, torch.compile: the operators stay where torch puts them, and wait for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import NO_DRAW, Format
from tests.codecs import gaussian, same_bits
from tests.feedback import composed, sum_format
from tests.gpu import device
from tests.gpu.cases import encoded
from tests.gpu.device import DEVICE, compiled, needs_cuda

device.need_device()

C = Format(4, 128)
OPTIONS = Format(3, 64, spikes=True, hadamard=True)
RANKS, NUMEL = 3, 20_001
SLEEP = 400_000_000  # cycles: a fifth of a second


class Static:
    """The operators on tensors that stay, as in a captured graph."""

    def __init__(self, c: Format, dtype: torch.dtype = torch.bfloat16, on: torch.device = DEVICE) -> None:
        self.codec = c
        self.x = torch.zeros(RANKS, NUMEL, dtype=dtype, device=on)
        self.payloads = torch.zeros(RANKS, c.payload_bytes(NUMEL), dtype=torch.uint8, device=on)
        self.decoded, self.total = torch.zeros_like(self.x), torch.zeros_like(self.x[0])
        self.sent = torch.zeros_like(self.payloads[0])
        self.fed = torch.zeros_like(self.payloads)
        self.residuals = torch.zeros(2, c.groups(NUMEL), c.group_size + 2, dtype=torch.uint8, device=on)

    def run(self) -> None:
        c = self.codec
        compiled.encode(self.x, self.payloads, c.bits, c.group_size, c.options)
        compiled.decode(self.payloads, self.decoded, c.bits, c.group_size, c.options)
        compiled.decode_sum(self.payloads, self.total, 0.5, c.bits, c.group_size, c.options)
        compiled.decode_sum_encode(self.payloads, self.sent, 0.5, c.bits, c.bits, c.group_size, c.options)
        self.residuals.zero_()
        before, after = self.residuals
        compiled.encode_feedback(self.x[:1], self.fed[:1], before, 0.8, c.bits, c.group_size, c.options)
        compiled.decode_sum_encode_feedback(
            self.payloads, self.fed[1], after, 0.5, 0.8, c.bits, c.bits, c.group_size, c.options
        )

    def check(self, x: Tensor) -> None:
        """Check that run() used x, on the CPU."""
        payloads = encoded(x, self.codec, NO_DRAW)
        assert torch.equal(self.payloads.cpu(), payloads)
        decoded, total = torch.empty_like(x), torch.empty_like(x[0])
        rows.decode(payloads, decoded, self.codec)
        rows.decode_sum(payloads, total, self.codec, 0.5)
        assert same_bits(self.decoded.cpu(), decoded) and same_bits(self.total.cpu(), total)
        sent = torch.empty_like(payloads[0])
        rows.decode_sum_encode(payloads, sent, self.codec, self.codec, 0.5)
        assert torch.equal(self.sent.cpu(), sent)
        plain = sum_format(self.codec)
        nothing = torch.zeros_like(self.residuals[0], device="cpu")
        sums = torch.empty(len(nothing) * self.codec.group_size)
        rows.decode_sum(payloads, sums, plain, 0.5)
        for i, (numbers, c) in enumerate(((x[0], self.codec), (sums, plain))):
            payload, residual = composed(numbers, nothing, 0.8, c)
            assert torch.equal(self.fed[i].cpu(), payload) and torch.equal(self.residuals[i].cpu(), residual)


def values(seed: int) -> Tensor:
    return gaussian(RANKS, NUMEL, seed=seed).bfloat16()


@pytest.mark.parametrize("c", [C, OPTIONS], ids=str)
def test_the_operators_on_tensors_that_stay(c: Format) -> None:
    """Check the operators that the tests below build on."""
    static = Static(c)
    for seed in (1, 2):
        static.x.copy_(values(seed))
        static.run()
        static.check(values(seed))


@pytest.fixture
def no_synchronization() -> Iterator[None]:
    """Make torch's own synchronizations errors; those of others are not seen by it."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.parametrize("c", [C, OPTIONS], ids=str)
def test_calls_return_while_the_device_is_busy_and_allocate_nothing(c: Format) -> None:
    static = Static(c)
    static.run()  # loads the kernels
    static.x.copy_(values(3))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    awake = torch.cuda.Event()
    torch.cuda._sleep(SLEEP)
    awake.record()
    static.run()
    waited = awake.query()
    assert not waited, "the operators returned only when what was before them on the stream had ended"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    static.check(values(3))


@needs_cuda
def test_torch_sees_no_synchronization(no_synchronization: None) -> None:
    static = Static(C)
    static.run()
    x = static.x[:1]
    payload = torch.empty(1, C.payload_bytes(NUMEL), dtype=torch.uint8, device=DEVICE)
    rows.encode(x, payload, C)
    rows.decode(payload, x, C)


@needs_cuda
@pytest.mark.parametrize("c", [C, OPTIONS], ids=str)
def test_on_the_current_stream(c: Format) -> None:
    """Let the stream sleep before the input is there: a kernel on any other stream would read zeros."""
    static, x = Static(c), values(4).to(DEVICE)
    static.run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        static.x.copy_(x)
        static.run()
    stream.synchronize()
    static.check(values(4))


@needs_cuda
@pytest.mark.parametrize("c", [C, OPTIONS], ids=str)
def test_a_captured_graph_replays_on_new_data(c: Format) -> None:
    static = Static(c)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.run()
    for seed in (5, 6, 7):
        static.x.copy_(values(seed))
        for output in (static.payloads, static.decoded, static.total, static.sent, static.fed):
            output.zero_()
        graph.replay()
        static.check(values(seed))


@needs_cuda
def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    other = torch.device("cuda", 1)
    static = Static(C, on=other)
    static.x.copy_(values(8))
    assert torch.cuda.current_device() == 0
    static.run()
    assert torch.cuda.current_device() == 0
    static.check(values(8))
    with pytest.raises(RuntimeError, match="different devices"):
        compiled.decode(static.payloads, torch.empty_like(static.x, device=DEVICE), 4, 128, 0)


def round_trip(x: Tensor) -> Tensor:
    y = x * 2
    payload = torch.empty(y.shape[0], C.payload_bytes(y.shape[1]), dtype=torch.uint8, device=y.device)
    compiled.encode(y, payload, 4, 128, 0)
    output = torch.empty_like(y)
    compiled.decode(payload, output, 4, 128, 0)
    total = torch.empty_like(y[0])
    compiled.decode_sum(payload, total, 1.0, 4, 128, 0)
    again = torch.empty_like(payload[0])
    compiled.decode_sum_encode(payload, again, 1.0, 4, 4, 128, 0)
    turned = torch.empty_like(y[:1])
    compiled.decode(again.view(1, -1), turned, 4, 128, 0)
    return output + total + turned


# inductor's C++ on a CPU would test the compiler of the machine.
BACKENDS = ["eager", "aot_eager"] if device.ON_CPU else ["eager", "aot_eager", "inductor"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_a_break_in_the_graph(backend: str) -> None:
    torch._dynamo.reset()
    x = gaussian(3, 5001).to(DEVICE)
    function: Callable[[Tensor], Tensor] = torch.compile(round_trip, fullgraph=True, backend=backend)
    assert same_bits(function(x).cpu(), round_trip(x).cpu())


@needs_cuda
def test_inductor_captures_what_it_compiled() -> None:
    """Compile with mode="reduce-overhead": a separate CUDA graph."""
    torch._dynamo.reset()
    function = torch.compile(round_trip, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = gaussian(3, 5001, seed=seed).to(DEVICE)
        assert same_bits(function(x).cpu(), round_trip(x).cpu())


OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", ["encode", "decode", "decode_sum", "decode_sum_encode"])
def test_opcheck(name: str) -> None:
    static = Static(C, torch.float32)
    static.x.copy_(gaussian(RANKS, NUMEL))
    static.run()
    arguments = {
        "encode": (static.x, static.payloads, 4, 128, 0),
        "decode": (static.payloads, static.decoded, 4, 128, 0),
        "decode_sum": (static.payloads, static.total, 0.5, 4, 128, 0),
        "decode_sum_encode": (static.payloads, static.sent, 0.5, 4, 4, 128, 0),
    }[name]
    torch.library.opcheck(getattr(compiled, name).default, arguments, test_utils=OPCHECKS)
