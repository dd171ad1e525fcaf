"""Load the compiled library, and register its operators for torch.compile.

The operators work on rows: one call does all shards of a chunk. They write into a given output:

    encode(input [rows, numel], payload [rows, bytes])            each row is a tensor
    decode(payload [rows, bytes], output [rows, numel])
    decode_sum(payloads [ranks, bytes], output [numel], factor)   sum in rank order, in float32, times factor
    decode_sum_encode(payloads [ranks, bytes], payload [bytes], factor)
    encode_feedback(input [1, numel], payload [1, bytes], residual, momentum)
    decode_sum_encode_feedback(payloads, payload, residual, factor, momentum)
    encode_difference(master, held [1, numel], payload [1, bytes]) -> bool    on a CPU
    decode_add(payload [rows, bytes], held [rows, numel])                     on a CPU

All take bits, group_size and options (format.Format.options) too. The encoding ones take the numbers of a format.Draw.
Rows may be strided, elements of a row may not. Dtypes float32, bfloat16, float16; payloads uint8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flash_allreduce_plugin.codec.format import WIRE_VERSION

_FEEDBACK = ("encode_feedback", "decode_sum_encode_feedback")


def _load() -> str | None:
    """Load the library. Return the reason of a failure, or None."""
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
        # The operators return nothing and allocate nothing, so their fakes have nothing to create.
        torch.library.register_fake(f"flash_allreduce::{name}", _fake)
    return None


def _fake(*_: Any) -> None:
    return None


def _load_cuda() -> str | None:
    """Load the operators for CUDA tensors. Return the reason of a failure, or None.

    Needs a CUDA build of torch, but no GPU.
    """
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


#: The reason why the compiled operators are missing, or None.
unavailable: str | None = _load()
#: The reason why the operators for CUDA tensors are missing, or None.
cuda_unavailable: str | None = _load_cuda()


def cpu_capability() -> str:
    """Return the instruction set in use: avx512, avx2 or default. ATEN_CPU_CAPABILITY lowers it, as in torch."""
    return str(torch.ops.flash_allreduce.cpu_capability())
