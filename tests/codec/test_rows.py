"""The compiled codec is the reference, bit for bit; payloads are arrays of records."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_allreduce_plugin.codec import ops
from flash_allreduce_plugin.codec.format import Format
from tests.codecs import (
    BITS,
    CODEBOOK,
    DTYPES,
    GROUP_SIZES,
    LAYOUTS,
    LENGTHS,
    Both,
    as_bytes,
    fits,
    gaussian,
    hard_values,
    residuals,
    same_bits,
)
from tests.feedback import residual_like
from tests.golden.make import DRAW, FOLDER, values_of

pytestmark = pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))

layouts = pytest.mark.parametrize(
    "layout", [*LAYOUTS, CODEBOOK], ids=["asymmetric", "symmetric", "compact", "codebook"]
)
codecs = st.builds(
    lambda bits, shape: Format(bits, shape[0], **shape[1]),
    st.sampled_from(BITS),
    st.sampled_from([(g, layout) for g in GROUP_SIZES for layout in (*LAYOUTS, CODEBOOK) if fits(g, layout)]),
)
dtypes = st.sampled_from(DTYPES)


@layouts
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_compiled_is_reference_for_every_length_and_dtype(bits: int, group_size: int, layout: dict[str, bool]) -> None:
    if not fits(group_size, layout):
        return
    both = Both(Format(bits, group_size, **layout))
    for dtype in DTYPES:
        for numel in LENGTHS:
            payload = both.encode(gaussian(2, numel).to(dtype))
            both.decode(payload, numel, dtype)


@layouts
@pytest.mark.parametrize("group_size", (32, 64, 1024))
def test_differences_are_those_of_float32(group_size: int, layout: dict[str, bool]) -> None:
    generator = torch.Generator().manual_seed(7)
    for bits in BITS if fits(group_size, layout) else ():
        both = Both(Format(bits, group_size, **layout))
        for dtype in DTYPES:
            for numel in LENGTHS[1:]:
                held = gaussian(2, numel).to(dtype)
                master = held[:1].float() + 1e-2 * torch.randn(1, numel, generator=generator)
                payload = both.encode_difference(master, held[:1])
                near = both.decode_add(payload, held[:1])
                step = 1e-1 if bits == 2 else 5e-2  # of differences of 1e-2, and the dtype's own of values up to 4
                assert (near.float() - master).abs().max() < step
                both.decode_add(payload.expand(2, -1).contiguous(), held)


@pytest.mark.parametrize(
    "options",
    [{"spikes": True}, {"hadamard": True}, {"mse": True}, {"stochastic": True}, {**CODEBOOK, "mse": True}],
    ids=str,
)
def test_differences_take_every_option(options: dict[str, bool]) -> None:
    both = Both(Format(3, 128, **options))
    held = gaussian(1, 1000).to(torch.bfloat16)
    payload = both.encode_difference(held.float() + 1e-2 * gaussian(1, 1000).flip(1), held, DRAW)
    both.decode_add(payload, held)


def test_differences_of_hard_values() -> None:
    for values in hard_values(300).values():
        both, master = Both(Format(4, 64)), values.float().view(1, -1)
        for dtype in DTYPES:
            held = master.flip(1).to(dtype)
            payload = both.encode_difference(master, held)
            both.decode_add(payload, held)


def test_differences_that_do_not_fit_are_refused() -> None:
    held, master = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 64)
    payload = torch.zeros(1, Format(4, 64).payload_bytes(64), dtype=torch.uint8)
    key = Format(4, 64).bits, 64, 0
    for one, other, sent, message in (
        (master.double(), held, payload, "unsupported dtype"),
        (master.bfloat16(), held, payload, "master is not float32"),
        (master[:, :63], held, payload, "master has 63 elements and held 64"),
        (master, held, payload[:, 1:], "bytes a row"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.flash_allreduce.encode_difference(one, other, sent, *key)
    with pytest.raises(RuntimeError, match="bytes a row"):
        torch.ops.flash_allreduce.decode_add(payload[:, 1:], held, *key)


@layouts
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_feedback_is_the_reference_for_every_length_and_dtype(group_size: int, layout: dict[str, bool]) -> None:
    for bits in BITS if fits(group_size, layout) else ():
        both = Both(Format(bits, group_size, **layout))
        for dtype, numel in itertools.product(DTYPES, LENGTHS):
            x = gaussian(1, numel, seed=2).to(dtype)
            x[:, ::5] = torch.where(torch.arange(x[:, ::5].shape[1]) % 2 == 0, 0.0, -0.0)
            for residual in residuals(numel, group_size):
                _, left = both.encode_feedback(x, residual)
                both.encode_feedback(x, left, momentum=0.0)


@layouts
@pytest.mark.parametrize(
    "options", [{"spikes": True}, {"hadamard": True}, {"mse": True}, {"stochastic": True}], ids=str
)
def test_feedback_takes_every_option(options: dict[str, bool], layout: dict[str, bool]) -> None:
    if layout == CODEBOOK and not {"hadamard", "mse"} & options.keys():
        return  # excluded
    both = Both(Format(3, 128, **layout, **options))
    x = gaussian(1, 5000)
    x[:, 700:1000] = 0.0
    for residual in residuals(5000, 128):
        both.encode_feedback(x, residual, draw=DRAW)
        _, left = both.encode_feedback(torch.zeros_like(x), residual, draw=DRAW)
        if residual.dtype is torch.bfloat16:  # 8 bits are encoded again
            waits = torch.equal(left.view(-1)[:5000], residual.view(-1)[:5000])
            assert waits == ("hadamard" not in options), "zeros keep their residual, but not rotated"


def test_feedback_of_hard_values() -> None:
    values = torch.stack(list(hard_values(1100).values()))
    plain = (Format(4, 64), Format(2, 32, compact=True), Format(8, 128, symmetric=True), Format(4, 64, mse=True))
    for codec in (*plain, Format(4, 128, codebook=True), Format(2, 256, codebook=True, mse=True)):
        both = Both(codec)
        for row, dtype in itertools.product(values.split(1), DTYPES):
            for residual in residuals(1100, codec.group_size):
                _, left = both.encode_feedback(row.to(dtype), residual)
                _, again = both.encode_feedback(row.to(dtype).flip(1), left)
                if again.dtype is torch.bfloat16:
                    assert again.isfinite().all()


def test_feedback_reads_minus_zero_as_zero() -> None:
    """Check the error of the smallest number, which is -0: with a residual of -0 it would stay."""
    c, x = Format(4, 64, symmetric=True), torch.full((1, 256), -(2.0**-149))
    x[:, ::64] = 1.0
    _, after = Both(c).encode_feedback(x, residual_like(torch.full((256,), -0.0), c, torch.bfloat16))
    assert not after[after == 0].signbit().any()


@layouts
def test_feedback_of_sums(layout: dict[str, bool]) -> None:
    for bits, gather, group_size, options in ((3, 4, 32, {}), (4, 4, 128, {"mse": True}), (2, 8, 1024, {})):
        group_size = group_size if fits(group_size, layout) else 4 * group_size
        both = Both(Format(bits, group_size, **layout, hadamard=True, **options))
        numel = 5 * 1024
        payloads = both.encode(gaussian(3, numel))
        for residual in residuals(numel, group_size):
            both.decode_sum_encode_feedback(payloads, residual, replace(both.codec, bits=gather), 1 / 3, DRAW)


@given(codec=codecs, dtype=dtypes, pattern=st.binary(min_size=4, max_size=600), kept=st.binary(min_size=1, max_size=64))
@settings(max_examples=100, deadline=None)
def test_feedback_is_the_reference_for_any_bit_pattern(
    codec: Format, dtype: torch.dtype, pattern: bytes, kept: bytes
) -> None:
    whole = len(pattern) // dtype.itemsize * dtype.itemsize
    values = torch.frombuffer(bytearray(pattern[:whole]), dtype=torch.uint8).view(dtype).view(1, -1)
    for residual in residuals(values.shape[1], codec.group_size):
        bytes_ = residual.view(torch.uint8).view(-1)
        bytes_.copy_(
            torch.frombuffer(bytearray((kept * (len(bytes_) // len(kept) + 1))[: len(bytes_)]), dtype=torch.uint8)
        )
        Both(codec).encode_feedback(values, residual)
        Both(codec).encode_feedback(values.nan_to_num(1.0), residual)


def test_feedback_that_does_not_fit_is_refused() -> None:
    x, payload = torch.zeros(1, 100), torch.zeros(1, Format(4, 64).payload_bytes(100), dtype=torch.uint8)
    small, wide = residuals(100, 64)
    key = 4, 64, 0
    for input, kept, momentum, message in (
        (x, small[:1], 0.8, r"residual is not \[2, 66\] and contiguous"),
        (x, wide[:, :63], 0.8, r"residual is not \[2, 64\] and contiguous"),
        (x, wide.float(), 0.8, "neither uint8 nor bfloat16"),
        (x, small, 1.0, "momentum is 1; expected 0 or more and below 1"),
        (x.expand(2, -1), small, 0.8, "input has 2 rows; expected 1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.flash_allreduce.encode_feedback(input, payload, kept, momentum, *key)


@layouts
@pytest.mark.parametrize("bits", BITS)
def test_compiled_is_reference_for_hard_values(bits: int, layout: dict[str, bool]) -> None:
    for group_size in (g for g in (32, 128, 1024) if fits(g, layout)):
        both = Both(Format(bits, group_size, **layout))
        # In rows, so that decode_sum adds hard values to one another.
        rows = torch.stack(list(hard_values(1100).values()))
        for dtype in DTYPES:
            payload = both.encode(rows.to(dtype))
            for output in DTYPES:
                both.decode(payload, 1100, output)
            for first in (0, 3, 12, 15, 18):
                both.decode_sum(payload[first : first + 3], 1100, dtype, factor=1 / 3)
            both.decode_sum_encode(payload[:3], Format(8, group_size, **layout))
            both.decode_sum_encode(payload[2:5], Format(3, group_size, **layout), factor=0.5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_compiled_is_reference_for_sums_over_ranks(ranks: int) -> None:
    for codec in (
        *(Format(8, 128), Format(4, 32), Format(5, 256, symmetric=True), Format(4, 64, compact=True)),
        *(Format(bits, group_size, codebook=True) for bits, group_size in ((2, 256), (4, 128), (8, 512))),
    ):
        both = Both(codec)
        for numel in LENGTHS:
            payloads = both.encode(gaussian(ranks, numel))
            for dtype in DTYPES:
                both.decode_sum(payloads, numel, dtype, factor=1 / ranks)
            for bits in (2, 7, 8):
                both.decode_sum_encode(payloads, replace(codec, bits=bits))


def test_sums_are_taken_in_rank_order_in_float32() -> None:
    both = Both(Format(8, 32))
    payloads = both.encode(gaussian(5, 320) * torch.tensor([[1e8], [1.0], [-1e8], [1e-3], [3.0]]))
    values = both.decode(payloads, 320)
    total = values[0]
    for value in values[1:]:
        total = total + value
    assert same_bits(both.decode_sum(payloads, 320), total)
    assert not same_bits(both.decode_sum(payloads.flip(0), 320), total)


@given(codec=codecs, dtype=dtypes, output=dtypes, pattern=st.binary(min_size=0, max_size=600))
@settings(max_examples=150, deadline=None)
def test_compiled_is_reference_for_any_bit_pattern(
    codec: Format, dtype: torch.dtype, output: torch.dtype, pattern: bytes
) -> None:
    whole = len(pattern) // dtype.itemsize * dtype.itemsize
    values = torch.frombuffer(bytearray(pattern[:whole] or b"\0\0\0\0"), dtype=torch.uint8).view(dtype)
    # Check twice: unchanged, where one NaN loses most groups, and without every NaN and Inf.
    Both(codec).round_trip(values.view(1, -1), output)
    Both(codec).round_trip(values.nan_to_num(1.0).view(1, -1), output)


@given(codec=codecs, payload=st.binary(min_size=1, max_size=64), ranks=st.integers(1, 3), dtype=dtypes)
@settings(max_examples=80, deadline=None)
def test_any_bytes_decode_to_the_same_values(codec: Format, payload: bytes, ranks: int, dtype: torch.dtype) -> None:
    """Decode bytes that a broken or hostile peer may send: both codecs give the same result."""
    size = ranks * 2 * codec.record_bytes
    data = (payload * (size // len(payload) + 1))[:size]
    payloads = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(ranks, -1)
    numel = 2 * codec.group_size - 3
    Both(codec).decode(payloads, numel, dtype)
    Both(codec).decode_sum(payloads, numel, dtype)


def test_rows_may_be_strided_and_no_other_memory_is_written() -> None:
    codec = Format(6, 64)
    wide = gaussian(3, 400)
    payload = torch.full((3, 500), 0xEE, dtype=torch.uint8)
    n = codec.payload_bytes(150)
    torch.ops.flash_allreduce.encode(wide[:, 100:250], payload[:, 7 : 7 + n], 6, 64, False)
    assert torch.equal(payload[:, 7 : 7 + n], Both(codec).encode(wide[:, 100:250].contiguous()))
    assert (payload[:, :7] == 0xEE).all() and (payload[:, 7 + n :] == 0xEE).all()
    output = torch.full((3, 400), 7.0)
    torch.ops.flash_allreduce.decode(payload[:, 7 : 7 + n], output[:, 100:250], 6, 64, False)
    assert same_bits(output[:, 100:250], Both(codec).round_trip(wide[:, 100:250].contiguous()))
    assert (output[:, :100] == 7).all() and (output[:, 250:] == 7).all()


@pytest.mark.parametrize(
    "codec", [Format(8, 128), Format(3, 32), Format(5, 64, True), Format(3, 128, codebook=True)], ids=str
)
def test_the_payload_of_a_part_is_a_slice_of_the_payload_of_the_whole(codec: Format) -> None:
    both, g = Both(codec), codec.group_size
    x = gaussian(1, 10 * g + 17)
    whole = both.encode(x)
    for k in (1, 3, 10):
        assert torch.equal(both.encode(x[:, k * g :]), whole[:, k * codec.record_bytes :])
        assert torch.equal(both.encode(x[:, : k * g]), whole[:, : k * codec.record_bytes])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@layouts
def test_a_value_that_is_not_finite_takes_its_group_and_no_other(value: float, layout: dict[str, bool]) -> None:
    for bits in BITS:
        for place in (0, 1, 127, 128, 200, 255, 256, 299):
            both = Both(Format(bits, 128, **layout))
            clean = gaussian(1, 300)
            x = clean.clone()
            x[0, place] = value
            decoded, expected = both.round_trip(x), both.round_trip(clean)
            group = torch.arange(300) // 128 == place // 128
            assert decoded[0, group].isnan().all()
            assert same_bits(decoded[0, ~group], expected[0, ~group])


def test_zeros_stay_zeros_and_lose_their_signs() -> None:
    for layout in (*LAYOUTS, CODEBOOK):
        both = Both(Format(8, 128, **layout))
        plus, minus = both.encode(torch.zeros(1, 128)), both.encode(-torch.zeros(1, 128))
        assert torch.equal(plus, minus)
        assert (both.decode(plus, 128) == 0).all()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_golden_bytes(path: Path) -> None:
    """Compare with payloads that tests/golden/make.py wrote once: a change of the wire format shows here."""
    for case in json.loads(path.read_text()):
        codec = Format(case["bits"], case["group_size"], case["symmetric"], **case["options"])
        x = values_of(case["input"], getattr(torch, case["dtype"])).view(1, -1)
        payload = Both(codec).encode(x, DRAW)
        assert bytes(payload[0].tolist()).hex() == case["payload"], case["name"]
        decoded = Both(codec).decode(payload, x.shape[1])
        assert bytes(as_bytes(decoded).tolist()).hex() == case["decoded_float32"], case["name"]


def test_there_are_golden_bytes() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == ["codebook", "edges", "options", "ramps", "spikes"]


def _wire_format_example() -> tuple[Tensor, bytes]:
    """Return the worked example of docs/trust/wire_format.md: its input and the bytes it prints."""
    text = (Path(__file__).parents[2] / "docs/trust/wire_format.md").read_text()
    block = re.split("<!-- worked example: checked by [^>]*-->", text)[1].split("```")[1]
    rows = [line.split("|") for line in block.strip().splitlines()[1:] if "|" in line]
    printed = b"".join(bytes.fromhex(row[1].strip()) for row in rows)
    return torch.arange(32, dtype=torch.float32) * 0.5 - 4.25, printed


def test_the_worked_example_of_the_documents() -> None:
    x, printed = _wire_format_example()
    assert bytes(Both(Format(5, 32)).encode(x.view(1, -1))[0].tolist()) == printed
    with_zero = Both(Format(5, 32)).encode(x.view(1, -1) + 0.25)
    assert bytes(with_zero[0, :4].tolist()) == bytes.fromhex("fc be 08 00")
    assert Both(Format(5, 32)).decode(with_zero, 32)[0, 8] == 0
