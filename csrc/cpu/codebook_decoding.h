// Decoding with the codebook. Included after option_kernels.h, for every instruction set.
//
//   planes -> codes -> levels, looked up in a register, times the step of the part
//          -> summed over the ranks in the first-level cache [rotated back] -> plus the spikes -> stored
#pragma once

#include "codebook_levels.h"
#include "prefetch.h"

namespace flash_allreduce {
namespace {

// A record's steps, a float a part.
struct PartSteps {
  alignas(64) float of[kParts < kLanes ? kLanes : kParts];
};

// word: the record's first 8 bytes.
FLASH_INLINE void read_steps(uint64_t word, float scale, PartSteps& steps) {
  const uint32_t fours[2] = {static_cast<uint32_t>(word >> 16), static_cast<uint32_t>(word >> 40)};
  for (int p = 0; p < kParts; p += kLanes) {
    const VecI part = lane_numbers() + p;
    const VecU from = part < 4 ? VecU{} + fours[0] : VecU{} + fours[1];
    const VecU number = from >> cast<VecU>((part & 3) * 6) & 63u;
    store(steps.of + p, cast<VecF>((number + static_cast<uint32_t>(kLeastPart)) << kPartShift) * scale);
  }
}

// The sums of one group's codes over the payloads, in rank order: they stay in the first-level cache, and each record's
// steps are read once.
template <int kBits, bool kSpiked, int kGroup>
FLASH_INLINE void sum_parts(const Payloads& p, int64_t group, float* sums) {
  constexpr int options = kCodebook | (kSpiked ? kSpikes : 0);
  const int g = kGroup > 0 ? kGroup : p.codec.group_size;
  const int part_shift = __builtin_ctz(static_cast<unsigned>(g / kParts)), front = metadata_bytes(g, options);
  const uint8_t* record = p.data + group * record_bytes(kBits, g, options);
  bool tame = true;  // no value is or becomes a NaN
  const auto add_record = [&](auto first) FLASH_INLINED {
    uint64_t word;
    __builtin_memcpy(&word, record, sizeof word);
    const float scale = bits_float(static_cast<uint32_t>(word & 0x7fffu) << 16);
    tame = tame && scale < kSafe;
    PartSteps steps;
    read_steps(word, scale, steps);
    const Levels<kBits> levels = levels_of_group<kBits>(word & kWhole);
    for (int i = 0; i < g; i += kBlock) {
      VecU codes[4];
      unpack_indices<kBits>(record + front, g, i, codes);
      for (int l = 0; l < 4; ++l) {
        const int at = i + l * kLanes;
        const VecF value = looked_up<kBits>(levels, codes[l]) * steps.of[at >> part_shift];
        store(sums + at, first.value ? value : load<VecF>(sums + at) + value);
      }
    }
    record += p.stride;
  };
  add_record(Number<1>{});
  for (int64_t rank = 1; rank < p.count; ++rank) add_record(Number<0>{});
  for (int i = 0; !tame && i < g; i += kLanes) {
    Element<DType::kFloat32>::write(reinterpret_cast<uint8_t*>(sums + i), load<VecF>(sums + i));
  }
}

FLASH_INLINE bool any_of(VecI lanes) {
  const Vec64 parts = cast<Vec64>(lanes);
  uint64_t any = 0;
  for (int i = 0; i < kLanes / 2; ++i) any |= parts[i];
  return any != 0;
}

// The spikes of `count` groups, count <= kBatch, added to the sums [count * g] of their codes, rank by rank. A lane
// is a group.
FLASH_INLINE void add_spikes(const Payloads& p, int64_t group, int count, float* sums) {
  const int g = p.codec.group_size, base = spike_base(p.codec.bits, g, p.codec.options & kHadamard);
  const int mantissa = spike_mantissa(g), log = log_of(g);
  const int64_t record = record_bytes(p.codec);
  const uint8_t* of_rank = p.data + group * record;
  alignas(64) uint32_t scale[kBatch] = {}, words[kBatch] = {}, place[2][kBatch];
  alignas(64) float value[2][kBatch];
  for (int64_t rank = 0; rank < p.count; ++rank, of_rank += p.stride) {
    for (int j = 0; j < count; ++j) {
      __builtin_memcpy(scale + j, of_rank + j * record, sizeof scale[j]);
      __builtin_memcpy(words + j, of_rank + j * record + spikes_offset(kCodebook), sizeof words[j]);
    }
    VecI not_finite = VecI{};
    for (int k = 0; k < 2; ++k) {
      for (int j = 0; j < kBatch; j += kLanes) {  // spike_place and spike_value, kLanes at once
        const VecU word = load<VecU>(words + j) >> (16 * k) & 0xffffu;
        const VecU small = word >> log & ((1u << (mantissa + kSpikeExponent)) - 1);
        const VecU from = ((load<VecU>(scale + j) >> 7 & 255u) + static_cast<uint32_t>(base)) << mantissa;
        const VecU bits = ((small + from) << (23 - mantissa) & 0x7fffffffu) | word >> 15 << 31;
        store(place[k] + j, word & static_cast<uint32_t>(g - 1));
        const VecU values = small >> mantissa == 0u ? VecU{} : bits;
        not_finite |= (values & kInfBits) == kInfBits;
        store(value[k] + j, values);
      }
    }
    for (int j = 0; j < count; ++j) {
      for (int k = 0; k < 2; ++k) {  // at any address
        float* sum = sums + j * g + static_cast<int>(place[k][j]);
        store(sum, load<float>(sum) + value[k][j]);
      }
    }
    if (any_of(not_finite)) {  // no encoding has made them: which NaN comes of it differs between machines
      for (int i = 0; i < count * g; ++i) store(sums + i, canonical_nan(load<float>(sums + i)));
    }
  }
}

// The sums of `count` groups, turned back and with their spikes.
template <int kBits, bool kSpiked, int kGroup>
FLASH_INLINE void sum_floats(const Payloads& p, int64_t group, int count, float* sums) {
  const int g = kGroup > 0 ? kGroup : p.codec.group_size;
  const int64_t record = record_bytes(p.codec);
  for (int64_t rank = 0; rank < p.count; ++rank) {
    prefetch_into<3>(p.data + group * record + rank * p.stride, 0, static_cast<int>(count * record));
  }
  for (int j = 0; j < count; ++j) {
    float* of_group = sums + j * g;
    sum_parts<kBits, kSpiked, kGroup>(p, group + j, of_group);
    if (p.codec.options & kHadamard) {
      write_turned_back<DType::kFloat32>(of_group, g, 1.0f, reinterpret_cast<uint8_t*>(of_group));
    }
  }
  if constexpr (kSpiked) add_spikes(p, group, count, sums);
}

// A function for all dtypes.
template <int kBits, bool kSpiked>
__attribute__((noinline)) void sum_groups(const Payloads& p, int64_t group, int count, float* sums) {
  if constexpr (kOwnFor128) {
    if (p.codec.group_size == 128) return sum_floats<kBits, kSpiked, 128>(p, group, count, sums);
  }
  sum_floats<kBits, kSpiked, 0>(p, group, count, sums);
}

// Of `count` groups, count <= batch_of(g).
template <DType kType, int kBits, bool kSpiked>
FLASH_INLINE void sum_codebook(const Payloads& p, int64_t group, int count, float factor, uint8_t* y) {
  using E = Element<kType>;
  if (kType == DType::kFloat32 && factor == 1.0f) {
    return sum_groups<kBits, kSpiked>(p, group, count, reinterpret_cast<float*>(y));
  }
  alignas(64) float sums[kBatchElements];
  sum_groups<kBits, kSpiked>(p, group, count, sums);
  for (int i = 0; i < count * p.codec.group_size; i += kLanes) {
    E::write(y + i * E::kBytes, load<VecF>(sums + i) * factor);
  }
}

template <DType kType, int kBits, bool kSpiked>
void decode_sum_codebook(const Payloads& p, float factor, uint8_t* y, int64_t numel, int64_t begin,
                         int64_t end) {
  constexpr int kBytes = Element<kType>::kBytes;
  const int g = p.codec.group_size, batch = batch_of(g);
  const int64_t whole = numel / g < end ? numel / g : end;
  for (int64_t i = begin; i < whole; i += batch) {
    const int count = static_cast<int>(whole - i < batch ? whole - i : batch);
    sum_codebook<kType, kBits, kSpiked>(p, i, count, factor, y + i * g * kBytes);
  }
  if (whole < end) {
    alignas(64) uint8_t group[4 * kMaxGroupSize];
    sum_codebook<kType, kBits, kSpiked>(p, whole, 1, factor, group);
    __builtin_memcpy(y + whole * g * kBytes, group, static_cast<size_t>((numel - whole * g) * kBytes));
  }
}

}  // namespace
}  // namespace flash_allreduce
