"""Guarantee 8 in the codec: an exact zero is decoded as an exact zero; compiled is reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_allreduce_plugin.codec import ops, reference
from flash_allreduce_plugin.codec import rows as codec_
from flash_allreduce_plugin.codec.format import Draw, Format
from tests.codecs import BITS, CODEBOOK, DTYPES, GROUP_SIZES, LAYOUTS, Both, fits, gaussian, same_bits

pytestmark = pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))

DRAW = Draw(codec_.draw_key(3, 8), first_group=5, groups_a_row=1000)
OPTIONS = [
    {**layout, **last, "spikes": spikes}
    for layout, last, spikes in itertools.product(LAYOUTS, ({}, {"mse": True}, {"stochastic": True}), (False, True))
] + [
    {**CODEBOOK, **last, "spikes": spikes} for last in ({}, {"mse": True}) for spikes in (False, True)
]  # all but the rotation
NAMES = ["+".join(name for name, on in options.items() if on) or "asymmetric" for options in OPTIONS]


def scattered(rows: int, numel: int, seed: int = 0) -> Tensor:
    """Return zeros of both signs among values of one sign, both, one large, tiny and subnormal, by turns of 128."""
    noise = gaussian(rows, numel, seed=seed)
    place = torch.arange(numel)
    kinds = (noise, noise.abs(), -noise.abs(), 1e-3 * noise + 5, noise * 1e-30, noise * 1e30, noise * 1e-40,
             torch.where(place % 97 == 5, -1e4, noise), noise.round(), 0.0 * noise)  # fmt: skip
    x = torch.stack(kinds)[place // 128 % len(kinds), :, place].t().contiguous()
    return torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.1, 0.0 * noise, x)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_guarantee_8_zeros_stay_zero_at_every_width_and_group_size(options: dict[str, bool]) -> None:
    sizes = [g for g in GROUP_SIZES if fits(g, options)]
    for i, (bits, group_size) in enumerate(itertools.product(BITS, sizes)):
        both, dtype, numel = Both(Format(bits, group_size, **options)), DTYPES[i % 3], (2500, 2048, 77)[i % 3]
        rows = torch.stack([scattered(1, numel, seed)[0] for seed in range(3)]).to(dtype).nan_to_num(0.0, 6e4, -6e4)
        rows[1:, ::3] = 0.0
        rows[:, ::7] = 0.0
        payload = both.encode(rows, DRAW)
        decoded = both.decode(payload, numel, DTYPES[(i + 1) % 3])
        assert (decoded[rows == 0] == 0).all()
        for gather_bits in BITS:
            again = both.decode_sum_encode(payload, Format(gather_bits, group_size, **options), 1 / 3, DRAW)
            total = Both(Format(gather_bits, group_size, **options)).decode(again.view(1, -1), numel)[0]
            assert (total[(rows == 0).all(0)] == 0).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("ends", [(-15681487.0, 1.0), (-1.0, 15681487.0), (-1e30, 1e-30), (-1e-30, 1e30)])
def test_guarantee_8_a_range_with_one_end_near_zero(ends: tuple[float, float], bits: int) -> None:
    """Check stochastic rounding, which has no slack: the code of 0 must leave one for the small end."""
    for layout in ({}, {"compact": True}):
        both = Both(Format(bits, 32, stochastic=True, **layout))
        x = torch.tensor([0.0, *ends] * 10 + [0.0, 0.0]).view(1, -1)
        decoded = both.decode(both.encode(x, DRAW), 32)
        assert decoded.isfinite().all() and (decoded[x == 0] == 0).all()


@given(
    options=st.sampled_from(OPTIONS),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_guarantee_8_zeros_stay_zero_among_any_values(
    options: dict[str, bool], bits: int, group_size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    value = st.one_of(
        st.sampled_from([0.0, -0.0]),
        st.floats(-(2.0**100), 2.0**100, width=32),
        st.floats(-3, 3, width=32),
        st.floats(-(2.0**-100), 2.0**-100, width=32),
        st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38]) if data.draw(st.booleans()) else st.just(1.0),
    )
    group_size = group_size if fits(group_size, options) else 4 * group_size
    values = data.draw(st.lists(value, min_size=1, max_size=50))
    x = torch.tensor(values * (1 + 2 * group_size // len(values)))[: 2 * group_size - 5].to(dtype).view(1, -1)
    both = Both(Format(bits, group_size, **options))
    decoded = both.decode(both.encode(x, DRAW), x.shape[1])
    lost = (
        torch.nn.functional.pad(decoded.isnan(), (0, 5)).view(-1, group_size).any(1).repeat_interleave(group_size)[:-5]
    )
    assert (decoded[0, (x[0] == 0) & ~lost] == 0).all()
    finite = x.isfinite().all() and x.float().abs().amax() < 1e38
    assert not (lost.any() and finite)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_guarantee_2_holds_in_a_group_with_zeros(options: dict[str, bool], value: float) -> None:
    for bits, place in itertools.product((2, 4, 8), (0, 1, 63, 64, 127)):
        size = 64 if fits(64, options) else 128
        both, x = Both(Format(bits, size, **options)), gaussian(1, 3 * size)
        x[0, ::5] = 0.0
        clean = both.decode(both.encode(x, DRAW), 3 * size)
        x[0, place] = value
        decoded = both.decode(both.encode(x, DRAW), 3 * size)
        group = torch.arange(3 * size) // size == place // size
        assert decoded[0, group].isnan().all()
        assert same_bits(decoded[0, ~group], clean[0, ~group])


@pytest.mark.parametrize("lo", [-3.4e38, -3e38, -1.8e38, -1e38, 0.0])
@pytest.mark.parametrize("hi", [3.4e38, 3e38, 1.8e38, 1e38, 0.0])
@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_values_beyond_float32_become_non_finite(options: dict[str, bool], lo: float, hi: float) -> None:
    for bits in BITS:
        size = 32 if fits(32, options) else 128
        both, x = Both(Format(bits, size, **options)), torch.zeros(1, size)
        x[0, 3], x[0, 17] = lo, hi
        decoded = both.decode(both.encode(x, DRAW), size)
        if decoded.isnan().any():
            assert decoded.isnan().all() and max(hi - lo, hi, -lo) * 1.5 > 1e38
        else:
            assert (decoded[x == 0] == 0).all()


def words(payload: Tensor, codec: Format) -> Tensor:
    return payload.view(-1, codec.record_bytes)[:, :4].contiguous().view(torch.int16).int() & 0xFFFF


@pytest.mark.parametrize("bits", BITS)
def test_only_a_group_that_holds_a_zero_says_that_its_zero_point_is_a_code(bits: int) -> None:
    codec = Format(bits, 64)
    x = gaussian(1, 640)
    before = Both(codec).encode(x)
    x[0, 130] = 0.0
    after = Both(codec).encode(x)
    differs = (before != after).view(-1, codec.record_bytes).any(1)
    assert differs.tolist() == [i == 2 for i in range(10)]
    assert (words(before, codec)[:, 0] < 0x8000).all()
    scale, k = words(after, codec)[2].tolist()
    assert scale & 0x8000 and 0 < k < 2**bits - 1


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_guarantee_6_the_step_of_a_group_with_a_zero(options: dict[str, bool]) -> None:
    """Check the docs' rule: the whole k costs one step less of the range, and the ends may lie 7/16 outside."""
    if options.get("symmetric") or options["spikes"] or options.get("codebook"):
        return
    for bits, skew in itertools.product(BITS, (-3, -1, -0.1, 0.0, 0.1, 0.5, 1, 3)):
        codec, x = Format(bits, 64, **options), gaussian(1, 64 * 100) + skew
        x[0, ::64] = 0.0
        low, high = x.view(-1, 64).double().amin(1), x.view(-1, 64).double().amax(1)
        slack = 0.0 if codec.stochastic else 7 / 16
        coarse = (9 / 8) ** 2 if codec.compact else 1 + 2.0**-7
        step = (high - low) / (2**bits - 2 + 2 * slack) * coarse
        if codec.compact and bits >= 5:
            step = torch.maximum(torch.maximum(high - low, high) / (2**bits - 1), -low / (31 * 2**bits / 32)) * 1.43
        error = (Both(codec).decode(Both(codec).encode(x, DRAW), x.shape[1]) - x).abs().view(-1, 64).amax(1)
        assert (error <= step * (1 if codec.stochastic else 0.5) * (1 + 1e-4)).all(), (bits, skew)


@pytest.mark.parametrize(
    ("bits", "asymmetric", "compact"),
    [(8, 44.4, 44.0), (6, 32.3, 31.9), (4, 20.0, 19.7), (3, 13.6, 13.3), (2, 6.2, 5.9)],
)
def test_mean_cost_of_a_zero_in_the_group(bits: int, asymmetric: float, compact: float) -> None:
    """Check Gaussian groups of 128 with one 0 each: the figures of docs/trust/numerics.md."""
    x = gaussian(1, 1 << 18)
    x[0, ::128] = 0.0
    for options, floor in (({}, asymmetric), ({"compact": True}, compact)):
        decoded = Both(Format(bits, 128, **options)).round_trip(x)
        assert 10 * torch.log10(x.double().square().sum() / (decoded - x).double().square().sum()) >= floor


def test_stochastic_rounding_is_unbiased_with_a_zero_and_on_spikes() -> None:
    x, calls = gaussian(1, 256), 600
    x[0, ::9] = 0.0
    x[0, 20], x[0, 70], x[0, 200] = 10.03, -9.97, 10.01  # between two bf16, 1/16 apart
    for options in ({}, {"spikes": True}, {"compact": True, "spikes": True}):
        codec = Format(3, 128, stochastic=True, **options)
        payload, total, squares = Both(codec).encode(x), torch.zeros(1, 256).double(), torch.zeros(1, 256).double()
        out = torch.empty(1, 256)
        for call in range(calls):
            codec_.encode(x, payload, codec, Draw(codec_.draw_key(1, call)))
            codec_.decode(payload, out, codec)
            total += out
            squares += out.double().square()
        mean = total / calls
        deviation = (squares / calls - mean.square()).clamp(min=0).sqrt()
        assert (mean - x).abs().amax() <= 5 * deviation.amax() / math.sqrt(calls)
        assert (mean[x == 0] == 0).all()
        if codec.spikes:  # a spike's own step, not the group's
            assert ((mean - x).abs()[0, [20, 70]] < 5 / 32 / math.sqrt(calls)).all()
            assert (deviation[0, [20, 70]] > 0.01).all()


def test_a_spike_that_bf16_holds_is_not_rounded() -> None:
    x = gaussian(1, 64).clamp(-2, 2)
    x[0, 3], x[0, 9] = 1000.0, -72.0
    codec = Format(2, 64, spikes=True, stochastic=True)
    for key in range(50):
        decoded = Both(codec).decode(Both(codec).encode(x, Draw(key)), 64)
        assert decoded[0, 3] == 1000.0 and decoded[0, 9] == -72.0


def test_random_numbers_of_spikes_are_those_of_no_element() -> None:
    x = torch.empty(1, 3, 64)
    pairs = reference._pairs(x, DRAW, slice(0, 33))
    assert pairs.unique().numel() == pairs.numel()
