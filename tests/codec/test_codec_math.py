"""The shared headers, element by element on the host, give the bytes and the values of the vector kernels.

The kernels for the CPU write the arithmetic of csrc/codec_math.h with vector types; a device kernel will call its
functions. This holds the two together.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import GROUP_SIZES, Draw, Format
from tests.codecs import fits

SOURCE = Path(__file__).parents[1] / "host" / "group.cpp"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to compile the shared headers with")
    library = tmp_path_factory.mktemp("host") / "group.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True, timeout=240)
    return ctypes.CDLL(str(library))


def groups(size: int) -> torch.Tensor:
    """Return rows of one group each: ordinary, offset, constant, tiny, huge, zeros of both signs, not finite."""
    ordinary = torch.randn(6, size, generator=torch.Generator().manual_seed(size))
    ordinary[1] = ordinary[1] * 0.1 + 100
    ordinary[2] = 3.7
    ordinary[3] *= 1e-30
    ordinary[4] *= 1e30
    ordinary[5] = torch.where(ordinary[5] > 0, 0.0, -0.0)
    special = torch.randn(5, size, generator=torch.Generator().manual_seed(size + 1))
    special[0, size // 2] = math.nan
    special[1, 0] = math.inf
    special[2, -1] = -math.inf
    special[3] *= 1e-38
    special[4] = -0.0
    return torch.cat([ordinary, special, torch.tensor([[3.3e38, -3.3e38] * (size // 2)])])


OPTIONS = [sum(flags) for flags in itertools.product((0, 1, 32), (0, 2), (0, 4), (0, 8, 16))]
OPTIONS += [64, 64 + 4, 64 + 8, 64 + 4 + 8]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_shared_headers_give_the_bytes_of_the_kernels(host: ctypes.CDLL, options: int) -> None:
    flags = [bool(options & 1 << i) for i in range(7)]
    draw = Draw(rows.draw_key(9), 4)
    for i, size in enumerate(GROUP_SIZES):
        if not fits(size, {"codebook": bool(options & 64)}):
            continue
        for bits in range(2, 9) if options in (0, 1, 32, 64, 72) else (2 + i, 8 - i):
            layout = Format(bits, size, *flags)
            values_in = groups(size)
            payload = torch.empty(len(values_in), layout.record_bytes, dtype=torch.uint8)
            values = torch.empty_like(values_in)
            rows.encode(values_in, payload, layout, draw)
            rows.decode(payload, values, layout)
            for x, record, value in zip(values_in, payload, values, strict=True):
                ours, back = torch.full_like(record, 0xAA), torch.empty_like(value)
                numbers = ctypes.c_int64(draw.key), ctypes.c_int64(draw.first_group)
                x_at, ours_at, back_at = (ctypes.c_void_p(t.data_ptr()) for t in (x, ours, back))
                host.encode_group(x_at, bits, size, options, *numbers, ours_at)
                host.decode_group(ours_at, bits, size, options, back_at)
                assert torch.equal(ours, record), layout
                assert torch.equal(back.view(torch.int32), value.view(torch.int32)), layout
