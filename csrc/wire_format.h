// The byte layout of a payload: the one place where it is written down.
// Host and device, no torch. docs/trust/wire_format.md explains it in words.
//
// A payload is an array of records, one record a group of g = `group_size` consecutive elements, the last
// group padded with code 0. Records have one size, so the payload of a part that starts at a group
// boundary is a slice of the payload of the whole, and payloads concatenate.
//
//   asymmetric   | scale bf16 | zero bf16 | spikes | plane | plane | plane |
//   symmetric    | scale bf16 |             spikes | plane | plane | plane |
//   compact      | both       |             spikes | plane | plane | plane |
//                  2 bytes      2 bytes              g*4/8   g*2/8   g*1/8    bytes, of the planes that exist
//
//   codebook     | scale bf16 | 8 parts, 6 bits each | spikes | plane | plane | plane |
//                  2 bytes      6 bytes                4 bytes, or none
//
// asymmetric, with the sign of the scale set: the other 15 bits are the scale. The zero point is not a bf16
// but a whole number k: 0 is the value of code k (codec_math.h).
//
// compact: scale and zero point share one word, a bf16 scale of 3 bits of mantissa. Its sign and its last
// bits hold the zero point, a multiple of 1/32 of the range of the codes (codec_math.h):
//
//                | bit 4 of the multiple | exponent | mantissa | bits 3 to 0 of the multiple |
//                  1 bit                   8 bits     3 bits     4 bits
//
// codebook, with the sign of the scale set: the group holds an exact 0. A part is an eighth of the group. Its
// 6 bits are the exponent and the mantissa of its scale relative to the group's (codec_math.h). The bits of
// the first part come first, in the lowest bits.
//
// spikes, only with spike reserving, the group's extremes and their places:
//
//                | least bf16 | greatest bf16 | place of the least | place of the greatest |
//                  2 bytes      2 bytes         1 byte each, 2 bytes in groups of more than 256
//
// The codes at those two places mean nothing. With the codebook, two short floats and their places, 16 bits each:
//
//                | sign | exponent | mantissa      | place    |
//                  1      4          11 - log2(g)    log2(g)      bits, the place in the lowest
//
// An exponent of 0: there is no such spike, and the rest of the 16 bits is 0. Otherwise it counts from the exponent
// of the group's scale on (codec_math.h). The codes at those places hold the rest of the elements.
//
// Rotation, range and rounding (codec_math.h) change which codes
// are chosen, not where they are.
//
// A code of b bits is split into units of 8, 4, 2 and 1 bits, widest first, as the binary digits of b say:
// 8 = 8, 7 = 4+2+1, 6 = 4+2, 5 = 4+1, 4 = 4, 3 = 2+1, 2 = 2. The widest unit holds the lowest bits of the
// code. A plane holds one unit of every element: element i of the group has bits [i*w, (i+1)*w) of the
// plane, counted from the lowest bit of its first byte. (Bit splitting: FlashCommunication V2, arXiv
// 2508.03760, section 3; the order inside a plane is ours.)
//
//   4 bits, g = 128  | s s z z | 4-bit plane, 64 bytes: 01 23 45 ..., element 2k in the low half of byte k |
//   5 bits, g = 32   | s s z z | 4-bit plane, 16 bytes: bits 0-3 of a code | 1-bit plane, 4 bytes: bit 4 |
//
// All numbers are little endian.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASH_HD __host__ __device__ __forceinline__
#else
#define FLASH_HD inline
#endif

namespace flash_allreduce {

constexpr int kWireVersion = 5;

// The options of a codec besides its width and its group size.
enum Option : int {
  kSymmetricCodes = 1,
  kSpikes = 2,
  kHadamard = 4,
  kMse = 8,
  kStochastic = 16,
  kCompact = 32,
  kCodebook = 64,
  kAllOptions = 127
};

// The layout of a group's scale and zero point.
enum class Layout : int { kAsymmetric, kSymmetric, kCompact, kCodebook };

FLASH_HD constexpr Layout layout_of(int options) {
  return options & kSymmetricCodes ? Layout::kSymmetric
         : options & kCompact      ? Layout::kCompact
         : options & kCodebook     ? Layout::kCodebook
                                   : Layout::kAsymmetric;
}

FLASH_HD constexpr int options_of(Layout layout) {
  return layout == Layout::kSymmetric  ? kSymmetricCodes
         : layout == Layout::kCompact  ? kCompact
         : layout == Layout::kCodebook ? kCodebook
                                       : 0;
}

constexpr int kMinBits = 2;
constexpr int kMaxBits = 8;
constexpr int kMinGroupSize = 32;
constexpr int kMaxGroupSize = 1024;
constexpr int kParts = 8;                   // of a group, codebook
constexpr int kMinCodebookGroupSize = 128;  // a part has 16 elements or more

FLASH_HD constexpr bool is_valid_bits(int64_t bits) { return bits >= kMinBits && bits <= kMaxBits; }

FLASH_HD constexpr bool is_valid_group_size(int64_t group_size) {
  return group_size >= kMinGroupSize && group_size <= kMaxGroupSize && (group_size & (group_size - 1)) == 0;
}

FLASH_HD constexpr int place_bytes(int group_size) { return group_size <= 256 ? 1 : 2; }

// The logarithm of a group size. No loop: it is worked out for every record.
FLASH_HD constexpr int log_of(int group_size) {
#if !defined(__CUDA_ARCH__)
  if (group_size > 0) return __builtin_ctz(static_cast<unsigned>(group_size));
#endif
  return 5 + (group_size > 32) + (group_size > 64) + (group_size > 128) + (group_size > 256) +
         (group_size > 512);
}

constexpr int kSpikeExponent = 4;  // bits, codebook
FLASH_HD constexpr int spike_mantissa(int group_size) { return 11 - log_of(group_size); }

FLASH_HD constexpr bool has_short_spikes(int options) {
  return (options & (kCodebook | kSpikes)) == (kCodebook | kSpikes);
}

// Those of a sum that is encoded again. Rotating is linear: the sum of rotated groups is the rotated sum, and
// stays as it is. Not so with short spikes, which are added once the sum is turned back.
FLASH_HD constexpr int sum_options(int options) {
  return has_short_spikes(options) ? options : options & ~kHadamard;
}

// Bytes from the start of a record to its spikes, and to its planes.
FLASH_HD constexpr int spikes_offset(int options) {
  const Layout layout = layout_of(options);
  return layout == Layout::kCodebook ? 8 : layout == Layout::kAsymmetric ? 4 : 2;
}

FLASH_HD constexpr int metadata_bytes(int group_size, int options) {
  const int spikes = has_short_spikes(options) ? 4 : 4 + 2 * place_bytes(group_size);
  return spikes_offset(options) + (options & kSpikes ? spikes : 0);
}

FLASH_HD constexpr int64_t record_bytes(int bits, int group_size, int options) {
  return metadata_bytes(group_size, options) + static_cast<int64_t>(group_size) * bits / 8;
}

FLASH_HD constexpr int64_t num_groups(int64_t numel, int group_size) {
  return (numel + group_size - 1) / group_size;
}

FLASH_HD constexpr int64_t payload_bytes(int64_t numel, int bits, int group_size, int options) {
  return num_groups(numel, group_size) * record_bytes(bits, group_size, options);
}

// Does the plane of `width`-bit units (8, 4, 2 or 1) exist for codes of `bits` bits?
FLASH_HD constexpr bool has_plane(int bits, int width) { return (bits & width) != 0; }

// Position in the code of the unit of `width` bits: the sum of the wider units.
FLASH_HD constexpr int plane_shift(int bits, int width) { return bits & ~(2 * width - 1); }

// Bytes from the start of a record's planes to the plane of `width`-bit units.
FLASH_HD constexpr int plane_offset(int bits, int width, int group_size) {
  return group_size * plane_shift(bits, width) / 8;
}

}  // namespace flash_allreduce
