// Argument checks shared by the CPU and the CUDA operators. Each failure is one sentence.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "codec_math.h"

namespace flash_allreduce {

using torch::stable::Tensor;

inline void check_codec(int64_t bits, int64_t group_size, int64_t options) {
  STD_TORCH_CHECK(is_valid_bits(bits), "bits is ", bits, "; expected ", kMinBits, " to ", kMaxBits);
  STD_TORCH_CHECK(is_valid_group_size(group_size), "group_size is ", group_size,
                  "; expected a power of two from ", kMinGroupSize, " to ", kMaxGroupSize);
  STD_TORCH_CHECK((options & ~static_cast<int64_t>(kAllOptions)) == 0, "options is ", options,
                  "; expected 0 to ", static_cast<int>(kAllOptions));
  STD_TORCH_CHECK(
      !(options & kMse && options & kStochastic),
      "mse and stochastic rounding exclude each other: what lies outside of the range could not be rounded "
      "without a bias");
  STD_TORCH_CHECK(!(options & kSymmetricCodes && options & kCompact),
                  "symmetric and compact exclude each other: both say how the scale travels");
}

// [rows, columns] with contiguous rows.
inline void check_rows(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 2, name, " has ", t.dim(), " dimensions; expected [rows, columns]");
  STD_TORCH_CHECK(t.size(1) <= 1 || t.stride(1) == 1, name, " has rows with stride ", t.stride(1),
                  "; expected contiguous rows");
}

// Payloads, one a row, long enough for `numel` elements.
inline void check_payload(const Tensor& t, const char* name, int64_t rows, int64_t bytes) {
  check_rows(t, name);
  STD_TORCH_CHECK(t.scalar_type() == torch::headeronly::ScalarType::Byte, name, " is not uint8");
  STD_TORCH_CHECK(t.size(0) == rows, name, " has ", t.size(0), " rows; expected ", rows);
  STD_TORCH_CHECK(t.size(1) == bytes, name, " has ", t.size(1), " bytes a row; expected ", bytes);
}

// One a rank, each long enough for `bytes` bytes.
inline void check_payloads(const Tensor& payloads, int64_t bytes) {
  check_payload(payloads, "payloads", payloads.size(0), bytes);
  STD_TORCH_CHECK(payloads.size(0) > 0, "payloads has no rows; expected one a rank");
}

inline void check_vector(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 1 && t.is_contiguous(), name, " is not a contiguous vector");
}

// A payload of whole records; returns their number.
inline int64_t check_records(const Tensor& payload, int64_t record) {
  STD_TORCH_CHECK(payload.dim() == 1 && payload.is_contiguous() &&
                      payload.scalar_type() == torch::headeronly::ScalarType::Byte,
                  "payload is not a contiguous uint8 vector");
  const int64_t groups = payload.size(0) / record;
  STD_TORCH_CHECK(payload.size(0) == groups * record, "payload has ", payload.size(0),
                  " bytes; expected a multiple of ", record);
  return groups;
}

// The dtype of a tensor that is or will be quantized, as a number of DType.
inline int element_type(const Tensor& t, const char* name) {
  using torch::headeronly::ScalarType;
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return static_cast<int>(DType::kFloat32);
    case ScalarType::BFloat16:
      return static_cast<int>(DType::kBFloat16);
    case ScalarType::Half:
      return static_cast<int>(DType::kFloat16);
    default:
      STD_TORCH_CHECK(false, name, " has an unsupported dtype; expected float32, bfloat16 or float16");
  }
}

}  // namespace flash_allreduce
