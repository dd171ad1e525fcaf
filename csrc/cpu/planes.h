// Codes and planes meet in a block of 4 vectors, which never leaves the registers (AVX-512: 64 elements):
//
//   4 vectors of codes, 32 bits each   a0 a1 ... | b0 b1 ... | c0 c1 ... | d0 d1 ...
//   one vector, a byte each            a0 a1 a2 a3 b0 ... d3  a4 ...      two steps of packing
//                                      a0 a1 ... b0 b1 ... c0 c1 ...      a permutation
//   a plane of w bits                  neighbours together: a multiplication by 2^w, an addition, twice
//   and back, plane by plane           one word of it in every lane, each shifted by its own number of bits
#pragma once

#include "vectors.h"

namespace flash_allreduce {
namespace {

constexpr int kBlock = 4 * kLanes;  // elements

constexpr int kBatch = 16;  // groups at most

FLASH_INLINE int batch_of(int g) { return g >= 256 ? 4096 / g : kBatch; }

// ---- rounding: floats to codes, whole numbers of 32 bits ------------------------------------------------

#if FLASH_LANES >= 8
// To nearest even. A NaN becomes the least int32, and so does a value that no int32 holds.
FLASH_INLINE VecI rounded(VecF v) {
#if FLASH_LANES == 16
  return cast<VecI>(_mm512_maskz_cvtps_epi32(0xffff, cast<__m512>(v)));
#else
  return cast<VecI>(_mm256_cvtps_epi32(cast<__m256>(v)));
#endif
}
FLASH_INLINE VecF float_of(VecI rounded) { return __builtin_convertvector(rounded, VecF); }

// Whole numbers of a block, 0 to 255 after adding `half`, to a byte each, four of a vector together. seen: gathers
// the sign of each.
FLASH_INLINE VecB packed(const VecI (&c)[4], int half, VecI& seen) {
#if FLASH_LANES == 16
  __m512i ab = _mm512_packs_epi32(cast<__m512i>(c[0]), cast<__m512i>(c[1]));
  __m512i cd = _mm512_packs_epi32(cast<__m512i>(c[2]), cast<__m512i>(c[3]));
  const __m512i more = _mm512_set1_epi16(static_cast<int16_t>(half));
  if (half != 0) ab = _mm512_add_epi16(ab, more), cd = _mm512_add_epi16(cd, more);
  const __m512i bytes = _mm512_packus_epi16(ab, cd);
#else
  __m256i ab = _mm256_packs_epi32(cast<__m256i>(c[0]), cast<__m256i>(c[1]));
  __m256i cd = _mm256_packs_epi32(cast<__m256i>(c[2]), cast<__m256i>(c[3]));
  const __m256i more = _mm256_set1_epi16(static_cast<int16_t>(half));
  if (half != 0) ab = _mm256_add_epi16(ab, more), cd = _mm256_add_epi16(cd, more);
  const __m256i bytes = _mm256_packus_epi16(ab, cd);
#endif
  seen |= cast<VecI>(ab) | cast<VecI>(cd);
  return cast<VecB>(bytes);
}

// In order.
FLASH_INLINE VecB bytes_of(const VecI (&c)[4], int half, VecI& seen) {
  return cast<VecB>(rows_together(cast<VecU>(packed(c, half, seen))));
}

// Codes that no NaN is among.
FLASH_INLINE VecB packed(const VecI (&codes)[4]) {
  VecI seen = VecI{};
  return packed(codes, 0, seen);
}
FLASH_INLINE VecB bytes_of(const VecI (&codes)[4]) {
  return cast<VecB>(rows_together(cast<VecU>(packed(codes))));
}

// Whole numbers below 0 or above the last code become the nearest code. (GCC 12 needs three instructions for a choice.)
template <int kBits>
FLASH_INLINE VecB clipped_packed(const VecI (&codes)[4]) {
  const VecB bytes = packed(codes), last = VecB{} + static_cast<uint8_t>((1 << kBits) - 1);
#if FLASH_LANES == 16
  return kBits == 8 ? bytes : cast<VecB>(_mm512_min_epu8(cast<__m512i>(bytes), cast<__m512i>(last)));
#else
  return kBits == 8 ? bytes : cast<VecB>(_mm256_min_epu8(cast<__m256i>(bytes), cast<__m256i>(last)));
#endif
}
template <int kBits>
FLASH_INLINE VecB clipped_bytes(const VecI (&codes)[4]) {
  return cast<VecB>(rows_together(cast<VecU>(clipped_packed<kBits>(codes))));
}

// True if bytes_of has seen the code of a NaN: 16 bits below zero.
FLASH_INLINE bool saw_nan(VecI seen, int, int) {
#if FLASH_LANES == 16
  return _mm512_movepi16_mask(cast<__m512i>(seen)) != 0;
#else
  return (static_cast<uint32_t>(_mm256_movemask_epi8(cast<__m256i>(seen))) & 0xaaaaaaaau) != 0;
#endif
}
#else
// The code is in the last bits of the sum. A NaN is far beyond the last code.
FLASH_INLINE VecI rounded(VecF v) { return cast<VecI>(v + kRoundMagic); }
FLASH_INLINE VecF float_of(VecI rounded) { return cast<VecF>(rounded) - kRoundMagic; }

FLASH_INLINE VecB bytes_in_order(VecU quads) {
  return cast<VecB>(rows_together(cast<VecU>(transpose_quads(cast<VecB>(quads)))));
}

FLASH_INLINE VecB bytes_of(const VecI (&codes)[4]) {
  VecU quads = VecU{};
  for (int l = 0; l < 4; ++l) quads |= cast<VecU>(codes[l]) << (8 * l);
  return bytes_in_order(quads);
}

template <int>
FLASH_INLINE VecB clipped_bytes(const VecI (&codes)[4]) {
  return bytes_of(codes);
}

FLASH_INLINE VecB bytes_of(const VecI (&c)[4], int half, VecI& seen) {
  VecU quads = VecU{} - (kRoundMagicBits - static_cast<uint32_t>(half)) * 0x01010101u;
  VecU largest = cast<VecU>(seen);
  for (int l = 0; l < 4; ++l) {
    const VecU code = cast<VecU>(c[l]);
    largest = code > largest ? code : largest;
    quads = quads + (code << (8 * l));
  }
  seen = cast<VecI>(largest);
  return bytes_in_order(quads);
}

FLASH_INLINE bool saw_nan(VecI seen, int half, int levels) {
  const VecU codes = cast<VecU>(seen);
  uint32_t worst = 0;
  for (int i = 0; i < kLanes; ++i) worst = codes[i] > worst ? codes[i] : worst;
  return worst > kRoundMagicBits - static_cast<uint32_t>(half) + static_cast<uint32_t>(levels);
}
#endif

// ---- planes ---------------------------------------------------------------------------------------------

// Element i + l * kLanes + k of a block that begins at element i of its group is lane k of vector l.
#if FLASH_LANES >= 8
// (maskz, here and below: GCC 12 warns of the headers of the forms without it.)

// The units of vector l of kWidth bits that begin at `plane`, to bit `to` of each lane. Reads a word, the
// last bytes of which are the vector's; the bytes before a plane are part of the record. kAlone: nothing else
// is cleared.
template <int kWidth, bool kAlone = true>
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
  return kAlone ? there & (((1u << kWidth) - 1) << to) : there;
}

// kLanes bytes, each to a lane.
FLASH_INLINE VecU widened(const uint8_t* bytes) {
#if FLASH_LANES == 16
  return cast<VecU>(_mm512_maskz_cvtepu8_epi32(0xffff, load<__m128i>(bytes)));
#else
  return cast<VecU>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#endif
}

template <int kBits>
FLASH_INLINE void unpack_block(const uint8_t* planes, int g, int64_t i, VecU (&codes)[4]) {
  for (int l = 0; l < 4; ++l) {
    if constexpr (kBits == 8) {
      codes[l] = widened(planes + i + l * kLanes);
      continue;
    }
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
FLASH_INLINE void unpack_block(const uint8_t* planes, int g, int64_t i, VecU (&codes)[4]) {
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
  const VecU quads = cast<VecU>(transpose_quads(cast<VecB>(rows_apart(cast<VecU>(x)))));
  codes[0] = quads & 0xffu;
  codes[1] = (quads >> 8) & 0xffu;
  codes[2] = (quads >> 16) & 0xffu;
  codes[3] = quads >> 24;
}
#endif

// Block of elements [i, i + kBlock) of a group of g; x: a byte each and in order.
template <int kBits>
FLASH_INLINE void pack_block(VecB x, int g, int i, uint8_t* planes) {
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

#if FLASH_LANES == 8
// Two blocks, packed: less to permute than in order. kAlone: the codes have no other bits.
template <int kWidth, bool kAlone>
FLASH_INLINE void pack_planes_of_two(VecB first, VecB second, int from, uint8_t* plane) {
  if constexpr (kWidth == 1) {
    pack_plane<1>(cast<VecB>(rows_together(cast<VecU>(first))), from, plane);
    pack_plane<1>(cast<VecB>(rows_together(cast<VecU>(second))), from, plane + kBlock / 8);
    return;
  }
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << kWidth) - 1) << from));
  const __m256i more = _mm256_set1_epi16(static_cast<int16_t>((1 << (8 + kWidth)) + 1));
  const auto pairs = [&](VecB x) FLASH_INLINED {
    return _mm256_maddubs_epi16(kAlone ? cast<__m256i>(x) : _mm256_and_si256(cast<__m256i>(x), mask), more);
  };
  const __m256i a = pairs(first), b = pairs(second);
  if constexpr (kWidth == 2) {
    const __m256i quads = _mm256_packus_epi32(_mm256_madd_epi16(a, _mm256_set1_epi32(0x00100001)),
                                              _mm256_madd_epi16(b, _mm256_set1_epi32(0x00100001)));
    const __m256i words = _mm256_srli_epi16(quads, from), bytes = _mm256_packus_epi16(words, words);
    store(plane, _mm_unpacklo_epi8(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
  } else {
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9,
                                           2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    store(plane, _mm256_shuffle_epi8(bytes, order));
  }
}

template <int kBits>
FLASH_INLINE void pack_two(VecB first, VecB second, int g, int i, uint8_t* planes) {
  if constexpr (has_plane(kBits, 4)) pack_planes_of_two<4, kBits == 4>(first, second, 0, planes + i / 2);
  if constexpr (has_plane(kBits, 2)) {
    pack_planes_of_two<2, kBits == 2>(first, second, plane_shift(kBits, 2),
                                      planes + plane_offset(kBits, 2, g) + i / 4);
  }
  if constexpr (has_plane(kBits, 1)) {
    pack_planes_of_two<1, kBits == 1>(first, second, plane_shift(kBits, 1),
                                      planes + plane_offset(kBits, 1, g) + i / 8);
  }
}
#endif

}  // namespace
}  // namespace flash_allreduce
