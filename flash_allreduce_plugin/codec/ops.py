"""Loads the compiled library and registers what torch.compile needs to know of its operators.

The operators work on rows so that one call serves all shards of a chunk; they fill an output they are given:

    encode(input [rows, numel], payload [rows, bytes])            each row a tensor of its own
    decode(payload [rows, bytes], output [rows, numel])
    decode_sum(payloads [ranks, bytes], output [numel], factor)   sum in rank order, in float32, times factor
    decode_sum_encode(payloads [ranks, bytes], payload [bytes], factor)
    encode_feedback(input [1, numel], payload [1, bytes], residual, momentum)
    decode_sum_encode_feedback(payloads, payload, residual, factor, momentum)
    encode_difference(master, held [1, numel], payload [1, bytes]) -> bool    on a CPU
    decode_add(payload [rows, bytes], held [rows, numel])                     on a CPU

Each takes bits, group_size and options (format.Format.options) as well. Those that encode take the numbers of a
format.Draw.
Rows may be strided, elements of a row may not. Dtypes float32, bfloat16, float16; payloads uint8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flash_allreduce_plugin.codec.format import WIRE_VERSION

_FEEDBACK = ("encode_feedback", "decode_sum_encode_feedback")


def _load() -> str | None:
    """Load the library; why it could not be, or None."""
    library = next(iter(sorted(Path(__file__).parent.parent.glob("_C*.so"))), None)
    if library is None:
        return "no compiled library is installed"
    try:
        torch.ops.load_library(library)
        version = torch.ops.flash_allreduce.wire_version()
    except (OSError, RuntimeError, AttributeError) as error:
        return f"{library.name} could not be loaded: {error}"
    if version != WIRE_VERSION:
        return f"{library.name} writes wire version {version}, this package {WIRE_VERSION}; build it again"
    for name in ("encode", "decode", "decode_sum", "decode_sum_encode", *_FEEDBACK, "decode_add"):
        # They return nothing and allocate nothing: a fake has nothing to make.
        torch.library.register_fake(f"flash_allreduce::{name}", _fake)
    return None


def _fake(*_: Any) -> None:
    return None


def _load_cuda() -> str | None:
    """Load the operators for CUDA tensors; why they could not be, or None. Needs no GPU, only a CUDA build of torch."""
    if unavailable is not None:
        return unavailable
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    library = Path(__file__).parent.parent / "_cuda.so"
    if not library.exists():
        return "no CUDA library is installed"
    try:
        torch.ops.load_library(library)
    except (OSError, RuntimeError) as error:
        return f"{library.name} could not be loaded: {error}"
    return None


#: Why the compiled operators are not there, or None if they are.
unavailable: str | None = _load()
#: Why those for CUDA tensors are not there, or None if they are.
cuda_unavailable: str | None = _load_cuda()


def cpu_capability() -> str:
    """The instruction set in use: avx512, avx2 or default. ATEN_CPU_CAPABILITY lowers it, as it does torch's."""
    return str(torch.ops.flash_allreduce.cpu_capability())
