// Argument checks shared by the CPU and the CUDA operators. Each failure is one sentence.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "wire_format.h"

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

}  // namespace flash_allreduce
