// The arithmetic of one group, for host and device alike, without torch.
//
// Every step is one IEEE operation in float32, rounded to nearest even, so that a CPU and a GPU that follow
// it agree to the bit. That holds only if the compiler does not fuse a multiplication with an addition:
// build with -ffp-contract=off (C++) and -fmad=false (nvcc). flash_allreduce_plugin/reference.py is the same
// text in PyTorch.
//
//   asymmetric   zero  = bf16 rounded down (min x)            codes 0 ... 2^b - 1
//                scale = bf16 rounded up ((max x - zero) / (2^b - 1)), at least 2^-126
//                code  = rint((x - zero) * (1 / scale))
//                value = code * scale + zero
//   symmetric    zero  = 0, half = 2^(b-1) - 1                codes 0 ... 2 * half
//                scale = bf16 rounded up (max |x| / half), at least 2^-126
//                code  = rint(x * (1 / scale)) + half
//                value = (code - half) * scale
//
// Rounding the metadata outwards keeps every element inside the range of the codes, so nothing is clipped:
// (max - zero) / scale exceeds 2^b - 1 by rounding errors of 2^-22 at most, which rint removes.
// A group that holds a NaN or an Inf, or whose range float32 or bf16 cannot hold, travels as scale = NaN,
// zero = 0, codes 0, and is read back as NaN throughout: an overflow is never hidden.
#pragma once

#include <cstdint>
#include <cstring>

#include "wire_format.h"

namespace flash_allreduce {

constexpr uint16_t kNaNScale = 0x7fc0;           // bf16
constexpr uint32_t kNaNBits = 0x7fc00000u;       // the one NaN that decoding writes
constexpr uint32_t kInfBits = 0x7f800000u;       // |bits| at or above it: not finite
constexpr uint32_t kMinScaleBits = 0x00800000u;  // 2^-126: 1 / scale stays finite
constexpr float kRoundMagic = 12582912.0f;       // 1.5 * 2^23: adding it rounds |x| < 2^22 to nearest even
constexpr uint32_t kRoundMagicBits = 0x4b400000u;

FLASH_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

FLASH_HD float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

FLASH_HD float bf16_to_float(uint16_t x) { return bits_float(static_cast<uint32_t>(x) << 16); }

// The largest bf16 not above x (x not NaN).
FLASH_HD uint16_t bf16_round_down(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t away = (bits >> 31) & static_cast<uint32_t>((bits & 0xffffu) != 0);
  return static_cast<uint16_t>((bits >> 16) + away);
}

// The smallest bf16 not below x (x >= 0, not NaN).
FLASH_HD uint16_t bf16_round_up(float x) {
  const uint32_t bits = float_bits(x);
  return static_cast<uint16_t>((bits >> 16) + ((bits & 0xffffu) != 0 ? 1u : 0u));
}

FLASH_HD constexpr int code_half(int bits, bool symmetric) { return symmetric ? (1 << (bits - 1)) - 1 : 0; }

FLASH_HD constexpr int code_levels(int bits, bool symmetric) {
  return symmetric ? 2 * code_half(bits, true) : (1 << bits) - 1;
}

// What travels in front of a group's codes, as bf16 bit patterns.
struct Metadata {
  uint16_t scale;
  uint16_t zero;
};

// The asymmetric zero point, a bf16 value. + 0 makes -0 and 0 the same bytes.
FLASH_HD float group_zero(float lo) {
  return bits_float(static_cast<uint32_t>(bf16_round_down(lo + 0.0f)) << 16);
}

// The bits, as a float, of the scale of a group between lo and hi: a bf16 value, NaN if there is none.
// steps: code_levels asymmetric, code_half symmetric.
FLASH_HD uint32_t group_scale(float lo, float hi, float zero, int steps, bool symmetric) {
  const float range = (symmetric ? (-lo > hi ? -lo : hi) : hi - zero) + 0.0f;  // a -0 would sort above Inf
  const uint32_t scale = static_cast<uint32_t>(bf16_round_up(range / static_cast<float>(steps))) << 16;
  const uint32_t served = scale < kMinScaleBits ? kMinScaleBits : scale;
  return served >= kInfBits ? kNaNBits : served;
}

// In range for every element of a finite group, far out of it for a NaN and for a scale that is NaN.
FLASH_HD uint32_t encode_element(float x, float zero, float inverse_scale, int half) {
  const float t = (x - zero) * inverse_scale + kRoundMagic;
  return float_bits(t) - kRoundMagicBits + static_cast<uint32_t>(half);
}

FLASH_HD float decode_element(uint32_t code, float scale, float zero, int half) {
  return static_cast<float>(static_cast<int>(code) - half) * scale + zero;
}

// Which NaN an invalid operation makes differs between machines; what we write does not.
FLASH_HD float canonical_nan(float x) { return x != x ? bits_float(kNaNBits) : x; }

}  // namespace flash_allreduce
