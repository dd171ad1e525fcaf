// The arithmetic of one group, for host and device, without torch.
//
// Every step is one IEEE operation in float32, rounded to nearest even, so that a CPU and a GPU that follow
// it agree to the bit. That holds only if the compiler does not fuse a multiplication with an addition:
// build with -ffp-contract=off (C++) and -fmad=false (nvcc). flash_allreduce_plugin/codec/reference.py is the
// same text in PyTorch.
//
// Four layouts, b bits, g elements in a group:
//
//   asymmetric
//     zero   = bf16 rounded down (min x)                              codes 0 ... 2^b - 1
//     scale  = bf16 rounded up ((max x - zero) / (2^b - 1)), at least 2^-126
//     code   = rint((x - zero) * (1 / scale))
//     value  = code * scale + zero
//
//   symmetric
//     half   = 2^(b-1) - 1, zero = 0                                  codes 0 ... 2 * half
//     scale  = bf16 rounded up (max |x| / half), at least 2^-126
//     code   = rint(x * (1 / scale)) + half
//     value  = (code - half) * scale
//
//   compact
//     scale  = the least with 3 bits of mantissa for which an offset fits, at least 2^-120
//     zero   = offset * 2^b / 32 * scale, offset -31 ... 0: the offset that puts the middle of the codes
//              nearest to the middle of the group
//     code, value as asymmetric                                       codes 0 ... 2^b - 1
//
//     An offset fits if no element lies more than 7/16 of a step outside of the codes' values (with
//     stochastic rounding: if none lies outside). The least scale of 3 bits that is as large as the group
//     asks for, or the next one, has such an offset: offsets are so close that 1/23 more is enough, and the
//     next scale is 1/15 larger.
//
//   codebook, a group is 8 parts of g / 8 elements
//     asked  = max |x| of a part / reach
//     scale  = bf16 rounded up (the largest asked of the group), at least 2^-112
//     step   = scale * f, f a float of 3 bits of mantissa between 1.125 * 2^-8 and 1: rounded up
//              (asked / scale), or, below 7 bits, the next one below
//     y      = x * (1 / step), + shift in a group that holds a 0
//     code   = y * (1 - bend * |y|) + 2^(b-1), rounded down           codes 0 ... 2^b - 1
//     value  = level of code * step
//
//     Levels: of a table at 2, 3 and 4 bits, computed at 5 and 6, equal steps at 7 and 8. Cells grow with the
//     distance from 0, as those that are best for Gaussian values (S. Lloyd, "Least squares quantization in
//     PCM", 1982; J. Max, 1960). A level is the mean of the values in its cell. Values beyond the last cell
//     are clipped (docs/trust/numerics.md). With mse the step of a part is the one of five with the least sum of
//     squared errors, in whole 1/32 of a step.
//
// Metadata are rounded outwards, which keeps every element inside the range of the codes, so nothing is
// clipped elsewhere: (max - zero) / scale exceeds 2^b - 1 by rounding errors of 2^-22 at most, which rint
// removes. A group that holds a NaN or an Inf, or has a range that float32 or bf16 cannot hold, is sent as
// scale = NaN, zero = 0, codes 0, and is decoded as NaN throughout: an overflow is never hidden.
//
// Exact zeros. A group that holds an exact 0 gets it back exactly: 0 is the value of a code there. That is so
// in every symmetric group, and in compact ones from 5 bits on, where an offset is a whole number of steps.
// Elsewhere such a group has a range of its own, which begins k steps below 0, k whole:
//
//   asymmetric, and compact at 2, 3 and 4 bits
//     scale  = rounded up (the least for which, with one of the best two k, no element lies more than 7/16 of
//              a step outside of the codes' values; with stochastic rounding, none outside), not below the
//              least of other groups
//     zero   = -(k * scale), which float32 holds exactly: code k is k * scale - k * scale
//
//   The metadata are k and a scale with its sign set; compact, the offset that equals k steps. A 0 rounds to
//   k: in steps it is k * (1 + 2^-23) at most, up to 255 + 2^-15, and u below stays 2^-13 away from 1/2.
//
// Options, in the order in which encoding applies them:
//
//   hadamard     The group, its signs changed after a fixed pattern, times the Hadamard matrix (entries
//                +-1). Decoding multiplies the sum of the ranks by the same matrix, by 1 / g and by the
//                signs. A group's sum is encoded again while rotated. (TACO; SDP4Bit, arXiv 2410.15526.)
//   spikes       The least and the greatest element, the first of equals, are sent as bf16, rounded to
//                nearest (stochastic: at random). A third element stands in for them in the steps that
//                follow. (FlashCommunication V2, arXiv 2508.03760.)
//                With the codebook, before the rotation: twice, the element of greatest magnitude, the first of
//                equals, is rounded to a short float, which is sent and subtracted. So the codes hold the rest
//                of the element, and the second spike may be more of the first. Decoding adds both, rank by
//                rank, to the sum of the codes, rotated back. No spike: below 2^-100, or a second one more than
//                14 octaves below the first. The scale is large enough for the exponent of the first.
//   mse          Other ranges are tried (below), with ends less than half a step inside of the group's own:
//                every element still rounds to a code, so the error stays below half a step. The first range
//                with the least sum of squared errors is taken, except in a group with a range of its own for
//                its 0. Errors are counted in odd 1/256 of a step: no order of adding changes the sum.
//   stochastic   rint(t + u) with u uniform between -1/2 and 1/2, made from (key, group, element) alone. A
//                spike: bf16 rounded down (|x| + r 2^-16 of a step), r a whole number below 2^16.
#pragma once

#include <cstdint>
#include <cstring>

#include "wire_format.h"

namespace flash_allreduce {

// Of a tensor.
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr uint16_t kNaNScale = 0x7fc0;           // bf16
constexpr uint32_t kNaNBits = 0x7fc00000u;       // the one NaN that decoding writes
constexpr uint32_t kInfBits = 0x7f800000u;       // |bits| at or above it: not finite
constexpr uint32_t kMinScaleBits = 0x00800000u;  // 2^-126: 1 / scale stays finite
constexpr float kRoundMagic = 12582912.0f;       // 1.5 * 2^23: adding it rounds |x| < 2^22 to nearest even
constexpr uint32_t kRoundMagicBits = 0x4b400000u;

FLASH_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

FLASH_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

FLASH_HD float bf16_to_float(uint16_t x) { return bits_float(static_cast<uint32_t>(x) << 16); }

// The largest bf16 not above x (x not NaN).
FLASH_HD uint16_t bf16_round_down(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t away = (bits >> 31) & static_cast<uint32_t>((bits & 0xffffu) != 0);
  return static_cast<uint16_t>((bits >> 16) + away);
}

// The smallest bf16 not below x (x >= 0, not NaN).
FLASH_HD uint16_t bf16_round_up(float x) {
  const uint32_t bits = float_bits(x);
  return static_cast<uint16_t>((bits >> 16) + ((bits & 0xffffu) != 0 ? 1u : 0u));
}

FLASH_HD constexpr int code_half(int bits, Layout layout) {
  return layout == Layout::kSymmetric ? (1 << (bits - 1)) - 1 : 0;
}

FLASH_HD constexpr int code_levels(int bits, Layout layout) {
  return layout == Layout::kSymmetric ? 2 * code_half(bits, layout) : (1 << bits) - 1;
}

// The asymmetric zero point, a bf16 value. + 0 makes -0 and 0 the same bytes.
FLASH_HD float group_zero(float lo) {
  return bits_float(static_cast<uint32_t>(bf16_round_down(lo + 0.0f)) << 16);
}

// The range that a group's steps must cover.
FLASH_HD float group_reach(float lo, float hi, float zero, bool symmetric) {
  return (symmetric ? (-lo > hi ? -lo : hi) : hi - zero) + 0.0f;  // a -0 would sort above Inf
}

// The bits, as a float, of the scale of a group that asks for steps of this size, 0 or above: the next bf16
// value from there on, NaN if there is none.
FLASH_HD uint32_t served_scale(float asked) {
  if (!(asked <= bits_float(kInfBits - 0x10000u))) return kNaNBits;  // the largest bf16 value; not a NaN
  const uint32_t scale = (float_bits(asked) + 0xffffu) & 0xffff0000u;
  return scale < kMinScaleBits ? kMinScaleBits : scale;
}

// The same of a group between lo and hi. steps: code_levels asymmetric, code_half symmetric; the mse range
// adds to it.
FLASH_HD uint32_t group_scale(float lo, float hi, float zero, float steps, bool symmetric) {
  return served_scale(group_reach(lo, hi, zero, symmetric) / steps);
}

// In range for every element of a finite group, far out of it for a NaN and for a scale that is NaN.
FLASH_HD uint32_t encode_element(float x, float zero, float inverse_scale, int half) {
  const float t = (x - zero) * inverse_scale + kRoundMagic;
  return float_bits(t) - kRoundMagicBits + static_cast<uint32_t>(half);
}

FLASH_HD float decode_element(uint32_t code, float scale, float zero, int half) {
  return static_cast<float>(static_cast<int>(code) - half) * scale + zero;
}

// Nearest even; a NaN is the bf16 NaN. The caller checks for values that round to Inf.
FLASH_HD uint16_t bf16_nearest(float x) {
  const uint32_t bits = float_bits(x);
  return x != x ? kNaNScale : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Half precision, as codec_kernels.h does it for vectors. Nearest even; 65520 and above become Inf.
FLASH_HD float half_to_float(uint16_t h) {
  const uint32_t exponent = (h & 0x7c00u) << 13;
  const uint32_t normal = ((h & 0x7fffu) << 13) + (112u << 23);
  uint32_t bits = normal;
  if (exponent == 0) bits = float_bits(bits_float(normal + (1u << 23)) - bits_float(113u << 23));
  if (exponent == (0x7c00u << 13)) bits = normal + (112u << 23);
  return bits_float(bits | (h & 0x8000u) << 16);
}

FLASH_HD uint16_t half_nearest(float x) {
  if (x != x) return 0x7e00u;
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t h = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  if (magnitude < (113u << 23)) h = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  if (magnitude >= 0x47800000u) h = 0x7c00u;
  return static_cast<uint16_t>(h | ((bits >> 16) & 0x8000u));
}

// To one of the two next to x, the nearer the likelier. random: 16 bits.
FLASH_HD uint16_t bf16_random(float x, uint32_t random) {
  return x != x ? kNaNScale : static_cast<uint16_t>((float_bits(x) + random) >> 16);
}

FLASH_HD bool bf16_is_finite(uint16_t x) { return (x & 0x7f80u) != 0x7f80u; }

// Whole numbers, spread (C. Wellons, "lowbias32"; S. Vigna, "splitmix64").
FLASH_HD constexpr uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

FLASH_HD constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Whether element i of a group changes its sign before the rotation.
FLASH_HD constexpr bool rotation_flips(uint32_t i) { return (mix32(0x9e3779b9u + i) >> 31) != 0; }

// The seed of a group's random numbers.
FLASH_HD constexpr uint64_t group_key(uint64_t key, uint64_t group) {
  return mix64(key + (group + 1) * 0x9e3779b97f4a7c15u);
}

// 32 random bits for elements i and i + g / 2 of a group, i < g / 2; for its spikes, i = g / 2.
FLASH_HD constexpr uint32_t pair_random(uint64_t of_group, uint32_t i) {
  return mix32(static_cast<uint32_t>(of_group) + i * (static_cast<uint32_t>(of_group >> 32) | 1u));
}

// 16 of them for each spike.
FLASH_HD constexpr uint32_t spike_random(uint64_t of_group, int group_size, bool greatest) {
  return pair_random(of_group, static_cast<uint32_t>(group_size / 2)) >> (greatest ? 16 : 0) & 0xffffu;
}

// 12 of them for element i.
FLASH_HD constexpr uint32_t element_random(uint64_t of_group, int i, int group_size) {
  const uint32_t pair = pair_random(of_group, static_cast<uint32_t>(i & (group_size / 2 - 1)));
  return i < group_size / 2 ? pair >> 20 : (pair >> 4) & 0xfffu;
}

// One of 4096 numbers, spread evenly between -1/2 and 1/2 and never at the ends: nothing leaves the range of
// the codes.
FLASH_HD float rounding_offset(uint32_t random) {
  return static_cast<float>(random) * (1.0f / 4096) + (0.5f / 4096 - 0.5f);
}

// The scale and the zero point of a group.
struct Range {
  float zero;
  uint32_t scale;     // the bits as a float; NaN: the range is invalid
  uint32_t metadata;  // the sent word, 2 or 4 bytes
};

// By how many steps the ends of a group may lie outside of the values of its codes.
constexpr float kInside = 7.0f / 16;
FLASH_HD constexpr float slack_of(int options) { return options & kStochastic ? 0.0f : kInside; }

// ---- asymmetric and symmetric
FLASH_HD Range wide_range(float lo, float hi, int bits, Layout layout) {
  const bool symmetric = layout == Layout::kSymmetric;
  const float steps = static_cast<float>(symmetric ? code_half(bits, layout) : code_levels(bits, layout));
  Range r;
  r.zero = symmetric ? 0.0f : group_zero(lo);
  r.scale = group_scale(lo, hi, r.zero, steps, symmetric);
  r.metadata = (r.scale >> 16) | float_bits(r.zero);
  return r;
}

// ---- compact: a scale, and the offset nearest to the one that lies in the middle or a neighbour of it
constexpr uint32_t kMinCompactBits = 0x03800000u;  // 2^-120: an offset's part of it is no subnormal
constexpr uint32_t kCompactStep = 0x00100000u;     // from a scale to the next
constexpr int kOffsets = 32;

// In steps, from an offset to the next.
FLASH_HD constexpr float offset_unit(int bits) { return static_cast<float>(1 << bits) / kOffsets; }

FLASH_HD uint32_t compact_word(uint32_t scale, float offset) {
  const uint32_t number = float_bits(offset + (kRoundMagic + (kOffsets - 1)));  // 0 ... 31 in its last bits
  return (scale >> 16) | (number & 15u) | (number & 16u) << 11;
}

// place 0: the nearest offset; 1: its neighbour on the side of the middle; 2: the other neighbour.
FLASH_HD Range with_offset(uint32_t scale, int place, float lo, float hi, int bits, float slack) {
  const float levels = static_cast<float>(code_levels(bits, Layout::kCompact));
  const float unit = offset_unit(bits), inverse = 1.0f / bits_float(scale);
  const float middle = ((lo * 0.5f + hi * 0.5f) * inverse - levels * 0.5f) * (1.0f / unit);
  const float nearest = middle + kRoundMagic - kRoundMagic;
  const float side = middle < nearest ? -1.0f : 1.0f;
  const float wish = nearest + (place == 0 ? 0.0f : place == 1 ? side : -side);
  const float offset = wish < 1 - kOffsets ? 1 - kOffsets : wish > 0.0f ? 0.0f : wish;
  Range r;
  r.zero = offset * unit * bits_float(scale);
  const bool serves = (lo - r.zero) * inverse >= -slack && (hi - r.zero) * inverse <= levels + slack;
  r.scale = serves ? scale : kNaNBits;
  r.metadata = compact_word(r.scale, offset);
  return r;
}

FLASH_HD Range compact_range(float lo, float hi, int bits, float slack) {
  const float levels = static_cast<float>(code_levels(bits, Layout::kCompact));
  const float spread = (hi - lo) / (levels + 2 * slack);
  const float below = -lo / (offset_unit(bits) * (kOffsets - 1) + slack);
  const float above = hi / (levels + slack);
  const float most = below > spread ? below : spread;
  const float least = above > most ? above : most;  // a scale below it has no offset that serves
  const uint32_t up = (float_bits(least) + (kCompactStep - 1)) & ~(kCompactStep - 1);
  const uint32_t served = up < kMinCompactBits ? kMinCompactBits : up;
  const uint32_t first = served >= kInfBits ? kNaNBits : served;
  const Range r = with_offset(first, 0, lo, hi, bits, slack);
  const Range next = with_offset(first + kCompactStep, 0, lo, hi, bits, slack);
  const bool serves = r.scale != kNaNBits;
  return {serves ? r.zero : next.zero, serves ? r.scale : next.scale, serves ? r.metadata : next.metadata};
}

// The range of a group between lo and hi, without a search. slack: see slack_of.
FLASH_HD Range whole_range(float lo, float hi, int bits, Layout layout, float slack) {
  return layout == Layout::kCompact ? compact_range(lo, hi, bits, slack) : wide_range(lo, hi, bits, layout);
}

// ---- mse: a few scales are tried, each with zero points in a few places
//
//   asymmetric   The whole range. Then the group's ends may lie up to 7/16 of a step outside of the values of
//                the codes: one scale leaves the zero point no room, the last leaves it half a step, in which
//                it takes four places, evenly spread.
//   symmetric    The larger end lies 0, 7/32 or 7/16 of a step outside.
//   compact      The scale of the whole range and the one after it. Offsets one step apart have the same
//                errors: at 2 and 3 bits both neighbours of the nearest are tried, at 4 bits one, then none.
//
// All zero points of a scale share the positions of the elements, in whole 1/256 of a step above the group's
// least: a zero point is a number that is added to them, and the last 8 bits of the sum are the error.

constexpr int kMostPlaces = 4;

FLASH_HD constexpr int scales_of(Layout layout) { return layout == Layout::kCompact ? 2 : 3; }

FLASH_HD constexpr int places_of(int scale, int bits, Layout layout) {
  if (layout == Layout::kCompact) return bits < 4 ? 3 : bits == 4 ? 2 : 1;
  return layout == Layout::kAsymmetric && scale == 2 ? kMostPlaces : 1;
}

// The least width with the same search, up to constants.
FLASH_HD constexpr int searched_as(int bits, Layout layout) {
  return layout != Layout::kCompact || bits < 4 ? 2 : bits == 4 ? 4 : 5;
}

constexpr uint32_t kMinTriedBits = 0x08800000u;  // 2^-110: 256 / scale stays finite

// The bits of scale number `scale`, NaN: it is not tried. whole: of the scale of the range without a search.
FLASH_HD uint32_t tried_scale(int scale, uint32_t whole, float lo, float hi, int bits, Layout layout) {
  uint32_t tried = whole;
  if (layout == Layout::kCompact) {
    tried = whole + static_cast<uint32_t>(scale) * kCompactStep;
  } else if (layout == Layout::kSymmetric) {
    const float steps =
        static_cast<float>(code_half(bits, layout)) + static_cast<float>(scale) * (kInside / 2);
    tried = group_scale(lo, hi, 0.0f, steps, true);
  } else if (scale > 0) {
    const float room = scale == 1 ? 0.0f : 0.5f;
    tried =
        group_scale(lo, hi, lo, static_cast<float>(code_levels(bits, layout)) + (2 * kInside - room), false);
  }
  const bool serves = whole < kInfBits && tried < kInfBits && tried >= kMinTriedBits;
  return serves ? tried : kNaNBits;
}

// From `from` to x in whole 1/256 of a step: a number to which kRoundMagic is added.
FLASH_HD float finely(float x, float from, float inverse_scale) {
  return (x - from) * (inverse_scale * 256.0f) + kRoundMagic;
}

// The range of a tried scale and one of its places; its own scale is NaN if it does not serve. whole: the
// zero point of the range without a search.
FLASH_HD Range tried_range(int scale, int place, uint32_t tried, float whole, float lo, float hi, int bits,
                           Layout layout) {
  if (layout == Layout::kCompact) return with_offset(tried, place, lo, hi, bits, kInside);
  const float levels = static_cast<float>(code_levels(bits, layout));
  const float half = static_cast<float>(code_half(bits, layout));
  const float step = bits_float(tried), inverse = 1.0f / step;
  Range r;
  r.zero = whole;
  if (layout == Layout::kAsymmetric && scale > 0) {
    const float least = hi - (levels + kInside) * step, most = lo + kInside * step;
    const float part = scale == 1 ? 0.5f : static_cast<float>(place) * (1.0f / (kMostPlaces - 1));
    const float wish = least + (most - least) * part;
    r.zero = bits_float((float_bits(wish) + 0x8000u) & 0xffff0000u);
  }
  const float first = finely(lo, r.zero, inverse) - kRoundMagic;
  const float last = finely(hi, r.zero, inverse) - kRoundMagic;
  // Below half a step from the values of the codes.
  const bool serves = first >= -127.0f - half * 256.0f && last <= (levels - half) * 256.0f + 127.0f;
  r.scale = serves ? tried : kNaNBits;
  r.metadata = (r.scale >> 16) | float_bits(r.zero);
  return r;
}

// The sent word of a range, for a group without a 0.
FLASH_HD uint32_t word_of(float zero, uint32_t scale, int bits, Layout layout) {
  if (layout != Layout::kCompact) return (scale >> 16) | float_bits(zero);
  return compact_word(scale, zero / bits_float(scale) * (1.0f / offset_unit(bits)));
}

// Where the positions of a group's elements are counted from.
FLASH_HD float search_origin(float lo, Layout layout) { return layout == Layout::kSymmetric ? 0.0f : lo; }

// The number that is added to the positions for a zero point; even.
FLASH_HD uint32_t search_shift(float origin, float zero, float inverse_scale) {
  return float_bits(finely(origin, zero, inverse_scale)) & ~1u;
}

// The factor of a range's errors in steps. scale: of the range; whole: of the range without a search.
FLASH_HD float search_ratio(uint32_t scale, uint32_t whole) {
  return bits_float(scale) * (1.0f / bits_float(whole));
}

// The error of an element, squared, in (1/256 of a step)^2. It counts as odd, so that its size is a byte
// below 128: the middle of the 1/128 of a step where it lies.
FLASH_HD float squared_error(float x, float origin, float inverse_scale, uint32_t shift) {
  const uint32_t last = ((float_bits(finely(x, origin, inverse_scale)) | 1u) + shift) & 255u;
  const float error = static_cast<float>(last < 128 ? last : 256 - last);
  return error * error;
}

// ---- a group that holds an exact 0

// Whether 0 may lie between two values of the codes.
FLASH_HD constexpr bool may_miss_zero(int bits, Layout layout) {
  return layout == Layout::kAsymmetric || (layout == Layout::kCompact && bits < 5);
}

// Asymmetric: the sign of a scale with a zero point of whole steps.
constexpr uint32_t kWhole = 0x8000u;

// The scale for k codes below 0. An end that is 0 requires nothing, and 0 / 0 is not above `least`.
FLASH_HD float scale_with_zero(float k, float lo, float hi, float levels, float slack, float least) {
  const float below = -lo / (k + slack);
  const float above = hi / (levels - k + slack);
  const float most = below > least ? below : least;
  return above > most ? above : most;
}

// slack: see slack_of. 0 lies between lo and hi.
FLASH_HD Range range_with_zero(float lo, float hi, int bits, Layout layout, float slack) {
  const bool compact = layout == Layout::kCompact;
  const float levels = static_cast<float>(code_levels(bits, layout));
  const float spread = (hi - lo) / (levels + 2 * slack);  // if k need not be whole
  const float smallest = bits_float(compact ? kMinCompactBits : kMinScaleBits);
  const float least = spread > smallest ? spread : smallest;
  const float wish = -lo / least - slack;  // where both ends ask for the same scale
  const float nearest = wish + kRoundMagic - kRoundMagic;
  const float under = nearest > wish ? nearest - 1.0f : nearest;
  // Two k in any case: without slack one end of the codes serves no group that reaches beyond zero there.
  const float first = under < 0.0f ? 0.0f : under > levels - 1.0f ? levels - 1.0f : under;
  const float second = first + 1.0f;
  const float a = scale_with_zero(first, lo, hi, levels, slack, least);
  const float b = scale_with_zero(second, lo, hi, levels, slack, least);
  const float k = b < a ? second : first;
  const uint32_t grain = compact ? kCompactStep : 0x10000u;
  const uint32_t scale = (float_bits(b < a ? b : a) + (grain - 1)) & ~(grain - 1);
  Range r;
  r.zero = -(k * bits_float(scale));
  const bool serves = scale < kInfBits && float_bits(hi - r.zero) < kInfBits;  // hi - zero: 0 or above
  r.scale = serves ? scale : kNaNBits;
  const uint32_t steps = float_bits(k + kRoundMagic) & 0xffu;
  const uint32_t number =
      static_cast<uint32_t>(kOffsets - 1) - (steps * static_cast<uint32_t>(kOffsets) >> bits);
  r.metadata = compact ? (r.scale >> 16) | (number & 15u) | (number & 16u) << 11
                       : (r.scale >> 16) | kWhole | steps << 16;
  return r;
}

// The metadata in front of a group's codes.
struct Metadata {
  float scale;
  float zero;
};

// word: the sent 2 or 4 bytes.
FLASH_HD Metadata metadata_of(uint32_t word, int bits, Layout layout) {
  if (layout == Layout::kAsymmetric) {
    const uint32_t step = word << 16;  // kWhole is its sign
    const bool whole = static_cast<int32_t>(step) < 0;
    return {bits_float(step & 0x7fffffffu),
            whole ? static_cast<float>(word >> 16) * bits_float(step) : bits_float(word & 0xffff0000u)};
  }
  if (layout == Layout::kSymmetric) return {bits_float(word << 16), 0.0f};
  const float scale = bits_float((word & 0x7ff0u) << 16);
  const int offset = static_cast<int>((word & 15u) | (word >> 11 & 16u)) - (kOffsets - 1);
  return {scale, static_cast<float>(offset) * offset_unit(bits) * scale};
}

FLASH_HD Metadata read_metadata(const uint8_t* record, int bits, Layout layout) {
  uint32_t word = 0;
  memcpy(&word, record, static_cast<size_t>(spikes_offset(options_of(layout))));
  return metadata_of(word, bits, layout);
}

// ---- codebook

// How a step becomes codes, at one width.
struct Book {
  float reach;  // steps from 0 to the largest element of a part, with the step that clips nothing
  float bend;   // by how much cells grow with the distance from 0
  float shift;  // of a group that holds a 0, which so lies inside of a cell
  int lower;    // the step without a search is so many below the one that clips nothing
  float rise;   // 5 bits and more: how the levels follow the cells
  float curve;
};

FLASH_HD constexpr Book book_of(int bits) {
  return bits == 2   ? Book{2.125f, 0.0f, 0.375f, 1, 0.0f, 0.0f}
         : bits == 3 ? Book{5.0f, 1.0f / 16, 0.5f, 1, 0.0f, 0.0f}
         : bits == 4 ? Book{11.25f, 1.0f / 32, 0.5f, 1, 0.0f, 0.0f}
         : bits == 5 ? Book{19.0f, 3.0f / 256, 0.5f, 1, 17.0f / 2048, 96.0f / 131072}
         : bits == 6 ? Book{39.0f, 3.0f / 512, 0.5f, 1, 9.0f / 2048, 23.0f / 131072}
                     : Book{static_cast<float>(1 << (bits - 1)), 0.0f, 0.5f, 0, 0.0f, 0.0f};
}

// The level of a code of 2, 3 or 4 bits in steps, times 128. with_zero: the group holds a 0.
FLASH_HD constexpr int level_of(int bits, bool with_zero, int code) {
  constexpr int two[2][4] = {{-199, -57, 57, 199}, {-238, -101, 0, 162}};
  constexpr int three[2][8] = {{-637, -385, -211, -67, 67, 211, 385, 637},
                               {-687, -445, -273, -129, 0, 149, 327, 591}};
  constexpr int four[2][16] = {
      {-1475, -1146, -896, -690, -510, -349, -202, -66, 66, 202, 349, 510, 690, 896, 1146, 1475},
      {-1533, -1212, -960, -753, -574, -413, -266, -129, 0, 139, 286, 447, 626, 834, 1086, 1434}};
  return bits == 2 ? two[with_zero][code] : bits == 3 ? three[with_zero][code] : four[with_zero][code];
}

// Of widths 2, 3 and 4, one after the other, without and with a 0.
struct LevelTable {
  int16_t of[2][28];
};

FLASH_HD constexpr LevelTable make_levels() {
  LevelTable table{};
  for (int bits = 2; bits <= 4; ++bits) {
    for (int code = 0; code < 1 << bits; ++code) {
      for (int held = 0; held < 2; ++held) {
        table.of[held][(1 << bits) - 4 + code] = static_cast<int16_t>(level_of(bits, held != 0, code));
      }
    }
  }
  return table;
}

// Of 5 bits and more, in a group without a 0: w is the code from the middle of the codes on.
FLASH_HD constexpr float computed_level(float w, Book book) {
  const float u = w < 0.0f ? -w : w;
  return w * (1.0f + u * (book.rise + book.curve * u));
}

// The level of a code in steps.
FLASH_HD float level(int bits, bool with_zero, uint32_t code) {
  static constexpr LevelTable table = make_levels();
  const int at = static_cast<int>(code);
  if (bits > 4) {
    const Book book = book_of(bits);
    const float of_zero = with_zero ? computed_level(0.5f, book) : 0.0f;
    return computed_level(static_cast<float>(at) + (0.5f - static_cast<float>(1 << (bits - 1))), book) -
           of_zero;
  }
  return static_cast<float>(table.of[with_zero][(1 << bits) - 4 + at]) * (1.0f / 128);
}

constexpr uint32_t kMinCodebookBits = 0x07800000u;  // 2^-112: of a group's scale
constexpr int kPartShift = 20;                      // to a part's 6 bits in a float, ...
constexpr int kLeastPart = 953;                     // ... which are so much more there
constexpr int kTriedSteps = 5;      // by a search: the one that clips nothing, and the next below
constexpr float kMostOff = 361.0f;  // 128 errors of it, squared, are below 2^24, and their sum is exact

// Of a part against its group: number 0 to 63.
FLASH_HD float part_scale(int number) {
  return bits_float(static_cast<uint32_t>(number + kLeastPart) << kPartShift);
}

FLASH_HD int at_least_0(int number) { return number < 0 ? 0 : number; }

// The number of the step that clips nothing. asked: of the part, at most scale.
FLASH_HD int widest_part(float asked, float scale) {
  const int up = static_cast<int>(float_bits(asked / scale) + ((1u << kPartShift) - 1)) >> kPartShift;
  const int number = at_least_0(up - kLeastPart);
  return number > 63 ? 63 : number;
}

// The bits, as a float, of a group's scale; NaN if the group is not finite.
FLASH_HD uint32_t codebook_scale(float asked) {
  const uint32_t scale = static_cast<uint32_t>(bf16_round_up(asked)) << 16;
  return !(scale < kInfBits) ? kNaNBits : scale < kMinCodebookBits ? kMinCodebookBits : scale;
}

// ---- spikes with the codebook

constexpr int kLeastSpike = 27;   // exponent of a float: 2^-100
constexpr int kSpikesApart = 14;  // octaves

// The bits of x rounded to so many bits of mantissa, half away from 0; towards 0 where that would be Inf.
FLASH_HD uint32_t short_float(uint32_t x, int mantissa) {
  const int cut = 23 - mantissa;
  const uint32_t kept = ~((1u << cut) - 1), rounded = (x + (1u << (cut - 1))) & kept;
  return (rounded & 0x7fffffffu) < kInfBits ? rounded : x & kept;
}

FLASH_HD int exponent_of(uint32_t bits) { return static_cast<int>(bits >> 23 & 255u); }

// The part of the greatest element that a spike takes; 0: none. least: exponent below which there is no spike.
FLASH_HD uint32_t taken_spike(uint32_t x, int mantissa, int least) {
  const uint32_t value = short_float(x, mantissa);
  return exponent_of(value) >= least ? value : 0u;
}

// The least exponent of the second spike.
FLASH_HD int least_second_spike(uint32_t first) {
  const int least = exponent_of(first) - kSpikesApart;
  return first == 0 ? 256 : least > kLeastSpike ? least : kLeastSpike;
}

// The offset from a scale's exponent to the exponent of a spike whose stored exponent is 0. The group without
// its spikes is at most 2^bits scales; rotated, group_size times its greatest element.
FLASH_HD constexpr int spike_base(int bits, int group_size, bool rotated) {
  return bits - 3 - (rotated ? log_of(group_size) : 0);
}

// The bits, as a float, of the scale that the exponent of the first spike needs.
FLASH_HD uint32_t scale_for_spike(uint32_t scale, uint32_t first, int base) {
  const int needed = (exponent_of(first) - base - ((1 << kSpikeExponent) - 1)) * (1 << 23);
  return static_cast<int32_t>(scale) > needed ? scale : static_cast<uint32_t>(needed);
}

// The sent 16 bits.
FLASH_HD uint32_t spike_word(uint32_t value, uint32_t place, uint32_t scale, int base, int group_size) {
  const int mantissa = spike_mantissa(group_size);
  const uint32_t from = static_cast<uint32_t>(exponent_of(scale) + base) << mantissa;
  const uint32_t small = ((value & 0x7fffffffu) >> (23 - mantissa)) - from;
  const uint32_t sign = value >> 31 << (mantissa + kSpikeExponent);
  return value == 0 ? 0u : (place | (small | sign) << log_of(group_size)) & 0xffffu;
}

FLASH_HD uint32_t spike_place(uint32_t word, int group_size) {
  return word & static_cast<uint32_t>(group_size - 1);
}

FLASH_HD float spike_value(uint32_t word, uint32_t scale, int base, int group_size) {
  const int mantissa = spike_mantissa(group_size);
  const uint32_t small = word >> log_of(group_size) & ((1u << (mantissa + kSpikeExponent)) - 1);
  const uint32_t from = static_cast<uint32_t>(exponent_of(scale) + base) << mantissa;
  const uint32_t bits = ((small + from) << (23 - mantissa) & 0x7fffffffu) | word >> 15 << 31;
  return small >> mantissa == 0 ? 0.0f : bits_float(bits);
}

// y: x in steps, moved by the shift of a group that holds a 0. 0 of a NaN.
FLASH_HD uint32_t codebook_code(float y, int bits) {
  const float half = static_cast<float>(1 << (bits - 1)), last = 2 * half - 0.5f;
  const float magnitude = bits_float(float_bits(y) & 0x7fffffffu);
  const float place = y * (1.0f - book_of(bits).bend * magnitude) + half;
  const float above = place > 0.0f ? place : 0.0f;
  return static_cast<uint32_t>(static_cast<int>(above < last ? above : last));
}

// The error of an element, squared, in (1/32 of a step)^2: a whole number. shift: of its group.
FLASH_HD float codebook_error(float y, float shift, int bits) {
  const float off = (y - shift) - level(bits, shift != 0.0f, codebook_code(y, bits));
  const float magnitude = bits_float(float_bits(off * 32.0f) & 0x7fffffffu);
  const float whole = magnitude + kRoundMagic - kRoundMagic;
  const float counted = whole < kMostOff ? whole : kMostOff;
  return counted * counted;
}

// The NaN of an invalid operation differs between machines; we write one NaN on all.
FLASH_HD float canonical_nan(float x) { return x != x ? bits_float(kNaNBits) : x; }

}  // namespace flash_allreduce
