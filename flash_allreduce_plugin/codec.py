"""Encode and decode: the compiled operators where they are, the reference where not.

`encode` and `decode` serve whole tensors; the functions on rows below them are what the collectives call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flash_allreduce_plugin import ops, reference, switches, traced
from flash_allreduce_plugin.config import FlashConfig
from flash_allreduce_plugin.errors import install_command
from flash_allreduce_plugin.wire import NO_DRAW, Codec, Draw

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_compiled = torch.ops.flash_allreduce
# What it takes to have compiled operators for tensors of a device.
_COMPILERS = {"cpu": "a C++ compiler", "cuda": "nvcc"}


@cache
def use_reference(device_type: str = "cpu") -> bool:
    """Whether the plain PyTorch codec serves tensors of a device; says why, once, when it was not asked for."""
    if switches.is_on(switches.REFERENCE) or device_type not in _COMPILERS:
        return True
    missing = ops.unavailable if device_type == "cpu" else ops.cuda_unavailable
    if missing is not None:
        warnings.warn(
            f"flash_allreduce_plugin uses its plain PyTorch codec, which is slower: {missing}. "
            f"Install {_COMPILERS[device_type]} and run {install_command()}.",
            RuntimeWarning,
            stacklevel=2,
        )
        return True
    return False


def _is_compiled(tensor: Tensor) -> bool:
    return not use_reference(tensor.device.type)


def payload_bytes(numel: int, config: FlashConfig) -> int:
    """Length in bytes of the payload of `numel` elements."""
    _check_config(config)
    return config.codec().payload_bytes(numel)


def encode(tensor: Tensor, config: FlashConfig, call: int = 0) -> Tensor:
    """Quantize a tensor of any shape and stride.

    Args:
        tensor: float32, bfloat16 or float16. Groups are counted from its first element, in row-major order.
        config: bits, group_size and what says how a group is quantized are used.
        call: with stochastic rounding, which random numbers: the same call, the same bytes.

    Returns:
        The payload, 1-D uint8 of payload_bytes(tensor.numel(), config), on the tensor's device. Its layout is
        drawn in docs/wire_format.md.

    Raises:
        TypeError: the tensor has another dtype.
    """
    if torch.compiler.is_dynamo_compiling():
        return traced.encode(tensor, config, call)
    _check_config(config)
    _check_dtype(tensor.dtype)
    codec = config.codec()
    flat = tensor.detach().contiguous().view(1, -1)
    payload = torch.empty(1, codec.payload_bytes(flat.shape[1]), dtype=torch.uint8, device=tensor.device)
    encode_rows(flat, payload, codec, Draw(draw_key(config.seed, call)))
    return payload[0]


def decode(payload: Tensor, shape: Sequence[int], dtype: torch.dtype, config: FlashConfig) -> Tensor:
    """The tensor that a payload stands for.

    Args:
        payload: 1-D uint8, as encode made it.
        shape: of the result.
        dtype: of the result: float32, bfloat16 or float16; need not be the one that was encoded.
        config: the one that encode was given.

    Raises:
        TypeError: payload is not uint8, or dtype is another.
        ValueError: the payload has not the length that shape and config ask for, or shape is none.
    """
    if torch.compiler.is_dynamo_compiling():
        return traced.decode(payload, shape, dtype, config)
    _check_config(config)
    _check_dtype(dtype)
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise TypeError(f"payload is {payload.dtype} with {payload.dim()} dimensions; expected 1-D uint8.")
    # Of an empty tensor torch multiplies the sizes that are left for its strides.
    if any(size < 0 for size in shape) or math.prod(max(size, 1) for size in shape) >= 1 << 63:
        raise ValueError(f"shape is {tuple(shape)}; expected sizes of 0 or more that int64 can multiply.")
    codec = config.codec()
    numel = math.prod(shape)
    expected = codec.payload_bytes(numel)
    if payload.numel() != expected:  # before there is memory for what it cannot fill
        raise ValueError(
            f"payload has {payload.numel()} bytes; {numel} elements at {codec.bits} bits in groups of "
            f"{codec.group_size} take {expected}."
        )
    output = torch.empty(tuple(shape), dtype=dtype, device=payload.device)
    decode_rows(payload.contiguous().view(1, -1), output.view(1, -1), codec)
    return output


traced.serve_codec(encode, decode)


def _check_config(config: Any) -> None:
    if not isinstance(config, FlashConfig):
        raise TypeError(f"config is {type(config).__name__}; expected FlashConfig.")


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"{dtype} cannot be quantized; expected float32, bfloat16 or float16.")


def encode_rows(input: Tensor, payload: Tensor, codec: Codec, draw: Draw = NO_DRAW) -> None:
    """input [rows, numel] -> payload [rows, bytes]; each row is encoded as a tensor of its own.

    draw: the random numbers of stochastic rounding, not looked at otherwise.
    """
    if _is_compiled(input):
        _compiled.encode(
            input,
            payload,
            codec.bits,
            codec.group_size,
            codec.options,
            draw.key,
            draw.first_group,
            draw.groups_a_row,
        )
    else:
        reference.encode(input, payload, codec, draw)


def decode_rows(payload: Tensor, output: Tensor, codec: Codec) -> None:
    """payload [rows, bytes] -> output [rows, numel]."""
    if _is_compiled(output):
        _compiled.decode(payload, output, codec.bits, codec.group_size, codec.options)
    else:
        reference.decode(payload, output, codec)


def decode_sum(payloads: Tensor, output: Tensor, codec: Codec, factor: float) -> None:
    """payloads [ranks, bytes] -> output [numel], the sum in rank order in float32, times factor."""
    if _is_compiled(output):
        _compiled.decode_sum(payloads, output, factor, codec.bits, codec.group_size, codec.options)
    else:
        reference.decode_sum(payloads, output, codec, factor)


def decode_sum_encode(
    payloads: Tensor, payload: Tensor, reduce: Codec, gather: Codec, factor: float, draw: Draw = NO_DRAW
) -> None:
    """payloads [ranks, bytes] under `reduce` -> payload [bytes] of their sum times factor under `gather`.

    The two differ in their width alone.
    """
    if _is_compiled(payload):
        _compiled.decode_sum_encode(
            payloads,
            payload,
            factor,
            reduce.bits,
            gather.bits,
            reduce.group_size,
            reduce.options,
            draw.key,
            draw.first_group,
        )
    else:
        reference.decode_sum_encode(payloads, payload, reduce, gather, factor, draw)


def draw_key(*numbers: int) -> int:
    """A key for Draw from small whole numbers (seed, call, rank ...): 64 bits, signed, spread."""
    key = 0
    for number in numbers:
        key = _mix64((key + number + 1) * 0x9E3779B97F4A7C15)
    return key - (1 << 64) if key >> 63 else key


def _mix64(x: int) -> int:
    """S. Vigna, "splitmix64"."""
    mask = (1 << 64) - 1
    x &= mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31
