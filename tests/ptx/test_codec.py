"""Tests of the codec's kernels that tests/gpu/test_gpu_codec.py, which runs on the machine too (`nox -s check-ptx`),
does not have: mistakes are noticed, and every kernel was looked at."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from flash_allreduce_plugin.codec.format import Format
from tests.codecs import gaussian
from tests.gpu import device
from tests.gpu.cases import check, check_feedback, encoded
from tests.ptx import build
from tests.ptx.operators import machine
from tests.ptx.translate import UnknownInstruction

reason = build.missing() or (None if device.ON_PTX else "`nox -s check-ptx` runs it, with GPU_TESTS_ON=ptx")
needs_ptx = pytest.mark.skipif(reason is not None, reason=str(reason))
pytestmark = needs_ptx

ROWS = gaussian(3, 9001).bfloat16()
PLAIN = Format(4, 128)


def run_all() -> None:
    """Run every kernel of a plain codec, on one block and on several."""
    for columns in (1025, 9001):
        x = ROWS[:, :columns].contiguous()
        check(x, PLAIN, torch.float16, 8)
        check_feedback(x, encoded(x, PLAIN), PLAIN, PLAIN, torch.bfloat16)


def without(pattern: str, replacement: str = "", number: int = 0) -> Callable[[str, str], str]:
    """Return the text of a kernel with one match replaced: the number-th, or the last (-1)."""

    def mutate(_: str, text: str) -> str:
        found = list(re.finditer(pattern, text))
        if len(found) <= max(number, 0):
            return text
        match = found[number]
        return text[: match.start()] + match.expand(replacement) + text[match.end() :]

    return mutate


def test_without_a_mistake_nothing_is_seen() -> None:
    with machine().mutated(lambda _, text: text):
        run_all()


HALF = "{ .reg .pred %half; .reg .b32 %thread; mov.u32 %thread, %tid.x; and.b32 %thread, %thread, 16;"
HALF += " setp.eq.s32 %half, %thread, 0; @%half @ }"
BARRIER, SHUFFLE = r"bar\.sync\s+0;", r"shfl\.sync\.bfly\.b32\s[^;]*;"


@pytest.mark.parametrize(
    ("mutate", "seen"),
    [
        (without(BARRIER), "race"),
        (without(BARRIER, number=-1), "race"),
        (without(BARRIER, HALF.replace("@ }", "bar.sync 0; }")), "race|barrier that some lanes"),
        (without(rf"({SHUFFLE})", HALF.replace("@ }", r"\1 }")), "lanes ffff0000 of its mask do not reach"),
        (without(r"(shfl\.sync\.bfly\.b32\s[^;]*), %r\d+;", r"\1, 65535;"), "not in the mask"),
        (without(r"(shfl\.sync\.bfly\.b32\s[^;]*), %r\d+;", r"\1, 65535;", -1), "not in the mask"),
        (without(r"(st\.global\.v4\.u32\s+\[%rd\d+)(?:\+\d+)?\]", r"\1+8192]"), "out of bounds|differ|beside"),
        (without(r"(ld\.shared\.v4\.u32\s[^;]*\[%r\d+)\]", r"\1+16]"), "out of bounds|bytes, the first at"),
        (without(r"(st\.global\.v4\.u32\s+\[%rd\d+)(?:\+\d+)?\]", r"\1+4]"), "misaligned"),
        (without(r"(ld\.param\.u32\s+%r\d+, \[\w+_param_1)\+\d+\]", r"\1+16]"), "bytes|out of bounds|division"),
    ],
    ids=[
        "no __syncthreads before the copy", "no last __syncthreads", "half a warp at a barrier",
        "half a warp at a shuffle", "half a mask", "half a mask at the end",
        "a payload one block further", "an image 16 bytes further", "a store 4 bytes further", "another parameter",
    ],
)  # fmt: skip
def test_a_mistake_in_a_kernel_is_seen(mutate: Callable[[str, str], str], seen: str) -> None:
    with machine().mutated(mutate), pytest.raises((AssertionError, RuntimeError), match=seen):
        run_all()


def test_a_contracted_multiplication_is_an_unknown_opcode() -> None:
    """Compile with -fmad=true: the results would depend on where the compiler fuses."""
    contract = without(r"mul\.rn\.f32\s+(%f\d+), (%f\d+), (%f\d+);", r"fma.rn.f32 \1, \2, \3, \1;")
    with machine().mutated(contract), pytest.raises(UnknownInstruction, match=r"no opcode fma\.rn\.f32"):
        run_all()


@pytest.mark.slow
def test_fmad_is_seen() -> None:
    ptx = build.ptx_of(build.ROOT / "csrc" / "cuda" / "codec.cu", "-fmad=true")
    assert "fma.rn.f32" in next(ptx.glob("*.ptx")).read_text()
    assert all("fma." not in body for module in machine().modules for _, body, _ in module.entries.values())


def test_an_access_outside_of_the_tensors_is_detected() -> None:
    """Pass tensors that the machine has not registered, or has registered as read-only."""
    x = ROWS[:1, :1024].contiguous()
    payload = torch.empty(1, PLAIN.payload_bytes(1024), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"a load of .* out of bounds"), machine().may_touch([(payload, True)]):
        torch.ops.flash_allreduce_ptx.encode(x, payload, 4, 128, 0)
    with pytest.raises(RuntimeError, match="only read"), machine().may_touch([(payload, False), (x, False)]):
        torch.ops.flash_allreduce_ptx.encode(x, payload, 4, 128, 0)


def test_every_kernel_is_of_known_opcodes() -> None:
    """Check all kernels, those that no test launches too."""
    run = machine()
    for module in run.modules:
        for name in module.entries:
            run.program_of(name)
