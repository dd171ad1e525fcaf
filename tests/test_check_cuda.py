"""scripts/check_cuda.py on reports as the compiler writes them; the compilation itself is `nox -s check-cuda`."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import check_cuda
from scripts.check_cuda import Kernel, parse, problems

REPORT = """\
ptxas info    : 28 bytes gmem
ptxas info    : Compiling entry function '_Z6encodei' for 'sm_80'
ptxas info    : Function properties for _Z6encodei
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 92 registers, used 1 barriers, 10752 bytes smem, 448 bytes cmem[0]
ptxas info    : Compile time = 131.269 ms
ptxas info    : Compiling entry function '_Z6decodei' for 'sm_90'
ptxas info    : Function properties for _Z6decodei
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 0 barriers
"""
GOOD = Kernel("_Z6encodei", "sm_80", registers=92, stack=0, spills=0, shared=10752)


def test_a_report_is_read_kernel_by_kernel() -> None:
    assert parse(REPORT) == [GOOD, Kernel("_Z6decodei", "sm_90", registers=168, stack=8, spills=16, shared=0)]


def test_refusals() -> None:
    assert problems([GOOD]) == []
    assert problems([]) == ["the compiler reported no kernel"]
    spilled, large = problems(parse(REPORT))
    assert spilled == "_Z6decodei on sm_90: 16 bytes of spills, a stack frame of 8; expected none"
    assert large == "_Z6decodei on sm_90: 168 registers; expected 128 at most"
    assert problems([replace(GOOD, registers=128)]) == []
    for name, alone in (
        ("_Z2two_shot_kernelv", True),
        ("22encode_feedback_kernelILNS_5DTypeE0ELb1EEEv", True),
        ("33decode_sum_encode_feedback_kernelILb1EEEv", True),
        ("22encode_feedback_kernelILNS_5DTypeE0ELb0EEEv", False),
        ("33decode_sum_encode_feedback_kernelILb0EEEv", False),
        ("13encode_kernelILNS_5DTypeE0ELb1EEEv", False),
    ):
        assert (problems([replace(GOOD, name=name, registers=168)]) == []) == alone, name


def test_a_symbol_that_no_torch_has_is_named(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("no C compiler or no nm")
    (tmp_path / "a.c").write_text(
        "void aoti_torch_no_such(void); void torch_c10_cuda_check_msg(void);"
        "void aoti_torch_delete_tensor_object(void*);"
        "void f(void) { aoti_torch_no_such(); torch_c10_cuda_check_msg(); aoti_torch_delete_tensor_object(0); }"
    )
    library = tmp_path / "a.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(tmp_path / "a.c"), "-o", str(library)], check=True)
    assert check_cuda.missing_symbols(library) == ["aoti_torch_no_such"]
