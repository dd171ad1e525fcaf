// Encoding and decoding with the codebook, rotated and searched or not. Included after option_kernels.h, for
// every instruction set; codec_math.h says what is computed.
//
//   encode   a batch of groups at a time, as codec_kernels.h does it:
//              1. x -> greatest |x| of each part, and whether the group holds a 0
//              2. -> scale of the group, step of each part [the best of five], its inverse
//              3. x again -> codes -> planes
//            Rotated groups are floats in the first-level cache first.
//   decode   planes -> codes -> levels, looked up in a register, times the step of the part
//            -> summed over the ranks in registers -> stored [as floats, rotated back, stored]

#include "codec_cpu.h"

namespace flash_allreduce {
namespace {

constexpr int kBatchParts = kBatch * kParts;

FLASH_INLINE VecF magnitude(VecF v) { return cast<VecF>(cast<VecI>(v) & 0x7fffffff); }

// ---- levels -------------------------------------------------------------------------------------------

struct Padded {
  float of[2][16];  // without and with a 0
};

template <int kBits>
constexpr Padded make_padded() {
  Padded table{};
  for (int held = 0; held < 2; ++held) {
    for (int i = 0; i < 16; ++i) {
      table.of[held][i] = static_cast<float>(level_of(kBits, held != 0, i & ((1 << kBits) - 1))) / 128;
    }
  }
  return table;
}

template <int kBits>
alignas(64) constexpr Padded kLevels = make_padded < kBits<5 ? kBits : 4>();

// The levels of a group, in steps.
template <int kBits>
struct Levels {
  const float* at;
  float of_zero;  // 5 bits and more: what a group that holds a 0 has moved its levels by
#if FLASH_LANES == 16
  VecF all;
#elif FLASH_LANES == 8
  VecF low, high;
#endif
};

template <int kBits>
FLASH_INLINE Levels<kBits> levels_of_group(bool with_zero) {
  Levels<kBits> levels;
  levels.at = kLevels<kBits>.of[with_zero];
  levels.of_zero = with_zero ? computed_level(0.5f, book_of(kBits)) : 0.0f;
#if FLASH_LANES == 16
  levels.all = load<VecF>(levels.at);
#elif FLASH_LANES == 8
  levels.low = load<VecF>(levels.at);
  levels.high = load<VecF>(levels.at + 8);
#endif
  return levels;
}

template <int kBits>
FLASH_INLINE VecF looked_up(const Levels<kBits>& levels, VecU codes) {
  if constexpr (kBits > 4) {  // computed_level, kLanes at once
    constexpr Book book = book_of(kBits);
    constexpr float middle = 0.5f - static_cast<float>(1 << (kBits - 1));
    const VecF w = __builtin_convertvector(cast<VecI>(codes), VecF) + middle;
    if constexpr (book.bend == 0.0f) return w - levels.of_zero;
    const VecF u = magnitude(w);
    return w * (1.0f + u * (book.rise + book.curve * u)) - levels.of_zero;
  } else {
#if FLASH_LANES == 16
    // maskz: GCC takes the other for uninitialized.
    return cast<VecF>(
        _mm512_maskz_permutexvar_ps(__mmask16{0xffff}, cast<__m512i>(codes), cast<__m512>(levels.all)));
#elif FLASH_LANES == 8
    const __m256i index = cast<__m256i>(codes);
    const __m256 low = _mm256_permutevar8x32_ps(cast<__m256>(levels.low), index);
    if constexpr (kBits < 4) return cast<VecF>(low);
    const __m256 high = _mm256_permutevar8x32_ps(cast<__m256>(levels.high), index);
    return cast<VecF>(_mm256_blendv_ps(low, high, cast<__m256>(codes << 28)));
#else
    return VecF{levels.at[codes[0]], levels.at[codes[1]], levels.at[codes[2]], levels.at[codes[3]]};
#endif
  }
}

// ---- encoding -----------------------------------------------------------------------------------------

struct GreatestBits {
  FLASH_INLINE VecF of(VecF a, VecF b) {  // of what is not negative; a NaN is greater than Inf
    const VecI x = cast<VecI>(a), y = cast<VecI>(b);
    return cast<VecF>(x > y ? x : y);
  }
};

struct PartBounds {
  VecF greatest[kBatchParts];  // by lane
  Without without[kBatch];     // zeros
};

// Of group j of a batch.
template <DType kType>
FLASH_INLINE void take_parts(const uint8_t* x, int g, PartBounds& bounds, int j) {
  using E = Element<kType>;
  const int part = g / kParts;
  for (int i = 0; i < g * E::kBytes; i += 64) {  // as take_bounds
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) +
                                                     static_cast<uintptr_t>(i + kPrefetchBytes)));
  }
  Without without = kWithoutZero;
  for (int p = 0; p < kParts; ++p) {
    VecF greatest = VecF{};
    for (int i = p * part; i < (p + 1) * part; i += kLanes) {
      const VecF v = E::read(x + i * E::kBytes);
      greatest = GreatestBits::of(magnitude(v), greatest);
      without = without_zero(without, v);
    }
    bounds.greatest[j * kParts + p] = greatest;
  }
  bounds.without[j] = without;
}

// What the groups of a batch travel with.
struct Steps {
  alignas(64) float asked[kBatchParts], scale[kBatchParts], step[kBatchParts], inverse[kBatchParts];
  alignas(64) int widest[kBatchParts], number[kBatchParts];
  bool with_zero[kBatch];
};

// codebook_code, kLanes at once.
template <int kBits>
FLASH_INLINE VecU codes_of(VecF y) {
  constexpr Book book = book_of(kBits);
  constexpr float half = static_cast<float>(1 << (kBits - 1));
  VecF v = y + half;
  if constexpr (book.bend != 0.0f) v = y * (1.0f - book.bend * magnitude(y)) + half;
  const VecF least = VecF{}, most = VecF{} + (2 * half - 0.5f);
  v = v > least ? v : least;
  v = v < most ? v : most;
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

// Greatest elements of the parts -> scales, steps, and the front of each record.
template <DType kType, int kBits>
FLASH_INLINE void choose_steps(const uint8_t* x, int count, const PartBounds& bounds, const Codec& c,
                               Steps& s, uint8_t* records) {
  constexpr Book book = book_of(kBits);
  const int g = c.group_size, part = g / kParts;
  const int64_t record = record_bytes(kBits, g, kCodebook);
  const int parts = count * kParts;
  for (int i = 0; i < parts; i += kLanes) {
    store(s.asked + i, across<GreatestBits>(bounds.greatest + i) / book.reach);
  }
  for (int j = 0; j < count; ++j) {
    uint32_t most = 0;
    for (int p = 0; p < kParts; ++p) {
      const uint32_t bits = float_bits(s.asked[j * kParts + p]) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    const float scale = bits_float(codebook_scale(bits_float(most)));
    for (int p = 0; p < kParts; ++p) s.scale[j * kParts + p] = scale;
    s.with_zero[j] = holds_zero(bounds.without[j]);
  }
  for (int i = 0; i < parts; i += kLanes) {  // widest_part, kLanes at once
    const VecF ratio = load<VecF>(s.asked + i) / load<VecF>(s.scale + i);
    const VecU rounded_up = cast<VecU>(ratio) + ((1u << kPartShift) - 1);  // of a NaN it wraps around
    const VecI up = (cast<VecI>(rounded_up) >> kPartShift) - kLeastPart;
    const VecI none = VecI{}, last = VecI{} + 63;
    const VecI above = up > none ? up : none;
    const VecI widest = above < last ? above : last;
    const VecI lower = widest - book.lower;
    store(s.widest + i, widest);
    store(s.number + i, lower > none ? lower : none);
  }
  if (c.options & kMse) {
    for (int i = 0; i < parts; ++i) {
      s.number[i] = best_number<kType, kBits>(x + i * part * Element<kType>::kBytes, part, s.scale[i],
                                              s.widest[i], s.with_zero[i / kParts]);
    }
  }
  for (int i = 0; i < parts; i += kLanes) {
    const VecF of_part = cast<VecF>((load<VecI>(s.number + i) + kLeastPart) << kPartShift);
    const VecF step = of_part * load<VecF>(s.scale + i);
    store(s.step + i, step);
    store(s.inverse + i, 1.0f / step);
  }
  for (int j = 0; j < count; ++j) {
    uint64_t front = float_bits(s.scale[j * kParts]) >> 16 | (s.with_zero[j] ? kWhole : 0u);
    for (int p = 0; p < kParts; ++p) front |= static_cast<uint64_t>(s.number[j * kParts + p]) << (16 + 6 * p);
    __builtin_memcpy(records + j * record, &front, sizeof front);
  }
}

// `count` whole groups, count <= kBatch, whose bounds are `now`; takes the bounds of the next batch on the
// way. kFeedback: as encode_batch.
template <DType kType, int kBits, bool kFeedback = false>
void encode_parts(const uint8_t* x, int count, const PartBounds& now, int next_count, PartBounds& next,
                  const Codec& c, uint8_t* records, float share = 0.0f, float* kept = nullptr) {
  using E = Element<kType>;
  const int g = c.group_size, part_shift = __builtin_ctz(static_cast<unsigned>(g / kParts));
  const int64_t record = record_bytes(kBits, g, kCodebook);
  constexpr int front = spikes_offset(kCodebook);
  Steps s;
  choose_steps<kType, kBits>(x, count, now, c, s, records);
  for (int j = 0; j < count; ++j) {
    uint8_t* out = records + j * record;
    const uint8_t* in = x + j * g * E::kBytes;
    const float* inverse = s.inverse + j * kParts;
    const float* step = s.step + j * kParts;
    const VecF shift = VecF{} + (s.with_zero[j] ? book_of(kBits).shift : 0.0f);
    const Levels<kBits> levels = levels_of_group<kBits>(s.with_zero[j]);
    for (int i = 0; i < g; i += kBlock) {
      VecU codes[4];
      for (int l = 0; l < 4; ++l) {
        const int at = i + l * kLanes;
        const VecF v = E::read(in + at * E::kBytes);
        codes[l] = codes_of<kBits>(v * inverse[at >> part_shift] + shift);
        if constexpr (kFeedback) {
          float* lost = kept + j * g + at;
          store(lost,
                (v - looked_up<kBits>(levels, codes[l]) * step[at >> part_shift]) * share + load<VecF>(lost));
        }
      }
      pack_block<kBits>(codes, 0, g, i, out + front);
    }
    if (float_bits(s.scale[j * kParts]) == kNaNBits) {
      __builtin_memset(out, 0, static_cast<size_t>(record));
      __builtin_memcpy(out, &kNaNScale, sizeof kNaNScale);
    }
    if (j < next_count) take_parts<kType>(in + count * g * E::kBytes, g, next, j);
  }
  if constexpr (kFeedback) {
    bool safe = true;
    for (int j = 0; j < count; ++j) safe = safe && s.scale[j * kParts] < kSafe;
    if (!safe) lose_non_finite(count, c, records, kept);
  }
}

// Groups that are rotated first, or a ragged one: one batch by itself.
template <DType kType, int kBits>
void encode_alone(const uint8_t* x, int count, const Codec& c, uint8_t* records) {
  if (c.options & kHadamard) {
    alignas(64) float groups[kBatchElements];
    PartBounds bounds = {};
    load_groups<kType>(x, count, c, groups);
    const auto* floats = reinterpret_cast<const uint8_t*>(groups);
    for (int j = 0; j < count; ++j) {
      take_parts<DType::kFloat32>(floats + j * c.group_size * 4, c.group_size, bounds, j);
    }
    encode_parts<DType::kFloat32, kBits>(floats, count, bounds, 0, bounds, c, records);
  } else {
    PartBounds bounds = {};
    for (int j = 0; j < count; ++j) {
      take_parts<kType>(x + j * c.group_size * Element<kType>::kBytes, c.group_size, bounds, j);
    }
    encode_parts<kType, kBits>(x, count, bounds, 0, bounds, c, records);
  }
}

template <DType kType, int kBits>
void encode_codebook(const uint8_t* x, int64_t numel, const Codec& c, uint8_t* payload, int64_t begin,
                     int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = c.group_size, batch = batch_of(g);
  const int64_t record = record_bytes(kBits, g, kCodebook);
  const int64_t whole = numel / g < end ? numel / g : end;
  const auto count_from = [=](int64_t i) {
    return i >= whole ? 0 : static_cast<int>(whole - i < batch ? whole - i : batch);
  };
  if (c.options & kHadamard) {
    for (int64_t i = begin; i < whole; i += batch) {
      encode_alone<kType, kBits>(x + i * g * kBytes, count_from(i), c, payload + i * record);
    }
  } else {
    PartBounds bounds_of[2] = {};
    for (int j = 0; j < count_from(begin); ++j) {
      take_parts<kType>(x + (begin + j) * g * kBytes, g, bounds_of[0], j);
    }
    int now = 0;
    for (int64_t i = begin; i < whole; i += batch, now ^= 1) {
      encode_parts<kType, kBits>(x + i * g * kBytes, count_from(i), bounds_of[now], count_from(i + batch),
                                 bounds_of[now ^ 1], c, payload + i * record);
    }
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize] = {};
    fill_ragged<kBytes>(x + whole * g * kBytes, numel - whole * g, g, group);
    encode_alone<kType, kBits>(group, 1, c, payload + whole * record);
  }
}

// Whole groups, not rotated, with error feedback; see encode_lost.
template <int kBits>
void encode_codebook_lost(const float* x, int64_t groups, const Codec& c, float share, float* kept,
                          uint8_t* payload) {
  constexpr DType kType = DType::kFloat32;
  const int g = c.group_size, batch = batch_of(g);
  PartBounds bounds = {};
  for (int64_t i = 0; i < groups; i += batch) {
    const int count = static_cast<int>(groups - i < batch ? groups - i : batch);
    const auto* part = reinterpret_cast<const uint8_t*>(x + i * g);
    for (int j = 0; j < count; ++j) take_parts<kType>(part + 4 * j * g, g, bounds, j);
    encode_parts<kType, kBits, true>(part, count, bounds, 0, bounds, c, payload + i * record_bytes(c), share,
                                     kept + i * g);
  }
}

// ---- decoding -----------------------------------------------------------------------------------------

// The sum of one group over the payloads, in rank order, stored in the tensor's dtype.
template <DType kType, int kBits>
FLASH_INLINE void sum_parts(const Payloads& p, int64_t group, float factor, uint8_t* y) {
  using E = Element<kType>;
  const int g = p.codec.group_size, part_shift = __builtin_ctz(static_cast<unsigned>(g / kParts));
  constexpr int front = spikes_offset(kCodebook);
  const uint8_t* first = p.data + group * record_bytes(kBits, g, kCodebook);
  for (int i = 0; i < g; i += kBlock) {
    VecF sums[4];
    for (VecF& sum : sums) sum = -VecF{};  // -0 + v is v, whatever the sign of a zero
    for (int64_t rank = 0; rank < p.count; ++rank) {
      const uint8_t* record = first + rank * p.stride;
      uint64_t word;
      __builtin_memcpy(&word, record, sizeof word);
      const float scale = bits_float(static_cast<uint32_t>(word & 0x7fffu) << 16);
      const Levels<kBits> levels = levels_of_group<kBits>(word & kWhole);
      VecU codes[4];
      unpack_block<kBits>(record + front, g, i, codes);
      for (int l = 0; l < 4; ++l) {
        const int part = (i + l * kLanes) >> part_shift;
        const float step = part_scale(static_cast<int>(word >> (16 + 6 * part) & 63u)) * scale;
        sums[l] = sums[l] + looked_up<kBits>(levels, codes[l]) * step;
      }
    }
    for (int l = 0; l < 4; ++l) E::write(y + (i + l * kLanes) * E::kBytes, sums[l] * factor);
  }
}

template <DType kType, int kBits>
FLASH_INLINE void sum_codebook(const Payloads& p, int64_t group, float factor, uint8_t* y) {
  if (p.codec.options & kHadamard) {
    alignas(64) float sums[kMaxGroupSize];
    sum_parts<DType::kFloat32, kBits>(p, group, 1.0f, reinterpret_cast<uint8_t*>(sums));
    write_turned_back<kType>(sums, p.codec.group_size, factor, y);
  } else {
    sum_parts<kType, kBits>(p, group, factor, y);
  }
}

template <DType kType, int kBits>
void decode_sum_codebook(const Payloads& p, float factor, uint8_t* y, int64_t numel, int64_t begin,
                         int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = p.codec.group_size;
  const int64_t whole = numel / g < end ? numel / g : end;
  for (int64_t i = begin; i < whole; ++i) sum_codebook<kType, kBits>(p, i, factor, y + i * g * kBytes);
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize];
    sum_codebook<kType, kBits>(p, whole, factor, group);
    __builtin_memcpy(y + whole * g * kBytes, group, static_cast<size_t>((numel - whole * g) * kBytes));
  }
}

template <int kBits>
constexpr CodecKernels kCodebooks = {
    {encode_codebook<DType::kFloat32, kBits>, encode_codebook<DType::kBFloat16, kBits>,
     encode_codebook<DType::kFloat16, kBits>},
    {decode_sum_codebook<DType::kFloat32, kBits>, decode_sum_codebook<DType::kBFloat16, kBits>,
     decode_sum_codebook<DType::kFloat16, kBits>},
    encode_codebook_lost<kBits>,
};

// ---- the table of all kernels -------------------------------------------------------------------------

constexpr Kernels kTable = {
    FLASH_LAYOUTS(kPlain),
    FLASH_LAYOUTS(kOptions),
    {kCodebooks<2>, kCodebooks<3>, kCodebooks<4>, kCodebooks<5>, kCodebooks<6>, kCodebooks<7>, kCodebooks<8>},
    {subtract<DType::kFloat32>, subtract<DType::kBFloat16>, subtract<DType::kFloat16>},
    {add<DType::kFloat32>, add<DType::kBFloat16>, add<DType::kFloat16>},
    {{carry<DType::kFloat32, false>, carry<DType::kFloat32, true>},
     {carry<DType::kBFloat16, false>, carry<DType::kBFloat16, true>},
     {carry<DType::kFloat16, false>, carry<DType::kFloat16, true>}},
    lose,
    narrow};

#undef FLASH_WIDTHS
#undef FLASH_LAYOUTS
#undef FLASH_INLINE
#undef FLASH_INLINED

}  // namespace
}  // namespace flash_allreduce
