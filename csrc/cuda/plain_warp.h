// The codec of a warp for most calls: 8 or 4 bits, groups of 128, no options but a layout, rows at addresses
// that 16 divides. The same bits, lanes and records as codec_warp.h, which handles all other calls.
// Here width and layout are constants, loads of a lane are issued together, and each element takes the fewest
// instructions:
//
//   bounds    of pairs: two elements of 16 bits in a word. A NaN is the least and the greatest of all: the
//             group's scale shows it, and no code has to be looked at
//   pack      a code is the last byte of x / step + 1.5 * 2^23: bytes are gathered, two, then four
//   decode    a code's byte is put into the float 2^15 + code, times the step less 2^15 steps, rounded once:
//             the bits of code * step, since 2^15 steps are a float too (a step has 8 bits)
//   NaN       sums are bounded by the ranks' metadata: where that is finite no sum is a NaN or was an Inf,
//             else the group is added up again as codec_warp.h does
//
// Four lanes share a group; a lane holds four runs of eight neighbours of it (codec_warp.h, of 128):
//
//            lane 0      lane 1       lane 2       lane 3
//   run 0    0 .. 7      8 .. 15      16 .. 23     24 .. 31
//   run 1    32 .. 39    40 .. 47     48 .. 55     56 .. 63      and so on
#pragma once

#include <type_traits>

#include "codec_warp.h"

namespace flash_allreduce {

// For rare loops: not unrolled, to save registers.
#if defined(__CUDACC__)
#define FLASH_ROLLED _Pragma("unroll 1")
#else
#define FLASH_ROLLED
#endif

constexpr int kPlainGroup = 128;
constexpr int kPlainLanes = kPlainGroup / kLaneElements;

// The alignment of every record: its size is the metadata and a multiple of 4.
FLASH_HD constexpr int plain_align(Layout layout) { return spikes_offset(options_of(layout)); }

template <int kBits, Layout kLayout>
FLASH_HD constexpr Form plain_form() {
  static_assert(kBits == 8 || kBits == 4, "the widths whose codes lie in bytes and halves of bytes");
  return Form(kBits, kPlainGroup, options_of(kLayout));
}

// On the host: f(bits), as a constant.
template <class F>
bool choose_plain_bits(int bits, const F& f) {
  if (bits == 8) f(std::integral_constant<int, 8>());
  if (bits == 4) f(std::integral_constant<int, 4>());
  return bits == 8 || bits == 4;
}

// f(bits, layout), as constants, if plain_warp.h has them. options: those that matter to the kernel.
template <class F>
bool choose_plain(const Form& form, int64_t options, const F& f) {
  if (form.group_size != kPlainGroup || (options & ~(kSymmetricCodes | kCompact)) != 0) return false;
  const auto with = [&](auto layout) {
    return choose_plain_bits(form.bits, [&](auto bits) { f(bits, layout); });
  };
  switch (layout_of(form.options)) {
    case Layout::kSymmetric:
      return with(std::integral_constant<Layout, Layout::kSymmetric>());
    case Layout::kCompact:
      return with(std::integral_constant<Layout, Layout::kCompact>());
    default:
      return with(std::integral_constant<Layout, Layout::kAsymmetric>());
  }
}

// ---- instructions ---------------------------------------------------------------------------------------

// Bytes of a and b, which are numbers 0 to 3 and 4 to 7: four numbers of 4 bits, that of the lowest byte
// first.
FLASH_HD uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t numbers) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, numbers);
#else
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    bytes |= static_cast<uint32_t>(both >> (8 * (numbers >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  }
  return bytes;
#endif
}

// a * b + c, rounded once. PTX has two names for it: a compiler that contracts says fma, which tests/ptx
// refuses.
FLASH_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  float sum;
  asm("mad.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// A constant that stays in a register: the compiler, which would else bring it there for each use, does not
// know that threads have numbers below 1024.
FLASH_HD uint32_t kept_in_register(uint32_t value) {
#if defined(__CUDA_ARCH__)
  uint32_t thread;
  asm("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return value + (thread >> 10);
#else
  return value;
#endif
}

// A warp's element that a lane's first one is; element 8 r is 32 r further.
FLASH_HD int place_in_warp(int lane) {
  return lane / kPlainLanes * kPlainGroup + lane % kPlainLanes * kNeighbours;
}

// Words of a lane's elements in their dtype: a float32, or two of 16 bits, in a word.
template <DType kType>
FLASH_HD constexpr int words_of_lane() {
  return kLaneElements * element_bytes(kType) / 4;
}

// f of the elements of two words, one by one.
template <DType kType, class F>
FLASH_HD uint32_t of_elements(uint32_t a, uint32_t b, F f) {
  if constexpr (kType == DType::kFloat32) {
    return float_bits(f(bits_float(a), bits_float(b)));
  } else {
    const uint32_t low = from_float<kType>(f(to_float<kType>(a & 0xffffu), to_float<kType>(b & 0xffffu)));
    return low | from_float<kType>(f(to_float<kType>(a >> 16), to_float<kType>(b >> 16))) << 16;
  }
}

// The lesser and the greater of each pair of elements; of a NaN and any other, a NaN.
template <DType kType>
FLASH_HD uint32_t lesser(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t least = 0;
  if constexpr (kType == DType::kFloat32) {
    float x;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(bits_float(a)), "f"(bits_float(b)));
    least = float_bits(x);
  }
  if constexpr (kType == DType::kBFloat16) asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  if constexpr (kType == DType::kFloat16) asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
#else
  return of_elements<kType>(a, b, [](float x, float y) { return x != x || x < y ? x : y; });
#endif
}

template <DType kType>
FLASH_HD uint32_t greater(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t most = 0;
  if constexpr (kType == DType::kFloat32) {
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(bits_float(a)), "f"(bits_float(b)));
    most = float_bits(x);
  }
  if constexpr (kType == DType::kBFloat16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  if constexpr (kType == DType::kFloat16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
#else
  return of_elements<kType>(a, b, [](float x, float y) { return x != x || x > y ? x : y; });
#endif
}

// Without their signs.
template <DType kType>
FLASH_HD uint32_t magnitudes(uint32_t a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t sizes = a & 0x7fffffffu;
  if constexpr (kType == DType::kFloat32) {
    float x;
    asm("abs.f32 %0, %1;" : "=f"(x) : "f"(bits_float(a)));
    sizes = float_bits(x);
  }
  if constexpr (kType == DType::kBFloat16) asm("abs.bf16x2 %0, %1;" : "=r"(sizes) : "r"(a));
  if constexpr (kType == DType::kFloat16) asm("abs.f16x2 %0, %1;" : "=r"(sizes) : "r"(a));
  return sizes;
#else
  return a & (kType == DType::kFloat32 ? 0x7fffffffu : 0x7fff7fffu);
#endif
}

// The lesser of their magnitudes, with a sign that means nothing; of a NaN and any other, a NaN.
template <DType kType>
FLASH_HD uint32_t nearer(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t least = 0;
  if constexpr (kType == DType::kBFloat16) {
    asm("min.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
  }
  if constexpr (kType == DType::kFloat16) {
    asm("min.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
  }
#endif
  return lesser<kType>(magnitudes<kType>(a), magnitudes<kType>(b));
}

// An element of a lane's words.
template <DType kType>
FLASH_HD float element_of(const uint32_t* words, int i) {
  if constexpr (kType == DType::kFloat32) {
    return bits_float(words[i]);
  } else {
    const uint32_t bits = i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16;
#if defined(__CUDA_ARCH__)
    if constexpr (kType == DType::kFloat16) {
      float x;
      asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(bits)));
      return x;
    }
#endif
    return to_float<kType>(bits);
  }
}

// Two elements of 16 bits, neither a NaN.
template <DType kType>
FLASH_HD uint32_t pair_of(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (kType == DType::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return from_float<kType>(low) | from_float<kType>(high) << 16;
#endif
}

// ---- encoding -------------------------------------------------------------------------------------------

// Loads a lane's elements in their dtype into `codes`. A ragged group is padded with its first element.
// row: from the warp's first element on, `left` of them.
template <DType kType>
FLASH_HD void load_words(Lane& own, int lane, const uint8_t* row, int left) {
  constexpr int bytes = element_bytes(kType), stride = kPlainLanes * kNeighbours * bytes;
  const int first = lane / kPlainLanes * kPlainGroup;
  if (first + kPlainGroup <= left) {
    const uint8_t* at = row + place_in_warp(lane) * bytes;
    FLASH_UNROLL
    for (int i = 0; i < words_of_lane<kType>(); i += 4) {
      const Words words = get_words(at + i / (2 * bytes) * stride + i * 4 % (kNeighbours * bytes));
      FLASH_UNROLL
      for (int k = 0; k < 4; ++k) own.codes[i + k] = words.w[k];
    }
    return;
  }
  FLASH_UNROLL
  for (uint32_t& word : own.codes) word = 0;
  if (first >= left) return;
  FLASH_UNROLL
  for (int i = 0; i < kLaneElements; ++i) {
    const int at = first + static_cast<int>(place_of(lane, i, kPlainLanes));
    const uint32_t bits = get(row + (at < left ? at : first) * bytes, bytes, bytes);
    own.codes[i * bytes / 4] |= bits << (bytes == 4 ? 0 : i % 2 * 16);
  }
}

// x / by, of an x of 0 or above; NaN for an Inf. As 1 / by is rounded to nearest, so is the corrected
// quotient (P. Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990); below
// 2^-126 that may fail, where all scales are one.
FLASH_HD float divided(float x, float by) {
  const float inverse = 1.0f / by, quotient = x * inverse;
  return fused(fused(-quotient, by, x), inverse, quotient);
}

// whole_range, of elements of a type.
template <DType kType, int kBits, Layout kLayout>
FLASH_HD Range plain_range(float lo, float hi) {
  if constexpr (kLayout == Layout::kCompact) return whole_range(lo, hi, kBits, kLayout, kInside);
  constexpr bool symmetric = kLayout == Layout::kSymmetric;
  constexpr int steps = symmetric ? code_half(kBits, kLayout) : code_levels(kBits, kLayout);
  Range r;
  r.zero = symmetric ? 0.0f : kType == DType::kBFloat16 ? lo + 0.0f : group_zero(lo);
  r.scale = served_scale(divided(group_reach(lo, hi, r.zero, symmetric), static_cast<float>(steps)));
  r.metadata = (r.scale >> 16) | float_bits(r.zero);
  return r;
}

// Encodes the groups in `codes` into records at `image`, as encode_groups; 4 divides image.
template <DType kType, int kBits, Layout kLayout, class Warp>
FLASH_HD void plain_encode_groups(Warp& warp, int left, uint8_t* image) {
  constexpr bool symmetric = kLayout == Layout::kSymmetric, zeros = may_miss_zero(kBits, kLayout);
  constexpr int front = spikes_offset(options_of(kLayout)), align = plain_align(kLayout);
  constexpr Form form = plain_form<kBits, kLayout>();
  warp.each([](int, Lane& own) {
    own.least_word = own.codes[0];
    own.most_word = symmetric ? magnitudes<kType>(own.codes[0]) : own.codes[0];
    own.near_word = own.codes[0];
    FLASH_UNROLL
    for (int i = 1; i < words_of_lane<kType>(); ++i) {
      const uint32_t word = own.codes[i];
      if (!symmetric) own.least_word = lesser<kType>(own.least_word, word);
      own.most_word = greater<kType>(own.most_word, symmetric ? magnitudes<kType>(word) : word);
      if (zeros) own.near_word = nearer<kType>(own.near_word, word);
    }
  });
  FLASH_UNROLL
  for (int mask = 1; mask < kPlainLanes; mask *= 2) {
    if (!symmetric) {
      warp.exchange(
          mask, [](const Lane& own) { return own.least_word; },
          [](int, Lane& own, uint32_t other) { own.least_word = lesser<kType>(own.least_word, other); });
    }
    warp.exchange(
        mask, [](const Lane& own) { return own.most_word; },
        [](int, Lane& own, uint32_t other) { own.most_word = greater<kType>(own.most_word, other); });
    if (zeros) {
      warp.exchange(
          mask, [](const Lane& own) { return own.near_word; },
          [](int, Lane& own, uint32_t other) { own.near_word = nearer<kType>(own.near_word, other); });
    }
  }
  warp.each([&](int lane, Lane& own) {
    constexpr DType kFloat = DType::kFloat32;
    // The second of a pair, or the only one.
    constexpr int second = kType == kFloat ? 0 : 1;
    const auto of = [](uint32_t word, int i) { return float_bits(element_of<kType>(&word, i)); };
    own.hi = bits_float(greater<kFloat>(of(own.most_word, 0), of(own.most_word, second)));
    own.lo =
        symmetric ? -own.hi : bits_float(lesser<kFloat>(of(own.least_word, 0), of(own.least_word, second)));
    own.best = plain_range<kType, kBits, kLayout>(own.lo, own.hi);
    if (zeros) {
      const uint32_t near = own.near_word;
      const bool zero =
          kType == kFloat ? (near & 0x7fffffffu) == 0 : (near & 0x7fffu) == 0 || (near & 0x7fff0000u) == 0;
      if (zero) {
        own.best = range_with_zero(own.lo, own.hi, kBits, kLayout, kInside);
      }
    }
    if (lane / kPlainLanes * kPlainGroup >= left) return;
    const bool lost = own.best.scale == kNaNBits;
    const int in_group = lane % kPlainLanes;
    uint8_t* at = image + lane / kPlainLanes * form.record + front + in_group * kBits;
    // Symmetric codes are 1 too large for now: with an even number the sum rounds as without.
    constexpr uint32_t over = symmetric ? (kBits == 8 ? 0x01010101u : 0x11111111u) : 0;
    constexpr float magic = kRoundMagic + static_cast<float>(symmetric ? 1 << (kBits - 1) : 0);
    const float inverse = 1.0f / bits_float(own.best.scale);
    const auto code = [&](int i) {
      const float x = element_of<kType>(own.codes, i);
      return float_bits((symmetric ? x : x - own.best.zero) * inverse + magic);
    };
    // Four codes that lie `step` apart.
    const auto four = [&](int i, int step) {
      return bytes_of(bytes_of(code(i), code(i + step), 0x0040),
                      bytes_of(code(i + 2 * step), code(i + 3 * step), 0x0040), 0x5410);
    };
    constexpr int stride = kPlainLanes * kBits;
    if (lost) {
      FLASH_ROLLED
      for (int i = 0; i < 4 * kBits; ++i) at[i / kBits * stride + i % kBits] = 0;
    } else {
      FLASH_UNROLL
      for (int i = 0; i < kLaneElements; i += kNeighbours) {
        uint8_t* to = at + i / kNeighbours * stride;
        if (kBits == 8) {
          put(to, four(i, 1) - over, 4, align);
          put(to + 4, four(i + 4, 1) - over, 4, align);
        } else {
          put(to, four(i, 2) + (four(i + 1, 2) << 4) - over, 4, align);
        }
      }
    }
    if (in_group == 0) put(at - front, lost ? kNaNScale : own.best.metadata, front, align);
  });
}

// row, left: as load_words.
template <DType kType, int kBits, Layout kLayout, class Warp>
FLASH_HD void plain_encode(Warp& warp, const uint8_t* row, int left, uint8_t* image) {
  warp.each([&](int lane, Lane& own) { load_words<kType>(own, lane, row, left); });
  plain_encode_groups<kType, kBits, kLayout>(warp, left, image);
}

// ---- decoding -------------------------------------------------------------------------------------------

// A lane's part of a record.
template <int kBits>
struct Part {
  uint32_t front;
  uint32_t codes[kBits];
};

template <int kBits, Layout kLayout>
FLASH_HD Part<kBits> load_part(const uint8_t* record, int lane) {
  constexpr int front = spikes_offset(options_of(kLayout)), align = plain_align(kLayout);
  Part<kBits> part;
  part.front = get(record, front, align);
  const uint8_t* at = record + front + (lane % kPlainLanes) * kBits;
  FLASH_UNROLL
  for (int i = 0; i < kBits; ++i) {
    part.codes[i] = get(at + i * 4 / kBits * kPlainLanes * kBits + i * 4 % kBits, 4, align);
  }
  return part;
}

// bound: see the head; the added number is at least every value of this record.
// base: 0x47000000, 2^15 as a float; its second byte counts whole numbers.
template <bool kFirst, int kBits, Layout kLayout>
FLASH_HD void add_part(Lane& own, const Part<kBits>& part, uint32_t base, float& bound) {
  constexpr bool symmetric = kLayout == Layout::kSymmetric;
  const Metadata m = metadata_of(part.front, kBits, kLayout);
  const float below = -(32768.0f + static_cast<float>(code_half(kBits, kLayout))) * m.scale;
  bound = bound + (symmetric ? magnitude(below) : magnitude(below) + magnitude(m.zero));
  FLASH_UNROLL
  for (int i = 0; i < kLaneElements; ++i) {
    const uint32_t word = part.codes[i * kBits / 32];
    const uint32_t bytes = kBits == 8 ? word : (i % 2 == 0 ? word : word >> 4) & 0x0f0f0f0fu;
    const uint32_t byte = static_cast<uint32_t>(kBits == 8 ? i % 4 : i % kNeighbours / 2);
    const float product = fused(bits_float(bytes_of(bytes, base, 0x7404u | byte << 4)), m.scale, below);
    const float value = symmetric ? product : product + m.zero;  // the product is never -0
    own.x[i] = kFirst ? value : own.x[i] + value;
  }
}

// The same sums, element by element in codec_math.h's own steps, for any numbers. Elements of a lane are
// registers: which one is meant is asked of each.
template <int kBits, Layout kLayout>
FLASH_HD void sum_slowly(Lane& own, int lane, const Sources& from) {
  constexpr int front = spikes_offset(options_of(kLayout));
  const int record = lane / kPlainLanes * plain_form<kBits, kLayout>().record;
  FLASH_ROLLED
  for (int i = 0; i < kLaneElements; ++i) {
    const int bit = static_cast<int>(place_of(lane, i, kPlainLanes)) * kBits;
    float sum = 0.0f;
    FLASH_ROLLED
    for (int64_t rank = 0; rank < from.count; ++rank) {
      const uint8_t* p = from.data + rank * from.stride + record;
      const Metadata m = metadata_of(get(p, front, plain_align(kLayout)), kBits, kLayout);
      const uint32_t code = static_cast<uint32_t>(p[front + bit / 8]) >> bit % 8 & ((1u << kBits) - 1);
      const float value = decode_element(code, m.scale, m.zero, code_half(kBits, kLayout));
      sum = rank == 0 ? value : sum + value;
    }
    FLASH_UNROLL
    for (int k = 0; k < kLaneElements; ++k) own.x[k] = k == i ? sum : own.x[k];
  }
}

template <DType kType>
FLASH_HD void store_slowly(const Lane& own, int lane, uint8_t* row, int left) {
  constexpr int bytes = element_bytes(kType);
  FLASH_ROLLED
  for (int i = 0; i < kLaneElements; ++i) {
    float x = own.x[0];
    FLASH_UNROLL
    for (int k = 1; k < kLaneElements; ++k) x = k == i ? own.x[k] : x;
    const int at = lane / kPlainLanes * kPlainGroup + static_cast<int>(place_of(lane, i, kPlainLanes));
    if (at < left) put(row + at * bytes, from_float<kType>(x), bytes, bytes);
  }
}

// As sum_groups, of a lane's group, which is there. from.data: the warp's first record. Whether the sums,
// times factor, are no NaN for certain. kSum: more than one payload, or a factor other than 1. kAtOnce: of how
// many ranks the records are on their way together, where there are as many.
template <int kBits, Layout kLayout, bool kSum, int kAtOnce>
FLASH_HD bool plain_sum(Lane& own, int lane, const Sources& from, float factor) {
  constexpr Form form = plain_form<kBits, kLayout>();
  const uint8_t* record = from.data + lane / kPlainLanes * form.record;
  float bound = kSum ? magnitude(factor) : 0.0f;
  const uint32_t base = kept_in_register(0x47000000u);
  if (kSum) {
    const int count = static_cast<int>(from.count);
    const auto one = [&](auto first) {
      const Part<kBits> part = load_part<kBits, kLayout>(record, lane);
      record += from.stride;
      add_part<first.value, kBits, kLayout>(own, part, base, bound);
    };
    // The records of two ranks are on their way together.
    const auto two = [&](auto first) {
      const Part<kBits> a = load_part<kBits, kLayout>(record, lane);
      const Part<kBits> b = load_part<kBits, kLayout>(record + from.stride, lane);
      record += 2 * from.stride;
      add_part<first.value, kBits, kLayout>(own, a, base, bound);
      add_part<false, kBits, kLayout>(own, b, base, bound);
    };
    const auto many = [&](auto first) {
      Part<kBits> parts[kAtOnce];
      FLASH_UNROLL
      for (Part<kBits>& part : parts) {
        part = load_part<kBits, kLayout>(record, lane);
        record += from.stride;
      }
      add_part<first.value, kBits, kLayout>(own, parts[0], base, bound);
      FLASH_UNROLL
      for (int i = 1; i < kAtOnce; ++i) add_part<false, kBits, kLayout>(own, parts[i], base, bound);
    };
    int rank = kAtOnce > 2 && count >= kAtOnce ? kAtOnce : count >= 2 ? 2 : 1;
    if (rank == 1) {
      one(std::true_type());
    } else if (kAtOnce == 2 || rank == 2) {
      two(std::true_type());
    } else {
      many(std::true_type());
      for (; rank + kAtOnce <= count; rank += kAtOnce) many(std::false_type());
    }
    for (; rank + 2 <= count; rank += 2) two(std::false_type());
    if (rank < count) one(std::false_type());
  } else {
    add_part<true, kBits, kLayout>(own, load_part<kBits, kLayout>(record, lane), base, bound);
  }
  if (bound < bits_float(kInfBits)) return true;
  sum_slowly<kBits, kLayout>(own, lane, from);
  return false;
}

// row, from.data, left: of the warp.
template <DType kType, int kBits, Layout kLayout, bool kSum, class Warp>
FLASH_HD void plain_decode(Warp& warp, const Sources& from, float factor, uint8_t* row, int left) {
  constexpr int bytes = element_bytes(kType), stride = kPlainLanes * kNeighbours * bytes;
  warp.each([&](int lane, Lane& own) {
    const int first = lane / kPlainLanes * kPlainGroup;
    if (first >= left) return;
    const bool numbers = plain_sum<kBits, kLayout, kSum, kBits == 4 ? 8 : 2>(own, lane, from, factor);
    if (kSum && factor != 1.0f) {
      FLASH_UNROLL
      for (float& x : own.x) x = x * factor;
    }
    if (!numbers || first + kPlainGroup > left) {
      store_slowly<kType>(own, lane, row, left);
      return;
    }
    uint8_t* at = row + place_in_warp(lane) * bytes;
    FLASH_UNROLL
    for (int i = 0; i < words_of_lane<kType>(); i += 4) {
      Words words;
      FLASH_UNROLL
      for (int k = 0; k < 4; ++k) {
        if constexpr (kType == DType::kFloat32) {
          words.w[k] = float_bits(own.x[i + k]);
        } else {
          words.w[k] = pair_of<kType>(own.x[2 * (i + k)], own.x[2 * (i + k) + 1]);
        }
      }
      put_words(at + i / (2 * bytes) * stride + i * 4 % (kNeighbours * bytes), words);
    }
  });
}

// left: elements of the warp, in whole groups.
template <int kReduceBits, int kGatherBits, Layout kLayout, class Warp>
FLASH_HD void plain_decode_sum_encode(Warp& warp, const Sources& from, float factor, int left,
                                      uint8_t* image) {
  warp.each([&](int lane, Lane& own) {
    if (lane / kPlainLanes * kPlainGroup < left) {
      plain_sum<kReduceBits, kLayout, true, 2>(own, lane, from, factor);
    } else {
      FLASH_UNROLL
      for (float& x : own.x) x = 0.0f;
    }
    if (factor != 1.0f) {
      FLASH_UNROLL
      for (float& x : own.x) x = x * factor;
    }
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; ++i) own.codes[i] = float_bits(own.x[i]);
  });
  plain_encode_groups<DType::kFloat32, kGatherBits, kLayout>(warp, left, image);
}

}  // namespace flash_allreduce
