// The interface between the operators (codec_cpu.cpp) and the kernels of each instruction set.
#pragma once

#include "../codec_math.h"

namespace flash_allreduce {

// The cache that kernels ask for memory before they read it; no bit depends on it.
enum class Ahead { kNot, kFirstLevel, kSecondLevel };

struct Codec {
  int bits;
  int group_size;
  int options;  // of wire_format.h
  // For stochastic rounding: the key of the call, and the number that the first group of the row has in it,
  // modulo 2^64.
  uint64_t key = 0;
  uint64_t first_group = 0;
  Ahead ahead = Ahead::kNot;
};

inline int layout_index(const Codec& c) { return static_cast<int>(layout_of(c.options)); }
inline int64_t record_bytes(const Codec& c) { return record_bytes(c.bits, c.group_size, c.options); }

// `count` payloads of the same elements, `stride` bytes apart, in rank order.
struct Payloads {
  const uint8_t* data;
  int64_t count;
  int64_t stride;
  Codec codec;
};

// Each works on the groups [begin, end) of a row of `numel` elements; the pointers are the row's start.
using Encode = void (*)(const uint8_t* x, int64_t numel, const Codec& codec, uint8_t* payload, int64_t begin,
                        int64_t end);
using DecodeSum = void (*)(const Payloads& payloads, float factor, uint8_t* y, int64_t numel, int64_t begin,
                           int64_t end);

// Error feedback of whole groups; codec_kernels.h describes each function.
using Carry = bool (*)(const uint8_t* gradient, const uint8_t* residual, int64_t groups, int group_size,
                       bool rotated, float momentum, Ahead ahead, float* x, float* kept);
using EncodeLost = void (*)(float* x, int64_t groups, const Codec& codec, float share, float* kept,
                            uint8_t* payload);  // may change x
using Lose = void (*)(const float* x, const float* arrives, int64_t n, float share, float* kept);
using Narrow = void (*)(const float* x, int64_t n, uint8_t* out);

// Indexed by DType.
struct CodecKernels {
  Encode encode[3];
  DecodeSum decode_sum[3];
  EncodeLost encode_lost;  // null: encode, decode, lose
};

// out[i] = master[i] - held[i], n elements; held of a DType.
using Subtract = void (*)(const float* master, const uint8_t* held, int64_t n, float* out);
// held[i] += x[i] in float32, rounded to nearest even.
using Add = void (*)(const float* x, uint8_t* held, int64_t n);

struct Kernels {
  CodecKernels plain[3][kMaxBits - kMinBits + 1];         // [layout][bits - 2]: no other option but mse
  CodecKernels with_options[3][kMaxBits - kMinBits + 1];  // any options
  CodecKernels codebook[2]
                       [kMaxBits - kMinBits + 1];  // [spikes][bits - 2]: rotated and searched as options say
  Subtract subtract[3];                            // indexed by DType
  Add add[3];
  Carry carry[3][2];  // [DType][residual of 8 bits, of bf16]
  Lose lose;
  Narrow narrow;
};

// Whether the kernels without options encode it.
inline bool is_plain(const Codec& c) { return (c.options & ~(kSymmetricCodes | kCompact | kMse)) == 0; }

inline const CodecKernels& codec_kernels(const Kernels& k, const Codec& c, bool plain) {
  const int width = c.bits - kMinBits;
  if (c.options & kCodebook) return k.codebook[has_short_spikes(c.options)][width];
  return (plain ? k.plain : k.with_options)[layout_index(c)][width];
}

inline Encode encoder(const Kernels& k, const Codec& c, int type) {
  return codec_kernels(k, c, is_plain(c)).encode[type];
}

// How the codes were chosen does not matter to it.
inline DecodeSum decoder(const Kernels& k, const Codec& c, int type) {
  return codec_kernels(k, c, (c.options & (kSpikes | kHadamard)) == 0).decode_sum[type];
}

// Encoding with error feedback, or null.
inline EncodeLost fused(const Kernels& k, const Codec& c) {
  return c.options & kCodebook && c.options & kHadamard ? nullptr
                                                        : codec_kernels(k, c, is_plain(c)).encode_lost;
}

// Blocks of 16, 32 and 64 elements: the last is not for groups of 32.
const Kernels& kernels_default();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace flash_allreduce
