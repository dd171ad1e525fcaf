// The vectors of one instruction set: types, loads and stores, permutations, and the conversions of a tensor's
// elements to and from float. FLASH_LANES is the number of floats in a vector (codec_<isa>.cpp).
#pragma once

#include "codec_cpu.h"

namespace flash_allreduce {
namespace {

constexpr int kLanes = FLASH_LANES;
// Whether kernels have a copy for groups of 128. On x86 without AVX2 it would only compile longer.
#ifdef __x86_64__
constexpr bool kOwnFor128 = kLanes > 4;
#else
constexpr bool kOwnFor128 = true;
#endif
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

// a * b + c, rounded once where the instruction set can: the same bits if float32 holds a * b exactly.
FLASH_INLINE VecF fused(VecF a, float b, float c) {
#if FLASH_LANES == 16
  return cast<VecF>(_mm512_fmadd_ps(cast<__m512>(a), _mm512_set1_ps(b), _mm512_set1_ps(c)));
#elif FLASH_LANES == 8
  return cast<VecF>(_mm256_fmadd_ps(cast<__m256>(a), _mm256_set1_ps(b), _mm256_set1_ps(c)));
#else
  return a * b + c;
#endif
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
#if FLASH_LANES == 8
  return _mm256_movemask_ps(cast<__m256>(without)) != 0xff;
#else
  const Vec64 parts = cast<Vec64>(without);
  uint64_t all = parts[0];
  for (int i = 1; i < kLanes / 2; ++i) all &= parts[i];
  return all != ~uint64_t{0};
#endif
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

// kLanes numbers of 16 bits, each in the low half of a lane.
FLASH_INLINE VecU widened_halves(const uint8_t* p) {
#if FLASH_LANES == 4  // GCC 12 converts them one by one for aarch64
  using Halves = uint16_t __attribute__((vector_size(16)));
  const Halves x = cast<Halves>(Vec64{load<uint64_t>(p)});
#if defined(__clang__)
  return cast<VecU>(__builtin_shufflevector(x, Halves{}, 0, 8, 1, 9, 2, 10, 3, 11));
#else
  return cast<VecU>(__builtin_shuffle(x, Halves{}, Halves{0, 8, 1, 9, 2, 10, 3, 11}));
#endif
#else
  return __builtin_convertvector(load<VecU16>(p), VecU);
#endif
}

template <DType>
struct Element;

template <>
struct Element<DType::kFloat32> {
  static constexpr int kBytes = 4;
  FLASH_INLINE VecF read(const uint8_t* p) { return load<VecF>(p); }
  FLASH_INLINE void write_number(uint8_t* p, VecF v) { store(p, v); }
  FLASH_INLINE void write(uint8_t* p, VecF v) {
    const VecU nan = VecU{} + kNaNBits;
    store(p, v != v ? nan : cast<VecU>(v));
  }
};

template <>
struct Element<DType::kBFloat16> {
  static constexpr int kBytes = 2;
  FLASH_INLINE VecF read(const uint8_t* p) { return cast<VecF>(widened_halves(p) << 16); }
  FLASH_INLINE VecU nearest(VecF v) {  // even
    const VecU bits = cast<VecU>(v);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
  FLASH_INLINE void write_number(uint8_t* p, VecF v) {
    store(p, __builtin_convertvector(nearest(v), VecU16));
  }
  FLASH_INLINE void write(uint8_t* p, VecF v) {
    const VecU nan = VecU{} + (kNaNBits >> 16);
    store(p, __builtin_convertvector(v != v ? nan : nearest(v), VecU16));
  }
};

// Half precision by shifting the exponent and letting one float addition normalize or round the subnormals
// (F. Giesen, "float->half variants"); no step has a subnormal float operand, so flush-to-zero is harmless.
template <>
struct Element<DType::kFloat16> {
  static constexpr int kBytes = 2;
  FLASH_INLINE VecF read(const uint8_t* p) {
    const VecU h = widened_halves(p);
    const VecU exponent = (h & 0x7c00u) << 13;
    const VecU normal = ((h & 0x7fffu) << 13) + (112u << 23);
    const VecF subnormal = cast<VecF>(normal + (1u << 23)) - cast<VecF>(VecU{} + (113u << 23));
    VecU bits = exponent == 0u ? cast<VecU>(subnormal) : normal;
    bits = exponent == (0x7c00u << 13) ? normal + (112u << 23) : bits;
    return cast<VecF>(bits | ((h & 0x8000u) << 16));
  }
  FLASH_INLINE void write_number(uint8_t* p, VecF v) { write(p, v); }
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

}  // namespace
}  // namespace flash_allreduce
