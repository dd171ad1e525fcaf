// The CPU codec, written once with the vector types of GCC and Clang and compiled once for every instruction
// set by codec_<isa>.cpp, which sets the target and the number of lanes, then includes this file.
//
//   encode   a batch of up to 16 groups at a time, so that the dependent steps (minimum -> zero point -> scale
//            -> its inverse) run for all groups together:
//              1. x (fp32, bf16, fp16) -> lo[j], hi[j] of each group, and if it holds a 0, kLanes at a time
//              2. lo, hi -> scale, zero point, inverse of the scale: one vector of groups
//              3. x again, from the first-level cache -> codes -> planes
//   decode   decoding.h
//
// Step 3 detects NaNs, for half an instruction a vector: the code of a NaN is far out of range, and so is every code of
// a group with a scale of NaN. Only then the groups are checked one by one.
//
// Groups of 128, the default, have a separate copy of the code, with unrolled loops; x86 without AVX2
// has none: it would make every build longer.
//
// No function here may be visible outside its translation unit: the linker would be free to hand a copy
// compiled for AVX-512 to a machine without it.

#include "codec_cpu.h"
#include "decoding.h"
#include "planes.h"
#include "prefetch.h"

namespace flash_allreduce {
namespace {

// ---- encoding -----------------------------------------------------------------------------------------

struct Bounds {
  VecF least[kBatch], greatest[kBatch];
  Without without[kBatch];  // zeros, by lane; set where that is asked
};

// Least and greatest of group j of a batch, g elements, by lane; a NaN may be passed over.
template <DType kType, bool kZeros>
FLASH_INLINE void take_bounds(const uint8_t* x, int g, Bounds& bounds, int j) {
  using E = Element<kType>;
  VecF lo0 = E::read(x), hi0 = lo0, lo1 = lo0, hi1 = lo0;
  Without without0 = kWithoutZero, without1 = kWithoutZero;
  for (int i = 0; i < g; i += kBlock) {
    for (int l = 0; l < 4; l += 2) {
      const VecF a = E::read(x + (i + l * kLanes) * E::kBytes);
      const VecF b = E::read(x + (i + (l + 1) * kLanes) * E::kBytes);
      lo0 = Least::of(a, lo0);
      hi0 = Greatest::of(a, hi0);
      lo1 = Least::of(b, lo1);
      hi1 = Greatest::of(b, hi1);
      if constexpr (kZeros) {
        without0 = without_zero(without0, a);
        without1 = without_zero(without1, b);
      }
    }
  }
  bounds.least[j] = Least::of(lo0, lo1);
  bounds.greatest[j] = Greatest::of(hi0, hi1);
  if constexpr (kZeros) bounds.without[j] = without0 & without1;
}

// Overwrites the records of groups with a NaN or an Inf, or with a scale of NaN.
template <DType kType>
void mark_non_finite(const uint8_t* x, int count, const Codec& c, const uint32_t* scale, uint8_t* records) {
  using E = Element<kType>;
  const int64_t record = record_bytes(c);
  for (int j = 0; j < count; ++j) {
    VecI largest = VecI{};
    for (int i = 0; i < c.group_size; i += kLanes) {
      const VecI bits = cast<VecI>(E::read(x + (j * c.group_size + i) * E::kBytes)) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    bool finite = scale[j] != kNaNBits;
    for (int i = 0; i < kLanes; ++i) finite = finite && largest[i] < static_cast<int32_t>(kInfBits);
    if (finite) continue;
    __builtin_memset(records + j * record, 0, static_cast<size_t>(record));
    __builtin_memcpy(records + j * record, &kNaNScale, sizeof kNaNScale);
  }
}

// Clears the residual of groups that are not finite, and of elements that decode to Inf.
FLASH_INLINE void lose_non_finite(int count, const Codec& c, const uint8_t* records, float* kept) {
  const int64_t record = record_bytes(c);
  for (int j = 0; j < count; ++j) {
    uint16_t first;
    __builtin_memcpy(&first, records + j * record, sizeof first);
    for (int i = 0; i < c.group_size; i += kLanes) {
      float* at = kept + j * c.group_size + i;
      const VecF v = load<VecF>(at);
      const VecI finite = (cast<VecI>(v) & 0x7fffffff) < static_cast<int32_t>(kInfBits);
      store(at, first == kNaNScale ? VecF{} : finite ? v : VecF{});
    }
  }
}

// f(Number<0>), f(Number<1>) ... f(Number<kCount - 1>): loops that are unrolled before the compiler makes
// vectors.
template <int kValue>
struct Number {
  static constexpr int value = kValue;
};
template <int kCount, int kFrom = 0, typename F>
FLASH_INLINE void for_each(const F& f) {
  if constexpr (kFrom < kCount) {
    f(Number<kFrom>{});
    for_each<kCount, kFrom + 1>(f);
  }
}

// ---- the ranges of a batch ----------------------------------------------------------------------------

struct Ranges {
  alignas(64) float lo[kBatch], hi[kBatch], zero[kBatch], inverse[kBatch];
  alignas(64) uint32_t scale[kBatch], metadata[kBatch];
};

// Of group j where `chosen` says so. No branch: the compiler makes vectors of a loop over j.
FLASH_INLINE void choose_range(Ranges& b, int j, const Range& r, bool chosen) {
  b.zero[j] = chosen ? r.zero : b.zero[j];
  b.scale[j] = chosen ? r.scale : b.scale[j];
  b.metadata[j] = chosen ? r.metadata : b.metadata[j];
}

// Those without a search, of groups between b.lo and b.hi.
FLASH_INLINE void whole_ranges(Ranges& b, int bits, Layout layout, float slack) {
  for (int j = 0; j < kBatch; ++j) {
    choose_range(b, j, whole_range(b.lo[j], b.hi[j], bits, layout, slack), true);
  }
}

FLASH_INLINE void ranges_with_zero(Ranges& b, const uint32_t* with_zero, int bits, Layout layout,
                                   float slack) {
  for (int j = 0; j < kBatch; ++j) {
    choose_range(b, j, range_with_zero(b.lo[j], b.hi[j], bits, layout, slack), with_zero[j] != 0);
  }
}

FLASH_INLINE void invert_scales(Ranges& b) {
  for (int j = 0; j < kBatch; ++j) b.inverse[j] = 1.0f / bits_float(b.scale[j]);
}

// Errors of a block of 4 vectors, from the positions of the elements (codec_math.h): the last byte of each,
// made odd, so that the work for each zero point is done for four elements in a lane.
#if FLASH_LANES == 16
using Positions = __m512i;
FLASH_INLINE Positions last_bytes(const VecU (&p)[4]) {
  const __m512i even = _mm512_mask_blend_epi16(0xaaaaaaaa, cast<__m512i>(p[0]), cast<__m512i>(p[1] << 16));
  const __m512i odd = _mm512_mask_blend_epi16(0xaaaaaaaa, cast<__m512i>(p[2]), cast<__m512i>(p[3] << 16));
  const __m512i all = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, even, _mm512_slli_epi16(odd, 8));
  return _mm512_or_si512(all, _mm512_set1_epi8(1));
}
FLASH_INLINE VecI squared_errors(Positions p, uint32_t shift) {
  const __m512i error = _mm512_abs_epi8(_mm512_add_epi8(p, _mm512_set1_epi8(static_cast<char>(shift))));
  return cast<VecI>(_mm512_madd_epi16(_mm512_maddubs_epi16(error, error), _mm512_set1_epi16(1)));
}
#elif FLASH_LANES == 8
using Positions = __m256i;
FLASH_INLINE Positions last_bytes(const VecU (&p)[4]) {
  const __m256i even = _mm256_blend_epi16(cast<__m256i>(p[0]), cast<__m256i>(p[1] << 16), 0xaa);
  const __m256i odd = _mm256_blend_epi16(cast<__m256i>(p[2]), cast<__m256i>(p[3] << 16), 0xaa);
  const __m256i low = _mm256_and_si256(even, _mm256_set1_epi16(0xff));
  return _mm256_or_si256(_mm256_or_si256(low, _mm256_slli_epi16(odd, 8)), _mm256_set1_epi8(1));
}
FLASH_INLINE VecI squared_errors(Positions p, uint32_t shift) {
  const __m256i error = _mm256_abs_epi8(_mm256_add_epi8(p, _mm256_set1_epi8(static_cast<char>(shift))));
  return cast<VecI>(_mm256_madd_epi16(_mm256_maddubs_epi16(error, error), _mm256_set1_epi16(1)));
}
#else
struct Positions {
  VecU of[4];
};
FLASH_INLINE Positions last_bytes(const VecU (&p)[4]) {
  return {{p[0] | 1u, p[1] | 1u, p[2] | 1u, p[3] | 1u}};
}
FLASH_INLINE VecI squared_errors(const Positions& p, uint32_t shift) {
  VecF sum = VecF{};
  for (const VecU& of : p.of) {
    const VecF error = __builtin_convertvector(cast<VecI>((of + shift) << 24) >> 24, VecF);
    sum = sum + error * error;
  }
  return __builtin_convertvector(sum, VecI);
}
#endif

// Replaces the whole ranges in b by the first ranges with the least sum of squared errors. kBits: the result
// of searched_as(bits).
template <DType kType, int kBits, Layout kLayout>
__attribute__((noinline)) void search_ranges(const uint8_t* x, int count, int g, int bits, Ahead ahead,
                                             Ranges& b) {
  using E = Element<kType>;
  constexpr int scales = scales_of(kLayout), each = places_of(0, kBits, kLayout);
  constexpr int places = (scales - 1) * each + places_of(scales - 1, kBits, kLayout);
  alignas(64) float origin[kBatch], inverse[scales][kBatch];
  alignas(64) uint32_t tried[scales][kBatch], shift[places][kBatch];
  alignas(64) int32_t errors[places][kBatch];
  alignas(64) float zero[places][kBatch], ratio[places][kBatch];
  for_each<scales>([&](auto s) FLASH_INLINED {
    for (int j = 0; j < kBatch; ++j) {
      const float lo = b.lo[j], hi = b.hi[j];
      const uint32_t scale = tried_scale(s.value, b.scale[j], lo, hi, bits, kLayout);
      origin[j] = search_origin(lo, kLayout);
      tried[s.value][j] = scale;
      inverse[s.value][j] = 1.0f / bits_float(scale);
      for_each<places_of(s.value, kBits, kLayout)>([&](auto p) FLASH_INLINED {
        constexpr int n = s.value * each + p.value;
        const Range r = tried_range(s.value, p.value, scale, b.zero[j], lo, hi, bits, kLayout);
        zero[n][j] = r.zero;
        shift[n][j] = search_shift(search_origin(lo, kLayout), r.zero, 1.0f / bits_float(scale));
        ratio[n][j] = search_ratio(r.scale, b.scale[j]);
      });
    }
  });
  VecI sums[places][kBatch];
  for (int j = count; j < kBatch; ++j) {
    for (int n = 0; n < places; ++n) sums[n][j] = VecI{};
  }
  for (int j = 0; j < count; ++j, x += g * E::kBytes) {
    VecI sum[places] = {};
    // As far ahead as the bounds of the next batch will: memory does not rest meanwhile.
    prefetch(x, count * g * E::kBytes + kPrefetchBytes, g * E::kBytes, ahead);
    for (int i = 0; i < g; i += kBlock) {
      VecF above[4];
      for (int l = 0; l < 4; ++l) above[l] = E::read(x + (i + l * kLanes) * E::kBytes) - origin[j];
      for_each<scales>([&](auto s) FLASH_INLINED {
        const VecF fine = VecF{} + inverse[s.value][j] * 256.0f;
        VecU at[4];
        for (int l = 0; l < 4; ++l) at[l] = cast<VecU>(above[l] * fine + kRoundMagic);  // finely
        const Positions positions = last_bytes(at);
        for_each<places_of(s.value, kBits, kLayout)>([&](auto p) FLASH_INLINED {
          constexpr int n = s.value * each + p.value;
          sum[n] = sum[n] + squared_errors(positions, shift[n][j]);
        });
      });
    }
    for (int n = 0; n < places; ++n) sums[n][j] = sum[n];
  }
  for (int n = 0; n < places; ++n) {
    for (int j = 0; j < kBatch; j += kLanes) store(errors[n] + j, across<Sum>(sums[n] + j));
  }
  alignas(64) float least[kBatch];
  for (int j = 0; j < kBatch; ++j) least[j] = bits_float(kInfBits);
  for_each<places>([&](auto n) FLASH_INLINED {
    constexpr int scale = n.value / each < scales ? n.value / each : scales - 1;
    for (int j = 0; j < kBatch; ++j) {
      const float error = static_cast<float>(errors[n.value][j]) * (ratio[n.value][j] * ratio[n.value][j]);
      const bool better = error < least[j];  // not so if it does not serve: NaN
      b.zero[j] = better ? zero[n.value][j] : b.zero[j];
      b.scale[j] = better ? tried[scale][j] : b.scale[j];
      least[j] = better ? error : least[j];
    }
  });
  for (int j = 0; j < kBatch; ++j) b.metadata[j] = word_of(b.zero[j], b.scale[j], bits, kLayout);
}

// Encodes `count` whole groups, count <= kBatch, with the bounds `now`. Computes the bounds of `next_count` groups
// behind them too, group by group, so that memory is read at an even pace. kFeedback: adds `share` of the error of each
// element to its residual; x is float then.
template <DType kType, int kBits, Layout kLayout, int kGroup = 0, bool kFeedback = false>
FLASH_INLINE void encode_batch(const uint8_t* x, int count, const Bounds& now, int next_count, Bounds& next,
                               const Codec& c, uint8_t* records, float share = 0.0f, float* kept = nullptr) {
  using E = Element<kType>;
  const int g = kGroup > 0 ? kGroup : c.group_size;
  const int64_t record = record_bytes(kBits, g, options_of(kLayout));
  constexpr int levels = code_levels(kBits, kLayout);
  constexpr int half = code_half(kBits, kLayout);
  constexpr int front = spikes_offset(options_of(kLayout));
  constexpr bool kZeros = may_miss_zero(kBits, kLayout);
  Ranges b;
  for (int j = 0; j < kBatch; j += kLanes) {
    store(b.lo + j, across<Least>(now.least + j));
    store(b.hi + j, across<Greatest>(now.greatest + j));
  }
  whole_ranges(b, kBits, kLayout, kInside);
  if (c.options & kMse) {
    search_ranges<kType, searched_as(kBits, kLayout), kLayout>(x, count, g, kBits, c.ahead, b);
  }
  if constexpr (kZeros) {
    Without without = kWithoutZero;
    for (int j = 0; j < count; ++j) without &= now.without[j];
    if (holds_zero(without)) {
      alignas(64) uint32_t with_zero[kBatch] = {};
      for (int j = 0; j < count; ++j) with_zero[j] = holds_zero(now.without[j]);
      ranges_with_zero(b, with_zero, kBits, kLayout, kInside);
    }
  }
  invert_scales(b);
  VecI seen = VecI{};
  for (int j = 0; j < count; ++j) {
    uint8_t* out = records + j * record;
    const uint8_t* in = x + j * g * E::kBytes;
    __builtin_memcpy(out, b.metadata + j, front);
    const VecF z = VecF{} + b.zero[j], minus_z = -z;
    const VecF inv = VecF{} + b.inverse[j];
    const VecF step = VecF{} + bits_float(b.scale[j]);
    const auto codes_of_block = [&](int i, VecI(&codes)[4]) FLASH_INLINED {  // encode_element, kLanes at once
      for (int l = 0; l < 4; ++l) {
        const VecF v = E::read(in + (i + l * kLanes) * E::kBytes);
        codes[l] = rounded((kLayout == Layout::kSymmetric ? v : v + minus_z) * inv);
        if constexpr (kFeedback) {  // decode_element
          float* at = kept + j * g + i + l * kLanes;
          store(at, (v - (float_of(codes[l]) * step + z)) * share + load<VecF>(at));
        }
      }
    };
    int i = 0;
#if FLASH_LANES == 8
    if constexpr (kBits < 8) {
      for (; i + kBlock < g; i += 2 * kBlock) {
        VecI codes[4];
        codes_of_block(i, codes);
        const VecB first = packed(codes, half, seen);
        codes_of_block(i + kBlock, codes);
        pack_two<kBits>(first, packed(codes, half, seen), g, i, out + front);
      }
    }
#endif
    for (; i < g; i += kBlock) {
      VecI codes[4];
      codes_of_block(i, codes);
      pack_block<kBits>(bytes_of(codes, half, seen), g, i, out + front);
    }
    if (j < next_count) {
      const uint8_t* behind = in + count * g * E::kBytes;
      prefetch(behind, kPrefetchBytes, g * E::kBytes, c.ahead);
      take_bounds<kType, kZeros>(behind, g, next, j);
    }
  }
  const bool lost = saw_nan(seen, half, levels);
  if (lost) mark_non_finite<kType>(x, count, c, b.scale, records);
  if constexpr (kFeedback) {
    bool safe = !lost;
    for (int j = 0; j < count; ++j) safe = safe && b.lo[j] > -kSafe && b.hi[j] < kSafe;
    if (!safe) lose_non_finite(count, c, records, kept);
  }
}

// Groups of any number of elements share one copy of the code, whole and ragged ones.
template <DType kType, int kBits, Layout kLayout>
__attribute__((noinline)) void encode_any_batch(const uint8_t* x, int count, const Bounds& now,
                                                int next_count, Bounds& next, const Codec& c,
                                                uint8_t* records) {
  encode_batch<kType, kBits, kLayout>(x, count, now, next_count, next, c, records);
}

// The last group of a tensor, of n < g elements, filled up with its first one.
template <int kBytes>
FLASH_INLINE void fill_ragged(const uint8_t* first, int64_t n, int g, uint8_t* group) {
  for (int i = 0; i < g; ++i) {
    __builtin_memcpy(group + i * kBytes, first + (i < n ? i : 0) * kBytes, kBytes);
  }
}

// kGroup: the elements of a group, or 0: any number.
template <DType kType, int kBits, Layout kLayout, int kGroup>
FLASH_INLINE void encode_groups(const uint8_t* x, int64_t numel, const Codec& c, uint8_t* payload,
                                int64_t begin, int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = kGroup > 0 ? kGroup : c.group_size;
  const int64_t record = record_bytes(kBits, g, options_of(kLayout));
  const int64_t whole = numel / g < end ? numel / g : end;
  const int batch = batch_of(g);
  const auto count_from = [=](int64_t i) {
    return i >= whole ? 0 : static_cast<int>(whole - i < batch ? whole - i : batch);
  };
  constexpr bool kZeros = may_miss_zero(kBits, kLayout);
  const bool ahead = reads_ahead<kBytes>(c);
  Bounds bounds_of[2] = {};
  int now = 0, known = 0;  // groups of this batch with bounds
  for (int64_t i = begin; i < whole; i += batch, now ^= 1) {
    const uint8_t* from = x + i * g * kBytes;
    uint8_t* to = payload + i * record;
    const int count = count_from(i), next_count = ahead ? count_from(i + batch) : 0;
    Bounds &bounds = bounds_of[now], &next = bounds_of[now ^ 1];
    for (int j = known; j < count; ++j) take_bounds<kType, kZeros>(from + j * g * kBytes, g, bounds, j);
    known = next_count;
    if constexpr (kGroup > 0) {
      encode_batch<kType, kBits, kLayout, kGroup>(from, count, bounds, next_count, next, c, to);
    } else {
      encode_any_batch<kType, kBits, kLayout>(from, count, bounds, next_count, next, c, to);
    }
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize] = {};
    fill_ragged<kBytes>(x + whole * g * kBytes, numel - whole * g, g, group);
    Bounds& ragged = bounds_of[0];
    take_bounds<kType, kZeros>(group, g, ragged, 0);
    encode_any_batch<kType, kBits, kLayout>(group, 1, ragged, 0, ragged, c, payload + whole * record);
  }
}

template <DType kType, int kBits, Layout kLayout>
void encode_range(const uint8_t* x, int64_t numel, const Codec& c, uint8_t* payload, int64_t begin,
                  int64_t end) {
  if constexpr (kOwnFor128) {
    if (c.group_size == 128) {
      return encode_groups<kType, kBits, kLayout, 128>(x, numel, c, payload, begin, end);
    }
  }
  encode_groups<kType, kBits, kLayout, 0>(x, numel, c, payload, begin, end);
}

// ---- differences --------------------------------------------------------------------------------------

template <DType kType>
void subtract(const float* master, const uint8_t* held, int64_t n, float* out) {
  using E = Element<kType>;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load<VecF>(master + i) - E::read(held + i * E::kBytes));
  if (i < n) {
    alignas(64) float m[kLanes] = {}, difference[kLanes];
    alignas(64) uint8_t h[4 * kLanes] = {};
    __builtin_memcpy(m, master + i, static_cast<size_t>(4 * (n - i)));
    __builtin_memcpy(h, held + i * E::kBytes, static_cast<size_t>(E::kBytes * (n - i)));
    store(difference, load<VecF>(m) - E::read(h));
    __builtin_memcpy(out + i, difference, static_cast<size_t>(4 * (n - i)));
  }
}

template <DType kType>
void add(const float* x, uint8_t* held, int64_t n) {
  using E = Element<kType>;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    uint8_t* h = held + i * E::kBytes;
    E::write(h, E::read(h) + load<VecF>(x + i));
  }
  if (i < n) {
    alignas(64) float more[kLanes] = {};
    alignas(64) uint8_t h[4 * kLanes] = {};
    __builtin_memcpy(more, x + i, static_cast<size_t>(4 * (n - i)));
    __builtin_memcpy(h, held + i * E::kBytes, static_cast<size_t>(E::kBytes * (n - i)));
    E::write(h, E::read(h) + load<VecF>(more));
    __builtin_memcpy(held + i * E::kBytes, h, static_cast<size_t>(E::kBytes * (n - i)));
  }
}

// ---- error feedback -------------------------------------------------------------------------------------
//
// A few groups at a time, which stay in the first-level cache (codec_cpu.cpp):
//
//   gradient, residual   -> carry        -> x, the input of the encoding; kept, the rest of the residual
//   x, kept              -> encode_lost  -> payload; kept, the new residual, in place
//   kept                 -> leave        -> residual
//
// An exact zero keeps its residual and is encoded as zero: x is -0 there, which no sum is. A rotated
// zero does not decode to zero: its error is carried over as that of any other element.

// Whole groups of g. A residual of bf16, or of 8 bits, symmetric. Returns false for a scale so large that the
// kept residual may not be finite, which no encoding leaves.
template <DType kType, bool kWide>
bool carry(const uint8_t* gradient, const uint8_t* residual, int64_t groups, int g, bool rotated,
           float momentum, Ahead ahead, float* x, float* kept) {
  using E = Element<kType>;
  using R = Element<DType::kBFloat16>;
  constexpr int half = code_half(8, Layout::kSymmetric), front = kWide ? 0 : spikes_offset(kSymmetricCodes);
  const int64_t record = kWide ? R::kBytes * g : record_bytes(8, g, kSymmetricCodes);
  const VecI zeros_wait = VecI{} - (rotated ? 0 : 1);
  bool safe = true;
  for (int64_t j = 0; j < groups; ++j, residual += record, gradient += g * E::kBytes, x += g, kept += g) {
    const Metadata m = kWide ? Metadata{} : read_metadata(residual, 8, Layout::kSymmetric);
    safe = safe && m.scale < kSafe && m.scale > -kSafe;
    prefetch(residual, kPrefetchBytes, static_cast<int>(record), ahead);
    prefetch(gradient, kPrefetchBytes, g * E::kBytes, ahead);
    for (int i = 0; i < g; i += kBlock) {
      VecU codes[4];
      if constexpr (!kWide) unpack_block<8>(residual + front, g, i, codes);
      for (int l = 0; l < 4; ++l) {
        const int at = i + l * kLanes;
        VecF carried;
        if constexpr (kWide) {
          carried = R::read(residual + at * R::kBytes) + 0.0f;  // -0 is 0
        } else {                                                // decode_element
          carried = __builtin_convertvector(cast<VecI>(codes[l]) - half, VecF) * m.scale + m.zero;
        }
        const VecF v = E::read(gradient + at * E::kBytes);
        const VecI is_zero = (v == 0.0f) & zeros_wait;
        store(x + at, is_zero ? -VecF{} : carried + v);
        store(kept + at, is_zero ? carried : carried * momentum);
      }
    }
  }
  return safe;
}

// Whole groups of a format without options but mse. kept: the rest of the residual -> the new residual.
template <int kBits, Layout kLayout>
void encode_lost(float* x, int64_t groups, const Codec& c, float share, float* kept, uint8_t* payload) {
  constexpr DType kType = DType::kFloat32;
  constexpr bool kZeros = may_miss_zero(kBits, kLayout);
  const int g = c.group_size, batch = batch_of(g);
  Bounds bounds = {};
  for (int64_t i = 0; i < groups; i += batch) {
    const int count = static_cast<int>(groups - i < batch ? groups - i : batch);
    const auto* part = reinterpret_cast<const uint8_t*>(x + i * g);
    for (int j = 0; j < count; ++j) {
      take_bounds<kType, kZeros>(part + 4 * j * g, g, bounds, j);
    }
    encode_batch<kType, kBits, kLayout, 0, true>(part, count, bounds, 0, bounds, c,
                                                 payload + i * record_bytes(c), share, kept + i * g);
  }
}

// ---- the table ----------------------------------------------------------------------------------------

template <int kBits, Layout kLayout>
constexpr CodecKernels kPlain = {
    {encode_range<DType::kFloat32, kBits, kLayout>, encode_range<DType::kBFloat16, kBits, kLayout>,
     encode_range<DType::kFloat16, kBits, kLayout>},
    {decode_sum_range<DType::kFloat32, kBits, kLayout>, decode_sum_range<DType::kBFloat16, kBits, kLayout>,
     decode_sum_range<DType::kFloat16, kBits, kLayout>},
    encode_lost<kBits, kLayout>,
};

}  // namespace
}  // namespace flash_allreduce
