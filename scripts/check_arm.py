"""Compile the CPU library for aarch64, and compare its bytes with those of this machine. Needs no ARM processor.

    python -m scripts.check_arm

1. setup.py builds the library with a cross compiler. The libraries of torch are empty ones: the linker asks for names.
   Each symbol that the library takes from torch must be one that this machine's torch has.
2. The kernels of that build run under user-mode emulation (qemu-aarch64), without torch, and make
   - the payloads and decoded values of tests/golden,
   - calls of every width, group size, layout, option and dtype, and the inputs of tests/fuzz/corpus: the bytes must be
     those of this machine's kernels.
3. The CUDA codec, lane by lane on the host, makes the same calls there as the kernels.

Everything is compiled into build/arm. Not covered: the library in a Python on ARM, and the speed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flash_allreduce_plugin.codec.format import GROUP_SIZES, MIN_CODEBOOK_GROUP_SIZE, Format
from scripts.check_cuda import missing_symbols
from scripts.fuzz import FUZZ, KERNELS
from tests.golden.make import DRAW, values_of

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "arm"
TARGET = "aarch64-linux-gnu"
EMULATOR = "qemu-aarch64"
PACKAGES = "apt-get install g++-aarch64-linux-gnu qemu-user"
TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=off"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENCODE, SUM, SUM_AND_ENCODE, FEEDBACK, SUM_AND_FEEDBACK = range(5)
DEVICE_EVERY = 9  # of the calls, each n-th one runs on the lanes, which take a hundred times as long


@dataclass(frozen=True)
class Call:
    """A call of the codec as tests/fuzz/case.h reads it. content: of the tensor or the payloads, repeated."""

    operation: int
    format: Format
    dtype: torch.dtype
    numel: int
    content: bytes
    gather_bits: int = 8
    ranks: int = 1
    shift: int = 0  # of the buffers' addresses, in bytes: 0 or odd
    cut: int = 0
    factor: int = 0  # one of case.h's
    wide: int = 0
    momentum: int = 1
    key: int = DRAW.key
    first_group: int = DRAW.first_group

    def input(self) -> bytes:
        """Return the bytes of the call. Where case.h multiplies two numbers, both bytes are equal."""
        f = self.format
        size = int(math.log2(f.group_size)) - 5
        head = [self.operation, 2, f.bits - 2, self.gather_bits - 2, size, f.options, DTYPES.index(self.dtype)]
        shifts = [self.shift] * 6
        numbers = struct.pack("<BHBIB", 0, self.numel, self.cut, 0, self.factor)
        draw = struct.pack("<qq", self.key, self.first_group)
        return (
            bytes([*head, self.ranks - 1, 0, 0, *shifts])
            + numbers
            + draw
            + bytes([self.wide, self.momentum])
            + self.content
        )


def raw(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


# Calls.


def formats() -> Iterator[Format]:
    """Every width and group size with every combination of options that the codec takes."""
    layouts: tuple[dict[str, bool], ...] = ({}, {"symmetric": True}, {"compact": True}, {"codebook": True})
    for layout, spikes, hadamard, last in itertools.product(
        layouts, (False, True), (False, True), ("", "mse", "stochastic")
    ):
        if "codebook" in layout and last == "stochastic":
            continue
        options = {**layout, "spikes": spikes, "hadamard": hadamard, **({last: True} if last else {})}
        for bits, group_size in itertools.product(range(2, 9), GROUP_SIZES):
            if "codebook" not in layout or group_size >= MIN_CODEBOOK_GROUP_SIZE:
                yield Format(bits, group_size, **options)


def contents() -> list[torch.Tensor]:
    """Elements that are hard on a codec; an odd number, so that no two groups of a call are equal."""
    noise = torch.randn(333, generator=torch.Generator().manual_seed(45))
    place = torch.arange(333)
    return [
        noise,
        100 + 0.1 * noise,
        torch.where(place % 5 == 0, -0.0, noise.abs()),
        torch.where(place % 97 == 5, 1e4, noise),
        noise * 10.0 ** (place % 61 - 30).float(),
        noise * 1e-40,
        torch.where(place == 211, float("nan"), noise),
        torch.where(place == 300, -float("inf"), noise),
    ]


def encodings() -> list[Call]:
    """Calls that encode tensors: every format with every dtype."""
    numbers = random.Random(45)
    values = [{dtype: raw(x.to(dtype)) for dtype in DTYPES} for x in contents()]
    calls = []
    for f, dtype in itertools.product(formats(), DTYPES):
        numel = numbers.randrange(2 * f.group_size, 3 * f.group_size + 1)  # two groups, and a ragged or a whole one
        common = {
            "shift": numbers.choice((0, 1, 3, 5)),
            "cut": numbers.randrange(4),
            "first_group": numbers.getrandbits(40),
        }
        content = values[numbers.randrange(len(values))][dtype]
        call = Call(ENCODE, f, dtype, numel, content, key=numbers.getrandbits(63), **common)
        calls += [call, replace(call, operation=FEEDBACK, wide=numbers.randrange(2), momentum=numbers.randrange(4))]
    return calls


def decodings(encoded: Sequence[tuple[Call, bytes]]) -> list[Call]:
    """Calls that decode and sum the payloads of `encoded`."""
    numbers = random.Random(46)
    calls = []
    for call, payload in encoded:
        summed = replace(
            call,
            content=payload,
            ranks=numbers.randrange(1, 4),
            factor=numbers.randrange(3),
            gather_bits=numbers.randrange(2, 9),
            shift=0,
            wide=numbers.randrange(2),
        )
        calls += [replace(summed, operation=operation) for operation in (SUM, SUM_AND_ENCODE, SUM_AND_FEEDBACK)]
    return calls


def golden() -> list[tuple[str, Call, bytes]]:
    """The name, the call and the expected bytes of each case of tests/golden: encoded, then decoded into fp32."""
    expected = []
    for path in sorted((ROOT / "tests" / "golden").glob("*.json")):
        for case in json.loads(path.read_text()):
            f = Format(case["bits"], case["group_size"], case["symmetric"], **case["options"])
            x = values_of(case["input"], getattr(torch, case["dtype"]))
            payload, decoded = bytes.fromhex(case["payload"]), bytes.fromhex(case["decoded_float32"])
            name = f"{path.name}: {case['name']}, {f}"
            expected.append((name, Call(ENCODE, f, x.dtype, len(x), raw(x)), payload))
            expected.append((name, Call(SUM, f, torch.float32, len(x), payload), decoded))
    return expected


# Programs.


def run(command: Sequence[str | Path], **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"check-arm: {' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def library(compiler: str) -> tuple[Path, list[Path]]:
    """Build the library with setup.py; return it and its objects of kernels."""
    empty = BUILD / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    for name in TORCH_LIBRARIES:
        soname = f"-Wl,-soname,lib{name}.so"
        run([compiler, "-shared", "-nostdlib", soname, "-x", "c++", "/dev/null", "-o", empty / f"lib{name}.so"])
    build: list[str | Path] = [
        "setup.py",
        "build_ext",
        "--force",
        "--build-temp",
        BUILD / "temp",
        "--build-lib",
        BUILD / "lib",
    ]
    linked = f"{compiler} -shared -L{empty}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja's
    tools = {"CC": compiler, "CXX": compiler, "LDSHARED": linked, "LDCXXSHARED": linked, "PATH": path, "MAX_JOBS": "2"}
    said = run([sys.executable, *build], FLASH_ALLREDUCE_BUILD="cpu", **tools)
    [target] = (BUILD / "lib").rglob("_C*.so")
    kernels = list((BUILD / "temp").rglob("codec_default.o"))
    if len(kernels) != 1:
        sys.exit(
            f"check-arm: setup.py left {len(kernels)} objects codec_default.o in {BUILD / 'temp'}; expected 1.\n{said}"
        )
    return target, kernels


def program(compiler: str, name: str, sources: Sequence[Path], *flags: str) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    run([compiler, *FLAGS, *flags, *sources, FUZZ / "replay.cpp", "-o", BUILD / name])
    return BUILD / name


def results(command: Sequence[str | Path], inputs: Sequence[bytes]) -> list[bytes]:
    """Run a replay, and return the bytes that each call has written."""
    records = b"".join(struct.pack("<I", len(one)) + one for one in inputs)
    done = subprocess.run([str(word) for word in command], input=records, capture_output=True)
    found: list[bytes] = []
    rest, at = done.stdout, 0
    while at + 4 <= len(rest):
        [size] = struct.unpack_from("<I", rest, at)
        found.append(rest[at + 4 : at + 4 + size])
        at += 4 + size
    if done.returncode or len(found) != len(inputs):
        text = done.stderr.decode(errors="replace")[-2000:]
        sys.exit(f"check-arm: {Path(command[-1]).name} ended with {done.returncode} in call {len(found)}: {text}")
    return found


# Comparisons.


def difference(call: Call, here: bytes, there: bytes) -> str | None:
    """Return where two results of a call differ, or None."""
    if here == there:
        return None
    at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    names = ("encode", "decode_sum", "decode_sum_encode", "encode_feedback", "decode_sum_encode_feedback")
    return f"{names[call.operation]} of {call.numel} {call.dtype}, {call.format}: byte {at} of {len(here)} differs"


def report(what: str, differing: Sequence[str], count: int) -> bool:
    """Print the outcome of a comparison; return True if nothing differs."""
    print(
        "\n".join(
            [*differing[:5], f"{what}: {count:,}, {len(differing) or 'no'} difference{'s' * (len(differing) > 1)}"]
        ),
        flush=True,
    )
    return not differing


def compare(native: Path, emulated: Path, device: Path) -> bool:
    arm: list[str | Path] = [EMULATOR, emulated]
    cases = golden()
    made = results(arm, [call.input() for _, call, _ in cases])
    wrong = [
        f"{name}: byte {next(i for i, b in enumerate(expected) if got[i : i + 1] != bytes([b]))} differs"
        for (name, _, expected), got in zip(cases, made, strict=True)
        if got[: len(expected)] != expected
    ]
    good = report("golden payloads and their values", wrong, len(cases))

    first = encodings()
    here = results([native], [call.input() for call in first])
    payloads = [
        (call, got[: call.format.payload_bytes(call.numel)])
        for call, got in zip(first, here, strict=True)
        if call.operation == ENCODE
    ]
    second = decodings(payloads)
    here += results([native], [call.input() for call in second])
    calls = [*first, *second]
    there = results(arm, [call.input() for call in calls])
    wrong = [d for call, a, b in zip(calls, here, there, strict=True) if (d := difference(call, a, b)) is not None]
    good &= report("calls, with this machine's bytes", wrong, len(calls))

    corpus = [path.read_bytes() for path in sorted((FUZZ / "corpus").iterdir())]
    pairs = zip(corpus, results([native], corpus), results(arm, corpus), strict=True)
    wrong = [f"input {hash_of(one)} differs" for one, a, b in pairs if a != b]
    good &= report("inputs of the fuzz corpus, with this machine's bytes", wrong, len(corpus))

    lanes = [*corpus, *(call.input() for call in calls[::DEVICE_EVERY])]
    results([EMULATOR, device], lanes)  # it ends with a failure where the lanes and the kernels differ
    return good & report("calls of the lanes of the CUDA text, with the bytes of the kernels", [], len(lanes))


def hash_of(content: bytes) -> str:
    """Return the name of an input in tests/fuzz/corpus."""
    return hashlib.sha1(content).hexdigest()


def tools() -> str:
    """Return the cross compiler, or end with the package that has the missing tool."""
    compiler = f"{TARGET}-g++"
    missing = [name for name in (compiler, EMULATOR) if shutil.which(name) is None]
    if missing:
        sys.exit(f"check-arm: {' and '.join(missing)} not found on PATH; on Debian: {PACKAGES}")
    if platform.machine() != "x86_64":
        sys.exit(f"check-arm compares ARM with x86-64, and this machine is {platform.machine()}: run the tests here.")
    return compiler


def main() -> int:
    compiler = tools()
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        here = pool.submit(program, "g++", "codec-here", [FUZZ / "codec.cpp", *KERNELS], "-O0")
        target, kernels = library(compiler)
        device = pool.submit(program, compiler, "device", [FUZZ / "device.cpp", *kernels], "-O1", "-static")
        emulated = program(compiler, "codec", [FUZZ / "codec.cpp", *kernels], "-O1", "-static")
        programs = here.result(), emulated, device.result()
    unknown = missing_symbols(target)
    good = not unknown
    print(f"{target.relative_to(ROOT)} takes from torch: {', '.join(unknown) or 'only symbols that torch has'}")
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    good &= compare(*programs)
    print(f"check-arm: {'passed' if good else 'FAILED'}, {time.monotonic() - began:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
