"""The codec in plain PyTorch: the executable specification, the oracle of the tests, and the fallback.

Bit for bit what the compiled operators do (csrc/codec_math.h has the same text in C++), on any device. Every
line is one rounding of IEEE float32, so there is nothing for a compiler to fuse. Shapes as in ops.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_allreduce_plugin.wire import Codec

_NAN_SCALE = 0x7FC0  # bf16: this group held a value that is not finite
_MIN_SCALE = 0x0080  # bf16: 2^-126, whose inverse is finite
_INF = 0x7F80  # bf16


def encode(input: Tensor, payload: Tensor, codec: Codec) -> None:
    """input [rows, numel] of fp32, bf16 or fp16 -> payload [rows, codec.payload_bytes(numel)], uint8."""
    rows, numel = input.shape
    if numel == 0 or rows == 0:
        return
    g = codec.group_size
    x = input.float()
    padding = -numel % g
    if padding:  # the ragged group is filled up with its first element
        first = x[:, numel - numel % g : numel - numel % g + 1]
        x = torch.cat([x, first.expand(rows, padding)], dim=1)
    x = x.reshape(rows, -1, g)
    low, high = x.amin(-1), x.amax(-1)

    half = _half(codec)
    if codec.symmetric:
        zero_bits = torch.zeros_like(low, dtype=torch.int32)
        step = (torch.maximum(-low, high) + 0.0) / half
    else:
        zero_bits = _bf16_down(low + 0.0)  # + 0 makes -0 and 0 the same bytes
        step = (high - _from_bf16(zero_bits) + 0.0) / ((1 << codec.bits) - 1)
    scale_bits = _bf16_up(step).clamp(min=_MIN_SCALE)
    lost = ~x.isfinite().all(-1) | (scale_bits >= _INF)
    zero, scale = _from_bf16(zero_bits), _from_bf16(scale_bits)

    t = (x - zero.unsqueeze(-1)) * torch.reciprocal(scale).unsqueeze(-1)
    codes = torch.where(lost.unsqueeze(-1), 0.0, t.round() + half).to(torch.int32)
    scale_bits = torch.where(lost, _NAN_SCALE, scale_bits)
    zero_bits = torch.where(lost, 0, zero_bits)

    metadata = scale_bits.unsqueeze(-1) if codec.symmetric else torch.stack([scale_bits, zero_bits], dim=-1)
    bytes_ = [torch.stack([metadata & 0xFF, metadata >> 8 & 0xFF], dim=-1).flatten(-2)]
    for width, shift in _planes(codec.bits):
        units = (codes >> shift & ((1 << width) - 1)).unflatten(-1, (-1, 8 // width))
        places = torch.arange(0, 8, width, dtype=torch.int32, device=units.device)
        bytes_.append((units << places).sum(-1, dtype=torch.int32))
    payload.copy_(torch.cat(bytes_, dim=-1).to(torch.uint8).flatten(1))


def decode(payload: Tensor, output: Tensor, codec: Codec) -> None:
    """payload [rows, bytes] -> output [rows, numel] of fp32, bf16 or fp16."""
    output.copy_(_stored(_values(payload, codec)[:, : output.shape[1]], output.dtype))


def decode_sum(payloads: Tensor, output: Tensor, codec: Codec, factor: float) -> None:
    """payloads [ranks, bytes] -> output [numel]: the sum in rank order, in float32, times factor."""
    output.copy_(_stored(_sum(payloads, codec, factor)[: output.shape[0]], output.dtype))


def decode_sum_encode(payloads: Tensor, payload: Tensor, reduce: Codec, gather: Codec, factor: float) -> None:
    """payloads [ranks, bytes] -> payload [bytes]: what decode_sum gives, encoded again."""
    encode(_sum(payloads, reduce, factor).unsqueeze(0), payload.unsqueeze(0), gather)


def _sum(payloads: Tensor, codec: Codec, factor: float) -> Tensor:
    total, *others = _values(payloads, codec).unbind(0)
    for value in others:
        total = total + value
    return total * factor


def _values(payload: Tensor, codec: Codec) -> Tensor:
    """Payloads [rows, bytes] -> their values [rows, groups * group_size], float32."""
    rows = payload.shape[0]
    if payload.numel() == 0:
        return torch.zeros(rows, 0, device=payload.device)
    record = payload.reshape(rows, -1, codec.record_bytes).to(torch.int32)
    words = record[..., 0 : codec.metadata_bytes : 2] | record[..., 1 : codec.metadata_bytes : 2] << 8
    scale = _from_bf16(words[..., :1])
    zero = torch.zeros_like(scale) if codec.symmetric else _from_bf16(words[..., 1:])
    codes = torch.zeros(*record.shape[:2], codec.group_size, dtype=torch.int32, device=payload.device)
    at = codec.metadata_bytes
    for width, shift in _planes(codec.bits):
        plane = record[..., at : at + codec.group_size * width // 8]
        places = torch.arange(0, 8, width, dtype=torch.int32, device=payload.device)
        units = (plane.unsqueeze(-1) >> places & ((1 << width) - 1)).flatten(-2)
        codes |= units << shift
        at += codec.group_size * width // 8
    return ((codes - _half(codec)).float() * scale + zero).flatten(1)


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to dtype, every NaN the same NaN."""
    return values.to(dtype).masked_fill(values.isnan(), float("nan"))


def _half(codec: Codec) -> int:
    """What is added to a code so that none is negative."""
    return (1 << (codec.bits - 1)) - 1 if codec.symmetric else 0


def _planes(bits: int) -> list[tuple[int, int]]:
    """(width of a unit, its position in the code), widest first: 6 bits -> [(4, 0), (2, 4)]."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return [(width, sum(widths[:i])) for i, width in enumerate(widths)]


def _bits(x: Tensor) -> Tensor:
    """The 32 bits of float32, split so that the sign does not smear: (upper 16, lower 16)."""
    bits = x.view(torch.int32)
    return torch.stack([bits >> 16 & 0xFFFF, bits & 0xFFFF])


def _bf16_down(x: Tensor) -> Tensor:
    """Bits of the largest bf16 not above x."""
    upper, lower = _bits(x)
    return (upper + ((upper >= 0x8000) & (lower != 0)).int()) & 0xFFFF


def _bf16_up(x: Tensor) -> Tensor:
    """Bits of the smallest bf16 not below x, x >= 0."""
    upper, lower = _bits(x)
    return upper + (lower != 0).int()


def _from_bf16(bits: Tensor) -> Tensor:
    return (bits << 16).view(torch.float32)
