"""Encode, decode and sum rows of elements: by the compiled operators, or by the reference without them.

The collectives call these functions. A user calls the functions of api/tensors.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from flash_allreduce_plugin import environment
from flash_allreduce_plugin.codec import ops, reference
from flash_allreduce_plugin.codec.format import NO_DRAW, Draw, Format
from flash_allreduce_plugin.errors import install_command

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_PIECE = 1 << 16  # elements of a buffer that stays in the cache; whole groups of any size
_compiled = torch.ops.flash_allreduce
# The requirements of the compiled operators, by device.
_COMPILERS = {"cpu": "a C++ compiler", "cuda": "nvcc"}


@cache
def use_reference(device_type: str = "cpu") -> bool:
    """Return True if the plain PyTorch codec runs for a device. Logs the reason once, unless the user chose it."""
    if environment.is_on(environment.REFERENCE) or device_type not in _COMPILERS:
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
    return not use_reference("cpu" if tensor.is_cpu else tensor.device.type)  # computed for every launch


def flat(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension of stride 1: the tensor's own memory if it is contiguous, else a copy.

    Torch calls a tensor of one element, or of none, contiguous whatever its strides, and view(-1) keeps them. But
    view(torch.uint8) needs a stride of 1.
    """
    whole = tensor.detach().contiguous().view(-1)
    return whole if whole.stride(0) == 1 else whole.as_strided(whole.shape, (1,))


def encode(input: Tensor, payload: Tensor, codec: Format, draw: Draw = NO_DRAW) -> None:
    """Encode input [rows, numel] into payload [rows, bytes]. Each row is encoded as a separate tensor.

    draw: the random numbers of stochastic rounding; not used otherwise.
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


def decode(payload: Tensor, output: Tensor, codec: Format) -> None:
    """Decode payload [rows, bytes] into output [rows, numel]."""
    if _is_compiled(output):
        _compiled.decode(payload, output, codec.bits, codec.group_size, codec.options)
    else:
        reference.decode(payload, output, codec)


def decode_sum(payloads: Tensor, output: Tensor, codec: Format, factor: float) -> None:
    """Write the sum of payloads [ranks, bytes], in rank order, in float32, times factor, into output [numel]."""
    if _is_compiled(output):
        _compiled.decode_sum(payloads, output, factor, codec.bits, codec.group_size, codec.options)
    else:
        reference.decode_sum(payloads, output, codec, factor)


def decode_sum_encode(
    payloads: Tensor, payload: Tensor, reduce: Format, gather: Format, factor: float, draw: Draw = NO_DRAW
) -> None:
    """Encode the sum of payloads [ranks, bytes] in `reduce`, times factor, into payload [bytes] in `gather`.

    The two formats may differ in width only.
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


def encode_feedback(
    input: Tensor, payload: Tensor, residual: Tensor, momentum: float, codec: Format, draw: Draw = NO_DRAW
) -> None:
    """Encode input [1, numel] plus the carried residual into payload [1, bytes], and replace the residual.

        x = input + carried;  payload = encode(x);  residual = momentum carried + (1 - momentum) (x - decode(payload))

    An exact zero is encoded as zero and keeps its residual, unless the codec rotates: then zeros get errors too. A
    group that is not finite leaves no residual.

    residual: of the payload's groups, uint8 [groups, residual_format(group_size).record_bytes] or bfloat16
        [groups, group_size].
    """
    if _is_compiled(input):
        numbers = codec.bits, codec.group_size, codec.options, draw.key, draw.first_group
        _compiled.encode_feedback(input, payload, residual, momentum, *numbers)
    else:
        reference.encode_feedback(input, payload, residual, momentum, codec, draw)


def decode_sum_encode_feedback(
    payloads: Tensor,
    payload: Tensor,
    residual: Tensor,
    reduce: Format,
    gather: Format,
    factor: float,
    momentum: float,
    draw: Draw = NO_DRAW,
) -> None:
    """Run decode_sum_encode with the residual of the sum. Rotated groups stay rotated in both."""
    if _is_compiled(payload):
        numbers = reduce.bits, gather.bits, reduce.group_size, reduce.options, draw.key, draw.first_group
        _compiled.decode_sum_encode_feedback(payloads, payload, residual, factor, momentum, *numbers)
    else:
        reference.decode_sum_encode_feedback(payloads, payload, residual, reduce, gather, factor, momentum, draw)


def encode_difference(master: Tensor, held: Tensor, payload: Tensor, codec: Format, draw: Draw = NO_DRAW) -> Tensor:
    """Encode master - held, both [1, numel], in float32 into payload [1, bytes].

    master: float32 or of held's dtype. Returns a bool tensor: True if every difference is finite.
    """
    if held.device.type == "cpu" and _is_compiled(held) and master.dtype is torch.float32:
        numbers = codec.bits, codec.group_size, codec.options, draw.key, draw.first_group
        return torch.tensor(_compiled.encode_difference(master, held, payload, *numbers))
    finite = torch.ones((), dtype=torch.bool, device=held.device)
    for first, last, buffer in _pieces(1, held.shape[1], held.device):
        buffer.copy_(master[:, first:last]).sub_(held[:, first:last])
        group, end = first // codec.group_size, codec.groups(last)
        piece = payload[:, group * codec.record_bytes : end * codec.record_bytes]
        encode(buffer, piece, codec, Draw(draw.key, draw.first_group + group))
        finite &= buffer.isfinite().all()
    return finite


def decode_add(payload: Tensor, held: Tensor, codec: Format) -> None:
    """Add decoded payload [rows, bytes] to held [rows, numel], in float32, rounded to held's dtype."""
    if held.device.type == "cpu" and _is_compiled(held):
        _compiled.decode_add(payload, held, codec.bits, codec.group_size, codec.options)
        return
    for first, last, buffer in _pieces(len(held), held.shape[1], held.device):
        group, end = first // codec.group_size, codec.groups(last)
        decode(payload[:, group * codec.record_bytes : end * codec.record_bytes], buffer, codec)
        held[:, first:last].add_(buffer)


def _pieces(height: int, numel: int, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first, last, buffer [height, last - first] in float32) for columns 0 to numel, at bounds of groups."""
    size = max(1024, _PIECE // height // 1024 * 1024) if device.type == "cpu" else numel  # a GPU wants few launches
    buffer = torch.empty(height * min(size, numel), dtype=torch.float32, device=device)
    for first in range(0, numel, max(size, 1)):
        last = min(first + size, numel)
        yield first, last, buffer[: height * (last - first)].view(height, -1)


def draw_key(*numbers: int) -> int:
    """Return a key for Draw, 64 bits, signed, hashed from small whole numbers (seed, call, rank ...)."""
    key = 0
    for number in numbers:
        key = _mix64((key + number + 1) * 0x9E3779B97F4A7C15)
    return key - (1 << 64) if key >> 63 else key


def _mix64(x: int) -> int:
    """Hash a number: S. Vigna, "splitmix64"."""
    mask = (1 << 64) - 1
    x &= mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31
