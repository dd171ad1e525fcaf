// Decoding payloads without spikes, rotation and codebook, and summing them over the ranks:
//
//   metadata of a batch of groups, rank by rank   -> scale, zero point: a vector of groups
//   planes of a block -> codes -> float           up to 3 bits (AVX-512: 4) a look-up, above code * scale + zero
//                                                 summed in registers, in rank order -> stored
#pragma once

#include "planes.h"
#include "prefetch.h"

namespace flash_allreduce {
namespace {

#if FLASH_LANES >= 8
// The values of the codes are lanes of a vector.
template <int kBits>
constexpr bool kLookedUp = (1 << kBits) <= kLanes;

// Lanes of `values`, by the last bits of `codes`.
FLASH_INLINE VecF look_up(VecF values, VecU codes) {
#if FLASH_LANES == 16
  return cast<VecF>(_mm512_maskz_permutexvar_ps(0xffff, cast<__m512i>(codes), cast<__m512>(values)));
#else
  return cast<VecF>(_mm256_permutevar8x32_ps(cast<__m256>(values), cast<__m256i>(codes)));
#endif
}

// As unpack_block, but for the bits that look_up does not read.
template <int kBits>
FLASH_INLINE void unpack_indices(const uint8_t* planes, int g, int64_t i, VecU (&codes)[4]) {
  if constexpr (kBits == 2 || kBits == 4) {  // one plane
    for (int l = 0; l < 4; ++l) codes[l] = unpack_units<kBits, false>(planes + i * kBits / 8, l, 0);
  } else {
    unpack_block<kBits>(planes, g, i, codes);
  }
}
#else
template <int>
constexpr bool kLookedUp = false;
FLASH_INLINE VecF look_up(VecF values, VecU) { return values; }

template <int kBits>
FLASH_INLINE void unpack_indices(const uint8_t* planes, int g, int64_t i, VecU (&codes)[4]) {
  unpack_block<kBits>(planes, g, i, codes);
}
#endif

// decode_element for a block. kExact: the products are far from an overflow and float32 holds them exactly (a code of
// 8 bits times a scale of 8), so they may be fused with the addition.
template <int kBits, int kHalf, bool kExact>
FLASH_INLINE void decode_block(const uint8_t* planes, int g, int64_t i, const Metadata& m,
                               VecF (&values)[4]) {
  const auto value_of = [&](VecI code) FLASH_INLINED {
    const VecF number = __builtin_convertvector(code - kHalf, VecF);
    return kExact ? fused(number, m.scale, m.zero) : number * m.scale + m.zero;
  };
  VecU codes[4];
  if constexpr (kLookedUp<kBits>) {
    const VecF table = value_of(lane_numbers() & ((1 << kBits) - 1));
    unpack_indices<kBits>(planes, g, i, codes);
    for (int l = 0; l < 4; ++l) values[l] = look_up(table, codes[l]);
  } else {
    unpack_block<kBits>(planes, g, i, codes);
    for (int l = 0; l < 4; ++l) values[l] = value_of(cast<VecI>(codes[l]));
  }
}

constexpr int kHeld = 16;  // ranks with metadata read once a batch

// The sums and differences of error feedback cannot overflow below this, nor can a sum of kHeld ranks.
constexpr float kSafe = 0x1p100f;

// The metadata of a batch, by rank and group.
struct Held {
  alignas(64) float scale[kHeld][kBatch], zero[kHeld][kBatch];
};

// Reads it, asks for the planes on the way, and returns whether every scale and zero point is below kSafe.
template <int kBits, Layout kLayout>
FLASH_INLINE bool hold_metadata(const uint8_t* first, int64_t ranks, int64_t stride, int g, int count,
                                Held& held) {
  const int64_t record = record_bytes(kBits, g, options_of(kLayout));
  uint32_t largest = 0;  // a NaN is larger than any number
  for (int64_t rank = 0; rank < ranks; ++rank, first += stride) {
    alignas(64) uint32_t words[kBatch] = {};
    // Where streams alternate, the processor's own prefetching stops.
    prefetch_into<3>(first, 0, static_cast<int>(count * record));
    for (int j = 0; j < count; ++j) {
      __builtin_memcpy(words + j, first + j * record,
                       static_cast<size_t>(spikes_offset(options_of(kLayout))));
    }
    for (int j = 0; j < kBatch; ++j) {
      const Metadata m = metadata_of(words[j], kBits, kLayout);
      held.scale[rank][j] = m.scale;
      held.zero[rank][j] = m.zero;
      const uint32_t scale = float_bits(m.scale) & 0x7fffffffu, zero = float_bits(m.zero) & 0x7fffffffu;
      const uint32_t larger = scale > zero ? scale : zero;
      largest = larger > largest ? larger : largest;
    }
  }
  return largest < float_bits(kSafe);
}

// The sum of group j of a batch, `first` its record of rank 0, stored in the tensor's dtype. kTame: no value is or
// becomes a NaN or an Inf, so none is looked for and a product need not be rounded. held: or null.
template <DType kType, int kBits, Layout kLayout, bool kTame>
FLASH_INLINE void sum_group(const uint8_t* first, int64_t ranks, int64_t stride, int g, const Held* held,
                            int j, float factor, uint8_t* y) {
  using E = Element<kType>;
  constexpr int front = spikes_offset(options_of(kLayout));
  for (int64_t i = 0; i < g; i += kBlock) {
    VecF sums[4], values[4];
    const auto decode = [&](int64_t rank, VecF(&to)[4]) FLASH_INLINED {
      const uint8_t* record = first + rank * stride;
      const Metadata m = held != nullptr ? Metadata{held->scale[rank][j], held->zero[rank][j]}
                                         : read_metadata(record, kBits, kLayout);
      decode_block<kBits, code_half(kBits, kLayout), kTame>(record + front, g, i, m, to);
    };
    decode(0, sums);
    for (int64_t rank = 1; rank < ranks; ++rank) {
      decode(rank, values);
      for (int l = 0; l < 4; ++l) sums[l] = sums[l] + values[l];
    }
    if (!kTame || factor != 1.0f) {
      for (int l = 0; l < 4; ++l) sums[l] = sums[l] * factor;
    }
    for (int l = 0; l < 4; ++l) {
      uint8_t* at = y + (i + l * kLanes) * E::kBytes;
      if constexpr (kTame) {
        E::write_number(at, sums[l]);
      } else {
        E::write(at, sums[l]);
      }
    }
  }
}

// The sums of `count` groups, count <= batch_of(g), from group number `group` on.
template <DType kType, int kBits, Layout kLayout>
FLASH_INLINE void sum_batch(const Payloads& p, int64_t group, int count, float factor, uint8_t* y) {
  const int g = p.codec.group_size;
  const int64_t ranks = p.count,
                stride = p.stride;  // copies: y may be anything, for all that the compiler knows
  const int64_t record = record_bytes(kBits, g, options_of(kLayout));
  const uint8_t* first = p.data + group * record;
  Held held;
  const bool holds = ranks <= kHeld;
  const bool tame = holds && hold_metadata<kBits, kLayout>(first, ranks, stride, g, count, held) &&
                    factor <= 1.0f && factor >= -1.0f;
  for (int j = 0; j < count; ++j, first += record, y += g * Element<kType>::kBytes) {
    if (tame) {
      sum_group<kType, kBits, kLayout, true>(first, ranks, stride, g, &held, j, factor, y);
    } else {
      sum_group<kType, kBits, kLayout, false>(first, ranks, stride, g, holds ? &held : nullptr, j, factor, y);
    }
  }
}

template <DType kType, int kBits, Layout kLayout>
void decode_sum_range(const Payloads& p, float factor, uint8_t* y, int64_t numel, int64_t begin,
                      int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = p.codec.group_size, batch = batch_of(g);
  const int64_t whole = numel / g < end ? numel / g : end;
  for (int64_t i = begin; i < whole; i += batch) {
    const int count = static_cast<int>(whole - i < batch ? whole - i : batch);
    sum_batch<kType, kBits, kLayout>(p, i, count, factor, y + i * g * kBytes);
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize];
    sum_batch<kType, kBits, kLayout>(p, whole, 1, factor, group);
    __builtin_memcpy(y + whole * g * kBytes, group, static_cast<size_t>((numel - whole * g) * kBytes));
  }
}

}  // namespace
}  // namespace flash_allreduce
