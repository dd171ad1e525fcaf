"""The codebook: compiled is reference, its SQNR on Gaussian values, and the largest error of an element."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_allreduce_plugin.codec import ops, reference
from flash_allreduce_plugin.codec.format import Format
from tests.codecs import BITS, DTYPES, LENGTHS, Both, gaussian, hard_values

pytestmark = pytest.mark.skipif(ops.unavailable is not None, reason=str(ops.unavailable))

SIZES = (128, 256, 512, 1024)
OPTIONS = [
    {"spikes": spikes, "hadamard": hadamard, "mse": mse}
    for spikes, hadamard, mse in itertools.product((False, True), (False, True), (False, True))
]
NAMES = ["+".join(name for name, on in options.items() if on) or "plain" for options in OPTIONS]
#: docs/trust/numerics.md: the largest error of an element, against the largest of its part: without a search in groups
#: without and with a 0, then with a search.
LARGEST_ERROR = {2: (0.36, 0.48, 0.61), 3: (0.20, 0.23, 0.39), 4: (0.125, 0.125, 0.34)}
LARGEST_ERROR |= {5: (0.055, 0.08, 0.31), 6: (0.06, 0.07, 0.31)}
LARGEST_ERROR |= {bits: (9 / 8 / 2**bits, 2 / 2**bits, 16 / 2**bits) for bits in (7, 8)}


def of(bits: int, group_size: int, **options: bool) -> Format:
    return Format(bits, group_size, codebook=True, **options)


def with_a_zero(x: Tensor, group_size: int) -> Tensor:
    """Put one zero in each group."""
    x = x.clone()
    x[..., group_size // 3 :: group_size] = 0.0
    return x


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_compiled_is_reference(options: dict[str, bool]) -> None:
    """Check every width and group size, lengths and hard values among them."""
    hard = torch.stack(list(hard_values(2100).values()))
    for i, (bits, group_size) in enumerate(itertools.product(BITS, SIZES)):
        both, dtype = Both(of(bits, group_size, **options)), DTYPES[i % 3]
        numel = LENGTHS[i % len(LENGTHS)]
        both.decode(both.encode(gaussian(2, numel).to(dtype)), numel, dtype)
        both.round_trip(with_a_zero(gaussian(2, 2311), group_size).to(dtype))
        payload = both.encode(hard.to(dtype))
        both.decode(payload, 2100, DTYPES[(i + 1) % 3])
        for first in (0, 12, 15):
            both.decode_sum(payload[first : first + 3], 2100, dtype, factor=1 / 3)
        both.decode_sum_encode(payload[2:5], of(9 - bits if bits < 8 else 2, group_size, **options), 0.5)


@given(
    options=st.sampled_from(OPTIONS),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    pattern=st.binary(min_size=0, max_size=1200),
)
@settings(max_examples=150, deadline=None)
def test_compiled_is_reference_for_any_bit_pattern(
    options: dict[str, bool], bits: int, group_size: int, dtype: torch.dtype, pattern: bytes
) -> None:
    whole = len(pattern) // dtype.itemsize * dtype.itemsize
    values = torch.frombuffer(bytearray(pattern[:whole] or b"\0\0\0\0"), dtype=torch.uint8).view(dtype).view(1, -1)
    both = Both(of(bits, group_size, **options))
    for x in (values, values.nan_to_num(1.0)):
        both.decode(both.encode(x), x.shape[1])


@given(
    options=st.sampled_from(OPTIONS),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(SIZES),
    data=st.binary(min_size=1, max_size=64),
)
@settings(max_examples=80, deadline=None)
def test_any_bytes_decode_to_the_same_values(options: dict[str, bool], bits: int, group_size: int, data: bytes) -> None:
    codec = of(bits, group_size, **options)
    size = 3 * 2 * codec.record_bytes
    payloads = torch.frombuffer(bytearray((data * (size // len(data) + 1))[:size]), dtype=torch.uint8).view(3, -1)
    Both(codec).decode(payloads, 2 * group_size - 3)
    Both(codec).decode_sum(payloads, 2 * group_size - 3)


def largest_errors(codec: Format, x: Tensor) -> Tensor:
    """Return the error that docs/trust/numerics.md allows each element of x [numel], whole groups."""
    parts = x.double().abs().view(-1, 8, codec.group_size // 8).amax(-1)
    held = (x == 0).view(-1, codec.group_size).any(-1, keepdim=True)
    plain, with_zero, searched = LARGEST_ERROR[codec.bits]
    share = searched if codec.mse else torch.where(held, with_zero, plain)
    least = torch.maximum(parts, parts.amax(-1, keepdim=True) / 200).clamp(min=2.0**-104)
    return (share * least).repeat_interleave(codec.group_size // 8).view(-1)


values_ = st.one_of(
    st.floats(-3, 3, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(-(2.0**-100), 2.0**-100, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e38, -3e38]),
)


@given(
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(SIZES),
    mse=st.booleans(),
    values=st.lists(values_, min_size=1, max_size=200),
    seed=st.integers(0, 99),
)
@settings(max_examples=300, deadline=None)
def test_guarantee_6_the_error_is_at_most_a_share_of_the_largest_of_its_part(
    bits: int, group_size: int, mse: bool, values: list[float], seed: int
) -> None:
    """Repeat values in another order, so that any of them meet in a part."""
    codec = of(bits, group_size, mse=mse)
    order = torch.randint(len(values), (2 * group_size,), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(values)[order].view(1, -1)
    decoded = Both(codec).round_trip(x)[0]
    error = (decoded.double() - x[0].double()).abs()
    assert (error <= largest_errors(codec, x[0]) * (1 + 1e-4)).all()
    assert (decoded[x[0] == 0] == 0).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mse", [False, True])
def test_guarantee_6_holds_where_an_element_is_clipped(bits: int, mse: bool) -> None:
    """Sweep an octave with the largest element of a part."""
    codec, worst = of(bits, 128, mse=mse), 0.0
    for held in (False, True):
        x = gaussian(1, 128 * 2000, seed=3) * 0.5
        rows = x.view(-1, 8, 16)
        rows[:, :, 3] = 2.0 ** torch.linspace(0, 2, rows.shape[0]).unsqueeze(-1) * rows[:, :, 3].sign()
        x = with_a_zero(x, 128) if held else x
        error = (Both(codec).round_trip(x)[0] - x[0]).abs().double()
        allowed = largest_errors(codec, x[0])
        assert (error <= allowed * (1 + 1e-4)).all()
        worst = max(worst, (error / allowed).max().item())
    assert worst > 0.3 or mse  # a search hardly ever chooses that code


@pytest.mark.parametrize("bits", [5, 6])
def test_the_largest_error_of_5_and_6_bits_is_that_of_clipping(bits: int) -> None:
    """Check the bounds of the documentation: a part's scale is up to 1/8 below the one that clips nothing."""
    book = reference._BOOKS[bits]
    for levels, allowed in zip(book.levels, LARGEST_ERROR[bits], strict=False):
        assert allowed - 0.005 < 1 - levels[-1] / (1.125 * book.reach) < allowed


def sqnr_db(exact: Tensor, result: Tensor) -> float:
    return float(10 * (exact.double().square().sum() / (result.double() - exact.double()).square().sum()).log10())


@pytest.mark.parametrize(
    ("bits", "plain", "searched", "plain_zero", "searched_zero"),
    [
        (2, 9.3, 9.7, 8.6, 9.0),
        (3, 15.2, 15.8, 14.9, 15.6),
        (4, 21.6, 22.0, 21.4, 21.9),
        (5, 27.4, 27.8, 27.3, 27.7),
        (6, 33.4, 33.7, 33.3, 33.7),
        (8, 45.0, 45.0, 44.9, 44.9),
    ],
)
def test_sqnr_of_gaussian_values(
    bits: int, plain: float, searched: float, plain_zero: float, searched_zero: float
) -> None:
    """Check the figures of docs/trust/numerics.md, in groups of 256: 1/4 bit an element more than the codes."""
    x = gaussian(1, 1 << 18)
    assert Format(bits, 256, codebook=True).bits_per_element == bits + 0.25
    for values, floors in ((x, (plain, searched)), (with_a_zero(x, 256), (plain_zero, searched_zero))):
        for mse, floor in zip((False, True), floors, strict=True):
            for hadamard in (False, True):
                codec = of(bits, 256, mse=mse, hadamard=hadamard)
                assert sqnr_db(values, Both(codec).round_trip(values)) >= (floors[1] - 0.5 if hadamard else floor), (
                    codec
                )


def test_parts_do_not_share_a_step() -> None:
    """Check that a part of small elements keeps its relative error next to large ones, down to 1/220 of the largest."""
    scales = torch.tensor([1.0, 0.5, 0.1, 0.03, 0.01, 1.0, 0.2, 0.007]).repeat_interleave(32)
    x = (gaussian(500, 256) * scales).view(1, -1)
    decoded = Both(of(4, 256)).round_trip(x)
    for part in range(8):
        rows = slice(32 * part, 32 * part + 32)
        assert sqnr_db(x.view(-1, 256)[:, rows], decoded.view(-1, 256)[:, rows]) > 19


def test_a_search_is_never_much_worse() -> None:
    for bits, seed in itertools.product(BITS, range(3)):
        x = gaussian(1, 1 << 14, seed=seed) ** 3
        plain, searched = (sqnr_db(x, Both(of(bits, 256, mse=mse)).round_trip(x)) for mse in (False, True))
        assert searched >= plain - 0.01


def test_the_levels_of_a_width_are_in_order_and_hold_a_zero_where_they_say() -> None:
    for bits, book in reference._BOOKS.items():
        without, with_zero = book.levels
        assert len(without) == len(with_zero) == 2**bits
        assert list(without) == sorted(set(without)) == [-level for level in reversed(without)]
        assert list(with_zero) == sorted(set(with_zero)) and with_zero[2 ** (bits - 1)] == 0


# ---- spikes


def rest_of(x: Tensor, codec: Format) -> Tensor:
    """Return groups [groups, group_size] without their spikes, computed in double precision, group by group."""
    rest = x.double().clone()
    step = 2.0 ** (1 + codec.spike_mantissa)
    for group in rest:
        first = 0.0
        for _ in range(2):
            at = int(group.abs().argmax())
            mantissa, exponent = torch.frexp(group[at])
            taken = float(torch.floor(mantissa.abs() * step + 0.5) / step * mantissa.sign() * 2.0**exponent)
            first = first or abs(taken)
            if abs(taken) >= max(2.0**-100, 2.0 ** (torch.frexp(torch.tensor(first))[1].item() - 15)):
                group[at] -= taken
    return rest


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [128, 256, 1024])
def test_guarantee_6_with_spikes_the_error_is_a_share_of_the_largest_that_they_leave(
    bits: int, group_size: int
) -> None:
    codec = of(bits, group_size, spikes=True)
    x = (gaussian(1, 16 * group_size, seed=bits) ** 5).view(-1, group_size)  # heavy tails
    x[1] = 0.0
    x[2, 5:] = 0.0
    x[3, 7] = 1e30
    decoded = Both(codec).round_trip(x.view(1, -1)).view(x.shape).double()
    allowed = largest_errors(codec, rest_of(x, codec).float().view(-1)).view(x.shape)
    held = (x == 0).any(-1, keepdim=True)
    allowed *= torch.where(held, LARGEST_ERROR[bits][1] / LARGEST_ERROR[bits][0], 1.0)  # a 0 may be left in it or not
    allowed[3] += 1e30 * 2.0 ** -(bits + 11)  # the scale that the exponent of a spike needs
    assert ((decoded - x.double()).abs() <= allowed * 1.001 + x.double().abs() * 2.0**-24).all()
    assert (decoded[x == 0] == 0).all()


@pytest.mark.parametrize(("bits", "gained"), [(2, 7.0), (4, 6.0), (6, 6.0), (8, 6.0)])
def test_spikes_bring_heavy_tails_near_gaussian_values(bits: int, gained: float) -> None:
    """Make one element in 60 large: half a bit an element more gains as much as a code of two more bits."""
    x = gaussian(1, 1 << 16)
    x = torch.where(gaussian(1, 1 << 16, seed=9) > 2.2, 20 * x, x)
    small = x.abs() < 4
    without, with_spikes = (Both(of(bits, 128, spikes=spikes)).round_trip(x) for spikes in (False, True))
    assert sqnr_db(x[small], with_spikes[small]) > sqnr_db(x[small], without[small]) + gained
    assert Format(bits, 128, codebook=True, spikes=True).bits_per_element == bits + 0.75


def test_a_spike_that_is_not_finite_is_never_hidden() -> None:
    codec = of(4, 128, spikes=True)
    for value in (float("inf"), float("-inf"), float("nan")):
        x = gaussian(1, 384)
        x[0, 200] = value
        decoded = Both(codec).round_trip(x)[0]
        assert decoded[128:256].isnan().all() and decoded[:128].isfinite().all() and decoded[256:].isfinite().all()


def test_the_largest_finite_values_survive() -> None:
    x = torch.full((1, 256), 1e-30)
    x[0, 3], x[0, 130] = 3.4e38, -3.4028234e38
    for bits in BITS:
        decoded = Both(of(bits, 128, spikes=True)).round_trip(x)[0]
        assert decoded.isfinite().all()
        assert abs(decoded[3] / 3.4e38 - 1) < 1e-4 and abs(decoded[130] / -3.4028234e38 - 1) < 1e-4


def test_sums_add_the_spikes_of_every_rank() -> None:
    """Put spikes in one place too, and in a rotated group, where codes are summed before the rotation is undone."""
    x = gaussian(5, 256)
    x[:, 17] += torch.tensor([300.0, -300.0, 1000.0, 0.25, 70.0])
    x[3, 200] = -5000.0
    for hadamard in (False, True):
        both = Both(of(6, 128, spikes=True, hadamard=hadamard))
        payload = both.encode(x)
        summed = both.decode_sum(payload, 256)
        assert sqnr_db(x.sum(0), summed) > 50
