// Encoding with error feedback: the error of a payload is added to the residual, in the first-level cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec_cpu.h"

namespace flash_allreduce {

// One encoding with error feedback, a few groups at a time, so that all of it stays in the first-level cache.
class Feedback {
 public:
  static constexpr int64_t kElements = 2048;

  // residual: of the call's first group; 8-bit symmetric records, or, wide, bf16.
  Feedback(const Kernels& kernels, const Codec& codec, bool wide, uint8_t* residual, double momentum)
      : kernels_(kernels),
        codec_(codec),
        record_(record_bytes(codec)),
        own_{8, codec.group_size, kSymmetricCodes, 0, 0, codec.ahead},
        wide_(wide),
        residual_(residual),
        residual_record_(wide_ ? 2 * codec.group_size : record_bytes(own_)),
        momentum_(static_cast<float>(momentum)),
        share_(static_cast<float>(1.0 - momentum)) {}

  // Groups [begin, end) of the call; gradient: n elements, of a DType, from the first of them on.
  void encode(const uint8_t* gradient, int type, int64_t n, int64_t begin, int64_t end,
              uint8_t* payload) const {
    const int64_t g = codec_.group_size, item = type == 0 ? 4 : 2;
    for (int64_t i = begin; i < end; i += kElements / g) {
      const int64_t count = std::min(kElements / g, end - i), first = (i - begin) * g;
      encode_few(gradient + first * item, type, std::min(count * g, n - first), i, count, payload);
    }
  }

 private:
  void encode_few(const uint8_t* gradient, int type, int64_t n, int64_t first, int64_t count,
                  uint8_t* payload) const {
    const int g = codec_.group_size;
    alignas(64) float x[kElements], kept[kElements];
    uint8_t* residual = residual_ + first * residual_record_;
    const auto carry = kernels_.carry[type][wide_ ? 1 : 0];
    const int64_t whole = n / g, there = n - whole * g;
    // The last group of a row is padded with its first element, and so is its residual.
    const auto fill_up = [&](float* groups) {
      if (whole < count) std::fill(groups + n, groups + count * g, groups[whole * g]);
    };
    const bool rotated = (codec_.options & kHadamard) != 0;
    bool safe = carry(gradient, residual, whole, g, rotated, momentum_, codec_.ahead, x, kept);
    if (whole < count) {
      const int64_t item = type == 0 ? 4 : 2;
      alignas(64) uint8_t last[4 * kMaxGroupSize] = {};
      std::memcpy(last, gradient + whole * g * item, static_cast<size_t>(there * item));
      safe &= carry(last, residual + whole * residual_record_, 1, g, rotated, momentum_, Ahead::kNot,
                    x + whole * g, kept + whole * g);
    }
    fill_up(x);
    Codec of_part = codec_;
    of_part.first_group += static_cast<uint64_t>(first);
    uint8_t* out = payload + first * record_;
    constexpr int kFloat = static_cast<int>(DType::kFloat32);
    if (const EncodeLost encode_lost = fused(kernels_, codec_)) {
      encode_lost(x, count, of_part, share_, kept, out);
    } else {
      alignas(64) float arrives[kElements];
      encoder(kernels_, codec_, kFloat)(reinterpret_cast<const uint8_t*>(x), count * g, of_part, out, 0,
                                        count);
      decoder(kernels_, codec_, kFloat)({out, 1, 0, codec_}, 1.0f, reinterpret_cast<uint8_t*>(arrives),
                                        count * g, 0, count);
      kernels_.lose(x, arrives, count * g, share_, kept);
    }
    if (!safe) std::replace_if(kept, kept + count * g, [](float v) { return !std::isfinite(v); }, 0.0f);
    fill_up(kept);
    if (wide_) {
      kernels_.narrow(kept, count * g, residual);
    } else {
      encoder(kernels_, own_, kFloat)(reinterpret_cast<const uint8_t*>(kept), count * g, own_, residual, 0,
                                      count);
    }
  }

  const Kernels& kernels_;
  Codec codec_;
  int64_t record_;
  Codec own_;
  bool wide_;
  uint8_t* residual_;
  int64_t residual_record_;
  float momentum_, share_;
};

}  // namespace flash_allreduce
