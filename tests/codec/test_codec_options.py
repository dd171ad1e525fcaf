"""Spikes, rotation, searched range and stochastic rounding: compiled is reference, and each has its effect."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_allreduce_plugin as fap
from flash_allreduce_plugin.codec import ops, reference
from flash_allreduce_plugin.codec import rows as codec_
from flash_allreduce_plugin.codec.format import Draw, Format
from tests.codecs import BITS, DTYPES, GROUP_SIZES, LAYOUTS, LENGTHS, Both, gaussian, hard_values, same_bits

pytestmark = pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))

DRAW = Draw(codec_.draw_key(3, 5), first_group=7, groups_a_row=1000)
OPTIONS = [
    {**layout, "spikes": spikes, "hadamard": hadamard, **last}
    for layout, spikes, hadamard in itertools.product(LAYOUTS, (False, True), (False, True))
    for last in ({}, {"mse": True}, {"stochastic": True})
    if spikes or hadamard or last or "compact" in layout
]
NAMES = ["+".join(name for name, on in options.items() if on) for options in OPTIONS]


def sqnr_db(exact: Tensor, result: Tensor) -> float:
    return 10 * math.log10(exact.double().square().sum() / (result.double() - exact.double()).square().sum())


def outlier_channels(rows: int) -> Tensor:
    """Return [rows * 1024]: 1 % of the channels 50 times the others."""
    x = gaussian(rows, 1024)
    x[:, torch.randperm(1024, generator=torch.Generator().manual_seed(1))[:10]] *= 50
    return x.flatten()


def of(bits: int, group_size: int, **options: bool) -> Format:
    return Format(bits, group_size, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_compiled_is_reference(options: dict[str, bool]) -> None:
    """Check every width and group size, lengths and hard values among them."""
    hard = torch.stack(list(hard_values(1100).values()))
    for i, (bits, group_size) in enumerate(itertools.product(BITS, GROUP_SIZES)):
        both, dtype = Both(of(bits, group_size, **options)), DTYPES[i % 3]
        numel = LENGTHS[i % len(LENGTHS)]
        both.decode(both.encode(gaussian(2, numel).to(dtype), DRAW), numel, dtype)
        payload = both.encode(hard.to(dtype), DRAW)
        both.decode(payload, 1100, DTYPES[(i + 1) % 3])
        for first in (0, 12, 15):
            both.decode_sum(payload[first : first + 3], 1100, dtype, factor=1 / 3)
        both.decode_sum_encode(payload[2:5], of(9 - bits if bits < 8 else 2, group_size, **options), 0.5, DRAW)


@given(
    options=st.sampled_from(OPTIONS),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(DTYPES),
    pattern=st.binary(min_size=0, max_size=600),
)
@settings(max_examples=150, deadline=None)
def test_compiled_is_reference_for_any_bit_pattern(
    options: dict[str, bool], bits: int, group_size: int, dtype: torch.dtype, pattern: bytes
) -> None:
    whole = len(pattern) // dtype.itemsize * dtype.itemsize
    values = torch.frombuffer(bytearray(pattern[:whole] or b"\0\0\0\0"), dtype=torch.uint8).view(dtype).view(1, -1)
    both = Both(of(bits, group_size, **options))
    for x in (values, values.nan_to_num(1.0)):
        both.decode(both.encode(x, DRAW), x.shape[1])


@given(
    options=st.sampled_from(OPTIONS),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    data=st.binary(min_size=1, max_size=64),
)
@settings(max_examples=80, deadline=None)
def test_any_bytes_decode_to_the_same_values(options: dict[str, bool], bits: int, group_size: int, data: bytes) -> None:
    """Decode places of spikes too that lie outside of the group."""
    codec = of(bits, group_size, **options)
    size = 3 * 2 * codec.record_bytes
    payloads = torch.frombuffer(bytearray((data * (size // len(data) + 1))[:size]), dtype=torch.uint8).view(3, -1)
    Both(codec).decode(payloads, 2 * group_size - 3)
    Both(codec).decode_sum(payloads, 2 * group_size - 3)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_guarantee_2_a_value_that_is_not_finite_takes_its_group_and_no_other(
    options: dict[str, bool], value: float
) -> None:
    for bits, place in itertools.product((2, 8), (0, 1, 127, 128, 255, 256, 299)):
        both = Both(of(bits, 128, **options))
        clean = gaussian(1, 300)
        x = clean.clone()
        x[0, place] = value
        decoded, expected = (both.decode(both.encode(rows, DRAW), 300) for rows in (x, clean))
        group = torch.arange(300) // 128 == place // 128
        assert decoded[0, group].isnan().all()
        assert same_bits(decoded[0, ~group], expected[0, ~group])


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_guarantee_3_the_payload_of_a_part_is_a_slice_of_the_payload_of_the_whole(options: dict[str, bool]) -> None:
    codec = of(3, 64, **options)
    x, both = gaussian(1, 10 * 64 + 17), Both(codec)
    whole = both.encode(x, Draw(11))
    for k in (1, 3, 10):
        assert torch.equal(both.encode(x[:, k * 64 :], Draw(11, k)), whole[:, k * codec.record_bytes :])
        assert torch.equal(both.encode(x[:, : k * 64], Draw(11)), whole[:, : k * codec.record_bytes])


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_guarantee_6_the_error_stays_below_half_a_step(options: dict[str, bool], bits: int) -> None:
    """Allow half a step of the group's whole range, a step with stochastic rounding; of a rotated group its own range.
    Add the rounding of the metadata, of float32 and, for spikes, of bf16.
    """
    codec, g = of(bits, 64, **options), 64
    steps = (2 ** (bits - 1) - 1 if codec.symmetric else 2**bits - 1) * 1.0
    for name, x in hard_values(64 * 50).items():
        if not x.isfinite().all() or name in ("near the end of float32", "subnormal", "normal and subnormal"):
            continue
        decoded = Both(codec).decode(Both(codec).encode(x.view(1, -1), DRAW), x.numel()).view(-1, g).double()
        groups = x.view(-1, g).double()
        quantized = reference._rotated(groups * reference._signs(g, x.device)) if codec.hadamard else groups
        low, high = quantized.amin(1), quantized.amax(1)
        largest = torch.maximum(low.abs(), high.abs())
        if codec.compact:  # a scale of three bits: the next or the one after, with mse one more
            spread = torch.maximum(high - low, torch.maximum(high, -low * steps / (31 * 2**bits / 32)))
            step = spread / steps * 1.125 ** (3 if codec.mse else 2) + 2.0**-120
        else:
            spread = largest if codec.symmetric else high - low + largest / 128
            step = spread / steps * (1 + 1 / 128) + 2.0**-126
        if not codec.symmetric:  # a group with a 0
            coarse = 9 / 8 if codec.compact else 1 + 1 / 128
            whole = (high - low) / (steps - (1 if codec.stochastic else 1 / 8)) * coarse + 2.0**-120
            step = torch.where((quantized == 0).any(1), torch.maximum(step, whole), step)
        allowed = step * (1.0 if codec.stochastic else 0.5) + largest * 2.0**-20
        if codec.spikes:
            allowed = allowed + largest / (128 if codec.stochastic else 256)
        assert ((decoded - groups).abs() <= allowed.unsqueeze(1)).all(), name


def test_spikes_are_bf16_and_the_rest_has_the_remaining_range() -> None:
    x = gaussian(1, 128).clamp(-2, 2)
    x[0, 17], x[0, 90] = 1000.0, -3000.0
    plain = Both(of(2, 128)).round_trip(x)
    reserved = Both(of(2, 128, spikes=True)).round_trip(x)
    assert reserved[0, 17] == 1000.0 and reserved[0, 90] == -3008.0  # bf16 nearest to -3000
    rest = torch.ones(128, dtype=torch.bool)
    rest[17] = rest[90] = False
    assert (reserved[0, rest] - x[0, rest]).abs().max() < 1.0
    assert (plain[0, rest] - x[0, rest]).abs().max() > 100


def test_a_spike_that_bf16_cannot_hold_loses_its_group() -> None:
    x = gaussian(1, 64)
    x[0, 5] = 3.4e38
    assert Both(of(4, 64, spikes=True)).round_trip(x).isnan().all()


def test_the_rotation_is_undone_exactly_where_nothing_is_rounded() -> None:
    """Rotate whole numbers, which survive sums and differences; the inverse is the matrix, halved log2(g) times."""
    x = torch.randint(-50, 50, (3, 512), generator=torch.Generator().manual_seed(0)).float()
    rotated = reference._rotated(x * reference._signs(512, x.device))
    assert torch.equal(reference._turned_back(rotated, of(8, 512, hadamard=True)), x)
    assert torch.allclose(rotated.square().sum(1), 512 * x.square().sum(1))


@pytest.mark.parametrize("bits", BITS)
def test_rotation_spreads_constants_and_outliers(bits: int) -> None:
    both, plain = Both(of(bits, 128, hadamard=True)), Both(of(bits, 128))
    constant = torch.full((1, 128), 3.0)
    assert sqnr_db(constant, both.round_trip(constant)) > 6.02 * bits - 9  # Gaussian: 6.02 * bits - 6 to - 3.6
    channels = outlier_channels(64).view(1, -1)
    assert sqnr_db(channels, both.round_trip(channels)) > sqnr_db(channels, plain.round_trip(channels)) + 6


@pytest.mark.parametrize("spikes", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_group_is_worse_with_a_searched_range(layout: dict[str, bool], spikes: bool) -> None:
    for bits in BITS:
        better = 0
        for values in ("gaussian", "one spike", "100 +- 0.1", "constant", "all 0"):
            x = hard_values(64 * 200)[values].view(1, -1)
            errors = [
                (Both(of(bits, 64, **layout, spikes=spikes, mse=mse)).round_trip(x) - x).view(-1, 64).double()
                for mse in (False, True)
            ]
            before, after = (error.square().sum(1) for error in errors)
            # Errors are counted in 1/128 of a step, which shows where all elements but one have the same small error;
            # and those of an element that stands in for spikes three times.
            assert (after <= before * 1.1 + 1e-12).all(), (bits, values)
            better += int((after < 0.98 * before).sum())
        # Compact ranges are narrow without a search; at 8 bits only the next scale differs.
        assert better > (10 if "compact" in layout else 60)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_searched_range_of_the_least_scales(layout: dict[str, bool]) -> None:
    """Check the end of the search: 256 / scale must be finite, so below 2^-110 there is none, on every path."""
    x = torch.cat([gaussian(1, 512) * 2.0**exponent for exponent in range(-126, -96)], dim=1)
    for bits in BITS:
        whole, searched = (Both(of(bits, 32, **layout, mse=mse)).encode(x) for mse in (False, True))
        differ = (whole != searched).view(len(range(-126, -96)), -1).any(1)
        assert not differ[:6].any() and differ[-8:].any(), bits


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    """Check that the mean over many draws comes as near to the value as their number allows; nearest does not."""
    x, calls = gaussian(1, 256), 600
    codec = of(2, 128, stochastic=True)
    payload = torch.empty(1, codec.payload_bytes(256), dtype=torch.uint8)
    total, out = torch.zeros(1, 256, dtype=torch.float64), torch.empty(1, 256)
    for call in range(calls):
        codec_.encode(x, payload, codec, Draw(codec_.draw_key(0, call)))
        codec_.decode(payload, out, codec)
        total += out
    step = (x.amax() - x.amin()) / 3
    bias = (total / calls - x).abs().max()
    assert bias < 5 * 0.5 * step / math.sqrt(calls)
    assert (Both(of(2, 128)).round_trip(x) - x).abs().max() > 0.4 * step
    again = torch.empty_like(payload)
    codec_.encode(x, again, codec, Draw(codec_.draw_key(0, calls - 1)))
    assert torch.equal(again, payload)
    codec_.encode(x, again, codec, Draw(codec_.draw_key(1, calls - 1)))
    assert not torch.equal(again, payload)


def test_random_numbers_are_spread_evenly_and_do_not_follow_one_another() -> None:
    offsets = reference._rounding_offsets(torch.empty(4, 512, 128), Draw(codec_.draw_key(1), 0, 512)).double()
    assert offsets.abs().max() < 0.5
    n = offsets.numel()
    assert abs(offsets.mean()) < 5 * math.sqrt(1 / 12 / n)
    assert abs(offsets.var() - 1 / 12) < 1e-3
    for other in (offsets.roll(1, 2), offsets.roll(1, 1), offsets.roll(1, 0)):
        assert abs((offsets * other).mean()) < 5 / 12 / math.sqrt(n)
    counts = torch.histc(offsets.float(), 64, -0.5, 0.5)
    assert ((counts - n / 64).abs() < 6 * math.sqrt(n / 64)).all()


def test_the_public_functions_take_the_options() -> None:
    x = outlier_channels(8)
    plain = fap.FlashConfig(bits=2)
    for config, gain in (
        (plain.model_copy(update={"spike_reserving": True}), 6),
        (plain.model_copy(update={"hadamard": True}), 6),
        (plain.model_copy(update={"range": "mse"}), 2),
    ):
        payload = fap.encode(x, config)
        assert payload.numel() == fap.payload_bytes(x.numel(), config)
        decoded = fap.decode(payload, x.shape, torch.float32, config)
        base = fap.decode(fap.encode(x, plain), x.shape, torch.float32, plain)
        assert sqnr_db(x, decoded) > sqnr_db(x, base) + gain, config
    config = plain.model_copy(update={"rounding": "stochastic", "seed": 4})
    assert torch.equal(fap.encode(x, config, call=3), fap.encode(x, config, call=3))
    assert not torch.equal(fap.encode(x, config, call=3), fap.encode(x, config, call=4))


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(fap.ConfigError, match=r"symmetric=True excludes compact=True"):
        fap.FlashConfig(symmetric=True, compact=True)
    with pytest.raises(fap.ConfigError, match=r"rounding='stochastic' excludes range=\"mse\""):
        fap.FlashConfig(range="mse", rounding="stochastic")
    payload = torch.empty(1, 36, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="mse and stochastic rounding exclude each other"):
        torch.ops.flash_allreduce.encode(torch.zeros(1, 64), payload, 4, 64, 24)
    with pytest.raises(RuntimeError, match="symmetric and compact exclude each other"):
        torch.ops.flash_allreduce.encode(torch.zeros(1, 64), payload, 4, 64, 33)
    with pytest.raises(RuntimeError, match="options is 128; expected 0 to 127"):
        torch.ops.flash_allreduce.encode(torch.zeros(1, 64), payload, 4, 64, 128)
    for key, value in (("compact", True), ("symmetric", True), ("rounding", "stochastic")):
        with pytest.raises(fap.ConfigError, match=r"=(True|'stochastic') excludes (codebook|compact)=True"):
            fap.FlashConfig.from_dict({"codebook": True, key: value})
    for options in (1, 16, 32):
        with pytest.raises(RuntimeError, match="codebook excludes symmetric, compact and stochastic rounding"):
            torch.ops.flash_allreduce.encode(torch.zeros(1, 64), payload, 4, 128, 64 | options)
    with pytest.raises(fap.ConfigError, match=r"codebook=True excludes group_size=64, .*; expected 128 or more"):
        fap.FlashConfig(codebook=True, group_size=64)
    with pytest.raises(RuntimeError, match="group_size is 64; expected 128 or more with codebook"):
        torch.ops.flash_allreduce.encode(torch.zeros(1, 64), payload, 4, 64, 64)
