// The CPU codec, written once with the vector types of GCC and Clang and compiled once for every instruction
// set by codec_<isa>.cpp, which sets the target and the number of lanes, then includes this file.
//
//   encode   a batch of up to 16 groups at a time, so that the steps that depend on one another (minimum ->
//            zero point -> scale -> its inverse) are done for all of them at once:
//              1. x (fp32, bf16, fp16) -> lo[j], hi[j] of each group and whether it holds a 0, kLanes at once
//              2. lo, hi -> scale, zero point, inverse of the scale: one vector of groups
//              3. x again, from the first-level cache -> codes -> planes
//   decode   planes -> codes -> float, summed over the ranks in registers, in rank order -> stored
//
// Codes and planes meet in a block of 4 vectors, which never leaves the registers (AVX-512: 64 elements):
//
//   4 vectors of codes, 32 bits each   a0 a1 ... | b0 b1 ... | c0 c1 ... | d0 d1 ...
//   one vector, a byte each            a0 b0 c0 d0  a1 b1 c1 d1 ...      shift and or
//                                      a0 a1 ... b0 b1 ... c0 c1 ...     two permutations
//   a plane of w bits                  neighbours together: a multiplication by 2^w, an addition, twice
//   and back, plane by plane           one word of it in every lane, each shifted by its own number of bits
//
// NaN is looked for in step 3, where it costs one instruction: the code of a NaN is far out of range, and so
// is every code of a group whose scale is NaN. Only then are the groups looked at one by one.
//
// No function here may be visible outside its translation unit: the linker would be free to hand a copy
// compiled for AVX-512 to a machine without it.

#include "codec_cpu.h"

namespace flash_allreduce {
namespace {

constexpr int kLanes = FLASH_LANES;
using VecF = float __attribute__((vector_size(4 * kLanes)));
using VecI = int32_t __attribute__((vector_size(4 * kLanes)));
using VecU = uint32_t __attribute__((vector_size(4 * kLanes)));
using VecU16 = uint16_t __attribute__((vector_size(2 * kLanes)));
using VecB = uint8_t __attribute__((vector_size(4 * kLanes)));
using Vec64 = uint64_t __attribute__((vector_size(4 * kLanes)));

#define FLASH_INLINE static inline __attribute__((always_inline))
#define FLASH_INLINED __attribute__((always_inline))  // of a lambda

template <typename V>
FLASH_INLINE V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
FLASH_INLINE void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <typename To, typename From>
FLASH_INLINE To cast(From v) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps the bits");
  To to;
  __builtin_memcpy(&to, &v, sizeof to);
  return to;
}

#if defined(__clang__)
#define FLASH_PERMUTE(V, v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define FLASH_PERMUTE(V, v, ...) __builtin_shuffle(v, V{__VA_ARGS__})
#endif

// A byte matrix of [kLanes][4] to [4][kLanes] and back: inside 16 bytes, then across them.
#define FLASH_BYTES_4X4(o)                                                                              \
  o + 0, o + 4, o + 8, o + 12, o + 1, o + 5, o + 9, o + 13, o + 2, o + 6, o + 10, o + 14, o + 3, o + 7, \
      o + 11, o + 15

#if FLASH_LANES == 16
FLASH_INLINE VecB transpose_quads(VecB v) {
  return FLASH_PERMUTE(VecB, v, FLASH_BYTES_4X4(0), FLASH_BYTES_4X4(16), FLASH_BYTES_4X4(32),
                       FLASH_BYTES_4X4(48));
}
FLASH_INLINE VecU rows_together(VecU v) {
  return FLASH_PERMUTE(VecU, v, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}
FLASH_INLINE VecU rows_apart(VecU v) { return rows_together(v); }
#elif FLASH_LANES == 8
FLASH_INLINE VecB transpose_quads(VecB v) {
  return FLASH_PERMUTE(VecB, v, FLASH_BYTES_4X4(0), FLASH_BYTES_4X4(16));
}
FLASH_INLINE VecU rows_together(VecU v) { return FLASH_PERMUTE(VecU, v, 0, 4, 1, 5, 2, 6, 3, 7); }
FLASH_INLINE VecU rows_apart(VecU v) { return FLASH_PERMUTE(VecU, v, 0, 2, 4, 6, 1, 3, 5, 7); }
#else
FLASH_INLINE VecB transpose_quads(VecB v) { return FLASH_PERMUTE(VecB, v, FLASH_BYTES_4X4(0)); }
FLASH_INLINE VecU rows_together(VecU v) { return v; }
FLASH_INLINE VecU rows_apart(VecU v) { return v; }
#endif

// Lanes [s] apart changed places.
#if FLASH_LANES == 16
#define FLASH_APART(s)                                                                                  \
  0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s, 8 ^ s, 9 ^ s, 10 ^ s, 11 ^ s, 12 ^ s, 13 ^ s, \
      14 ^ s, 15 ^ s
#elif FLASH_LANES == 8
#define FLASH_APART(s) 0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s
#else
#define FLASH_APART(s) 0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s
#endif

FLASH_INLINE VecI lane_numbers() { return VecI{FLASH_APART(0)}; }

struct Least {
  FLASH_INLINE VecF of(VecF a, VecF b) { return a < b ? a : b; }
};
struct Greatest {
  FLASH_INLINE VecF of(VecF a, VecF b) { return a > b ? a : b; }
};
struct Sum {
  FLASH_INLINE VecI of(VecI a, VecI b) { return a + b; }
};

// Whether no element was 0 so far, by lane; a NaN is none.
#if FLASH_LANES == 16
using Without = __mmask16;
constexpr Without kWithoutZero = 0xffff;
FLASH_INLINE Without without_zero(Without so_far, VecF v) {
  return _mm512_mask_cmp_ps_mask(so_far, cast<__m512>(v), _mm512_setzero_ps(), _CMP_NEQ_UQ);
}
FLASH_INLINE bool holds_zero(Without without) { return without != kWithoutZero; }
#else
using Without = VecI;
constexpr Without kWithoutZero = VecI{} - 1;
FLASH_INLINE Without without_zero(Without so_far, VecF v) { return so_far & (v != 0.0f); }
FLASH_INLINE bool holds_zero(Without without) {
  const Vec64 parts = cast<Vec64>(without);
  uint64_t all = parts[0];
  for (int i = 1; i < kLanes / 2; ++i) all &= parts[i];
  return all != ~uint64_t{0};
}
#endif

// Lanes of a where bit s of their number is 0, of b where it is 1.
#if defined(__clang__)
#define FLASH_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FLASH_PICK(a, b, ...) __builtin_shuffle(a, b, VecI{__VA_ARGS__})
#endif
#define FLASH_OF(i, s) ((i) + ((i) & (s) ? kLanes : 0))
#if FLASH_LANES == 16
#define FLASH_FIRST_OR_SECOND(s)                                                                        \
  FLASH_OF(0, s), FLASH_OF(1, s), FLASH_OF(2, s), FLASH_OF(3, s), FLASH_OF(4, s), FLASH_OF(5, s),       \
      FLASH_OF(6, s), FLASH_OF(7, s), FLASH_OF(8, s), FLASH_OF(9, s), FLASH_OF(10, s), FLASH_OF(11, s), \
      FLASH_OF(12, s), FLASH_OF(13, s), FLASH_OF(14, s), FLASH_OF(15, s)
#elif FLASH_LANES == 8
#define FLASH_FIRST_OR_SECOND(s)                                                                  \
  FLASH_OF(0, s), FLASH_OF(1, s), FLASH_OF(2, s), FLASH_OF(3, s), FLASH_OF(4, s), FLASH_OF(5, s), \
      FLASH_OF(6, s), FLASH_OF(7, s)
#else
#define FLASH_FIRST_OR_SECOND(s) FLASH_OF(0, s), FLASH_OF(1, s), FLASH_OF(2, s), FLASH_OF(3, s)
#endif

// Lane j of the result: the least (greatest) lane of v[j], or the sum of its lanes. A tree that halves the
// number of vectors: where bit kStride of the lane is 0 it holds the first of two vectors, where it is 1 the
// second.
template <typename Pick, int kStride = 1, typename V>
FLASH_INLINE V across(const V* v) {
  if constexpr (kStride == kLanes) {
    return v[0];
  } else {
    V merged[kLanes / 2 / kStride];
    for (int j = 0; j < kLanes / 2 / kStride; ++j) {
      const V stay = FLASH_PICK(v[2 * j], v[2 * j + 1], FLASH_FIRST_OR_SECOND(kStride));
      const V move = FLASH_PICK(v[2 * j + 1], v[2 * j], FLASH_FIRST_OR_SECOND(kStride));
      merged[j] = Pick::of(stay, FLASH_PERMUTE(VecU, move, FLASH_APART(kStride)));
    }
    return across<Pick, 2 * kStride>(merged);
  }
}

// ---- conversions: kLanes elements of a tensor to and from float -------------------------------------------

#include "widened.h"
template <DType>
struct Element;

template <>
struct Element<DType::kFloat32> {
  static constexpr int kBytes = 4;
  FLASH_INLINE VecF read(const uint8_t* p) { return load<VecF>(p); }
  FLASH_INLINE void write(uint8_t* p, VecF v) {
    const VecU nan = VecU{} + kNaNBits;
    store(p, v != v ? nan : cast<VecU>(v));
  }
};

template <>
struct Element<DType::kBFloat16> {
  static constexpr int kBytes = 2;
  FLASH_INLINE VecF read(const uint8_t* p) { return cast<VecF>(widened(p) << 16); }
  FLASH_INLINE void write(uint8_t* p, VecF v) {  // nearest even
    const VecU bits = cast<VecU>(v);
    const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const VecU nan = VecU{} + (kNaNBits >> 16);
    store(p, __builtin_convertvector(v != v ? nan : rounded, VecU16));
  }
};

// Half precision by shifting the exponent and letting one float addition normalize or round the subnormals
// (F. Giesen, "float->half variants"); no step has a subnormal float operand, so flush-to-zero is harmless.
template <>
struct Element<DType::kFloat16> {
  static constexpr int kBytes = 2;
  FLASH_INLINE VecF read(const uint8_t* p) {
    const VecU h = widened(p);
    const VecU exponent = (h & 0x7c00u) << 13;
    const VecU normal = ((h & 0x7fffu) << 13) + (112u << 23);
    const VecF subnormal = cast<VecF>(normal + (1u << 23)) - cast<VecF>(VecU{} + (113u << 23));
    VecU bits = exponent == 0u ? cast<VecU>(subnormal) : normal;
    bits = exponent == (0x7c00u << 13) ? normal + (112u << 23) : bits;
    return cast<VecF>(bits | ((h & 0x8000u) << 16));
  }
  FLASH_INLINE void write(uint8_t* p, VecF v) {  // nearest even; 65520 and above become Inf
    const VecU bits = cast<VecU>(v);
    const VecU magnitude = bits & 0x7fffffffu;
    const VecU sign = (bits >> 16) & 0x8000u;
    const VecU half_ulp = 0xfffu + ((magnitude >> 13) & 1u);
    VecU h = (magnitude - (112u << 23) + half_ulp) >> 13;
    const VecF shifted = cast<VecF>(magnitude) + 0.5f;  // the ulp of 0.5 is the step of fp16's subnormals
    h = magnitude < (113u << 23) ? cast<VecU>(shifted) - 0x3f000000u : h;
    h = (magnitude >= 0x47800000u ? VecU{} + 0x7c00u : h) | sign;
    store(p, __builtin_convertvector(v != v ? VecU{} + 0x7e00u : h, VecU16));
  }
};

// ---- bit planes ---------------------------------------------------------------------------------------

constexpr int kBlock = 4 * kLanes;  // elements

// Codes of a block, a byte each and in order.
FLASH_INLINE void unpack_bytes(VecB bytes, VecU (&codes)[4]) {
  const VecU quads = cast<VecU>(transpose_quads(cast<VecB>(rows_apart(cast<VecU>(bytes)))));
  codes[0] = quads & 0xffu;
  codes[1] = (quads >> 8) & 0xffu;
  codes[2] = (quads >> 16) & 0xffu;
  codes[3] = quads >> 24;
}

// Element i + l * kLanes + k of a block that begins at element i of its group is lane k of vector l.
#if FLASH_LANES >= 8
// (maskz, here and below: GCC 12 warns of the headers of the forms without it.)

// The units of vector l of kWidth bits that begin at `plane`, to bit `to` of each lane. Reads a word, the
// last bytes of which are the vector's; what lies before a plane is part of the record.
template <int kWidth>
FLASH_INLINE VecU unpack_units(const uint8_t* plane, int l, int to) {
  constexpr int used = kWidth * kLanes < 32 ? kWidth * kLanes : 32;  // bits of a word
  const uint8_t* end = plane + (l + 1) * kWidth * kLanes / 8;
  VecU words = VecU{} + load<uint32_t>(end - 4);
#if FLASH_LANES == 16
  if constexpr (kWidth == 4) words = lane_numbers() < 8 ? VecU{} + load<uint32_t>(end - 8) : words;
#endif
  const VecI by = (lane_numbers() & (32 / kWidth - 1)) * kWidth + (32 - used - to);
#if FLASH_LANES == 16
  const VecU there = cast<VecU>(
      _mm512_maskz_rorv_epi32(0xffff, cast<__m512i>(words), cast<__m512i>(by)));  // by < 0: to the left
#else
  const VecU there = words >> cast<VecU>(by);
#endif
  return there & (((1u << kWidth) - 1) << to);
}

template <int kBits>
FLASH_INLINE void unpack_block(const uint8_t* planes, int g, int i, VecU (&codes)[4]) {
  if constexpr (kBits == 8) {
    unpack_bytes(load<VecB>(planes + i), codes);
    return;
  }
  for (int l = 0; l < 4; ++l) {
    codes[l] = VecU{};
    if constexpr (has_plane(kBits, 4)) codes[l] = unpack_units<4>(planes + i / 2, l, 0);
    if constexpr (has_plane(kBits, 2)) {
      const uint8_t* plane = planes + plane_offset(kBits, 2, g) + i / 4;
      codes[l] |= unpack_units<2>(plane, l, plane_shift(kBits, 2));
    }
    if constexpr (has_plane(kBits, 1)) {
      const uint8_t* plane = planes + plane_offset(kBits, 1, g) + i / 8;
#if FLASH_LANES == 16
      const __m512i one = cast<__m512i>(VecU{} + (1u << plane_shift(kBits, 1)));
      const __m512i rest = cast<__m512i>(codes[l]);
      codes[l] = cast<VecU>(_mm512_mask_or_epi32(rest, load<__mmask16>(plane + 2 * l), rest, one));
#else
      codes[l] |= unpack_units<1>(plane, l, plane_shift(kBits, 1));
#endif
    }
  }
}

// The units at bit `from` of a block of codes, a byte each and in order, to their place in the plane:
// neighbours are brought together by multiplying the second of them.
#if FLASH_LANES == 16
template <int kWidth>
FLASH_INLINE void pack_plane(VecB codes, int from, uint8_t* plane) {
  const __m512i x = cast<__m512i>(codes);
  if constexpr (kWidth == 1) {
    store(plane, _mm512_test_epi8_mask(x, _mm512_set1_epi8(static_cast<char>(1 << from))));
  } else if constexpr (kWidth == 2) {
    const __m512i units = _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(3 << from)));
    const __m512i pairs = _mm512_maddubs_epi16(units, _mm512_set1_epi16(0x0401));
    const __m512i quads = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
    store(plane, _mm512_maskz_cvtepi32_epi8(0xffff, cast<__m512i>(cast<VecU>(quads) >> from)));
  } else {
    const __m512i units = _mm512_and_si512(x, _mm512_set1_epi8(15));
    store(plane,
          _mm512_maskz_cvtepi16_epi8(0xffffffff, _mm512_maddubs_epi16(units, _mm512_set1_epi16(0x1001))));
  }
}
#else
template <int kWidth>
FLASH_INLINE void pack_plane(VecB codes, int from, uint8_t* plane) {
  const __m256i x = cast<__m256i>(codes);
  if constexpr (kWidth == 1) {
    store(plane, _mm256_movemask_epi8(_mm256_slli_epi16(x, 7 - from)));
  } else if constexpr (kWidth == 2) {
    const __m256i units = _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(3 << from)));
    const __m256i pairs = _mm256_maddubs_epi16(units, _mm256_set1_epi16(0x0401));
    const __m256i quads =
        cast<__m256i>(cast<VecU>(_mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001))) >> from);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(plane), _mm_packus_epi16(words, words));
  } else {
    const __m256i units = _mm256_and_si256(x, _mm256_set1_epi8(15));
    const __m256i pairs = _mm256_maddubs_epi16(units, _mm256_set1_epi16(0x1001));
    store(plane, _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
  }
}
#endif
#else
// 8 codes a 64-bit word <-> 8 units of kWidth bits a word of kWidth bytes.
template <int kWidth>
struct Plane;
template <>
struct Plane<4> {
  using V = uint32_t __attribute__((vector_size(2 * kLanes)));
};
template <>
struct Plane<2> {
  using V = uint16_t __attribute__((vector_size(kLanes)));
};
template <>
struct Plane<1> {
  using V = uint8_t __attribute__((vector_size(kLanes / 2)));
};

constexpr uint64_t repeat(uint64_t pattern, int period) {
  uint64_t r = 0;
  for (int i = 0; i < 64; i += period) r |= pattern << i;
  return r;
}
template <int kWidth>
constexpr uint64_t kUnit = repeat((1u << kWidth) - 1, 8);
template <int kWidth>
constexpr uint64_t kPair = repeat((1u << (2 * kWidth)) - 1, 16);
template <int kWidth>
constexpr uint64_t kQuad = repeat((uint64_t{1} << (4 * kWidth)) - 1, 32);

// The unit at bit `from` of every code of a block, a byte each and in order, to its place in the plane.
template <int kWidth>
FLASH_INLINE void pack_plane(VecB codes, int from, uint8_t* plane) {
  Vec64 x = (cast<Vec64>(codes) >> from) & kUnit<kWidth>;
  x = (x | (x >> (8 - kWidth))) & kPair<kWidth>;
  x = (x | (x >> (16 - 2 * kWidth))) & kQuad<kWidth>;
  x = x | (x >> (32 - 4 * kWidth));
  store(plane, __builtin_convertvector(x, typename Plane<kWidth>::V));
}

template <int kWidth>
FLASH_INLINE Vec64 unpack_plane(const uint8_t* plane, int shift) {
  Vec64 x = __builtin_convertvector(load<typename Plane<kWidth>::V>(plane), Vec64);
  x = (x | (x << (32 - 4 * kWidth))) & kQuad<kWidth>;
  x = (x | (x << (16 - 2 * kWidth))) & kPair<kWidth>;
  x = (x | (x << (8 - kWidth))) & kUnit<kWidth>;
  return x << shift;
}

template <int kBits>
FLASH_INLINE void unpack_block(const uint8_t* planes, int g, int i, VecU (&codes)[4]) {
  Vec64 x;
  if constexpr (kBits == 8) {
    x = load<Vec64>(planes + i);
  } else {
    x = Vec64{};
    if constexpr (has_plane(kBits, 4)) x = unpack_plane<4>(planes + i / 2, 0);
    if constexpr (has_plane(kBits, 2)) {
      x |= unpack_plane<2>(planes + plane_offset(kBits, 2, g) + i / 4, plane_shift(kBits, 2));
    }
    if constexpr (has_plane(kBits, 1)) {
      x |= unpack_plane<1>(planes + plane_offset(kBits, 1, g) + i / 8, plane_shift(kBits, 1));
    }
  }
  unpack_bytes(cast<VecB>(x), codes);
}
#endif

// Block of elements [i, i + kBlock) of a group of g; codes[l] holds their codes and `more`.
template <int kBits>
FLASH_INLINE void pack_block(const VecU (&codes)[4], uint32_t more, int g, int i, uint8_t* planes) {
  const VecU quads = codes[0] + (codes[1] << 8) + (codes[2] << 16) + (codes[3] << 24) - more * 0x01010101u;
  const VecB x = cast<VecB>(rows_together(cast<VecU>(transpose_quads(cast<VecB>(quads)))));
  if constexpr (kBits == 8) {
    store(planes + i, x);
  } else {
    if constexpr (has_plane(kBits, 4)) pack_plane<4>(x, 0, planes + i / 2);
    if constexpr (has_plane(kBits, 2)) {
      pack_plane<2>(x, plane_shift(kBits, 2), planes + plane_offset(kBits, 2, g) + i / 4);
    }
    if constexpr (has_plane(kBits, 1)) {
      pack_plane<1>(x, plane_shift(kBits, 1), planes + plane_offset(kBits, 1, g) + i / 8);
    }
  }
}

// ---- encoding -----------------------------------------------------------------------------------------

constexpr int kBatch = 16;  // groups at most

FLASH_INLINE int batch_of(int g) { return g >= 256 ? 4096 / g : kBatch; }

// The processor's own prefetching stops at the end of a page; this far ahead it need not start again there.
constexpr int kPrefetchBytes = 12288;

template <int kBytes>
FLASH_INLINE void prefetch_block(const uint8_t* x, int further) {
  for (int k = 0; k < kBlock * kBytes; k += 64) {
    // As a number: a pointer may not point there.
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) +
                                                     static_cast<uintptr_t>(further + k + kPrefetchBytes)));
  }
}

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
    prefetch_block<E::kBytes>(x + i * E::kBytes, 0);
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

// Overwrites the records of the groups that hold a NaN or an Inf, or whose scale says so.
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

// What error feedback keeps of groups that are not finite, and of elements that arrive as Inf: nothing.
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

// What the sums and differences of error feedback cannot overflow below.
constexpr float kSafe = 0x1p100f;

// f(Number<0>), f(Number<1>) ... f(Number<kCount - 1>): loops that are gone before the compiler makes
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
// made odd, so that what is done for every zero point is done for four elements in a lane.
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

// Puts into b, where the whole ranges are, the first of those with the least sum of squared errors. kBits:
// what searched_as(bits) says.
template <DType kType, int kBits, Layout kLayout>
__attribute__((noinline)) void search_ranges(const uint8_t* x, int count, int g, int bits, Ranges& b) {
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
    for (int i = 0; i < g; i += kBlock) {
      // As far ahead as the bounds of the next batch will: memory does not rest meanwhile.
      prefetch_block<E::kBytes>(x + i * E::kBytes, count * g * E::kBytes);
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

// `count` whole groups, count <= kBatch, whose bounds are `now`. Takes the bounds of the next batch on the
// way, group by group, so that memory is read at an even pace. kFeedback: adds `share` of what each element
// lost to what is kept of it; x is float then.
template <DType kType, int kBits, Layout kLayout, bool kFeedback = false>
FLASH_INLINE void encode_batch(const uint8_t* x, int count, const Bounds& now, int next_count, Bounds& next,
                               const Codec& c, uint8_t* records, float share = 0.0f, float* kept = nullptr) {
  using E = Element<kType>;
  const int g = c.group_size;
  const int64_t record = record_bytes(kBits, g, options_of(kLayout));
  constexpr int levels = code_levels(kBits, kLayout);
  constexpr uint32_t more = kRoundMagicBits - static_cast<uint32_t>(code_half(kBits, kLayout));
  constexpr int front = spikes_offset(options_of(kLayout));
  constexpr bool kZeros = may_miss_zero(kBits, kLayout);
  Ranges b;
  for (int j = 0; j < kBatch; j += kLanes) {
    store(b.lo + j, across<Least>(now.least + j));
    store(b.hi + j, across<Greatest>(now.greatest + j));
  }
  whole_ranges(b, kBits, kLayout, kInside);
  if (c.options & kMse) search_ranges<kType, searched_as(kBits, kLayout), kLayout>(x, count, g, kBits, b);
  if constexpr (kZeros) {
    alignas(64) uint32_t with_zero[kBatch] = {};
    uint32_t any = 0;
    for (int j = 0; j < count; ++j) any |= with_zero[j] = holds_zero(now.without[j]);
    if (any) ranges_with_zero(b, with_zero, kBits, kLayout, kInside);
  }
  invert_scales(b);
  VecU largest = VecU{};
  for (int j = 0; j < count; ++j) {
    uint8_t* out = records + j * record;
    const uint8_t* in = x + j * g * E::kBytes;
    __builtin_memcpy(out, b.metadata + j, front);
    const VecF z = VecF{} + b.zero[j];
    const VecF inv = VecF{} + b.inverse[j];
    const VecF step = VecF{} + bits_float(b.scale[j]);
    for (int i = 0; i < g; i += kBlock) {
      VecU codes[4];
      for (int l = 0; l < 4; ++l) {  // encode_element, kLanes at once
        const VecF v = E::read(in + (i + l * kLanes) * E::kBytes);
        const VecF t = (kLayout == Layout::kSymmetric ? v : v - z) * inv + kRoundMagic;
        codes[l] = cast<VecU>(t);
        largest = codes[l] > largest ? codes[l] : largest;
        if constexpr (kFeedback) {  // the code is still a float: decode_element
          float* at = kept + j * g + i + l * kLanes;
          store(at, (v - ((t - kRoundMagic) * step + z)) * share + load<VecF>(at));
        }
      }
      pack_block<kBits>(codes, more, g, i, out + front);
    }
    if (j < next_count) take_bounds<kType, kZeros>(in + count * g * E::kBytes, g, next, j);
  }
  uint32_t worst = 0;
  for (int i = 0; i < kLanes; ++i) worst = largest[i] > worst ? largest[i] : worst;
  const bool lost = worst > more + static_cast<uint32_t>(levels);
  if (lost) mark_non_finite<kType>(x, count, c, b.scale, records);
  if constexpr (kFeedback) {
    bool safe = !lost;
    for (int j = 0; j < count; ++j) safe = safe && b.lo[j] > -kSafe && b.hi[j] < kSafe;
    if (!safe) lose_non_finite(count, c, records, kept);
  }
}

// The last group of a tensor, of n < g elements, filled up with its first one.
template <int kBytes>
FLASH_INLINE void fill_ragged(const uint8_t* first, int64_t n, int g, uint8_t* group) {
  for (int i = 0; i < g; ++i) {
    __builtin_memcpy(group + i * kBytes, first + (i < n ? i : 0) * kBytes, kBytes);
  }
}

template <DType kType, int kBits, Layout kLayout>
void encode_range(const uint8_t* x, int64_t numel, const Codec& c, uint8_t* payload, int64_t begin,
                  int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = c.group_size;
  const int64_t record = record_bytes(kBits, g, options_of(kLayout));
  const int64_t whole = numel / g < end ? numel / g : end;
  const int batch = batch_of(g);
  const auto count_from = [=](int64_t i) {
    return i >= whole ? 0 : static_cast<int>(whole - i < batch ? whole - i : batch);
  };
  constexpr bool kZeros = may_miss_zero(kBits, kLayout);
  Bounds bounds_of[2] = {};
  for (int j = 0; j < count_from(begin); ++j) {
    take_bounds<kType, kZeros>(x + (begin + j) * g * kBytes, g, bounds_of[0], j);
  }
  int now = 0;
  for (int64_t i = begin; i < whole; i += batch, now ^= 1) {
    encode_batch<kType, kBits, kLayout>(x + i * g * kBytes, count_from(i), bounds_of[now],
                                        count_from(i + batch), bounds_of[now ^ 1], c, payload + i * record);
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize] = {};
    fill_ragged<kBytes>(x + whole * g * kBytes, numel - whole * g, g, group);
    Bounds& ragged = bounds_of[0];
    take_bounds<kType, kZeros>(group, g, ragged, 0);
    encode_batch<kType, kBits, kLayout>(group, 1, ragged, 0, ragged, c, payload + whole * record);
  }
}

// ---- decoding -----------------------------------------------------------------------------------------

// The sum of one group over the payloads, in rank order, stored in the tensor's dtype.
template <DType kType, int kBits, Layout kLayout>
FLASH_INLINE void sum_group(const Payloads& p, int64_t group, float factor, uint8_t* y) {
  using E = Element<kType>;
  const int g = p.codec.group_size;
  constexpr int half = code_half(kBits, kLayout);
  constexpr int front = spikes_offset(options_of(kLayout));
  const uint8_t* first = p.data + group * record_bytes(kBits, g, options_of(kLayout));
  for (int i = 0; i < g; i += kBlock) {
    VecF sums[4];
    for (VecF& sum : sums) sum = -VecF{};  // -0 + v is v, whatever the sign of a zero
    for (int64_t rank = 0; rank < p.count; ++rank) {
      const uint8_t* record = first + rank * p.stride;
      const Metadata m = read_metadata(record, kBits, kLayout);
      VecU codes[4];
      unpack_block<kBits>(record + front, g, i, codes);
      for (int l = 0; l < 4; ++l) {  // decode_element, kLanes at once
        sums[l] = sums[l] + (__builtin_convertvector(cast<VecI>(codes[l]) - half, VecF) * m.scale + m.zero);
      }
    }
    for (int l = 0; l < 4; ++l) E::write(y + (i + l * kLanes) * E::kBytes, sums[l] * factor);
  }
}

template <DType kType, int kBits, Layout kLayout>
void decode_sum_range(const Payloads& p, float factor, uint8_t* y, int64_t numel, int64_t begin,
                      int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = p.codec.group_size;
  const int64_t whole = numel / g < end ? numel / g : end;
  for (int64_t i = begin; i < whole; ++i) {
    sum_group<kType, kBits, kLayout>(p, i, factor, y + i * g * kBytes);
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize];
    sum_group<kType, kBits, kLayout>(p, whole, factor, group);
    __builtin_memcpy(y + whole * g * kBytes, group, static_cast<size_t>((numel - whole * g) * kBytes));
  }
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
//   gradient, residual   -> carry        -> x, what is encoded; kept, what stays of the residual
//   x, kept              -> encode_lost  -> payload; kept, the new residual, in place
//   kept                 -> leave        -> residual
//
// An exact zero keeps its residual and is encoded as zero: x is -0 there, which no sum is. A rotated
// zero does not arrive as zero: its error is carried over as that of any other element.

// Whole groups of g. A residual of bf16, or of 8 bits, symmetric; false: of a scale so large that what is
// kept may not be finite, which no encoding has left.
template <DType kType, bool kWide>
bool carry(const uint8_t* gradient, const uint8_t* residual, int64_t groups, int g, bool rotated,
           float momentum, float* x, float* kept) {
  using E = Element<kType>;
  using R = Element<DType::kBFloat16>;
  constexpr int half = code_half(8, Layout::kSymmetric), front = kWide ? 0 : spikes_offset(kSymmetricCodes);
  const int64_t record = kWide ? R::kBytes * g : record_bytes(8, g, kSymmetricCodes);
  const VecI zeros_wait = VecI{} - (rotated ? 0 : 1);
  bool safe = true;
  for (int64_t j = 0; j < groups; ++j, residual += record, gradient += g * E::kBytes, x += g, kept += g) {
    const Metadata m = kWide ? Metadata{} : read_metadata(residual, 8, Layout::kSymmetric);
    safe = safe && m.scale < kSafe && m.scale > -kSafe;
    for (int i = 0; i < g; i += kBlock) {
      constexpr int kResidualBytes = kWide ? R::kBytes : 1;
      prefetch_block<kResidualBytes>(residual + i * kResidualBytes, 0);
      prefetch_block<E::kBytes>(gradient + i * E::kBytes, 0);
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

// Whole groups of a format without options but mse. kept: what stays of the residual -> the new one.
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
    encode_batch<kType, kBits, kLayout, true>(part, count, bounds, 0, bounds, c,
                                              payload + i * record_bytes(c), share, kept + i * g);
  }
}

// The same of any format, after encoding and decoding. n: a multiple of kLanes.
void lose(const float* x, const float* arrives, int64_t n, float share, float* kept) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecF v = load<VecF>(x + i), a = load<VecF>(arrives + i);
    const VecI waits = (cast<VecI>(v) == cast<VecI>(-VecF{})) & (a == a);
    const VecF lost = (waits ? VecF{} : v - a) * share + load<VecF>(kept + i);
    const VecI finite = (cast<VecI>(lost) & 0x7fffffff) < static_cast<int32_t>(kInfBits);
    store(kept + i, finite ? lost : VecF{});
  }
}

// Floats to bf16, nearest even; what is not finite to 0. n: a multiple of kLanes.
void narrow(const float* x, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecF v = load<VecF>(x + i);
    const VecI finite = (cast<VecI>(v) & 0x7fffffff) < static_cast<int32_t>(kInfBits);
    Element<DType::kBFloat16>::write(out + 2 * i, finite ? v : VecF{});
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
