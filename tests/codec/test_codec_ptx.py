"""The kernels with error feedback as nvcc makes them, run on the CPU: the same bits, every address where it may be.

tests/codec/test_codec_warp.py runs the text of a warp. This runs what nvcc made of the whole kernel, with the blocks'
shared memory and what the launch passes. What is left is the step from PTX to machine code, and the launch itself.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from tests.codecs import DTYPES, gaussian, hard_values, same_bits
from tests.feedback import KINDS, composed, residual_like
from tests.ptx.translate import translate

ROOT = Path(__file__).parents[2]
DRAW = Draw(rows.draw_key(3, 5), first_group=7)
GUARD = 64  # bytes around what is written
#: bf16, with and without options; the sums, likewise.
KERNELS = r"feedback_kernelI(LNS_5DTypeE1E)?Lb\dE"
SOME = (
    Format(4, 128),
    Format(8, 1024, symmetric=True),
    Format(5, 32, compact=True),
    Format(4, 32, compact=True, mse=True),
    Format(3, 64, spikes=True, hadamard=True),
    Format(6, 512, compact=True, spikes=True, stochastic=True),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def form(c: Format) -> bytes:
    lanes = c.group_size // 32
    return struct.pack("<6i", c.bits, c.group_size, c.options, c.record_bytes, lanes, lanes.bit_length() - 1)


def residual_of(kept: Tensor, momentum: float) -> bytes:
    return struct.pack("<Q?3xff4x", kept.data_ptr(), kept.dtype is torch.bfloat16, momentum, 1 - momentum)


def number(value: int) -> bytes:
    return struct.pack("<Q", value & (1 << 64) - 1)


def blocks_of(groups: int, c: Format) -> int:
    return -(-groups // (8192 // c.group_size))


class Guarded:
    """A copy of a tensor between bytes that nothing may touch, `offset` bytes beside a multiple of 64."""

    def __init__(self, values: Tensor, offset: int = 0) -> None:
        self._first = GUARD + offset
        self._buffer = torch.full((values.nbytes + 2 * GUARD + offset,), 0xA5, dtype=torch.uint8)
        inner = self._buffer[self._first : self._first + values.nbytes]
        self.values = inner.view(values.dtype).view(values.shape)
        self.values.copy_(values)

    def checked(self) -> Tensor:
        beside = self._buffer[: self._first], self._buffer[self._first + self.values.nbytes :]
        assert all((part == 0xA5).all() for part in beside)
        return self.values


class Kernels:
    """Launches as csrc/cuda/codec.cu does them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.launch.restype = ctypes.c_long

    def _launch(self, name: str, blocks: int, parameters: list[bytes], reads: Tensor, *writes: Tensor) -> None:
        for tensor, writable in ((reads, 0), *((t, 1) for t in writes)):
            self._library.allow(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes), writable)
        buffers = [ctypes.create_string_buffer(p, len(p)) for p in parameters]
        addresses = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        assert self._library.launch(name.encode(), blocks, addresses) == 0

    def encode_feedback(
        self, x: Tensor, residual: Tensor, momentum: float, c: Format, offset: int
    ) -> tuple[Tensor, Tensor]:
        payload = Guarded(torch.zeros(c.payload_bytes(len(x)), dtype=torch.uint8), offset)
        kept, blocks = Guarded(residual, 2 * offset), blocks_of(c.groups(len(x)), c)
        row = struct.pack("<qq?3xI", len(x), 0, x.data_ptr() % 16 == 0, blocks)
        options = int(replace(c, symmetric=False, compact=False).options != 0)
        self._launch(
            f"22encode_feedback_kernelILNS_5DTypeE{DTYPES.index(x.dtype)}ELb{options}E",
            blocks,
            [
                number(x.data_ptr()), row, form(c), residual_of(kept.values, momentum), number(DRAW.key),
                number(DRAW.first_group), number(payload.values.data_ptr()),
            ],
            x,
            payload.values,
            kept.values,
        )  # fmt: skip
        return payload.checked(), kept.checked()

    def decode_sum_encode_feedback(
        self, payloads: Tensor, residual: Tensor, reduce: Format, gather: Format, factor: float, momentum: float
    ) -> tuple[Tensor, Tensor]:
        payload = Guarded(torch.zeros(len(residual) * gather.record_bytes, dtype=torch.uint8))
        kept = Guarded(residual)
        align = 4 if (payloads.stride(0) | reduce.record_bytes) % 4 == 0 else 2
        sources = struct.pack("<Qqqi4x", payloads.data_ptr(), len(payloads), payloads.stride(0), align)
        options = int(replace(reduce, symmetric=False, compact=False).options != 0)
        self._launch(
            f"33decode_sum_encode_feedback_kernelILb{options}E",
            blocks_of(len(residual), gather),
            [
                sources, form(reduce), form(gather), struct.pack("<f", factor), number(len(residual)),
                residual_of(kept.values, momentum), number(DRAW.key), number(DRAW.first_group),
                number(payload.values.data_ptr()),
            ],
            payloads,
            payload.values,
            kept.values,
        )  # fmt: skip
        return payload.checked(), kept.checked()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    from torch.utils.cpp_extension import include_paths

    nvcc = shutil.which(os.environ.get("NVCC", "nvcc")) or shutil.which("/usr/local/cuda/bin/nvcc")
    compiler = shutil.which("c++") or shutil.which("g++")
    if nvcc is None or compiler is None:
        pytest.skip("no nvcc or no C++ compiler")
    folder = tmp_path_factory.mktemp("ptx")
    headers = [f"-isystem={path}" for path in include_paths()]
    defines = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]  # as setup.py
    command = [nvcc, "-std=c++17", "-O3", "-fmad=false", *defines, *headers, "-arch=compute_80"]
    command += ["-ptx", str(ROOT / "csrc/cuda/codec.cu"), "-o", str(folder / "codec.ptx")]
    subprocess.run(command, check=True, timeout=300)
    source, library = folder / "codec.cpp", folder / "codec.so"
    text = translate((folder / "codec.ptx").read_text(), KERNELS)
    source.write_text(f'#include "{ROOT / "tests/ptx/runtime.h"}"\n{text}')
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True, timeout=300)
    yield Kernels(ctypes.CDLL(str(library)))


@pytest.mark.parametrize("c", SOME, ids=str)
def test_the_kernels_do_what_the_operators_together_do(kernels: Kernels, c: Format) -> None:
    """One block and several, ragged groups, zeros and numbers that are not finite, payloads at any address."""
    hard = torch.stack(list(hard_values(1100).values())).bfloat16()
    hard[::2, 4::9] = 0.0
    ragged = gaussian(3, 9001).bfloat16()
    ragged[:, 5::7] = 0.0
    cases = [gaussian(3, 1).bfloat16(), gaussian(3, 8192, seed=1).bfloat16(), ragged, hard[:3], hard[-6:-3], hard[-3:]]
    for (i, x), kind in itertools.product(enumerate(cases), KINDS):
        x = x.contiguous()
        residual = residual_like(0.1 * gaussian(x.shape[1], seed=2), c, kind)
        ours = kernels.encode_feedback(x[0].clone(), residual, 0.8, c, (0, 1, 2, 4, 6, 8)[i])
        for mine, theirs in zip(ours, composed(x[0], residual, 0.8, c, DRAW), strict=True):
            assert same_bits(mine, theirs), (c, i, kind)
        payloads = torch.empty(3, c.payload_bytes(x.shape[1]), dtype=torch.uint8)
        rows.encode(x, payloads, c, DRAW)
        reduce = replace(c, hadamard=False)
        gather = replace(reduce, bits=2 + i)
        sums = torch.empty(len(residual) * c.group_size)
        rows.decode_sum(payloads, sums, reduce, 0.5)
        ours = kernels.decode_sum_encode_feedback(payloads, residual, reduce, gather, 0.5, 0.8)
        for mine, theirs in zip(ours, composed(sums, residual, 0.8, gather, DRAW), strict=True):
            assert same_bits(mine, theirs), (c, gather, i, kind)


def test_an_access_beside_the_tensors_is_noticed(kernels: Kernels) -> None:
    """That the check can fail: a residual of one group less than the launch says."""
    x, c = gaussian(300).bfloat16(), Format(4, 128)
    residual = residual_like(torch.zeros(256), c, torch.uint8)
    with pytest.raises(AssertionError):
        kernels.encode_feedback(x, residual, 0.8, c, 0)
