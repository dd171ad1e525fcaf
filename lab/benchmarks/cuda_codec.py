"""The codec on a GPU against the speed of its memory.

    python -m lab.benchmarks.cuda_codec --json cuda_codec.json

The arguments of a kernel determine its bytes read and written. A device-to-device copy of as many bytes is timed
alternately with it, in rounds. "share" is the copy's time over the kernel's, the median over the rounds: 1 is the speed
of memory. The L2 cache is emptied before every run by reading 256 MiB. Times
are of CUDA events.

MiB is the size of the encoded or decoded tensor; for the sums, of one rank's shard, the sum of 8 payloads. Feedback
also reads and writes a residual of 8 bits. Codebook and spikes are the presets' formats. "peers" are other projects'
formats, quantized by Triton kernels written here from their documentation (lab/benchmarks/triton_fp8.py), not by their
own kernels.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import ops, rows
from flash_allreduce_plugin.codec.format import Format
from lab.benchmarks import command

MIB = 1 << 20
RANKS = 8
FLUSH = 256 * MIB
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = (
    "encode", "decode", "decode_sum", "decode_sum_encode", "encode_feedback", "decode_sum_encode_feedback",
)  # fmt: skip
# From this size on something is aimed at.
TARGET_MIB = 64
WIDTHS = (8, 7, 6, 5, 4, 3, 2)


def counted_bytes(kernel: str, numel: int, element: int, c: Format, ranks: int = RANKS) -> int:
    """Bytes that a kernel has to read and write. numel: of the tensor, or of a shard; element: bytes of one."""
    payload = c.payload_bytes(numel)
    residual = c.groups(numel) * (c.group_size + 2)
    return {
        "encode": element * numel + payload,
        "decode": payload + element * numel,
        "decode_sum": ranks * payload + element * numel,
        "decode_sum_encode": ranks * payload + payload,
        "encode_feedback": element * numel + payload + 2 * residual,
        "decode_sum_encode_feedback": ranks * payload + payload + 2 * residual,
    }[kernel]


def options_of(c: Format) -> str:
    return "+".join(name for name in ("compact", "codebook", "spikes") if getattr(c, name))


def target(kernel: str, bits: int, dtype: str, group_size: int, mib: int, options: str) -> float | None:
    """The share that is aimed at, or None where nothing is."""
    if mib < TARGET_MIB or dtype != "bf16" or group_size != 128 or kernel.endswith("feedback") or options:
        return None
    return 0.9 if bits in (8, 4) else 0.75


@dataclass
class Clock:
    """Times of calls on one device, in turn. On a CPU only so that this file can be tested."""

    device: torch.device
    rounds: int

    def __post_init__(self) -> None:
        self.is_cuda = self.device.type == "cuda"
        self._flush = torch.zeros(FLUSH // 4 if self.is_cuda else 1, device=self.device)
        self._sink = torch.zeros((), device=self.device)

    def in_turn(self, runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Seconds of each run in each round; the first two rounds are not counted."""
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        for _ in range(self.rounds + 2):
            for name, run in runs.items():
                torch.sum(self._flush, dim=0, out=self._sink)  # read, so that nothing is left to be written back
                before = self._mark()
                run()
                marks[name].append((before, self._mark()))
        if self.is_cuda:
            torch.cuda.synchronize()
        return {name: [self._seconds(*pair) for pair in pairs[2:]] for name, pairs in marks.items()}

    def _mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) * 1e-3 if self.is_cuda else float(after - before)


def random(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)


def copy_of(nbytes: int, device: torch.device) -> Callable[[], Any]:
    """A copy that reads and writes `nbytes` together."""
    source = torch.randint(0, 256, (nbytes // 2,), dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def calls_of(numel: int, dtype: torch.dtype, c: Format, device: torch.device) -> dict[str, Callable[[], Any]]:
    x = random(numel, dtype, device)
    payloads = torch.empty(RANKS, c.payload_bytes(numel), dtype=torch.uint8, device=device)
    rows.encode(x.expand(RANKS, -1), payloads, c)
    spare, sent, y = payloads[:1].clone(), torch.empty_like(payloads[0]), torch.empty_like(x)
    residual = torch.zeros(c.groups(numel), c.group_size + 2, dtype=torch.uint8, device=device)
    numbers = c.bits, c.group_size, c.options
    compiled = torch.ops.flash_allreduce
    return {
        "encode": partial(rows.encode, x.view(1, -1), spare, c),
        "decode": partial(rows.decode, payloads[:1], y.view(1, -1), c),
        "decode_sum": partial(rows.decode_sum, payloads, y, c, 1.0),
        "decode_sum_encode": partial(rows.decode_sum_encode, payloads, sent, c, c, 1.0),
        "encode_feedback": partial(compiled.encode_feedback, x.view(1, -1), spare, residual, 0.8, *numbers),
        "decode_sum_encode_feedback": partial(
            compiled.decode_sum_encode_feedback, payloads, sent, residual, 1.0, 0.8, c.bits, *numbers
        ),
    }


def measure(clock: Clock, mib: int, dtype: str, c: Format) -> dict[str, Any]:
    """Return a row: the times of each kernel and of its copy."""
    element = DTYPES[dtype].itemsize
    numel = mib * MIB // element
    row: dict[str, Any] = {"MiB": mib, "dtype": dtype, "bits": c.bits, "group_size": c.group_size}
    row |= {"options": options_of(c), "us": {}, "copy us": {}, "GB/s": {}, "share": {}, "bytes": {}}
    for kernel, call in calls_of(numel, DTYPES[dtype], c, clock.device).items():
        counted = counted_bytes(kernel, numel, element, c)
        times = clock.in_turn({"kernel": call, "copy": copy_of(counted, clock.device)})
        seconds = statistics.median(times["kernel"])
        share = statistics.median(b / a for a, b in zip(times["kernel"], times["copy"], strict=True))
        row["us"][kernel] = round(1e6 * seconds, 2)
        row["copy us"][kernel] = round(1e6 * statistics.median(times["copy"]), 2)
        row["GB/s"][kernel] = round(1e-9 * counted / seconds)
        row["share"][kernel] = round(share, 3)
        row["bytes"][kernel] = counted
    return row


def launch_time(clock: Clock) -> float:
    """Return the seconds of an encode of one group: the fixed cost of a call."""
    calls = calls_of(128, torch.bfloat16, Format(4, 128), clock.device)
    return statistics.median(clock.in_turn({"encode": calls["encode"]})["encode"])


def check() -> None:
    """Correctness first: a fast codec that is wrong has no speed."""
    x, device = torch.randn(1, 100_001), DEVICE
    for c in (Format(8, 128), Format(4, 128), Format(3, 64, compact=True)):
        ours = torch.empty(1, c.payload_bytes(x.numel()), dtype=torch.uint8, device=device)
        theirs = torch.empty_like(ours, device="cpu")
        rows.encode(x.to(device), ours, c)
        rows.encode(x, theirs, c)
        assert torch.equal(ours.cpu(), theirs), f"{c}: the GPU and the CPU encode differently"


def measure_peers(clock: Clock, mib: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Their quantization of the same bf16 tensor, and why those that are left out are."""
    measured, left_out = [], {}
    numel = mib * MIB // 2
    x = random(numel, torch.bfloat16, clock.device)
    runs: dict[str, tuple[Callable[[], Any], int]] = {}
    for bits in (8, 4):
        c = Format(bits, 128)
        payload = torch.empty(1, c.payload_bytes(numel), dtype=torch.uint8, device=clock.device)
        runs[f"ours, {bits} bits g128: encode"] = (
            partial(rows.encode, x.view(1, -1), payload, c),
            payload.numel(),
        )
        runs[f"ours, {bits} bits g128: decode"] = (
            partial(rows.decode, payload, torch.empty_like(x).view(1, -1), c),
            payload.numel(),
        )
    try:
        triton_fp8 = importlib.import_module("lab.benchmarks.triton_fp8")
        for peer in triton_fp8.peers(x):
            runs[f"{peer.name} (re-implemented): encode"] = (peer.encode, peer.nbytes)
            runs[f"{peer.name} (re-implemented): decode"] = (peer.decode, peer.nbytes)
            left_out[peer.name + "'s own kernels"] = f"{peer.package} is not needed: its format, in Triton, is timed"
    except Exception as error:  # whatever Triton objects to must not hide the rest
        left_out["torchft, FlashInfer"] = f"their formats in Triton could not be run: {type(error).__name__}: {error}"
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder").QuantizerBuilder()
        quantizer = builder.load()
        groups = numel // 2048
        for bits in (8, 4):
            run = partial(quantizer.quantize, x.half(), groups, bits, quantizer.Symmetric)
            codes, scales = run()
            runs[f"DeepSpeed, {bits} bits g2048: encode"] = (run, codes.nbytes + scales.nbytes)
    except Exception as error:
        left_out["DeepSpeed's CUDA quantizer"] = f"{type(error).__name__}: {error}"
    times = clock.in_turn({name: run for name, (run, _) in runs.items()})
    for name, (_, nbytes) in runs.items():
        seconds = statistics.median(times[name])
        measured.append(
            {
                "name": name,
                "MiB": mib,
                "bits per element": 8 * nbytes / numel,
                "us": 1e6 * seconds,
                "GB/s": 1e-9 * (2 * numel + nbytes) / seconds,
            }
        )
    return measured, left_out


def plan(quick: bool) -> list[tuple[int, str, Format]]:
    """Return the measurements: MiB, dtype, codec."""
    plain = {bits: Format(bits, 128) for bits in WIDTHS}
    compact = {bits: Format(bits, 64, compact=True) for bits in WIDTHS}
    of_presets = [Format(bits, 256 if bits == 8 else 128, codebook=True, spikes=True) for bits in (8, 6, 4, 2)]
    if quick:
        return [(64, "bf16", c) for c in (plain[8], plain[5], plain[4], of_presets[2])]
    cases = [(mib, "bf16", plain[bits]) for mib in (1, 4, 16, 64, 256, 512) for bits in (8, 4)]
    cases += [(64, "bf16", plain[bits]) for bits in WIDTHS if bits not in (8, 4)]
    cases += [(64, "bf16", c) for c in of_presets]
    cases += [(64, "bf16", compact[bits]) for bits in WIDTHS]
    cases += [(64, "fp32", c) for bits in (8, 4) for c in (plain[bits], compact[bits])]
    return cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="64 MiB and three widths only")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mib", type=int, help="this size only")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # cpu: tests this file


def run(arguments: argparse.Namespace, keep: command.Keep) -> int:
    global DEVICE
    DEVICE = torch.device(arguments.device)
    reason = getattr(ops, "cuda_unavailable", "this package has no CUDA operators")
    if DEVICE.type == "cuda" and (not torch.cuda.is_available() or reason is not None):
        print(reason or "torch finds no CUDA device")
        return 2
    check()
    clock = Clock(DEVICE, arguments.rounds)
    results: dict[str, Any] = {"about": about(), "launch us": 1e6 * launch_time(clock), "rows": [], "failed": {}}

    print(f"{results['about']['device']}, an encode of one group: {results['launch us']:.1f} us")
    print(f"{'kernel':27}{'MiB':>5} {'dtype':6}{'bits':>4}{'g':>5} {'':16}{'us':>9}{'GB/s':>8}{'share':>7}")
    for mib, dtype, c in plan(arguments.quick):
        try:
            row = measure(clock, arguments.mib or mib, dtype, c)
        except RuntimeError as error:  # one size that fails must not hide the others
            results["failed"][f"{mib} MiB {dtype} {c}"] = str(error)
            print(f"{mib} MiB {dtype} {c}: {error}")
            continue
        form = f"{row['MiB']:5} {dtype:6}{c.bits:4}{c.group_size:5} {row['options']:16}"
        for kernel in KERNELS:
            us, speed, share = (row[key][kernel] for key in ("us", "GB/s", "share"))
            aim = target(kernel, c.bits, dtype, c.group_size, row["MiB"], row["options"])
            missed = "  below the aim" if aim and share < aim else ""
            print(f"{kernel:27}{form}{us:9.1f}{speed:8.0f}{share:7.2f}{missed}")
        results["rows"].append(row)
        keep(results)
    results["peers"], results["left out"] = measure_peers(clock, arguments.mib or 64)
    for row in results["peers"]:
        print(f"{row['name']:52}{row['bits per element']:7.3f} bits{row['us']:9.1f} us{row['GB/s']:8.0f} GB/s")
    for name, why in results["left out"].items():
        print(f"left out: {name}: {why}")
    keep(results)
    return 1 if results["failed"] else 0


def about() -> dict[str, Any]:
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else platform.processor() or "CPU"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "ranks": RANKS}


DEVICE = torch.device("cuda")

if __name__ == "__main__":
    sys.exit(command.main(__doc__, add_arguments, run))
