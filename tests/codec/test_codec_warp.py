"""The device codec, warp by warp on the host, against the codec: the same bytes, the same bits, aligned addresses.

csrc/cuda/codec_warp.h is one text for the device and the host; tests/host/warp.cpp is its warp here. Every lane,
shuffle and address of the kernels is run, without a GPU. Not run: the staging of a block's payload, and launches.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_allreduce_plugin.codec import rows
from flash_allreduce_plugin.codec.format import Draw, Format
from tests.codecs import BITS, CODEBOOK, DTYPES, GROUP_SIZES, LAYOUTS, fits, gaussian, hard_values, same_bits
from tests.feedback import KINDS, composed, residual_like, sum_format

SOURCE = Path(__file__).parents[1] / "host" / "warp.cpp"
DRAW = Draw(rows.draw_key(3, 5), first_group=7)
GUARD = 64  # bytes around the written ones
OPTIONS = [
    {**layout, "spikes": spikes, "hadamard": hadamard, **last}
    for layout, spikes, hadamard in itertools.product(LAYOUTS, (False, True), (False, True))
    for last in ({}, {"mse": True}, {"stochastic": True})
]
OPTIONS += [
    {**CODEBOOK, "spikes": spikes, "hadamard": hadamard, "mse": mse}
    for spikes, hadamard, mse in itertools.product((False, True), repeat=3)
]
NAMES = ["+".join(name for name, on in options.items() if on) or "plain" for options in OPTIONS]


class Warps:
    """The device's functions on rows, with the checks that a device would make."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _misaligned(self) -> int:
        return ctypes.c_long.in_dll(self._library, "misaligned").value

    def encode(self, row: Tensor, c: Format, draw: Draw = DRAW, fast: bool = True) -> Tensor:
        """Encode row [numel]; fast: 16 divides its address."""

        def run(plain: int, payload: Tensor) -> None:
            self._library.warp_encode_row(
                plain, _at(row), ctypes.c_int64(len(row)), DTYPES.index(row.dtype), int(fast), c.bits, c.group_size,
                c.options, ctypes.c_uint64(draw.key), ctypes.c_int64(draw.first_group), _at(payload),
            )  # fmt: skip

        return self._both(run, torch.empty(c.payload_bytes(len(row)), dtype=torch.uint8))

    def decode_sum(
        self, payloads: Tensor, numel: int, dtype: torch.dtype, c: Format, factor: float, align: int, fast: bool = True
    ) -> Tensor:
        def run(plain: int, row: Tensor) -> None:
            self._library.warp_decode_sum_row(
                plain, _at(payloads), ctypes.c_int64(len(payloads)), ctypes.c_int64(payloads.stride(0)), align,
                ctypes.c_float(factor), ctypes.c_int64(numel), DTYPES.index(dtype), int(fast), c.bits, c.group_size,
                c.options, _at(row),
            )  # fmt: skip

        return self._both(run, torch.empty(numel, dtype=dtype))

    def decode_sum_encode(self, payloads: Tensor, reduce: Format, gather: Format, factor: float, align: int) -> Tensor:
        groups = payloads.shape[1] // reduce.record_bytes

        def run(plain: int, payload: Tensor) -> None:
            self._library.warp_decode_sum_encode_row(
                plain, _at(payloads), ctypes.c_int64(len(payloads)), ctypes.c_int64(payloads.stride(0)), align,
                ctypes.c_float(factor), ctypes.c_int64(groups), reduce.bits, gather.bits, reduce.group_size,
                reduce.options, ctypes.c_uint64(DRAW.key), ctypes.c_int64(DRAW.first_group), _at(payload),
            )  # fmt: skip

        return self._both(run, torch.empty(groups * gather.record_bytes, dtype=torch.uint8))

    def _both(self, run: Callable[[int, Tensor], None], like: Tensor) -> Tensor:
        """Run codec_warp.h and, where plain_warp.h has a separate kernel, that kernel too. Return the result."""
        results = []
        for plain in (0, 1):
            buffer, written = _guarded(like)
            run(plain, written)
            results.append(self._checked(buffer, written))
        assert same_bits(results[1], results[0]), "plain_warp.h"
        return results[1]

    def encode_feedback(
        self, row: Tensor, residual: Tensor, momentum: float, c: Format, fast: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Encode row [numel] with a residual. Return the payload and the new residual."""
        buffer, payload = _guarded(torch.empty(c.payload_bytes(len(row)), dtype=torch.uint8))
        kept_buffer, kept = _guarded(residual)
        kept.copy_(residual.view(-1))
        self._library.warp_encode_feedback_row(
            _at(row), ctypes.c_int64(len(row)), DTYPES.index(row.dtype), int(fast), ctypes.c_double(momentum), c.bits,
            c.group_size, c.options, ctypes.c_uint64(DRAW.key), ctypes.c_int64(DRAW.first_group),
            int(residual.dtype is torch.bfloat16), _at(kept), _at(payload),
        )  # fmt: skip
        return self._checked(buffer, payload), self._checked(kept_buffer, kept).view_as(residual)

    def decode_sum_encode_feedback(
        self,
        payloads: Tensor,
        residual: Tensor,
        reduce: Format,
        gather: Format,
        factor: float,
        momentum: float,
        align: int,
    ) -> tuple[Tensor, Tensor]:
        buffer, payload = _guarded(torch.empty(len(residual) * gather.record_bytes, dtype=torch.uint8))
        kept_buffer, kept = _guarded(residual)
        kept.copy_(residual.view(-1))
        self._library.warp_decode_sum_encode_feedback_row(
            _at(payloads), ctypes.c_int64(len(payloads)), ctypes.c_int64(payloads.stride(0)), align,
            ctypes.c_float(factor), ctypes.c_double(momentum), ctypes.c_int64(len(residual)), reduce.bits, gather.bits,
            reduce.group_size, reduce.options, ctypes.c_uint64(DRAW.key), ctypes.c_int64(DRAW.first_group),
            int(residual.dtype is torch.bfloat16), _at(kept), _at(payload),
        )  # fmt: skip
        return self._checked(buffer, payload), self._checked(kept_buffer, kept).view_as(residual)

    def _checked(self, buffer: Tensor, written: Tensor) -> Tensor:
        assert self._misaligned() == 0
        assert (buffer[:GUARD] == 0xA5).all() and (buffer[GUARD + written.nbytes :] == 0xA5).all()
        return written


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _guarded(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a buffer and, in its middle, a vector like the given tensor; torch's buffers begin at multiples of 64."""
    buffer = torch.full((like.nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
    return buffer, buffer[GUARD : GUARD + like.nbytes].view(like.dtype)


def _align(payloads: Tensor, c: Format) -> int:
    """Return the number that divides the address of every record."""
    bits = payloads.data_ptr() | (payloads.stride(0) if len(payloads) > 1 else 0) | c.record_bytes
    return 4 if bits % 4 == 0 else 2 if bits % 2 == 0 else 1


@pytest.fixture(scope="module")
def warps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warps]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to compile the device codec with")
    library = tmp_path_factory.mktemp("host") / "warp.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True, timeout=240)
    yield Warps(ctypes.CDLL(str(library)))


def check(warps: Warps, x: Tensor, c: Format, dtype: torch.dtype, gather_bits: int) -> None:
    """Run x [ranks, numel] through every function of the device."""
    numel = x.shape[1]
    payloads = torch.empty(len(x), c.payload_bytes(numel), dtype=torch.uint8)
    rows.encode(x, payloads, c, DRAW)
    for row, payload in zip(x[:2], payloads, strict=False):
        rows.encode(row.view(1, -1), payload.view(1, -1), c, DRAW)
        assert torch.equal(warps.encode(row.clone(), c), payload), c
    if not numel:
        return
    decoded = torch.empty(numel, dtype=dtype)
    for ranks, factor in ((1, 1.0), (len(x), 1 / 3)):
        rows.decode_sum(payloads[:ranks], decoded, c, factor)
        ours = warps.decode_sum(payloads[:ranks], numel, dtype, c, factor, _align(payloads[:ranks], c))
        assert same_bits(ours, decoded), c
    gather = Format(gather_bits, c.group_size, **{f: getattr(c, f) for f in FLAGS})
    sent = torch.empty(c.groups(numel) * gather.record_bytes, dtype=torch.uint8)
    rows.decode_sum_encode(payloads, sent, c, gather, 0.5, DRAW)
    assert torch.equal(warps.decode_sum_encode(payloads, c, gather, 0.5, _align(payloads, c)), sent), (c, gather)


FLAGS = ("symmetric", "compact", "codebook", "spikes", "hadamard", "mse", "stochastic")


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_every_option_width_and_group_size(warps: Warps, options: dict[str, bool]) -> None:
    """Check lengths around a warp's 1024 elements, and hard values, not finite ones among them."""
    hard = torch.stack(list(hard_values(1100).values()))
    lengths = itertools.cycle((1, 33, 1000, 1023, 1024, 1025, 2048, 2100))
    sizes = [g for g in GROUP_SIZES if fits(g, options)]
    for i, (bits, group_size) in enumerate(itertools.product(BITS, sizes)):
        if options and i % 3:  # a third of them with options: with none, all
            continue
        c, dtype = Format(bits, group_size, **options), DTYPES[i % 3]
        check(warps, gaussian(3, next(lengths)).to(dtype), c, DTYPES[(i + 1) % 3], 2 + i % 7)
        first = i % (len(hard) - 3)
        check(warps, hard[first : first + 3].to(dtype), c, dtype, 2 + (i + 3) % 7)


@given(
    options=st.sampled_from(OPTIONS),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(DTYPES),
    pattern=st.binary(min_size=0, max_size=300),
)
@settings(max_examples=60, deadline=None)
def test_any_bit_pattern(
    warps: Warps, options: dict[str, bool], bits: int, group_size: int, dtype: torch.dtype, pattern: bytes
) -> None:
    whole = len(pattern) // dtype.itemsize * dtype.itemsize
    values = torch.frombuffer(bytearray(pattern[:whole] or b"\0\0\0\0"), dtype=torch.uint8).view(dtype)
    check(
        warps,
        torch.stack([values, values.flip(0), values.nan_to_num(1.0)]),
        Format(bits, group_size if fits(group_size, options) else 4 * group_size, **options),
        dtype,
        4,
    )


@given(
    options=st.sampled_from(OPTIONS),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    data=st.binary(min_size=1, max_size=64),
)
@settings(max_examples=60, deadline=None)
def test_any_bytes_decode_to_the_same_values(
    warps: Warps, options: dict[str, bool], bits: int, group_size: int, data: bytes
) -> None:
    """Decode places of spikes too that lie outside of the group: nothing is read or written elsewhere."""
    group_size = group_size if fits(group_size, options) else 4 * group_size
    c = Format(bits, group_size, **options)
    size = 3 * 2 * c.record_bytes
    payloads = (
        torch.frombuffer(bytearray((data * (size // len(data) + 1))[:size]), dtype=torch.uint8).view(3, -1).clone()
    )
    expected = torch.empty(2 * group_size - 3)
    rows.decode_sum(payloads, expected, c, 1.0)
    assert same_bits(warps.decode_sum(payloads, len(expected), torch.float32, c, 1.0, _align(payloads, c)), expected)


@pytest.mark.parametrize("hadamard", [False, True])
def test_short_spikes_at_their_limits(warps: Warps, hadamard: bool) -> None:
    """Check massive, tiny and equal elements, and second spikes 12 to 17 octaves below a first that is exact."""
    for i, (group_size, apart) in enumerate(itertools.product(GROUP_SIZES[2:], range(12, 18))):
        c = Format(BITS[i % 7], group_size, codebook=True, spikes=True, hadamard=hadamard)
        x = gaussian(6, 2100, seed=i).clamp(-1, 1)
        x[0] *= 2.0**-20
        x[0, ::100], x[0, 7::group_size] = 2.0**-apart, -1.0
        x[1] *= 2.0 ** (apart - 114)  # around the least spike, 2^-100
        x[2] = x[2].sign()  # the first of equals, whatever its sign
        x[3, 9::group_size] = 3e38  # rounded up a short float would be Inf
        x[4, 11::group_size] = 2.0**apart * 1e3
        x[5] = 0.0
        x[5, group_size - 1 :: group_size] = -1.0 - 2.0**-apart
        for first in range(0, 6, 2):
            check(warps, x[first : first + 2], c, torch.float32, 2 + i % 7)


def test_addresses_of_any_alignment(warps: Warps) -> None:
    """Check rows that begin anywhere, and payloads at odd addresses."""
    for c, dtype in itertools.product(
        (
            Format(4, 128),
            Format(3, 64, compact=True),
            Format(8, 32, spikes=True),
            Format(4, 128, codebook=True),
            Format(5, 128, codebook=True, spikes=True),
        ),
        DTYPES,
    ):
        x = gaussian(2000).to(dtype)
        expected = torch.empty(1, c.payload_bytes(1999), dtype=torch.uint8)
        rows.encode(x[1:].view(1, -1), expected, c)
        assert torch.equal(warps.encode(x[1:], c, fast=False), expected[0])
        decoded = torch.empty(1, 1999, dtype=dtype)
        rows.decode(expected, decoded, c)
        odd = torch.empty(len(expected[0]) + 1, dtype=torch.uint8)[1:]
        odd.copy_(expected[0])
        for payload in (expected, odd.view(1, -1)):
            ours = warps.decode_sum(payload, 1999, dtype, c, 1.0, _align(payload, c), fast=False)
            assert same_bits(ours, decoded[0])


def test_a_misaligned_address_is_noticed(warps: Warps) -> None:
    """Check that the check of addresses can fail."""
    library, c, x = warps._library, Format(4, 128), gaussian(2000)
    try:
        with pytest.raises(AssertionError):
            warps.encode(x[1:], c, fast=True)
    finally:
        ctypes.c_long.in_dll(library, "misaligned").value = 0


# ---- error feedback ----


def check_feedback(
    warps: Warps, x: Tensor, residual: Tensor, c: Format, gather_bits: int, momentum: float = 0.8
) -> None:
    """Run the first row of x [ranks, numel] with feedback, then the sum of all with feedback."""
    expected = composed(x[0], residual, momentum, c, DRAW)
    ours = warps.encode_feedback(x[0].clone(), residual, momentum, c)
    for mine, theirs in zip(ours, expected, strict=True):
        assert same_bits(mine, theirs), (c, x.dtype, residual.dtype)
    plain, gather = (sum_format(replace(c, bits=bits)) for bits in (c.bits, gather_bits))
    payloads = torch.empty(len(x), c.payload_bytes(x.shape[1]), dtype=torch.uint8)
    rows.encode(x, payloads, c, DRAW)
    sums = torch.empty(len(residual) * c.group_size)
    rows.decode_sum(payloads, sums, plain, 0.5)
    expected = composed(sums, residual, momentum, gather, DRAW)
    ours = warps.decode_sum_encode_feedback(payloads, residual, c, gather, 0.5, momentum, _align(payloads, c))
    for mine, theirs in zip(ours, expected, strict=True):
        assert same_bits(mine, theirs), (c, gather, residual.dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_feedback_with_every_option_width_and_group_size(warps: Warps, options: dict[str, bool]) -> None:
    """Check zeros among the numbers, then hard values: carried errors of all sizes meet them."""
    hard = torch.stack(list(hard_values(1100).values()))
    lengths = itertools.cycle((1, 33, 1000, 1023, 1024, 1025, 2048, 2100))
    for i, (bits, group_size) in enumerate(itertools.product(BITS, GROUP_SIZES)):
        if (options and i % 3) or not fits(group_size, options):
            continue
        c, dtype, kind = Format(bits, group_size, **options), DTYPES[i % 3], KINDS[i // 2 % 2]
        x = gaussian(3, next(lengths), seed=i).to(dtype)
        x[:, 5::7] = 0.0
        x[:, 3::11] = -0.0
        residual = residual_like(0.1 * gaussian(x.shape[1], seed=i + 1), c, kind)
        check_feedback(warps, x, residual, c, 2 + i % 7, (0.0, 0.8, 0.5, 0.9)[i % 4])
        first = i % (len(hard) - 3)
        x = hard[first : first + 3].to(dtype)
        x[:, 4 :: 8 + i % 3] = 0.0  # next to numbers that are not finite
        for kept in (hard[(first + 7) % len(hard)].nan_to_num(1.0), torch.zeros(1100)):
            check_feedback(warps, x, residual_like(kept, c, kind), c, 2 + (i + 3) % 7)


@given(
    options=st.sampled_from(OPTIONS),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    pattern=st.binary(min_size=4, max_size=300),
    kept=st.binary(min_size=1, max_size=64),
    momentum=st.floats(0.0, 1.0, exclude_max=True),
)
@settings(max_examples=60, deadline=None)
def test_feedback_of_any_bit_pattern_with_any_residual(
    warps: Warps,
    options: dict[str, bool],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    kind: torch.dtype,
    pattern: bytes,
    kept: bytes,
    momentum: float,
) -> None:
    """Check residuals too that no encoding made: NaN, infinities, codes that do not exist."""
    whole = len(pattern) // dtype.itemsize * dtype.itemsize
    values = torch.frombuffer(bytearray(pattern[:whole]), dtype=torch.uint8).view(dtype)
    c = Format(bits, group_size if fits(group_size, options) else 4 * group_size, **options)
    residual = residual_like(torch.zeros(len(values)), c, kind)
    size = residual.nbytes
    repeated = bytearray((kept * (size // len(kept) + 1))[:size])
    residual = torch.frombuffer(repeated, dtype=torch.uint8).clone().view(kind).view_as(residual)
    check_feedback(warps, torch.stack([values, values.flip(0)]), residual, c, 4, momentum)


def test_feedback_reads_minus_zero_as_zero(warps: Warps) -> None:
    c, x = Format(4, 64, symmetric=True), torch.full((2, 256), -(2.0**-149))
    x[:, ::64] = 1.0
    check_feedback(warps, x, residual_like(torch.full((256,), -0.0), c, torch.bfloat16), c, 4)


def test_feedback_of_rows_that_begin_anywhere(warps: Warps) -> None:
    for c, dtype, kind in itertools.product((Format(4, 128), Format(3, 64, spikes=True, mse=True)), DTYPES, KINDS):
        x = gaussian(2000).to(dtype)[1:]
        residual = residual_like(0.1 * gaussian(1999, seed=1), c, kind)
        ours = warps.encode_feedback(x, residual, 0.8, c, fast=False)
        for mine, theirs in zip(ours, composed(x.clone(), residual, 0.8, c, DRAW), strict=True):
            assert same_bits(mine, theirs)
