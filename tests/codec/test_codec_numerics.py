"""Guarantee 6: the error of an element, group by group and on average."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec.format import Format
from tests.codecs import BITS, DTYPES, LAYOUTS, gaussian, hard_values, sqnr_db

HARD = hard_values(2311)
FINITE = [name for name, values in HARD.items() if values.isfinite().all()]
FITTING = [(name, dtype) for name in FINITE for dtype in DTYPES if HARD[name].to(dtype).isfinite().all()]


def metadata(payload: Tensor, codec: Format) -> tuple[Tensor, Tensor]:
    """Return scale and zero of every group, float64, read from the payload as docs/trust/wire_format.md draws it."""
    words = payload.view(-1, codec.record_bytes)[:, : codec.metadata_bytes].contiguous().view(torch.bfloat16)
    if codec.compact:
        word = words[:, 0].view(torch.int16).int() & 0xFFFF
        scale = (word & 0x7FF0).to(torch.int16).view(torch.bfloat16).double()
        return scale, ((word & 15) + 16 * (word >> 15) - 31) * 2.0**codec.bits / 32 * scale
    scale = words[:, 0].double()
    if codec.symmetric:
        return scale, torch.zeros_like(scale)
    whole = words.view(torch.int16)[:, 0] < 0  # the sign of the scale: the zero point is a number of steps
    steps = words.view(torch.int16)[:, 1].double()
    return scale.abs(), torch.where(whole, -steps * scale.abs(), words[:, 1].double())


def config_of(codec: Format) -> fap.FlashConfig:
    return fap.FlashConfig(
        bits=codec.bits, group_size=codec.group_size, symmetric=codec.symmetric, compact=codec.compact
    )


@pytest.mark.parametrize(("name", "dtype"), FITTING, ids=str)
def test_guarantee_6_the_error_is_at_most_half_a_step_of_the_group(name: str, dtype: torch.dtype) -> None:
    x = HARD[name].to(dtype)
    for layout in LAYOUTS:
        for bits in BITS:
            codec = Format(bits, 64, **layout)
            payload = fap.encode(x, config_of(codec))
            decoded = fap.decode(payload, x.shape, torch.float32, config_of(codec)).double()
            scale, zero = (v.repeat_interleave(64)[: x.numel()] for v in metadata(payload, codec))
            # Groups with a range too large for float32 or bf16 are NaN, on purpose (docs/trust/numerics.md).
            served = scale.isfinite()
            assert (decoded.isnan() == ~served).all()
            if name != "near the end of float32":
                assert served.all()
            # Half a step; 1e-4 of it for the roundings of (x - zero) / scale; one rounding of the result.
            rounding = 2.0**-24 * (decoded.abs() + zero.abs()) + 2.0**-149
            excess = (decoded - x.double()).abs() - scale * (0.5 + 1e-4) - rounding
            assert (excess[served] <= 0).all(), f"{codec}: {excess[served].max().item()}"


@pytest.mark.parametrize("name", FINITE)
def test_guarantee_6_the_step_is_the_range_of_the_group_rounded_outwards(name: str) -> None:
    x = HARD[name][:2304]
    groups = x.view(-1, 64).double()
    low, high = groups.amin(1), groups.amax(1)
    for bits in BITS:
        for symmetric in (False, True):
            codec = Format(bits, 64, symmetric)
            scale, zero = metadata(fap.encode(x, config_of(codec)), codec)
            served = scale.isfinite() & ((groups != 0).all(1) | symmetric)  # with a 0: tests/codec/test_codec_zeros.py
            half, levels = 2 ** (bits - 1) - 1, 2**bits - 1
            exact = torch.maximum(-low, high) / half if symmetric else (high - zero) / levels
            exact = exact.clamp(min=2.0**-126)
            rounded = 2.0**-23 * exact  # of the float32 quotient
            assert (scale >= exact - rounded)[served].all()
            assert (scale <= exact * (1 + 2.0**-7) + rounded)[served].all()
            if not symmetric:
                assert (zero <= low)[served].all()
                assert (low - zero <= low.abs() * 2.0**-7 + 2.0**-133)[served].all()


@pytest.mark.parametrize("name", FINITE)
def test_guarantee_6_a_compact_step_is_the_least_that_three_bits_of_mantissa_allow(name: str) -> None:
    """Check each end within 7/16 of a step of a code, at that scale or the next; no offset allows a lower scale."""
    groups = HARD[name][:2304].view(-1, 64).double()
    low, high = groups.amin(1), groups.amax(1)
    for bits in BITS:
        codec = Format(bits, 64, compact=True)
        scale, zero = metadata(fap.encode(HARD[name][:2304], config_of(codec)), codec)
        served = scale.isfinite() & ((groups != 0).all(1) | (bits >= 5))  # with a 0: tests/codec/test_codec_zeros.py
        levels, slack = 2**bits - 1, 7 / 16
        least = torch.maximum((high - low) / (levels + 2 * slack), high / (levels + slack))
        least = torch.maximum(least, -low / (31 * 2**bits / 32 + slack)).clamp(min=2.0**-120)
        assert (scale >= least * (1 - 2.0**-22))[served].all()
        assert (scale <= least * 1.125**2 * (1 + 2.0**-22))[served].all()
        assert (low - zero >= -(slack + 1e-4) * scale)[served].all()
        assert (high - zero <= (levels + slack + 1e-4) * scale)[served].all()


@pytest.mark.parametrize(("bits", "floor"), [(4, 20.7), (3, 14.5), (2, 8.4)])
def test_compact_groups_of_64_take_no_more_bytes_and_lose_less(bits: int, floor: float) -> None:
    compact, plain = fap.FlashConfig(bits=bits, group_size=64, compact=True), fap.FlashConfig(bits=bits)
    x = gaussian(1 << 18)
    assert fap.payload_bytes(x.numel(), compact) == fap.payload_bytes(x.numel(), plain)
    assert sqnr_db(x, fap.decode(fap.encode(x, compact), x.shape, x.dtype, compact)) >= floor


@pytest.mark.parametrize(("bits", "floor"), [(8, 44.4), (6, 32.2), (4, 19.9), (3, 13.2), (2, 5.9)])
def test_sqnr_of_gaussian_values(bits: int, floor: float) -> None:
    config = fap.FlashConfig(bits=bits, group_size=128)
    for seed in range(3):
        x = gaussian(1 << 18, seed=seed)
        assert sqnr_db(x, fap.decode(fap.encode(x, config), x.shape, x.dtype, config)) >= floor


def test_a_constant_group_comes_back_within_the_rounding_of_its_metadata() -> None:
    for value in (3.14159, -2.71828, 1e-30, -1e30, 65504.0):
        x = torch.full((256,), value)
        for bits in BITS:
            config = fap.FlashConfig(bits=bits)
            decoded = fap.decode(fap.encode(x, config), x.shape, x.dtype, config)
            assert (decoded == decoded[0]).all()
            # The zero point lies up to 2^-7 below the value; the levels reach up from there to the value.
            assert abs(decoded[0].item() - value) <= abs(value) * 2.0**-7 * 2.0**-8


def test_decoding_into_a_narrower_dtype_rounds_once() -> None:
    x = gaussian(1000) * 300
    config = fap.FlashConfig(bits=7)
    payload = fap.encode(x, config)
    exact = fap.decode(payload, x.shape, torch.float32, config)
    for dtype in DTYPES:
        assert torch.equal(fap.decode(payload, x.shape, dtype, config), exact.to(dtype))


def test_fp16_overflows_to_inf_as_a_plain_cast_does() -> None:
    x = torch.tensor([0.0, 65504.0, 70000.0, -70000.0, 65519.0] * 10)
    config = fap.FlashConfig(bits=8, group_size=32)
    payload = fap.encode(x, config)
    decoded = fap.decode(payload, x.shape, torch.float16, config)
    assert decoded[2] == float("inf") and decoded[3] == float("-inf") and decoded[0].isfinite()
    assert torch.equal(decoded, fap.decode(payload, x.shape, torch.float32, config).half())


FLUSHING = """
import torch, flash_allreduce_plugin as fap
from tests.codecs import gaussian
from tests.codec.test_codec_numerics import normal_values
def payloads():
    return [fap.encode(x.to(d), fap.FlashConfig(bits=b, symmetric=s))
            for x in normal_values() for d in (torch.float32, torch.bfloat16, torch.float16)
            for b in (2, 5, 8) for s in (False, True)]
config = fap.FlashConfig(bits=8)
plain = payloads()
half = gaussian(4096).half() * 2.0 ** -16  # subnormal in fp16, normal in float32
plain_half = fap.decode(fap.encode(half, config), half.shape, torch.float16, config)
assert torch.set_flush_denormal(True)
assert all(torch.equal(a, b) for a, b in zip(plain, payloads(), strict=True))
assert torch.equal(plain_half, fap.decode(fap.encode(half, config), half.shape, torch.float16, config))
"""


def normal_values() -> list[Tensor]:
    """Return values with steps that are normal numbers too."""
    return [gaussian(3000), gaussian(3000) * 1e-30, gaussian(3000) * 1e30, 100 + 0.1 * gaussian(3000)]


def test_flushing_subnormals_to_zero_does_not_touch_normal_values() -> None:
    """Turn on torch.set_flush_denormal, as training scripts do, in a separate process."""
    subprocess.run([sys.executable, "-c", FLUSHING], check=True, timeout=240)
