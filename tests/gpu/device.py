"""The device that these tests run on, and the operators on it.

`python -m scripts.gpu_check` runs them. GPU_TESTS_ON=cpu puts CPU tensors in the place of CUDA tensors, for all tests
but those of streams, graphs and NCCL: it tests the tests. GPU_TESTS_ON=ptx, which `nox -s check-ptx` sets, runs nvcc's
PTX of the kernels on the CPU (tests/ptx), with the operators' own host code.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_allreduce_plugin.codec import ops
from flash_allreduce_plugin.codec.format import NO_DRAW, Draw, Format
from tests.ptx import build as ptx_build
from tests.ptx.operators import operators as ptx_operators

ON_PTX = os.environ.get("GPU_TESTS_ON") == "ptx"
ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"
DEVICE = torch.device("cpu") if ON_CPU or ON_PTX else torch.device("cuda", 0)
#: Test every n-th combination of widths, group sizes and dtypes; 1: all. Not a multiple of 2, 3 or 7.
EVERY = int(os.environ.get("GPU_TESTS_EVERY", "5"))

compiled: Any = ptx_operators if ON_PTX else torch.ops.flash_allreduce
GUARD = 64  # bytes around the written ones
_FILL = 0xA5


def missing() -> str | None:
    """Return the reason why the tests cannot run here, or None."""
    if ops.unavailable is not None or ON_CPU:
        return ops.unavailable
    if ON_PTX:
        return ptx_build.missing()
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return ops.cuda_unavailable


def need_device() -> None:
    """Skip a module, at its head, where its tests cannot run."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)


needs_cuda = pytest.mark.skipif(ON_CPU or ON_PTX, reason="GPU_TESTS_ON=cpu or ptx: this needs CUDA")


@dataclass
class Written:
    """Rows on the device that an operator fills. It must touch nothing else in their buffer.

    offset: bytes by which the first row misses a multiple of 64; gap: elements between a row and the next.
    """

    rows: Tensor
    buffer: Tensor

    @classmethod
    def make(cls, rows: int, columns: int, dtype: torch.dtype, offset: int = 0, gap: int = 0) -> Written:
        size = rows * (columns + gap) * dtype.itemsize
        buffer = torch.full((2 * GUARD + offset + size,), _FILL, dtype=torch.uint8, device=DEVICE)
        inner = buffer[GUARD + offset : GUARD + offset + size].view(dtype).view(rows, columns + gap)
        return cls(inner[:, :columns], buffer)

    @classmethod
    def of(cls, values: Tensor, offset: int = 0) -> Written:
        """Return rows that are read and replaced."""
        written = cls.make(len(values), values.shape[1], values.dtype, offset)
        written.rows.copy_(values)
        return written

    def take(self) -> Tensor:
        """Return the rows on the CPU. Fail if a byte around them has changed."""
        values = self.rows.to("cpu", copy=True)
        fill = torch.full((self.rows.element_size(),), _FILL, dtype=torch.uint8).view(self.rows.dtype)
        self.rows.copy_(fill.to(DEVICE).expand_as(self.rows))
        changed = (self.buffer != _FILL).nonzero().flatten()
        assert not len(changed), f"bytes {changed[:4].tolist()} of {len(self.buffer)} were written beside the rows"
        return values


def encode(rows: Tensor, c: Format, draw: Draw = NO_DRAW, offset: int = 0, gap: int = 0) -> Tensor:
    """Encode rows on the device. Return the payloads on the CPU."""
    out = Written.make(len(rows), c.payload_bytes(rows.shape[1]), torch.uint8, offset, gap)
    compiled.encode(
        rows, out.rows, c.bits, c.group_size, c.options, draw.key, draw.first_group, draw.groups_a_row
    )  # fmt: skip
    return out.take()


def decode(payload: Tensor, numel: int, dtype: torch.dtype, c: Format, offset: int = 0, gap: int = 0) -> Tensor:
    """Decode a payload on the device. Return the rows on the CPU."""
    out = Written.make(len(payload), numel, dtype, offset, gap)
    compiled.decode(payload, out.rows, c.bits, c.group_size, c.options)
    return out.take()


def decode_sum(payloads: Tensor, numel: int, dtype: torch.dtype, c: Format, factor: float, offset: int = 0) -> Tensor:
    out = Written.make(1, numel, dtype, offset)
    compiled.decode_sum(payloads, out.rows[0], factor, c.bits, c.group_size, c.options)
    return out.take()[0]


def decode_sum_encode(
    payloads: Tensor, reduce: Format, gather: Format, factor: float, draw: Draw = NO_DRAW, offset: int = 0
) -> Tensor:
    groups = payloads.shape[1] // reduce.record_bytes
    out = Written.make(1, groups * gather.record_bytes, torch.uint8, offset)
    compiled.decode_sum_encode(
        payloads, out.rows[0], factor, reduce.bits, gather.bits, reduce.group_size, reduce.options,
        draw.key, draw.first_group,
    )  # fmt: skip
    return out.take()[0]


def encode_feedback(
    row: Tensor, residual: Tensor, momentum: float, c: Format, draw: Draw = NO_DRAW, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Encode row [1, numel] on the device with a residual of the CPU. Return payload and residual on the CPU."""
    out, kept = Written.make(1, c.payload_bytes(row.shape[1]), torch.uint8, offset), Written.of(residual, 2 * offset)
    compiled.encode_feedback(
        row, out.rows, kept.rows, momentum, c.bits, c.group_size, c.options, draw.key, draw.first_group
    )  # fmt: skip
    return out.take()[0], kept.take()


def decode_sum_encode_feedback(
    payloads: Tensor,
    residual: Tensor,
    reduce: Format,
    gather: Format,
    factor: float,
    momentum: float,
    draw: Draw = NO_DRAW,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    out = Written.make(1, len(residual) * gather.record_bytes, torch.uint8, offset)
    kept = Written.of(residual, 2 * offset)
    compiled.decode_sum_encode_feedback(
        payloads, out.rows[0], kept.rows, factor, momentum, reduce.bits, gather.bits, reduce.group_size,
        reduce.options, draw.key, draw.first_group,
    )  # fmt: skip
    return out.take()[0], kept.take()
