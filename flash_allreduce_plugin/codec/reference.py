"""The codec in plain PyTorch: the executable specification, the oracle of the tests, and the fallback.

It has the bits of the compiled operators on any device; csrc/codec_math.h has the same text in C++. Every line is one
rounding of IEEE float32, so a compiler has nothing to fuse. Shapes as in ops.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_allreduce_plugin.codec.format import NO_DRAW, Draw, Format, residual_format

_NAN_SCALE = 0x7FC0  # bf16: this group held a value that is not finite
_MIN_SCALE = 0x0080  # bf16: 2^-126, whose inverse is finite
_INF = 0x7F80  # bf16
_M32 = 0xFFFFFFFF
_OFFSETS = 32  # compact: zero points of a scale
_COMPACT_STEP = 0x10  # bf16: from a scale of 3 bits of mantissa to the next
_MIN_COMPACT_SCALE = 0x0380  # bf16: 2^-120

_INSIDE = 7 / 16  # steps by which the ends of a group may lie outside of the values of its codes
_MIN_TRIED_SCALE = 2.0**-110  # mse
_PLACES = 4  # asymmetric: zero points that mse tries for a scale that leaves room
_THIRD = float(torch.tensor(1 / 3))  # as float32
_WHOLE = 0x8000  # asymmetric: the sign of a scale whose zero point is a code; codebook: of a group that holds a 0

_PARTS = 8  # of a group, codebook
_PART_SHIFT = 20  # a part's 6 bits are bits 20 to 25 of a float32 of 3 bits of mantissa, ...
_LEAST_PART = 953  # ... less this: from 1.125 * 2^-8 to 1
_MIN_CODEBOOK_SCALE = 0x0780  # bf16: 2^-112
_SPIKE_EXPONENT = 4  # bits
_LEAST_SPIKE = 27  # codebook: exponent of a float32, 2^-100; no smaller element is a spike
_SPIKES_APART = 14  # octaves by which the second spike may lie below the first
_TRIED = 5  # scales of a part that mse tries
_MOST_OFF = 361.0  # an error of a part's element, in 1/32 of a step, as it is summed: 128 of them stay below 2^24


@dataclass(frozen=True)
class _Book:
    """The codebook of one width. csrc/codec_math.h has the same numbers.

    Args:
        reach: steps from 0 to the largest element of a part, at the scale that clips nothing.
        bend: growth of the cells with the distance from 0.
        shift: steps by which a group with a 0 moves up, so that 0 lies inside of a cell.
        levels: in steps, of groups without and with a 0.
        lower: number of scales below the one that clips nothing, without a search.
    """

    reach: float
    bend: float
    shift: float
    levels: tuple[tuple[float, ...], tuple[float, ...]]
    lower: int


def _tabled(without: tuple[int, ...], with_zero: tuple[int, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the levels of 2, 3 and 4 bits, given in 1/128 of a step."""
    return tuple(level / 128 for level in without), tuple(level / 128 for level in with_zero)


def _computed(bits: int, rise: float, curve: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the levels of 5 bits and more, which follow the cells."""

    def level(w: Tensor) -> Tensor:
        u = w.abs()
        return w * (1.0 + u * (rise + curve * u))

    without = level(torch.arange(1 << bits, dtype=torch.float32) + (0.5 - (1 << (bits - 1))))
    return tuple(without.tolist()), tuple((without - level(torch.tensor(0.5))).tolist())


# Lloyd's levels of Gaussian values in parts of 32, with mse (csrc/codec_math.h).
# fmt: off
_BOOKS = {
    2: _Book(2.125, 0.0, 0.375, _tabled((-199, -57, 57, 199), (-238, -101, 0, 162)), 1),
    3: _Book(
        5.0, 1 / 16, 0.5,
        _tabled((-637, -385, -211, -67, 67, 211, 385, 637), (-687, -445, -273, -129, 0, 149, 327, 591)), 1),
    4: _Book(
        11.25, 1 / 32, 0.5, _tabled(
            (-1475, -1146, -896, -690, -510, -349, -202, -66, 66, 202, 349, 510, 690, 896, 1146, 1475),
            (-1533, -1212, -960, -753, -574, -413, -266, -129, 0, 139, 286, 447, 626, 834, 1086, 1434)), 1),
    5: _Book(19.0, 3 / 256, 0.5, _computed(5, 17 / 2048, 96 / 131072), 1),
    6: _Book(39.0, 3 / 512, 0.5, _computed(6, 9 / 2048, 23 / 131072), 1),
    7: _Book(64.0, 0.0, 0.5, _computed(7, 0.0, 0.0), 0),
    8: _Book(128.0, 0.0, 0.5, _computed(8, 0.0, 0.0), 0),
}
# fmt: on


def encode(input: Tensor, payload: Tensor, codec: Format, draw: Draw = NO_DRAW) -> None:
    """Encode input [rows, numel] of fp32, bf16 or fp16 into payload [rows, codec.payload_bytes(numel)], uint8."""
    rows, numel = input.shape
    if numel == 0 or rows == 0:
        return
    g = codec.group_size
    x = input.float()
    padding = -numel % g
    if padding:  # the ragged group is padded with its first element
        first = x[:, numel - numel % g : numel - numel % g + 1]
        x = torch.cat([x, first.expand(rows, padding)], dim=1)
    payload.copy_(_encoded_whole(x.reshape(rows, -1, g), codec, draw))


def _encoded_whole(x: Tensor, codec: Format, draw: Draw) -> Tensor:
    """Return the payload [rows, bytes], uint8, of whole groups [rows, groups, group_size]."""
    held, taken = (x == 0).any(-1), None
    if codec.codebook and codec.spikes:
        x, taken = _without_greatest(x, codec)
    if codec.hadamard:
        x = _rotated(x * _signs(codec.group_size, x.device))
        held = (x == 0).any(-1)
    if codec.codebook:
        return _codebook_encoded(x, held, taken, codec)
    return _encoded(x, codec, draw)


def _encoded(x: Tensor, codec: Format, draw: Draw) -> Tensor:
    """Return the payload [rows, bytes], uint8, of whole groups [rows, groups, group_size], already rotated."""
    if codec.codebook:
        return _codebook_encoded(x, (x == 0).any(-1), None, codec)
    lost = ~x.isfinite().all(-1)
    spikes: list[Tensor] = []
    if codec.spikes:
        x, spikes = _without_spikes(x, codec, draw)
        lost = lost | _is_not_finite(spikes[0]) | _is_not_finite(spikes[1])
    low, high = x.amin(-1), x.amax(-1)
    range_ = _whole_range(low, high, codec)
    if codec.mse:
        range_ = _best_range(x, low, high, range_, codec)
    if _may_miss_zero(codec):
        held = (x == 0).any(-1)
        range_ = _chosen(held, _range_with_zero(low, high, codec), range_)
    zero, scale, *words = range_
    lost = lost | ~scale.isfinite()

    t = (x - zero.unsqueeze(-1)) * torch.reciprocal(scale).unsqueeze(-1)
    if codec.stochastic:
        t = t + _rounding_offsets(x, draw)
    codes = torch.where(lost.unsqueeze(-1), 0.0, t.round() + _half(codec)).to(torch.int32)

    words += spikes[:2]
    bytes_ = [_two_bytes(word) for word in words]
    bytes_ += [place.unsqueeze(-1) if codec.place_bytes == 1 else _two_bytes(place) for place in spikes[2:]]
    return _records(lost, bytes_, codes, codec)


def _records(lost: Tensor, front: list[Tensor], codes: Tensor, codec: Format) -> Tensor:
    """Return payload [rows, bytes] from metadata bytes [rows, groups, some] and codes; NaN where `lost` is true."""
    bytes_ = list(front)
    for width, shift in _planes(codec.bits):
        units = (codes >> shift & ((1 << width) - 1)).unflatten(-1, (-1, 8 // width))
        places = torch.arange(0, 8, width, dtype=torch.int32, device=units.device)
        bytes_.append((units << places).sum(-1, dtype=torch.int32))
    record = torch.cat(bytes_, dim=-1)
    nothing = torch.zeros_like(record)
    nothing[..., 0], nothing[..., 1] = _NAN_SCALE & 0xFF, _NAN_SCALE >> 8
    return torch.where(lost.unsqueeze(-1), nothing, record).to(torch.uint8).flatten(1)


def _without_greatest(x: Tensor, codec: Format) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the groups without the spikes, and the spikes: places, and values as bits of a float32; 0: no spike.

    The second spike is the greatest element after the first was subtracted, and may lie at the same place.
    """
    cut = 23 - codec.spike_mantissa
    taken: list[tuple[Tensor, Tensor]] = []
    least = torch.tensor(_LEAST_SPIKE, device=x.device)
    for _ in range(2):
        place = x.abs().argmax(-1, keepdim=True)  # the first of equals
        value = x.gather(-1, place)
        bits = value.view(torch.int32)
        short = bits + (1 << (cut - 1)) >> cut << cut
        short = torch.where(short & 0x7FFFFFFF >= _INF << 16, bits >> cut << cut, short)
        exponent = short >> 23 & 0xFF
        short = torch.where(exponent >= least, short, 0)
        x = x.scatter(-1, place, value - short.view(torch.float32))
        taken.append((place, short))
        least = torch.where(short == 0, 256, (exponent - _SPIKES_APART).clamp(min=_LEAST_SPIKE))
    return x, taken


def _spike_base(codec: Format) -> int:
    """Return the offset from a scale's exponent to the exponent of a spike whose stored exponent is 0.

    The rest of a group is at most 2^bits scales; rotated, at most group_size times its greatest element.
    """
    return codec.bits - 3 - (codec.group_size.bit_length() - 1 if codec.hadamard else 0)


def _spike_words(taken: list[tuple[Tensor, Tensor]], scale_bits: Tensor, codec: Format) -> list[Tensor]:
    """Return spikes as 16 bits each, [rows, groups]: place, mantissa, exponent, sign, from the lowest bits on."""
    mantissa, words = codec.spike_mantissa, []
    base = ((scale_bits.unsqueeze(-1) >> 7 & 0xFF) + _spike_base(codec)) << mantissa
    for place, value in taken:
        small = ((value & 0x7FFFFFFF) >> (23 - mantissa)) - base
        small = small | (value >> 31 & 1) << (mantissa + _SPIKE_EXPONENT)
        word = place.int() | small << (codec.group_size.bit_length() - 1)
        words.append(torch.where(value == 0, 0, word).squeeze(-1))
    return words


def _codebook_encoded(x: Tensor, held: Tensor, taken: list[tuple[Tensor, Tensor]] | None, codec: Format) -> Tensor:
    """Return the payload [rows, bytes], uint8. held: True for groups with a 0. taken: their spikes."""
    lost, book = ~x.isfinite().all(-1), _BOOKS[codec.bits]
    parts = x.unflatten(-1, (_PARTS, -1))
    asked = _quotient(parts.abs().amax(-1), book.reach)
    scale_bits = _bf16_up(asked.amax(-1)).clamp(min=_MIN_CODEBOOK_SCALE, max=_NAN_SCALE)
    if taken is not None:  # an exponent that the first spike needs
        exponent = (taken[0][1] >> 23 & 0xFF).squeeze(-1)
        scale_bits = torch.maximum(scale_bits, exponent - _spike_base(codec) - ((1 << _SPIKE_EXPONENT) - 1) << 7)
    scale = _from_bf16(scale_bits).unsqueeze(-1)
    ratio = (asked / scale).view(torch.int32)
    widest = (((ratio + ((1 << _PART_SHIFT) - 1)) >> _PART_SHIFT) - _LEAST_PART).clamp(0, 63)
    shift = torch.where(held, book.shift, 0.0)[..., None, None]
    levels = _levels_of(book, held)
    half = 1 << (codec.bits - 1)

    def codes_of(number: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and elements in steps, moved by the shift, of each part at its scale."""
        step = _part_scale(number) * scale
        y = parts * torch.reciprocal(step).unsqueeze(-1) + shift
        place = y * (1.0 - book.bend * y.abs()) + half
        return place.nan_to_num(0.0).clamp(0.0, 2 * half - 0.5).to(torch.int32), y

    best = (widest - book.lower).clamp(min=0)
    if codec.mse:
        least = torch.full_like(asked, torch.inf)
        for lower in range(_TRIED):
            number = (widest - lower).clamp(min=0)
            codes, y = codes_of(number)
            off = (y - shift) - _looked_up(levels, codes)
            off = (off * 32.0).round().abs().clamp(max=_MOST_OFF)
            error = off.square().sum(-1) * _part_scale(number).square()
            best = torch.where(error < least, number, best)
            least = torch.where(error < least, error, least)
    codes, _ = codes_of(best)
    front = [_two_bytes(scale_bits | held.int() << 15), _six_bits(best)]
    if taken is not None:
        front += [_two_bytes(word) for word in _spike_words(taken, scale_bits, codec)]
    return _records(lost, front, codes.flatten(-2), codec)


def _part_scale(number: Tensor) -> Tensor:
    """Return the scale of a part relative to its group's: 6 bits -> 1.125 * 2^-8 to 1."""
    return ((number + _LEAST_PART) << _PART_SHIFT).to(torch.int32).view(torch.float32)


def _six_bits(numbers: Tensor) -> Tensor:
    """Pack [..., 8] numbers of 6 bits into 6 bytes, the first number in the lowest bits."""
    fours = numbers.unflatten(-1, (2, 4)) << torch.arange(0, 24, 6, dtype=torch.int32, device=numbers.device)
    words = fours.sum(-1, keepdim=True, dtype=torch.int32)
    return (words >> torch.arange(0, 24, 8, dtype=torch.int32, device=numbers.device) & 0xFF).flatten(-2)


def _levels_of(book: _Book, held: Tensor) -> Tensor:
    """Return the levels of each group in steps, [..., 2^bits]. held [...]: bool, True for a group with a 0."""
    return torch.tensor(book.levels, dtype=torch.float32, device=held.device)[held.long()]


def _looked_up(levels: Tensor, codes: Tensor) -> Tensor:
    """Return the codes [..., parts, elements] in steps. levels: [..., count] of each group."""
    return levels.gather(-1, codes.flatten(-2).long()).view(codes.shape)


def _whole_range(low: Tensor, high: Tensor, codec: Format) -> tuple[Tensor, ...]:
    """Return zero point and scale of each group, without a search, and the words of its record.

    A scale of NaN: the group has no range.
    """
    if codec.compact:
        return _compact_range(low, high, codec)
    zero = torch.zeros_like(low) if codec.symmetric else _from_bf16(_bf16_down(low + 0.0))  # + 0: -0 is 0
    if codec.symmetric:
        return _wide(zero, _scale(torch.maximum(-low, high), _half(codec)), codec)
    return _wide(zero, _scale(high - zero, _levels(codec)), codec)


def _may_miss_zero(codec: Format) -> bool:
    """Return True if 0 may lie between two values of the codes."""
    return not codec.symmetric and not (codec.compact and codec.bits >= 5)


def _range_with_zero(low: Tensor, high: Tensor, codec: Format) -> tuple[Tensor, ...]:
    """Return the range of groups with an exact 0: the value of code k is 0.

    The scale is the least with no element more than `slack` of a step outside of the values of the codes:
    -k - slack <= x / scale <= levels - k + slack. k is one of the two whole numbers next to the point at which both
    ends require the same scale.
    """
    levels, slack = _levels(codec), _slack(codec)
    spread = _quotient(high - low, levels + 2 * slack)
    least = 2.0**-120 if codec.compact else 2.0**-126
    spread = torch.where(spread > least, spread, least)

    def scale_of(k: Tensor) -> Tensor:
        below, above = -low / (k + slack), high / (levels - k + slack)
        asked = torch.where(below > spread, below, spread)  # not so if 0 / 0: an end that is 0 asks for nothing
        return torch.where(above > asked, above, asked)

    # Two k in any case: without slack one end of the codes serves no group that reaches beyond zero there.
    first = (-low / spread - slack).floor().clamp(0, levels - 1)
    second = first + 1
    a, b = scale_of(first), scale_of(second)
    k, (upper, lower) = torch.where(b < a, second, first), _bits(torch.where(b < a, b, a))
    grain = _COMPACT_STEP if codec.compact else 1
    up = (upper + (grain - 1) + (lower != 0).int()) & -grain
    scale = _from_bf16(torch.where(up >= _INF, _NAN_SCALE, up))
    zero = -(k * scale)
    scale = torch.where((high - zero).isfinite(), scale, torch.nan)
    if not codec.compact:
        return zero, scale, _upper(scale) | _WHOLE, _whole(k)
    return zero, scale, _compact_word(scale, k * -(_OFFSETS >> codec.bits))


def _quotient(x: Tensor, by: float) -> Tensor:
    """Return x / by, rounded once. For a Python number torch's CUDA kernel multiplies with the reciprocal."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def _wide(zero: Tensor, scale: Tensor, codec: Format) -> tuple[Tensor, ...]:
    """Return an asymmetric or symmetric range."""
    return (zero, scale, _upper(scale)) if codec.symmetric else (zero, scale, _upper(scale), _upper(zero))


def _scale(range_: Tensor, steps: float) -> Tensor:
    """Return a bf16 scale as float32; NaN if there is none."""
    step = _quotient(range_ + 0.0, steps)
    scale_bits = _bf16_up(step).clamp(min=_MIN_SCALE)
    # A negative value has its sign bit first: as bits it is above Inf.
    lost = (scale_bits >= _INF) | step.isnan()
    return _from_bf16(torch.where(lost, _NAN_SCALE, scale_bits))


def _compact_range(low: Tensor, high: Tensor, codec: Format) -> tuple[Tensor, ...]:
    slack = _slack(codec)
    levels, unit = _levels(codec), (1 << codec.bits) / _OFFSETS
    spread = _quotient(high - low, levels + 2 * slack)
    below, above = _quotient(-low, unit * (_OFFSETS - 1) + slack), _quotient(high, levels + slack)
    least = torch.where(below > spread, below, spread)
    least = torch.where(above > least, above, least)
    upper, lower = _bits(least)
    up = (upper + (_COMPACT_STEP - 1) + (lower != 0).int()) & -_COMPACT_STEP
    up = torch.where((up >= _INF) | least.isnan(), _NAN_SCALE, up.clamp(min=_MIN_COMPACT_SCALE))
    first = _with_offset(_from_bf16(up), 0, low, high, codec)
    second = _with_offset(_from_bf16(up + _COMPACT_STEP), 0, low, high, codec)
    return _chosen(first[1].isnan(), second, first)


def _with_offset(scale: Tensor, place: int, low: Tensor, high: Tensor, codec: Format) -> tuple[Tensor, ...]:
    """Return a range with an offset. place 0: nearest to the middle; 1: the neighbour towards it; 2: the other one."""
    levels, unit, slack = _levels(codec), (1 << codec.bits) / _OFFSETS, _slack(codec)
    inverse = torch.reciprocal(scale)
    middle = ((low * 0.5 + high * 0.5) * inverse - levels * 0.5) * (1 / unit)
    nearest = middle.round()
    side = torch.where(middle < nearest, -1.0, 1.0)
    offset = (nearest + (0, side, -side)[place]).clamp(1 - _OFFSETS, 0)
    zero = offset * unit * scale
    serves = ((low - zero) * inverse >= -slack) & ((high - zero) * inverse <= levels + slack)
    scale = torch.where(serves, scale, torch.nan)
    return zero, scale, _compact_word(scale, offset)


def _compact_word(scale: Tensor, offset: Tensor) -> Tensor:
    number = _whole(offset + (_OFFSETS - 1))
    return _upper(scale) | (number & 15) | (number >> 4) << 15


def _best_range(x: Tensor, low: Tensor, high: Tensor, whole: tuple[Tensor, ...], codec: Format) -> tuple[Tensor, ...]:
    """Return the first of several ranges with the least sum of squared errors; `whole` if none is valid."""
    origin = torch.zeros_like(low) if codec.symmetric else low
    best, least = whole, torch.full_like(low, torch.inf)
    for scale, ranges in _tried(low, high, whole, codec):
        inverse = torch.reciprocal(scale)
        positions = _finely(x, origin.unsqueeze(-1), inverse.unsqueeze(-1)) | 1
        for range_ in ranges:
            shift = _finely(origin, range_[0], inverse) & ~1
            last = positions + shift.unsqueeze(-1) & 255  # odd: the middle of 1/128 of a step
            error = torch.minimum(last, 256 - last).square().sum(-1, dtype=torch.int32).float()
            ratio = range_[1] * torch.reciprocal(whole[1])
            error = error * (ratio * ratio)
            better = error < least
            best = _chosen(better, range_, best)
            least = torch.where(better, error, least)
    return best


def _finely(x: Tensor, origin: Tensor, inverse: Tensor) -> Tensor:
    """Return the distance from origin to x in whole 1/256 of a step; any number for an invalid range."""
    return _whole(((x - origin) * (inverse * 256.0)).round().clamp(-(2.0**22), 2.0**22))


def _tried(
    low: Tensor, high: Tensor, whole: tuple[Tensor, ...], codec: Format
) -> Iterator[tuple[Tensor, list[tuple[Tensor, ...]]]]:
    """Yield the ranges that mse tries, by scale. A range with a scale of NaN is invalid."""

    def checked(scale: Tensor) -> Tensor:
        return torch.where(whole[1].isfinite() & scale.isfinite() & (scale >= _MIN_TRIED_SCALE), scale, torch.nan)

    def wide(zero: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Return a range, valid if every element lies within half a step of the value of a code."""
        fine = torch.reciprocal(scale) * 256.0
        first, last = (((end - zero) * fine).round() for end in (low, high))
        half, levels = _half(codec), _levels(codec)
        serves = (first >= -127 - half * 256) & (last <= (levels - half) * 256 + 127)
        return _wide(zero, torch.where(serves, scale, torch.nan), codec)

    if codec.compact:
        bits = _upper(whole[1])
        for scale in (whole[1], _from_bf16(torch.where(bits >= _INF, bits, bits + _COMPACT_STEP))):
            tried, places = checked(scale), 3 if codec.bits < 4 else 2 if codec.bits == 4 else 1
            yield tried, [_with_offset(tried, place, low, high, codec) for place in range(places)]
    elif codec.symmetric:
        for inside in (0.0, _INSIDE / 2, _INSIDE):
            tried = checked(_scale(torch.maximum(-low, high), _half(codec) + inside))
            yield tried, [wide(whole[0], tried)]
    else:
        tried = checked(whole[1])
        yield tried, [wide(whole[0], tried)]
        for room, parts in ((0.0, [0.5]), (0.5, [place * _THIRD for place in range(_PLACES)])):
            tried = checked(_scale(high - low, _levels(codec) + (2 * _INSIDE - room)))
            least, most = high - (_levels(codec) + _INSIDE) * tried, low + _INSIDE * tried
            wishes = [least + (most - least) * part for part in parts]
            yield tried, [wide(_from_bf16(_bf16_half_up(wish)), tried) for wish in wishes]


def _chosen(which: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return range a of each group where `which` is true, else b."""
    return tuple(torch.where(which, x, y) for x, y in zip(a, b, strict=True))


def _without_spikes(x: Tensor, codec: Format, draw: Draw) -> tuple[Tensor, list[Tensor]]:
    """Return the groups with other elements at the extremes' places; least, greatest (bf16 bits) and their places."""
    places = [x.argmin(-1, keepdim=True), x.argmax(-1, keepdim=True)]
    values = [x.gather(-1, place) + 0.0 for place in places]
    if codec.stochastic:
        pair = _pairs(x, draw, slice(codec.group_size // 2, codec.group_size // 2 + 1))
        values = [_bf16_random(value, pair >> shift & 0xFFFF) for value, shift in zip(values, (0, 16), strict=True)]
    else:
        values = [_bf16_nearest(value) for value in values]
    numbers = torch.arange(3, device=x.device)
    free = ((numbers != places[0]) & (numbers != places[1])).int().argmax(-1, keepdim=True)
    other = x.gather(-1, free)
    for place in places:
        x = x.scatter(-1, place, other)
    return x, [value.squeeze(-1) for value in (*values, *(place.int() for place in places))]


def _rounding_offsets(x: Tensor, draw: Draw) -> Tensor:
    """Return an offset between -1/2 and 1/2 for every element of the groups [rows, groups, group_size]."""
    pairs = _pairs(x, draw, slice(x.shape[-1] // 2))
    random = torch.cat([pairs >> 20, pairs >> 4 & 0xFFF], dim=-1)  # an element of each half of the group
    return random.float() * (1 / 4096) + (0.5 / 4096 - 0.5)


def _pairs(x: Tensor, draw: Draw, which: slice) -> Tensor:
    """Return 32 random bits each, in int64, for every group of [rows, groups, group_size].

    A group has group_size / 2 of them for its elements and one for its spikes.
    """
    rows, groups, g = x.shape
    row = torch.arange(rows, dtype=torch.int64, device=x.device).unsqueeze(-1) * draw.groups_a_row
    number = draw.first_group + row + torch.arange(groups, dtype=torch.int64, device=x.device)
    key = _mix64(draw.key + (number + 1) * _signed(0x9E3779B97F4A7C15)).unsqueeze(-1)
    step = _shifted(key, 32) | 1
    return _mix32(((key & _M32) + torch.arange(g, dtype=torch.int64, device=x.device)[which] * step) & _M32)


def _mix32(x: Tensor) -> Tensor:
    """Hash 32-bit numbers in int64: C. Wellons, "lowbias32"."""
    x = (x ^ x >> 16) * 0x7FEB352D & _M32
    x = (x ^ x >> 15) * 0x846CA68B & _M32
    return x ^ x >> 16


def _mix64(x: Tensor) -> Tensor:
    """Hash int64 numbers with wrap-around: S. Vigna, "splitmix64"."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return x >> by, unsigned."""
    return x >> by & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _signs(g: int, device: torch.device) -> Tensor:
    """Return the signs, 1 or -1, that multiply the elements of a group before the rotation."""
    numbers = torch.arange(g, dtype=torch.int64, device=device) + 0x9E3779B9
    return torch.where(_mix32(numbers & _M32) >> 31 != 0, -1.0, 1.0)


def _rotated(x: Tensor) -> Tensor:
    """Multiply with the Hadamard matrix of +-1: sums and differences of neighbours, then at distance 2, 4 ..."""
    stride = 1
    while stride < x.shape[-1]:
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    return x


def decode(payload: Tensor, output: Tensor, codec: Format) -> None:
    """Decode payload [rows, bytes] into output [rows, numel] of fp32, bf16 or fp16."""
    values = _turned_back(_values(payload, codec), codec)
    for place, spike in _spikes_beside(payload, codec):
        values = values.scatter(-1, place, values.gather(-1, place) + spike)
    values = values.flatten(1)
    output.copy_(_stored(values[:, : output.shape[1]], output.dtype))


def decode_sum(payloads: Tensor, output: Tensor, codec: Format, factor: float) -> None:
    """Write the sum of payloads [ranks, bytes], in rank order, in float32, times factor, into output [numel]."""
    values = _whole_sum(payloads, codec).flatten() * factor
    output.copy_(_stored(values[: output.shape[0]], output.dtype))


def decode_sum_encode(
    payloads: Tensor, payload: Tensor, reduce: Format, gather: Format, factor: float, draw: Draw = NO_DRAW
) -> None:
    """Encode the sum of payloads [ranks, bytes] times factor into payload [bytes].

    Rotated groups stay rotated, because the sum of rotated groups is the rotated sum. With spikes they do not.
    """
    if reduce.codebook and reduce.spikes:
        payload.copy_(_encoded_whole((_whole_sum(payloads, reduce) * factor).unsqueeze(0), gather, draw)[0])
        return
    payload.copy_(_encoded((_sum(payloads, reduce) * factor).unsqueeze(0), gather, draw)[0])


def encode_feedback(
    input: Tensor, payload: Tensor, residual: Tensor, momentum: float, codec: Format, draw: Draw = NO_DRAW
) -> None:
    """Encode input [1, numel] plus a residual (8 bits, bf16) into payload [1, bytes]; replace the residual: rows.py."""
    numel, own = input.shape[1], residual_format(codec.group_size)
    if numel == 0:
        return
    carried = torch.empty(1, numel, dtype=torch.float32, device=input.device)
    if residual.dtype is torch.uint8:
        decode(residual.view(1, -1), carried, own)
    else:
        carried.copy_(residual.view(1, -1)[:, :numel]).add_(0.0)  # -0 is 0
    zero = (input == 0) & (not codec.hadamard)  # a rotated zero does not decode to zero
    x = torch.where(zero, -0.0, carried + input)
    arrives = torch.empty_like(x)
    encode(x, payload, codec, draw)
    decode(payload, arrives, codec)
    lost = torch.where(zero & ~arrives.isnan(), 0.0, x - arrives) * (1 - momentum)
    lost = (lost + torch.where(zero, carried, carried * momentum)).nan_to_num(0.0, 0.0, 0.0)
    if residual.dtype is torch.uint8:
        encode(lost, residual.view(1, -1), own)
    else:
        first = numel - 1 - (numel - 1) % codec.group_size  # of the last group, which is padded with it
        residual.view(1, -1)[:, numel:] = lost[:, first : first + 1]
        residual.view(1, -1)[:, :numel] = lost


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
    """Encode the sum of payloads [ranks, bytes] times factor into payload [bytes], and write its residual."""
    if not (reduce.codebook and reduce.spikes):  # as decode_sum_encode
        reduce, gather = (replace(codec, hadamard=False) for codec in (reduce, gather))
    sums = (_whole_sum(payloads, reduce) * factor).view(1, -1)
    encode_feedback(sums, payload.view(1, -1), residual, momentum, gather, draw)


def _sum(payloads: Tensor, codec: Format) -> Tensor:
    """Return the sum of payloads [ranks, bytes] as [groups, group_size], float32, still rotated with hadamard."""
    total, *others = _values(payloads, codec).unbind(0)
    for value in others:
        total = total + value
    return total


def _whole_sum(payloads: Tensor, codec: Format) -> Tensor:
    """Return the sum of payloads [ranks, bytes] as [groups, group_size], float32: codes, rotated back, then spikes."""
    total = _turned_back(_sum(payloads, codec), codec)
    both = _spikes_beside(payloads, codec)
    for rank in range(len(payloads)):
        for places, spikes in both:
            total = total.scatter(-1, places[rank], total.gather(-1, places[rank]) + spikes[rank])
    return total


def _spikes_beside(payload: Tensor, codec: Format) -> list[tuple[Tensor, Tensor]]:
    """Return places and values [rows, groups, 1] of the codebook's spikes, which are added to the decoded codes."""
    if not (codec.codebook and codec.spikes) or payload.numel() == 0:
        return []
    record = payload.reshape(payload.shape[0], -1, codec.record_bytes).to(torch.int32)
    mantissa, places = codec.spike_mantissa, codec.group_size.bit_length() - 1
    base = ((record[..., 1:2] << 1 & 0xFF | record[..., :1] >> 7) + _spike_base(codec)) << mantissa
    both = []
    for at in (8, 10):
        word = record[..., at : at + 1] | record[..., at + 1 : at + 2] << 8
        small = word >> places & ((1 << (mantissa + _SPIKE_EXPONENT)) - 1)
        bits = (small + base << (23 - mantissa)) & 0x7FFFFFFF | (word >> 15) << 31
        value = torch.where(small >> mantissa == 0, 0, bits).view(torch.float32)
        both.append(((word & (codec.group_size - 1)).long(), value))
    return both


def _turned_back(values: Tensor, codec: Format) -> Tensor:
    """Return the values [..., group_size] rotated back."""
    if not codec.hadamard:
        return values
    return _rotated(values) * (1 / codec.group_size) * _signs(codec.group_size, values.device)


def _values(payload: Tensor, codec: Format) -> Tensor:
    """Return the values [rows, groups, group_size], float32, of payloads [rows, bytes], still rotated with hadamard."""
    rows = payload.shape[0]
    if payload.numel() == 0:
        return torch.zeros(rows, 0, codec.group_size, device=payload.device)
    record = payload.reshape(rows, -1, codec.record_bytes).to(torch.int32)
    front, at = record[..., : codec.metadata_bytes], 0

    def word(width: int = 2) -> Tensor:
        nonlocal at
        bytes_ = front[..., at : at + width]
        at += width
        return bytes_ if width == 1 else bytes_[..., :1] | bytes_[..., 1:] << 8

    scale_bits = word()
    if codec.codebook:
        return _codebook_values(scale_bits, record, codec)
    scale = _from_bf16(scale_bits & 0x7FF0 if codec.compact else scale_bits)
    if codec.compact:
        offset = (scale_bits & 15 | scale_bits >> 11 & 16) - (_OFFSETS - 1)
        zero = offset.float() * ((1 << codec.bits) / _OFFSETS) * scale
    elif codec.symmetric:
        zero = torch.zeros_like(scale)
    else:
        zero_bits, whole = word(), scale_bits >= _WHOLE
        scale = torch.where(whole, -scale, scale)
        zero = torch.where(whole, -(zero_bits.float() * scale), _from_bf16(zero_bits))
    spikes = [_from_bf16(word()), _from_bf16(word())] if codec.spikes else []
    places = [word(codec.place_bytes).long() & (codec.group_size - 1) for _ in spikes]
    values = (_codes(record, codec) - _half(codec)).float() * scale + zero
    for spike, place in zip(spikes, places, strict=True):
        values = values.scatter(-1, place, torch.where(scale.isnan(), values.gather(-1, place), spike))
    return values


def _codebook_values(scale_bits: Tensor, record: Tensor, codec: Format) -> Tensor:
    """Return values [rows, groups, group_size] from scale_bits [rows, groups, 1] and records."""
    thirds = record[..., 2:8].unflatten(-1, (2, 3)) << torch.arange(0, 24, 8, dtype=torch.int32, device=record.device)
    fours = thirds.sum(-1, keepdim=True, dtype=torch.int32)
    numbers = (fours >> torch.arange(0, 24, 6, dtype=torch.int32, device=record.device) & 63).flatten(-2)
    step = _part_scale(numbers) * _from_bf16(scale_bits & 0x7FFF)
    levels = _levels_of(_BOOKS[codec.bits], (scale_bits >= _WHOLE).squeeze(-1))
    codes = _codes(record, codec).unflatten(-1, (_PARTS, -1))
    return (_looked_up(levels, codes) * step.unsqueeze(-1)).flatten(-2)


def _codes(record: Tensor, codec: Format) -> Tensor:
    """Return codes [rows, groups, group_size], int32, of records [rows, groups, bytes]."""
    codes = torch.zeros(*record.shape[:2], codec.group_size, dtype=torch.int32, device=record.device)
    at = codec.metadata_bytes
    for width, shift in _planes(codec.bits):
        plane = record[..., at : at + codec.group_size * width // 8]
        positions = torch.arange(0, 8, width, dtype=torch.int32, device=record.device)
        units = (plane.unsqueeze(-1) >> positions & ((1 << width) - 1)).flatten(-2)
        codes |= units << shift
        at += codec.group_size * width // 8
    return codes


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values rounded to dtype, with one NaN for all NaNs."""
    return values.to(dtype).masked_fill(values.isnan(), float("nan"))


def _half(codec: Format) -> int:
    """Return the offset of each code, so that none is negative."""
    return (1 << (codec.bits - 1)) - 1 if codec.symmetric else 0


def _levels(codec: Format) -> int:
    """Return the greatest code."""
    return 2 * _half(codec) if codec.symmetric else (1 << codec.bits) - 1


def _slack(codec: Format) -> float:
    """Return the steps by which the ends of a group may lie outside of the values of its codes."""
    return 0.0 if codec.stochastic else _INSIDE


def _planes(bits: int) -> list[tuple[int, int]]:
    """Return (width of a unit, its position in the code), widest first: 6 bits -> [(4, 0), (2, 4)]."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return [(width, sum(widths[:i])) for i, width in enumerate(widths)]


def _bits(x: Tensor) -> Tensor:
    """Return the 32 bits of float32 as (upper 16, lower 16), without sign extension."""
    bits = x.view(torch.int32)
    return torch.stack([bits >> 16 & 0xFFFF, bits & 0xFFFF])


def _bf16_down(x: Tensor) -> Tensor:
    """Return the bits of the largest bf16 not above x."""
    upper, lower = _bits(x)
    return (upper + ((upper >= 0x8000) & (lower != 0)).int()) & 0xFFFF


def _bf16_up(x: Tensor) -> Tensor:
    """Return the bits of the smallest bf16 not below x, x >= 0."""
    upper, lower = _bits(x)
    return upper + (lower != 0).int()


def _bf16_nearest(x: Tensor) -> Tensor:
    """Return the bits of the bf16 nearest to x, ties to even; those of Inf if it is too large."""
    upper, lower = _bits(x)
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper & 1 != 0))
    return torch.where(x.isnan(), _NAN_SCALE, upper + up.int())


def _bf16_half_up(x: Tensor) -> Tensor:
    """Return the bits of the bf16 nearest to x, ties away from 0."""
    upper, lower = _bits(x)
    return upper + (lower >= 0x8000).int() & 0xFFFF


def _bf16_random(x: Tensor, random: Tensor) -> Tensor:
    """Return the bits of one of the two bf16 next to x, chosen without bias; those of Inf if x is too large."""
    bits = (x.view(torch.int32).to(torch.int64) & _M32) + random >> 16
    return torch.where(x.isnan(), _NAN_SCALE, bits).int()


def _is_not_finite(bits: Tensor) -> Tensor:
    return bits & _INF == _INF


def _upper(x: Tensor) -> Tensor:
    """Return the bits of a bf16 value that is stored in float32."""
    return _bits(x)[0]


def _whole(x: Tensor) -> Tensor:
    """Return a small whole number; any number for a group with non-finite values."""
    return x.nan_to_num(0.0).to(torch.int32)


def _two_bytes(word: Tensor) -> Tensor:
    return torch.stack([word & 0xFF, word >> 8 & 0xFF], dim=-1)


def _from_bf16(bits: Tensor) -> Tensor:
    return (bits << 16).view(torch.float32)
