"""encode and decode: tensors to payloads and back, as a user calls them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.runtime import traced


def payload_bytes(numel: int, config: FlashConfig) -> int:
    """Return the length in bytes of the payload of `numel` elements."""
    _check_config(config)
    return config.format().payload_bytes(numel)


def encode(tensor: Tensor, config: FlashConfig, call: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Quantize a tensor of any shape and stride.

    Args:
        tensor: float32, bfloat16 or float16. Groups are counted from its first element, in row-major order.
        config: bits, group_size and the options of the codec are used.
        call: number of the random numbers of stochastic rounding: the same call gives the same bytes.
        out: the payload's memory, contiguous; None: new memory, which costs more time than the codec.

    Returns:
        The payload, 1-D uint8 of payload_bytes(tensor.numel(), config), on the tensor's device. Its layout is
        drawn in docs/trust/wire_format.md.

    Raises:
        TypeError: the tensor has another dtype.
        ValueError: out does not fit.
    """
    if torch.compiler.is_dynamo_compiling():
        payload = traced.encode(tensor, config, call)
        return payload if out is None else out.copy_(payload)
    _check_config(config)
    _check_dtype(tensor.dtype)
    format = config.format()
    flat = rows.flat(tensor).view(1, -1)
    payload = _output(out, (format.payload_bytes(flat.shape[1]),), torch.uint8, tensor.device)
    rows.encode(flat, payload.view(1, -1), format, Draw(rows.draw_key(config.seed, call)))
    return payload


def decode(
    payload: Tensor, shape: Sequence[int], dtype: torch.dtype, config: FlashConfig, *, out: Tensor | None = None
) -> Tensor:
    """Return the tensor of a payload.

    Args:
        payload: 1-D uint8, from encode.
        shape: of the result.
        dtype: of the result: float32, bfloat16 or float16; may differ from the encoded one.
        config: as given to encode.
        out: the result's memory, contiguous, of that shape and dtype; None: new memory.

    Raises:
        TypeError: payload is not uint8, or dtype is another.
        ValueError: the length of the payload does not fit shape and config, shape has a negative or too large size,
            or out does not fit.
    """
    if torch.compiler.is_dynamo_compiling():
        decoded = traced.decode(payload, shape, dtype, config)
        return decoded if out is None else out.copy_(decoded)
    _check_config(config)
    _check_dtype(dtype)
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise TypeError(f"payload is {payload.dtype} with {payload.dim()} dimensions; expected 1-D uint8.")
    # For an empty tensor torch multiplies the remaining sizes for its strides.
    if any(size < 0 for size in shape) or math.prod(max(size, 1) for size in shape) >= 1 << 63:
        raise ValueError(f"shape is {tuple(shape)}; expected sizes of 0 or more that int64 can multiply.")
    format = config.format()
    numel = math.prod(shape)
    expected = format.payload_bytes(numel)
    if payload.numel() != expected:  # before memory is allocated that the payload cannot fill
        raise ValueError(
            f"payload has {payload.numel()} bytes; {numel} elements at {format.bits} bits in groups of "
            f"{format.group_size} take {expected}."
        )
    output = _output(out, tuple(shape), dtype, payload.device)
    rows.decode(payload.contiguous().view(1, -1), output.view(1, -1), format)
    return output


traced.serve_codec(encode, decode)


def _output(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if (out.shape, out.dtype, out.device) != (shape, dtype, device) or not out.is_contiguous():
        kind = "" if out.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}{kind}; expected {dtype} {shape} on {device}, "
            "contiguous."
        )
    return out.detach()


def _check_config(config: Any) -> None:
    if not isinstance(config, FlashConfig):
        raise TypeError(f"config is {type(config).__name__}; expected FlashConfig.")


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in rows.DTYPES:
        raise TypeError(f"{dtype} cannot be quantized; expected float32, bfloat16 or float16.")
