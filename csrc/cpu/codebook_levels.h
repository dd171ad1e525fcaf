// The values of the codebook's codes: looked up in a register up to 4 bits, computed above (codec_math.h).
#pragma once

#include "vectors.h"

namespace flash_allreduce {
namespace {

FLASH_INLINE VecF magnitude(VecF v) { return cast<VecF>(cast<VecI>(v) & 0x7fffffff); }

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
  float of_zero;  // 5 bits and more: the shift of the levels of a group with a 0
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

}  // namespace
}  // namespace flash_allreduce
