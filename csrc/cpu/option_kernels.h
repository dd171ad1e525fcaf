// Encoding and decoding with options: rotation, spikes, a searched range, stochastic rounding. Included after
// codec_kernels.h, for every instruction set; the order of the options is codec_math.h's.
//
//   encode   a batch of groups, as float, in the first-level cache:
//              x -> [rotate] -> [take the spikes out] -> lo, hi -> [try ranges] -> codes [+ random] -> planes
//   decode   a group at a time, as float:
//              planes of each rank -> added, its spikes put in their places -> [rotate] -> stored
//
// A rotation takes log2(g) steps of sums and differences: those between elements of one vector first, then
// those between vectors, two steps at a time.
//
//   stride 1   a b c d e f g h   ->  a+b a-b c+d c-d e+f e-f g+h g-h
//   stride 2   a b c d e f g h   ->  a+c b+d a-c b-d e+g f+h e-g f-h     and so on

#include "codec_cpu.h"

namespace flash_allreduce {
namespace {

#define FLASH_INLINE static inline __attribute__((always_inline))

constexpr int kBatchElements = 4096;

// ---- rotation -----------------------------------------------------------------------------------------

struct Signs {
  uint32_t flip[kMaxGroupSize];
};

constexpr Signs make_signs() {
  Signs s{};
  for (uint32_t i = 0; i < kMaxGroupSize; ++i) s.flip[i] = rotation_flips(i) ? 0x80000000u : 0u;
  return s;
}

alignas(64) constexpr Signs kSigns = make_signs();

FLASH_INLINE VecF flipped(VecF v, int i) { return cast<VecF>(cast<VecU>(v) ^ load<VecU>(kSigns.flip + i)); }

// +1 in the first lane of every pair that is kStride apart, -1 in the second.
template <int kStride>
FLASH_INLINE VecF first_and_second() {
  const VecI second = (lane_numbers() & kStride) != 0;
  return second ? VecF{} - 1.0f : VecF{} + 1.0f;
}

template <int kStride>
FLASH_INLINE VecF sums_and_differences(VecF v) {
  if constexpr (kStride >= kLanes) {
    return v;
  } else {
    const VecF partner = cast<VecF>(FLASH_PERMUTE(VecU, cast<VecU>(v), FLASH_APART(kStride)));
#if FLASH_LANES == 16
    // One rounding, and a product that is exact: the same as a sum or a difference.
    return cast<VecF>(
        _mm512_fmadd_ps(cast<__m512>(v), cast<__m512>(first_and_second<kStride>()), cast<__m512>(partner)));
#else
    return partner + v * first_and_second<kStride>();
#endif
  }
}

FLASH_INLINE VecF rotated_lanes(VecF v) {
  v = sums_and_differences<1>(v);
  v = sums_and_differences<2>(v);
  v = sums_and_differences<4>(v);
  return sums_and_differences<8>(v);
}

// The steps between vectors; x [g] already has those inside of vectors behind it.
FLASH_INLINE void rotate_vectors(float* x, int g) {
  int s = kLanes;
  for (; 2 * s < g; s *= 4) {
    for (int block = 0; block < g; block += 4 * s) {
      for (int i = block; i < block + s; i += kLanes) {
        const VecF a = load<VecF>(x + i), b = load<VecF>(x + i + s);
        const VecF c = load<VecF>(x + i + 2 * s), d = load<VecF>(x + i + 3 * s);
        const VecF ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
        store(x + i, ab + cd);
        store(x + i + s, a_b + c_d);
        store(x + i + 2 * s, ab - cd);
        store(x + i + 3 * s, a_b - c_d);
      }
    }
  }
  if (s < g) {
    for (int i = 0; i < s; i += kLanes) {
      const VecF a = load<VecF>(x + i), b = load<VecF>(x + i + s);
      store(x + i, a + b);
      store(x + i + s, a - b);
    }
  }
}

// ---- encoding -----------------------------------------------------------------------------------------

// `count` whole groups as float, rotated if asked for.
template <DType kType>
FLASH_INLINE void load_groups(const uint8_t* x, int count, const Codec& c, float* out) {
  using E = Element<kType>;
  const int g = c.group_size;
  for (int j = 0; j < count; ++j, x += g * E::kBytes, out += g) {
    if (c.options & kHadamard) {
      for (int i = 0; i < g; i += kLanes) {
        store(out + i, rotated_lanes(flipped(E::read(x + i * E::kBytes), i)));
      }
      rotate_vectors(out, g);
    } else {
      for (int i = 0; i < g; i += kLanes) store(out + i, E::read(x + i * E::kBytes));
    }
  }
}

// The bounds, ranges and spikes of the groups of a batch.
struct Groups : Ranges {
  uint16_t least[kBatch], greatest[kBatch];  // the spikes, bf16
  int least_at[kBatch], greatest_at[kBatch];
  bool lost[kBatch];
  alignas(64) uint32_t with_zero[kBatch];  // holds one
};

// Least and greatest of each group; a NaN may be passed over.
__attribute__((noinline)) void bounds_of(const float* x, int count, int g, Groups& b) {
  VecF lo[kBatch] = {}, hi[kBatch] = {};
  for (int j = 0; j < count; ++j) {
    VecF least = load<VecF>(x + j * g), greatest = least;
    Without without = kWithoutZero;
    for (int i = 0; i < g; i += kLanes) {
      const VecF v = load<VecF>(x + j * g + i);
      least = Least::of(v, least);
      greatest = Greatest::of(v, greatest);
      without = without_zero(without, v);
    }
    lo[j] = least;
    hi[j] = greatest;
    b.with_zero[j] = holds_zero(without);
  }
  for (int j = 0; j < kBatch; j += kLanes) {
    store(b.lo + j, across<Least>(lo + j));
    store(b.hi + j, across<Greatest>(hi + j));
  }
}

// Where b.lo and b.hi are, the first of equals; a group with a NaN may get any place inside of it.
FLASH_INLINE void places_of(const float* x, int count, int g, Groups& b) {
  VecF low_at[kBatch] = {}, high_at[kBatch] = {};
  const VecF first = __builtin_convertvector(lane_numbers(), VecF);
  for (int j = 0; j < count; ++j) {
    const VecF lo = VecF{} + b.lo[j], hi = VecF{} + b.hi[j],
               none = VecF{} + static_cast<float>(kMaxGroupSize);
    VecF low = none, high = none;
    for (int i = g - kLanes; i >= 0; i -= kLanes) {  // backwards: the first one stays
      const VecF v = load<VecF>(x + j * g + i), place = first + static_cast<float>(i);
      low = v == lo ? place : low;
      high = v == hi ? place : high;
    }
    low_at[j] = low;
    high_at[j] = high;
  }
  alignas(64) float low[kBatch], high[kBatch];
  for (int j = 0; j < kBatch; j += kLanes) {
    store(low + j, across<Least>(low_at + j));
    store(high + j, across<Least>(high_at + j));
  }
  for (int j = 0; j < count; ++j) {
    b.least_at[j] = static_cast<int>(low[j]) & (g - 1);
    b.greatest_at[j] = static_cast<int>(high[j]) & (g - 1);
  }
}

// The extremes out of the groups, something that is none in their places.
__attribute__((noinline)) void take_spikes(float* x, int count, const Codec& c, uint64_t number, Groups& b) {
  const int g = c.group_size;
  bounds_of(x, count, g, b);
  places_of(x, count, g, b);
  for (int j = 0; j < count; ++j, x += g) {
    const int low = b.least_at[j], high = b.greatest_at[j];
    int other = 0;
    while (other == low || other == high) ++other;
    const float least = x[low] + 0.0f, greatest = x[high] + 0.0f;
    if (c.options & kStochastic) {
      const uint64_t of_group = group_key(c.key, number + j);
      b.least[j] = bf16_random(least, spike_random(of_group, g, false));
      b.greatest[j] = bf16_random(greatest, spike_random(of_group, g, true));
    } else {
      b.least[j] = bf16_nearest(least);
      b.greatest[j] = bf16_nearest(greatest);
    }
    b.lost[j] = !(bf16_is_finite(b.least[j]) && bf16_is_finite(b.greatest[j]));
    x[low] = x[other];
    x[high] = x[other];
  }
}

// pair_random of elements 0 to count - 1.
__attribute__((noinline)) void random_pairs(uint64_t of_group, int count, uint32_t* pairs) {
  const uint32_t step = static_cast<uint32_t>(of_group >> 32) | 1u;
  VecU from = static_cast<uint32_t>(of_group) + cast<VecU>(lane_numbers()) * step;
  for (int i = 0; i < count; i += kLanes, from = from + kLanes * step) {
    VecU r = (from ^ (from >> 16)) * 0x7feb352du;
    r = (r ^ (r >> 15)) * 0x846ca68bu;
    store(pairs + i, r ^ (r >> 16));
  }
}

// `count` groups of floats, count <= kBatch, to their records. number: of the first in its call. Overwrites
// x.
template <int kBits, Layout kLayout>
void encode_floats(float* x, int count, const Codec& c, uint64_t number, uint8_t* records) {
  const int g = c.group_size;
  const int64_t record = record_bytes(c);
  const int planes = metadata_bytes(g, c.options);
  constexpr int levels = code_levels(kBits, kLayout);
  constexpr int half = code_half(kBits, kLayout);
  constexpr int front = spikes_offset(options_of(kLayout));
  const float slack = slack_of(c.options);
  alignas(64) uint32_t pairs[kMaxGroupSize / 2];
  Groups b = {};
  if (c.options & kSpikes) take_spikes(x, count, c, number, b);
  bounds_of(x, count, g, b);
  whole_ranges(b, kBits, kLayout, slack);
  if (c.options & kMse) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(x);
    search_ranges<DType::kFloat32, searched_as(kBits, kLayout), kLayout>(bytes, count, g, kBits, Ahead::kNot,
                                                                         b);
  }
  if constexpr (may_miss_zero(kBits, kLayout)) ranges_with_zero(b, b.with_zero, kBits, kLayout, slack);
  invert_scales(b);
  for (int j = 0; j < count; ++j) {
    uint8_t* out = records + j * record;
    const float* in = x + j * g;
    __builtin_memcpy(out, b.metadata + j, front);
    if (c.options & kSpikes) {
      uint8_t* spikes = out + front;
      const uint16_t values[2] = {b.least[j], b.greatest[j]};
      __builtin_memcpy(spikes, values, sizeof values);
      if (place_bytes(g) == 1) {
        spikes[4] = static_cast<uint8_t>(b.least_at[j]);
        spikes[5] = static_cast<uint8_t>(b.greatest_at[j]);
      } else {
        const uint16_t at[2] = {static_cast<uint16_t>(b.least_at[j]),
                                static_cast<uint16_t>(b.greatest_at[j])};
        __builtin_memcpy(spikes + 4, at, sizeof at);
      }
    }
    const VecF z = VecF{} + b.zero[j];
    const VecF inv = VecF{} + b.inverse[j];
    if (c.options & kStochastic) random_pairs(group_key(c.key, number + j), g / 2, pairs);
    VecI seen = VecI{};
    for (int i = 0; i < g; i += kBlock) {
      VecI codes[4];
      for (int l = 0; l < 4; ++l) {
        const int at = i + l * kLanes;
        const VecF v = load<VecF>(in + at);
        VecF t = (kLayout == Layout::kSymmetric ? v : v - z) * inv;
        if (c.options & kStochastic) {  // element_random and rounding_offset, kLanes at once
          const VecU pair = load<VecU>(pairs + (at & (g / 2 - 1)));
          const VecU random = at < g / 2 ? pair >> 20 : (pair >> 4) & 0xfffu;
          t = t + (__builtin_convertvector(cast<VecI>(random), VecF) * (1.0f / 4096) + (0.5f / 4096 - 0.5f));
        }
        codes[l] = rounded(t);
      }
      pack_block<kBits>(bytes_of(codes, half, seen), g, i, out + planes);
    }
    if (saw_nan(seen, half, levels) || b.lost[j]) {  // a NaN, an Inf or a scale that is NaN
      __builtin_memset(out, 0, static_cast<size_t>(record));
      __builtin_memcpy(out, &kNaNScale, sizeof kNaNScale);
    }
  }
}

template <DType kType, int kBits, Layout kLayout>
void encode_with_options(const uint8_t* x, int64_t numel, const Codec& c, uint8_t* payload, int64_t begin,
                         int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  alignas(64) float groups[kBatchElements];
  const int g = c.group_size;
  const int64_t record = record_bytes(c);
  const int64_t whole = numel / g < end ? numel / g : end;
  const int64_t batch = kBatchElements / g < kBatch ? kBatchElements / g : kBatch;
  for (int64_t i = begin; i < whole; i += batch) {
    const int count = static_cast<int>(whole - i < batch ? whole - i : batch);
    load_groups<kType>(x + i * g * kBytes, count, c, groups);
    encode_floats<kBits, kLayout>(groups, count, c, c.first_group + i, payload + i * record);
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize] = {};
    fill_ragged<kBytes>(x + whole * g * kBytes, numel - whole * g, g, group);
    load_groups<kType>(group, 1, c, groups);
    encode_floats<kBits, kLayout>(groups, 1, c, c.first_group + whole, payload + whole * record);
  }
}

// ---- decoding -----------------------------------------------------------------------------------------

// One rank's group added to sums [g]; the first one's is stored.
template <int kBits, Layout kLayout, bool kFirst>
FLASH_INLINE void add_group(const uint8_t* record, const Codec& c, float* sums) {
  constexpr int half = code_half(kBits, kLayout);
  const int g = c.group_size;
  const Metadata m = read_metadata(record, kBits, kLayout);
  const bool spikes = c.options & kSpikes && m.scale == m.scale;
  uint16_t values[2] = {0, 0};
  int at[2] = {0, 0};
  float before[2] = {0, 0};
  if (spikes) {
    const uint8_t* p = record + spikes_offset(options_of(kLayout));
    __builtin_memcpy(values, p, sizeof values);
    for (int k = 0; k < 2; ++k) {
      uint16_t place = p[4 + k];
      if (place_bytes(g) == 2) __builtin_memcpy(&place, p + 4 + 2 * k, sizeof place);
      at[k] = place & (g - 1);
      before[k] = kFirst ? -0.0f : sums[at[k]];
    }
  }
  const uint8_t* planes = record + metadata_bytes(g, c.options);
  for (int i = 0; i < g; i += kBlock) {
    VecU codes[4];
    unpack_block<kBits>(planes, g, i, codes);
    for (int l = 0; l < 4; ++l) {  // decode_element, kLanes at once
      float* sum = sums + i + l * kLanes;
      const VecF value = __builtin_convertvector(cast<VecI>(codes[l]) - half, VecF) * m.scale + m.zero;
      store(sum, kFirst ? value : load<VecF>(sum) + value);
    }
  }
  if (spikes) {
    for (int k = 0; k < 2; ++k) sums[at[k]] = before[k] + bf16_to_float(values[k]);
  }
}

// sums [g] of rotated groups; overwrites them.
template <DType kType>
FLASH_INLINE void write_turned_back(float* sums, int g, float factor, uint8_t* y) {
  using E = Element<kType>;
  for (int i = 0; i < g; i += kLanes) store(sums + i, rotated_lanes(load<VecF>(sums + i)));
  rotate_vectors(sums, g);
  const float shrink = 1.0f / static_cast<float>(g);
  for (int i = 0; i < g; i += kLanes) {
    E::write(y + i * E::kBytes, flipped(load<VecF>(sums + i) * shrink, i) * factor);
  }
}

// The sums of a group over the payloads, in rank order, not turned back: a function for all dtypes.
template <int kBits, Layout kLayout>
__attribute__((noinline)) void add_groups(const Payloads& p, int64_t group, float* sums) {
  const Codec& c = p.codec;
  const uint8_t* record = p.data + group * record_bytes(c);
  add_group<kBits, kLayout, true>(record, c, sums);
  for (int64_t rank = 1; rank < p.count; ++rank) {
    add_group<kBits, kLayout, false>(record + rank * p.stride, c, sums);
  }
}

template <DType kType>
void write_sums(float* sums, const Codec& c, float factor, uint8_t* y) {
  using E = Element<kType>;
  if (c.options & kHadamard) return write_turned_back<kType>(sums, c.group_size, factor, y);
  for (int i = 0; i < c.group_size; i += kLanes) {
    E::write(y + i * E::kBytes, load<VecF>(sums + i) * factor);
  }
}

template <DType kType, int kBits, Layout kLayout>
void decode_sum_with_options(const Payloads& p, float factor, uint8_t* y, int64_t numel, int64_t begin,
                             int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = p.codec.group_size;
  const int64_t whole = numel / g < end ? numel / g : end;
  alignas(64) float sums[kMaxGroupSize];
  for (int64_t i = begin; i < whole; ++i) {
    add_groups<kBits, kLayout>(p, i, sums);
    write_sums<kType>(sums, p.codec, factor, y + i * g * kBytes);
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize];
    add_groups<kBits, kLayout>(p, whole, sums);
    write_sums<kType>(sums, p.codec, factor, group);
    __builtin_memcpy(y + whole * g * kBytes, group, static_cast<size_t>((numel - whole * g) * kBytes));
  }
}

// ---- error feedback ------------------------------------------------------------------------------------

// encode_lost of any format, after encoding and decoding. n: a multiple of kLanes.
void lose(const float* x, const float* arrives, int64_t n, float share, float* kept) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecF v = load<VecF>(x + i), a = load<VecF>(arrives + i);
    const VecI waits = (cast<VecI>(v) == cast<VecI>(-VecF{})) & (a == a);
    const VecF lost = (waits ? VecF{} : v - a) * share + load<VecF>(kept + i);
    const VecI finite = (cast<VecI>(lost) & 0x7fffffff) < static_cast<int32_t>(kInfBits);
    store(kept + i, finite ? lost : VecF{});
  }
}

// Converts floats to bf16, nearest even, and non-finite ones to 0. n: a multiple of kLanes.
void narrow(const float* x, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecF v = load<VecF>(x + i);
    const VecI finite = (cast<VecI>(v) & 0x7fffffff) < static_cast<int32_t>(kInfBits);
    Element<DType::kBFloat16>::write(out + 2 * i, finite ? v : VecF{});
  }
}

// ---- the table: codebook_kernels.h has the whole of it -----------------------------------------------

template <int kBits, Layout kLayout>
constexpr CodecKernels kOptions = {
    {encode_with_options<DType::kFloat32, kBits, kLayout>,
     encode_with_options<DType::kBFloat16, kBits, kLayout>,
     encode_with_options<DType::kFloat16, kBits, kLayout>},
    {decode_sum_with_options<DType::kFloat32, kBits, kLayout>,
     decode_sum_with_options<DType::kBFloat16, kBits, kLayout>,
     decode_sum_with_options<DType::kFloat16, kBits, kLayout>},
    nullptr,
};

#define FLASH_WIDTHS(table, layout)                                                                        \
  {table<2, Layout::layout>, table<3, Layout::layout>, table<4, Layout::layout>, table<5, Layout::layout>, \
   table<6, Layout::layout>, table<7, Layout::layout>, table<8, Layout::layout>}
#define FLASH_LAYOUTS(table) \
  {FLASH_WIDTHS(table, kAsymmetric), FLASH_WIDTHS(table, kSymmetric), FLASH_WIDTHS(table, kCompact)}

}  // namespace
}  // namespace flash_allreduce
