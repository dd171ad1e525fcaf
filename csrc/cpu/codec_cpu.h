// What the operators (codec_cpu.cpp) and the kernels of each instruction set agree on.
#pragma once

#include "../codec_math.h"

namespace flash_allreduce {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct Codec {
  int bits;
  int group_size;
  bool symmetric;
};

// `count` payloads of the same elements, `stride` bytes apart, in rank order.
struct Payloads {
  const uint8_t* data;
  int64_t count;
  int64_t stride;
  Codec codec;
};

// Each works on the groups [begin, end) of a row of `numel` elements; the pointers are the row's start.
// Indexed by DType.
struct CodecKernels {
  void (*encode[3])(const uint8_t* x, int64_t numel, const Codec& codec, uint8_t* payload, int64_t begin,
                    int64_t end);
  void (*decode_sum[3])(const Payloads& payloads, float factor, uint8_t* y, int64_t numel, int64_t begin,
                        int64_t end);
};

struct Kernels {
  CodecKernels of_bits[kMaxBits - kMinBits + 1];
};

// Blocks of 16, 32 and 64 elements: the last is not for groups of 32.
const Kernels& kernels_default(bool symmetric);
#if defined(__x86_64__)
const Kernels& kernels_avx2(bool symmetric);
const Kernels& kernels_avx512(bool symmetric);
#endif

}  // namespace flash_allreduce
