"""Two FP8 formats of other projects as Triton kernels, written from their documentation in peer_codecs.py.

torchft: a row of a matrix has one fp32 scale, 448 / max |x|, and then its e4m3 codes, filled up to 4 bytes; one program
a row, blocks of 2048, the row read twice. FlashInfer: groups of 256 with one fp32 scale max |x| / 448 each, scales
and codes in tensors of their own. These are re-implementations: the speed of their own kernels may differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

COLUMNS = 8192  # of the matrix as which torchft sees the tensor
BLOCK = 2048
GROUP = 256
GROUPS = 8  # of one program
LEAST_SQNR = 25.0  # dB, of Gaussian values: e4m3 has about 31


@dataclass(frozen=True)
class Peer:
    name: str
    package: str
    encode: Callable[[], Any]
    decode: Callable[[], Any]
    nbytes: int


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rows_encode(x, out, columns, out_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    source = x + row * columns
    target = out + row * out_stride
    place = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        value = tl.load(source + first + place, mask=first + place < columns, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
    greatest = tl.max(most, axis=0)
    scale = tl.where(greatest > 0.0, 448.0 / greatest, 1.0)
    tl.store(target.to(tl.pointer_type(tl.float32)), scale)
    codes = (target + 4).to(tl.pointer_type(tl.float8e4nv))
    for first in range(0, columns, BLOCK):
        inside = first + place < columns
        value = tl.load(source + first + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes + first + place, (value * scale).to(tl.float8e4nv), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rows_decode(payload, y, columns, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    source = payload + row * stride
    place = tl.arange(0, BLOCK)
    scale = tl.load(source.to(tl.pointer_type(tl.float32)))
    codes = (source + 4).to(tl.pointer_type(tl.float8e4nv))
    for first in range(0, columns, BLOCK):
        inside = first + place < columns
        code = tl.load(codes + first + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * columns + first + place, (code / scale).to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _groups_encode(x, codes, scales, count, GROUP: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (group < count)[:, None]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12)
    tl.store(scales + group, most / 448.0, mask=group < count)
    tl.store(codes + place, (value * (448.0 / most)[:, None]).to(tl.float8e4nv), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _groups_decode(codes, scales, y, count, GROUP: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (group < count)[:, None]
    scale = tl.load(scales + group, mask=group < count, other=0.0)
    code = tl.load(codes + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, (code * scale[:, None]).to(y.dtype.element_ty), mask=inside)


def peers(x: Tensor) -> list[Peer]:
    """x: 1-D on a GPU, a multiple of COLUMNS. Each has been run and its error looked at."""
    rows = x.numel() // COLUMNS
    payload = torch.empty(rows, COLUMNS + 4, dtype=torch.uint8, device=x.device)
    y = torch.empty_like(x)

    def torchft_encode() -> None:
        _rows_encode[(rows,)](x, payload, COLUMNS, COLUMNS + 4, BLOCK=BLOCK)

    def torchft_decode() -> None:
        _rows_decode[(rows,)](payload, y, COLUMNS, COLUMNS + 4, BLOCK=BLOCK)

    count = x.numel() // GROUP
    codes = torch.empty(x.numel(), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(count, device=x.device)
    programs = (-(-count // GROUPS),)

    def flashinfer_encode() -> None:
        _groups_encode[programs](x, codes, scales, count, GROUP=GROUP, GROUPS=GROUPS)

    def flashinfer_decode() -> None:
        _groups_decode[programs](codes, scales, y, count, GROUP=GROUP, GROUPS=GROUPS)

    found = [
        Peer("torchft FP8", "torchft", torchft_encode, torchft_decode, payload.nbytes),
        Peer("FlashInfer FP8 g256", "flashinfer", flashinfer_encode, flashinfer_decode, codes.nbytes + scales.nbytes),
    ]
    for peer in found:
        y.zero_()
        peer.encode()
        peer.decode()
        sqnr = 10 * float(torch.log10(x.float().square().sum() / (y.float() - x.float()).square().sum()))
        if not sqnr > LEAST_SQNR:
            raise RuntimeError(f"{peer.name}: SQNR {sqnr:.1f} dB; expected at least {LEAST_SQNR}")
    return found
