// Encoding with the codebook, rotated and searched or not. Included after option_kernels.h, for every instruction
// set; codec_math.h has the arithmetic.
//
//   a batch of groups at a time, as codec_kernels.h does it:
//     1. x -> greatest |x| of each part, and whether the group holds a 0
//     2. -> scale of the group, step of each part [the best of five], its inverse
//     3. x again -> codes -> planes
//   Rotated groups are floats in the first-level cache first.

#include "codebook_decoding.h"

namespace flash_allreduce {
namespace {

// ---- encoding -----------------------------------------------------------------------------------------

struct GreatestBits {
  FLASH_INLINE VecF of(VecF a, VecF b) {  // of non-negative values; a NaN is greater than Inf
    const VecI x = cast<VecI>(a), y = cast<VecI>(b);
    return cast<VecF>(x > y ? x : y);
  }
};

struct PartBounds {
  VecF greatest[kParts][kBatch];  // by lane, of each part of each group
  Without without[kBatch];        // zeros
};

// Of group j of a batch. kKeep: its elements as floats, too.
template <DType kType, bool kKeep = false>
FLASH_INLINE void take_parts(const uint8_t* x, int g, PartBounds& bounds, int j, float* kept = nullptr) {
  using E = Element<kType>;
  const int part = g / kParts;
  Without without = kWithoutZero;
  for (int p = 0; p < kParts; ++p) {
    VecF greatest = VecF{};
    for (int l = 0; l < part / kLanes; ++l) {
      const int i = p * part + l * kLanes;
      const VecF v = E::read(x + i * E::kBytes);
      if constexpr (kKeep) store(kept + i, v);
      greatest = GreatestBits::of(magnitude(v), greatest);
      without = without_zero(without, v);
    }
    bounds.greatest[p][j] = greatest;
  }
  bounds.without[j] = without;
}

// One number for each part of each group: a lane is a group.
using OfParts = float[kParts][kBatch];

// The greatest |x| of each part.
FLASH_INLINE void greatest_of(const PartBounds& bounds, OfParts& most) {
  for (int p = 0; p < kParts; ++p) {
    for (int j = 0; j < kBatch; j += kLanes) {
      store(most[p] + j, across<GreatestBits>(bounds.greatest[p] + j));
    }
  }
}

// The scales and steps of the groups of a batch.
struct Steps {
  alignas(64) OfParts most, step, inverse;
  alignas(64) int32_t widest[kParts][kBatch], number[kParts][kBatch];
  alignas(64) float scale[kBatch];
  alignas(64) uint32_t with_zero[kBatch];                 // kWhole or 0
  alignas(64) uint32_t spikes[2][kBatch], at[2][kBatch];  // bits of their values, and places
};

// A NaN becomes 0. (GCC 12 makes comparisons of the choices.)
FLASH_INLINE VecF between_0_and(float most, VecF v) {
#if FLASH_LANES == 8
  return cast<VecF>(_mm256_min_ps(_mm256_max_ps(cast<__m256>(v), _mm256_setzero_ps()), _mm256_set1_ps(most)));
#else
  return Least::of(Greatest::of(v, VecF{}), VecF{} + most);
#endif
}

// codebook_code, kLanes at once. kClipped: false leaves the clipping to clipped_bytes and clipped_packed.
template <int kBits, bool kClipped = true>
FLASH_INLINE VecU codes_of(VecF y) {
  constexpr Book book = book_of(kBits);
  constexpr float half = static_cast<float>(1 << (kBits - 1));
  VecF v = y + half;
  if constexpr (kBits == 3 || kBits == 4) {  // a power of two: the product is exact, or lost in the sum
    v = y * fused(magnitude(y), -book.bend, 1.0f) + half;
  } else if constexpr (book.bend != 0.0f) {
    v = y * (1.0f - book.bend * magnitude(y)) + half;
  }
  if constexpr (kClipped) {
    v = between_0_and(2 * half - 0.5f, v);
  }
  return cast<VecU>(__builtin_convertvector(v, VecI));
}

// The number of a part's step with the least sum of squared errors, the first of equals; x: elements of the
// part.
template <DType kType, int kBits>
int best_number(const uint8_t* x, int part, float scale, int widest, bool with_zero) {
  using E = Element<kType>;
  const Levels<kBits> levels = levels_of_group<kBits>(with_zero);
  const float shift = with_zero ? book_of(kBits).shift : 0.0f;
  VecF sums[kTriedSteps] = {}, inverse[kTriedSteps];
  for (int r = 0; r < kTriedSteps; ++r) {
    inverse[r] = VecF{} + 1.0f / (part_scale(at_least_0(widest - r)) * scale);
  }
  const VecF most = VecF{} + kMostOff;
  for (int i = 0; i < part; i += kLanes) {
    const VecF v = E::read(x + i * E::kBytes);
    for (int r = 0; r < kTriedSteps; ++r) {  // codebook_error, kLanes at once
      const VecF y = v * inverse[r] + shift;
      const VecF off = (y - shift) - looked_up<kBits>(levels, codes_of<kBits>(y));
      const VecF whole = magnitude(off * 32.0f) + kRoundMagic - kRoundMagic;
      const VecF counted = whole < most ? whole : most;
      sums[r] = sums[r] + counted * counted;
    }
  }
  int best = 0;
  float least = 0.0f;
  for (int r = 0; r < kTriedSteps; ++r) {
    const int number = at_least_0(widest - r);
    float error = 0.0f;
    for (int i = 0; i < kLanes; ++i) error += sums[r][i];
    error *= part_scale(number) * part_scale(number);
    if (r != 0 && !(error < least)) continue;
    best = number;
    least = error;
  }
  return best;
}

// ---- spikes -------------------------------------------------------------------------------------------

// Lanes of v that are `wanted`, a bit each.
FLASH_INLINE uint32_t lanes_equal(VecI v, int32_t wanted) {
#if FLASH_LANES == 16
  return _mm512_cmpeq_epi32_mask(cast<__m512i>(v), _mm512_set1_epi32(wanted));
#elif FLASH_LANES == 8
  const __m256i equal = _mm256_cmpeq_epi32(cast<__m256i>(v), _mm256_set1_epi32(wanted));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)));
#else
  uint32_t equal = 0;
  for (int i = 0; i < kLanes; ++i) equal |= (v[i] == wanted ? 1u : 0u) << i;
  return equal;
#endif
}

// Where |x| is `most` for the first time, of `vectors` vectors from x on; it is there.
FLASH_INLINE int place_of(const float* x, int vectors, int32_t most) {
  constexpr int kAtOnce = 32 / kLanes;  // vectors with as many lanes as a word has bits
  for (int i = 0; i < vectors; i += kAtOnce) {
    uint32_t found = 0;
    for (int l = 0; l < kAtOnce && l < vectors; ++l) {
      found |= lanes_equal(cast<VecI>(magnitude(load<VecF>(x + (i + l) * kLanes))), most) << (l * kLanes);
    }
    if (vectors <= kAtOnce || found != 0) return i * kLanes + __builtin_ctz(found | 1u << 31);
  }
  return 0;
}

// Twice for each group: the greatest element is replaced by its rest after the short float. A lane is a group
// where groups are compared, and an element where one of their parts is searched:
//
//   most [part][group]  -> the part of the greatest, a lane a group
//   that part of x      -> its place, and the greatest of the others, a lane an element, group by group
//   the element         -> short float, and the rest, a lane a group; the rest replaces it in x and in most
//
// kVectors: of a part; 0: any number.
template <int kVectors>
FLASH_INLINE void take_greatest(float* x, int count, int g, Steps& s) {
  const int part = kVectors > 0 ? kVectors * kLanes : g / kParts, cut = 23 - spike_mantissa(g);
  alignas(64) int32_t in[kBatch] = {}, least[kBatch];
  alignas(64) int32_t top[kBatch];
  alignas(64) float now[kBatch] = {};
  VecF others[kBatch] = {};
  for (int j = 0; j < kBatch; ++j) least[j] = kLeastSpike;
  for (int k = 0; k < 2; ++k) {
    for (int j = 0; j < kBatch; j += kLanes) {
      VecI best = load<VecI>(s.most[0] + j), where = VecI{};
      for (int p = 1; p < kParts; ++p) {
        const VecI other = load<VecI>(s.most[p] + j);
        where = other > best ? VecI{} + p : where;
        best = other > best ? other : best;
      }
      store(in + j, where);
      store(top + j, best);
    }
    for (int j = 0; j < count; ++j) {
      const float* from = x + j * g + in[j] * part;
      const int at = place_of(from, part / kLanes, top[j]);
      s.at[k][j] = static_cast<uint32_t>(in[j] * part + at);
      now[j] = from[at];
      VecF greatest = VecF{};
      for (int i = 0; i < part; i += kLanes) {
        const VecF v = magnitude(load<VecF>(from + i));
        greatest = GreatestBits::of(lane_numbers() == at - i ? VecF{} : v, greatest);
      }
      others[j] = greatest;
    }
    for (int j = 0; j < kBatch; j += kLanes) {  // taken_spike and least_second_spike, kLanes at once
      const VecU bits = load<VecU>(now + j);
      const VecU kept = VecU{} - (1u << cut), rounded = (bits + (1u << (cut - 1))) & kept;
      const VecU value = (rounded & 0x7fffffffu) < kInfBits ? rounded : bits & kept;
      const VecI exponent = cast<VecI>(value >> 23 & 255u), smallest = load<VecI>(least + j);
      const VecU taken = exponent >= smallest ? value : VecU{};
      const VecI below = exponent - kSpikesApart, none = VecI{} + 256, ever = VecI{} + kLeastSpike;
      store(least + j, taken == 0u ? none : below > ever ? below : ever);
      store(s.spikes[k] + j, taken);
      const VecF rest = load<VecF>(now + j) - cast<VecF>(taken);
      store(now + j, rest);
      const VecF greatest = GreatestBits::of(magnitude(rest), across<GreatestBits>(others + j));
      const VecI where = load<VecI>(in + j);
      for (int p = 0; p < kParts; ++p) {
        store(s.most[p] + j, where == p ? greatest : load<VecF>(s.most[p] + j));
      }
    }
    for (int j = 0; j < count; ++j) x[j * g + static_cast<int>(s.at[k][j])] = now[j];
  }
}

FLASH_INLINE void take_greatest(float* x, int count, int g, Steps& s) {
  const int vectors = g / kParts / kLanes;
  if (vectors == 1) return take_greatest<1>(x, count, g, s);
  if (vectors == 2) return take_greatest<2>(x, count, g, s);
  take_greatest<0>(x, count, g, s);
}

// ---- steps --------------------------------------------------------------------------------------------

// s.most -> scales, steps, and the front of each record. x: the groups without their spikes.
template <DType kType, int kBits, bool kSpiked>
FLASH_INLINE void choose_steps(const uint8_t* x, int count, const Without* without, const Codec& c, Steps& s,
                               uint8_t* records) {
  constexpr Book book = book_of(kBits);
  const int g = c.group_size, part = g / kParts;
  const int64_t record = record_bytes(kBits, g, kCodebook | (kSpiked ? kSpikes : 0));
  const int base = spike_base(kBits, g, c.options & kHadamard);
  for (int j = 0; j < count; ++j) s.with_zero[j] = holds_zero(without[j]) ? kWhole : 0u;
  for (int j = 0; j < kBatch; j += kLanes) {
    VecF asked[kParts];
    VecI most = VecI{};
    for (int p = 0; p < kParts; ++p) {
      asked[p] = load<VecF>(s.most[p] + j) / book.reach;
      const VecI bits = cast<VecI>(asked[p]) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
    // codebook_scale and scale_for_spike, kLanes at once
    const VecU up = (cast<VecU>(most) + 0xffffu) & 0xffff0000u;
    const VecU least = VecU{} + kMinCodebookBits, nan = VecU{} + kNaNBits;
    VecU scale = up < kInfBits ? up < kMinCodebookBits ? least : up : nan;
    if constexpr (kSpiked) {
      const VecI exponent = cast<VecI>(load<VecU>(s.spikes[0] + j) >> 23 & 255u);
      const VecI needed = (exponent - (base + (1 << kSpikeExponent) - 1)) * (1 << 23);
      scale = cast<VecI>(scale) > needed ? scale : cast<VecU>(needed);
    }
    store(s.scale + j, scale);
    for (int p = 0; p < kParts; ++p) {  // widest_part, kLanes at once
      const VecF ratio = asked[p] / cast<VecF>(scale);
      const VecU rounded_up = cast<VecU>(ratio) + ((1u << kPartShift) - 1);  // of a NaN it wraps around
      const VecI number = (cast<VecI>(rounded_up) >> kPartShift) - kLeastPart;
      const VecI none = VecI{}, last = VecI{} + 63;
      const VecI above = number > none ? number : none;
      const VecI widest = above < last ? above : last;
      const VecI lower = widest - book.lower;
      store(s.widest[p] + j, widest);
      store(s.number[p] + j, lower > none ? lower : none);
    }
  }
  if (c.options & kMse) {
    for (int j = 0; j < count; ++j) {
      for (int p = 0; p < kParts; ++p) {
        s.number[p][j] = best_number<kType, kBits>(x + (j * g + p * part) * Element<kType>::kBytes, part,
                                                   s.scale[j], s.widest[p][j], s.with_zero[j] != 0);
      }
    }
  }
  alignas(64) uint32_t front[3][kBatch];
  for (int j = 0; j < kBatch; j += kLanes) {
    const VecF scale = load<VecF>(s.scale + j);
    VecU fours[2] = {};  // of parts 0 to 3 and 4 to 7, 24 bits
    for (int p = 0; p < kParts; ++p) {
      const VecI number = load<VecI>(s.number[p] + j);
      const VecF step = cast<VecF>((number + kLeastPart) << kPartShift) * scale;
      store(s.step[p] + j, step);
      store(s.inverse[p] + j, 1.0f / step);
      fours[p / 4] |= cast<VecU>(number) << (6 * (p % 4));
    }
    store(front[0] + j, cast<VecU>(scale) >> 16 | load<VecU>(s.with_zero + j) | fours[0] << 16);
    store(front[1] + j, fours[0] >> 16 | fours[1] << 8);
    if constexpr (kSpiked) {  // spike_word, kLanes at once
      const int mantissa = spike_mantissa(g), log = log_of(g);
      const VecI exponent = cast<VecI>(cast<VecU>(scale) >> 23 & 255u) + base;
      VecU word = VecU{};
      for (int k = 0; k < 2; ++k) {
        const VecU value = load<VecU>(s.spikes[k] + j);
        const VecU small =
            (value >> (23 - mantissa) & ((1u << (8 + mantissa)) - 1)) - (cast<VecU>(exponent) << mantissa);
        const VecU sign = value >> 31 << (mantissa + kSpikeExponent);
        const VecU all = (load<VecU>(s.at[k] + j) | (small | sign) << log) & 0xffffu;
        word |= (value == 0u ? VecU{} : all) << (16 * k);
      }
      store(front[2] + j, word);
    }
  }
  for (int j = 0; j < count; ++j) {
    for (int i = 0; i < (kSpiked ? 3 : 2); ++i) {
      __builtin_memcpy(records + j * record + 4 * i, &front[i][j], sizeof front[i][j]);
    }
  }
}

// ---- encoding -----------------------------------------------------------------------------------------

// The residuals at the places of a group's spikes. rest: of the elements after the spikes. before: residuals so far.
template <int kBits>
FLASH_INLINE void lose_spikes(const float* rest, const Steps& s, int j, int part_shift, float share,
                              const float* before, float* kept) {
  const bool with_zero = s.with_zero[j] != 0, twice = s.at[0][j] == s.at[1][j];
  const float shift = with_zero ? book_of(kBits).shift : 0.0f;
  for (int k = 0; k < 2; ++k) {
    if (s.spikes[k][j] == 0) continue;
    const uint32_t at = s.at[k][j], part = at >> part_shift;
    const uint32_t code = codebook_code(rest[at] * s.inverse[part][j] + shift, kBits);
    float arrives = level(kBits, with_zero, code) * s.step[part][j], exact = rest[at];
    for (int i = twice ? 0 : k; i < (twice ? 2 : k + 1); ++i) arrives += bits_float(s.spikes[i][j]);
    for (int i = twice ? 1 : k; i >= (twice ? 0 : k); --i) exact += bits_float(s.spikes[i][j]);
    kept[at] = (exact - arrives) * share + before[k];
  }
}

// Encodes `count` whole groups, count <= kBatch, with known s.most; calls after(j) behind each. kFeedback: as in
// encode_batch.
template <DType kType, int kBits, bool kSpiked, bool kFeedback, int kGroup, typename After>
FLASH_INLINE void encode_parts(const uint8_t* x, int count, const Without* without, Steps& s, const Codec& c,
                               uint8_t* records, const After& after, float share = 0.0f,
                               float* kept = nullptr) {
  using E = Element<kType>;
  constexpr int options = kCodebook | (kSpiked ? kSpikes : 0);
  constexpr bool kClipped = kFeedback || kLanes == 4;
  const int g = kGroup > 0 ? kGroup : c.group_size,
            part_shift = __builtin_ctz(static_cast<unsigned>(g / kParts));
  const int64_t record = record_bytes(kBits, g, options);
  const int front = metadata_bytes(g, options);
  choose_steps<kType, kBits, kSpiked>(x, count, without, c, s, records);
  for (int j = 0; j < count; ++j) {
    uint8_t* out = records + j * record;
    const uint8_t* in = x + j * g * E::kBytes;
    const VecF shift = VecF{} + (s.with_zero[j] != 0 ? book_of(kBits).shift : 0.0f);
    const Levels<kBits> levels = levels_of_group<kBits>(s.with_zero[j] != 0);
    float before[2] = {};
    if constexpr (kFeedback && kSpiked) {
      for (int k = 0; k < 2; ++k) before[k] = kept[j * g + static_cast<int>(s.at[k][j])];
    }
    const auto codes_of_block = [&](int i, VecI(&codes)[4]) FLASH_INLINED {
      for (int l = 0; l < 4; ++l) {
        const int at = i + l * kLanes;
        const VecF v = E::read(in + at * E::kBytes);
        codes[l] = cast<VecI>(codes_of<kBits, kClipped>(v * s.inverse[at >> part_shift][j] + shift));
        if constexpr (kFeedback) {
          float* lost = kept + j * g + at;
          const VecF arrives = looked_up<kBits>(levels, cast<VecU>(codes[l])) * s.step[at >> part_shift][j];
          store(lost, (v - arrives) * share + load<VecF>(lost));
        }
      }
    };
    int i = 0;
#if FLASH_LANES == 8
    const auto packed_codes = [&](int at) FLASH_INLINED {
      VecI codes[4];
      codes_of_block(at, codes);
      return kClipped ? packed(codes) : clipped_packed<kBits>(codes);
    };
    for (; kBits < 8 && i + kBlock < g; i += 2 * kBlock) {
      const VecB first = packed_codes(i);
      pack_two<kBits>(first, packed_codes(i + kBlock), g, i, out + front);
    }
#endif
    for (; i < g; i += kBlock) {
      VecI codes[4];
      codes_of_block(i, codes);
      pack_block<kBits>(kClipped ? bytes_of(codes) : clipped_bytes<kBits>(codes), g, i, out + front);
    }
    if constexpr (kFeedback && kSpiked) {
      lose_spikes<kBits>(reinterpret_cast<const float*>(in), s, j, part_shift, share, before, kept + j * g);
    }
    if (float_bits(s.scale[j]) == kNaNBits) {
      __builtin_memset(out, 0, static_cast<size_t>(record));
      __builtin_memcpy(out, &kNaNScale, sizeof kNaNScale);
    }
    after(j);
  }
  if constexpr (kFeedback) {
    bool safe = true;
    for (int j = 0; j < count; ++j) safe = safe && s.scale[j] < kSafe;
    if (!safe) lose_non_finite(count, c, records, kept);
  }
}

constexpr auto kNothing = [](int) {};

// `count` groups of floats, x, that may be changed, and their bounds: rotated or not, with spikes or without.
// from: where they are in the tensor, `size` bytes each. The next batch is prefetched group by group, at an even pace.
template <int kBits, bool kSpiked, int kGroup>
void encode_floats(float* x, int count, PartBounds& bounds, const Codec& c, uint8_t* records,
                   const uint8_t* from, int size) {
  const int g = kGroup > 0 ? kGroup : c.group_size;
  const auto* bytes = reinterpret_cast<const uint8_t*>(x);
  Steps s;
  if constexpr (kSpiked) {
    greatest_of(bounds, s.most);
    take_greatest(x, count, g, s);
  }
  if (c.options & kHadamard) {
    for (int j = 0; j < count; ++j) {
      float* group = x + j * g;
      for (int i = 0; i < g; i += kLanes) store(group + i, rotated_lanes(flipped(load<VecF>(group + i), i)));
      rotate_vectors(group, g);
      take_parts<DType::kFloat32>(bytes + 4 * j * g, g, bounds, j);
    }
  }
  if (!kSpiked || c.options & kHadamard) greatest_of(bounds, s.most);
  encode_parts<DType::kFloat32, kBits, kSpiked, false, kGroup>(
      bytes, count, bounds.without, s, c, records,
      [&](int j) FLASH_INLINED { prefetch(from, (batch_of(g) + j) * size, size, c.ahead); });
}

template <DType kType, int kBits, bool kSpiked>
void encode_codebook(const uint8_t* x, int64_t numel, const Codec& c, uint8_t* payload, int64_t begin,
                     int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = c.group_size, batch = batch_of(g);
  const int64_t record = record_bytes(kBits, g, kCodebook | (kSpiked ? kSpikes : 0));
  const int64_t whole = numel / g < end ? numel / g : end;
  const auto count_from = [=](int64_t i) {
    return i >= whole ? 0 : static_cast<int>(whole - i < batch ? whole - i : batch);
  };
  PartBounds bounds_of[2] = {};
  const auto as_floats = [&](const uint8_t* groups, int count, uint8_t* records) {
    alignas(64) float floats[kBatchElements];
    if (g == 128) {  // the compiler unrolls the loops
      for (int j = 0; j < count; ++j) {
        take_parts<kType, true>(groups + j * 128 * kBytes, 128, bounds_of[0], j, floats + j * 128);
      }
      return encode_floats<kBits, kSpiked, 128>(floats, count, bounds_of[0], c, records, groups,
                                                128 * kBytes);
    }
    for (int j = 0; j < count; ++j) {
      take_parts<kType, true>(groups + j * g * kBytes, g, bounds_of[0], j, floats + j * g);
    }
    encode_floats<kBits, kSpiked, 0>(floats, count, bounds_of[0], c, records, groups, g * kBytes);
  };
  const bool may_change = kSpiked || c.options & kHadamard;
  if constexpr (!kSpiked) {
    if (!may_change) {
      int now = 0, known = 0;  // as encode_groups
      for (int64_t i = begin; i < whole; i += batch, now ^= 1) {
        const uint8_t *from = x + i * g * kBytes, *next = from + batch * g * kBytes;
        const int count = count_from(i), next_count = reads_ahead<kBytes>(c) ? count_from(i + batch) : 0;
        for (int j = known; j < count; ++j) {
          take_parts<kType>(from + j * g * kBytes, g, bounds_of[now], j);
        }
        known = next_count;
        Steps s;
        greatest_of(bounds_of[now], s.most);
        encode_parts<kType, kBits, false, false, 0>(from, count, bounds_of[now].without, s, c,
                                                    payload + i * record, [&](int j) FLASH_INLINED {
                                                      if (j >= next_count) return;
                                                      const uint8_t* behind = next + j * g * kBytes;
                                                      prefetch(behind, kPrefetchBytes, g * kBytes, c.ahead);
                                                      take_parts<kType>(behind, g, bounds_of[now ^ 1], j);
                                                    });
      }
    }
  }
  for (int64_t i = begin; may_change && i < whole; i += batch) {
    as_floats(x + i * g * kBytes, count_from(i), payload + i * record);
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize] = {};
    fill_ragged<kBytes>(x + whole * g * kBytes, numel - whole * g, g, group);
    as_floats(group, 1, payload + whole * record);
  }
}

template <int kBits, bool kSpiked, int kGroup>
FLASH_INLINE void encode_groups_lost(float* x, int64_t groups, const Codec& c, float share, float* kept,
                                     uint8_t* payload) {
  constexpr DType kType = DType::kFloat32;
  const int g = kGroup > 0 ? kGroup : c.group_size, batch = batch_of(g);
  PartBounds bounds = {};
  for (int64_t i = 0; i < groups; i += batch) {
    const int count = static_cast<int>(groups - i < batch ? groups - i : batch);
    const auto* part = reinterpret_cast<const uint8_t*>(x + i * g);
    for (int j = 0; j < count; ++j) take_parts<kType>(part + 4 * j * g, g, bounds, j);
    Steps s;
    greatest_of(bounds, s.most);
    if constexpr (kSpiked) take_greatest(x + i * g, count, g, s);
    encode_parts<kType, kBits, kSpiked, true, kGroup>(
        part, count, bounds.without, s, c, payload + i * record_bytes(c), kNothing, share, kept + i * g);
  }
}

// Whole groups, not rotated, with error feedback; see encode_lost.
template <int kBits, bool kSpiked>
void encode_codebook_lost(float* x, int64_t groups, const Codec& c, float share, float* kept,
                          uint8_t* payload) {
  if constexpr (kOwnFor128) {
    if (c.group_size == 128) {
      return encode_groups_lost<kBits, kSpiked, 128>(x, groups, c, share, kept, payload);
    }
  }
  encode_groups_lost<kBits, kSpiked, 0>(x, groups, c, share, kept, payload);
}

// ---- the table of all kernels -------------------------------------------------------------------------

template <int kBits, bool kSpiked>
constexpr CodecKernels kCodebooks = {
    {encode_codebook<DType::kFloat32, kBits, kSpiked>, encode_codebook<DType::kBFloat16, kBits, kSpiked>,
     encode_codebook<DType::kFloat16, kBits, kSpiked>},
    {decode_sum_codebook<DType::kFloat32, kBits, kSpiked>,
     decode_sum_codebook<DType::kBFloat16, kBits, kSpiked>,
     decode_sum_codebook<DType::kFloat16, kBits, kSpiked>},
    encode_codebook_lost<kBits, kSpiked>,
};

#define FLASH_BOOKS(spiked)                                                                    \
  {kCodebooks<2, spiked>, kCodebooks<3, spiked>, kCodebooks<4, spiked>, kCodebooks<5, spiked>, \
   kCodebooks<6, spiked>, kCodebooks<7, spiked>, kCodebooks<8, spiked>}

constexpr Kernels kTable = {
    FLASH_LAYOUTS(kPlain),
    FLASH_LAYOUTS(kOptions),
    {FLASH_BOOKS(false), FLASH_BOOKS(true)},
    {subtract<DType::kFloat32>, subtract<DType::kBFloat16>, subtract<DType::kFloat16>},
    {add<DType::kFloat32>, add<DType::kBFloat16>, add<DType::kFloat16>},
    {{carry<DType::kFloat32, false>, carry<DType::kFloat32, true>},
     {carry<DType::kBFloat16, false>, carry<DType::kBFloat16, true>},
     {carry<DType::kFloat16, false>, carry<DType::kFloat16, true>}},
    lose,
    narrow};

#undef FLASH_BOOKS
#undef FLASH_WIDTHS
#undef FLASH_LAYOUTS
#undef FLASH_INLINE
#undef FLASH_INLINED

}  // namespace
}  // namespace flash_allreduce
