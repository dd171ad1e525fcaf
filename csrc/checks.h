// Argument checks shared by the CPU and the CUDA operators. Each failure is one sentence.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
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
  STD_TORCH_CHECK(
      !(options & kCodebook && options & (kSymmetricCodes | kCompact | kStochastic)),
      "codebook excludes symmetric, compact and stochastic rounding: its scales and levels are its "
      "own");
  STD_TORCH_CHECK(!(options & kCodebook) || group_size >= kMinCodebookGroupSize, "group_size is ", group_size,
                  "; expected ", kMinCodebookGroupSize, " or more with codebook");
}

// Of a row: with more, its size in bytes might be no int64.
constexpr int64_t kMostElements = int64_t{1} << 56;

inline void check_numel(int64_t numel) {
  STD_TORCH_CHECK(numel >= 0 && numel <= kMostElements, "numel is ", numel, "; expected 0 to ",
                  kMostElements);
}

// Of a dtype that the operators take; 0 of any other.
inline int64_t item_bytes(const Tensor& t) {
  using torch::headeronly::ScalarType;
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return 2;
    case ScalarType::Byte:
      return 1;
    default:
      return 0;
  }
}

// Torch holds a tensor to its memory where it makes it, not where the memory is taken away
// (UntypedStorage.resize_).
inline void check_memory(const Tensor& t, const char* name) {
  if (t.numel() == 0) return;  // and its strides may be any
  int64_t there = 0, last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += t.size(d) > 1 ? (t.size(d) - 1) * t.stride(d) : 0;
  STD_TORCH_CHECK(aoti_torch_get_storage_size(t.get(), &there) == AOTI_TORCH_SUCCESS, name, " has no memory");
  const int64_t needed = (last + 1) * item_bytes(t);
  STD_TORCH_CHECK(needed <= there, name, " has ", there, " bytes of memory; its elements need ", needed);
}

// [rows, columns] with contiguous rows.
inline void check_rows(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 2, name, " has ", t.dim(), " dimensions; expected [rows, columns]");
  STD_TORCH_CHECK(t.size(1) <= 1 || t.stride(1) == 1, name, " has rows with stride ", t.stride(1),
                  "; expected contiguous rows");
  check_memory(t, name);
}

// The stride of rows, in elements. That of a tensor with one row or none is arbitrary.
inline int64_t row_stride(const Tensor& t) { return t.numel() == 0 || t.size(0) == 1 ? 0 : t.stride(0); }

// Rows that threads write at the same time.
inline void check_rows_apart(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.numel() == 0 || t.size(0) == 1 || t.stride(0) >= t.size(1), name, " has rows of ",
                  t.size(1), " elements every ", t.stride(0), "; expected rows that do not overlap");
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
  check_memory(t, name);
}

// A payload of whole records; returns their number.
inline int64_t check_records(const Tensor& payload, int64_t record) {
  STD_TORCH_CHECK(payload.dim() == 1 && payload.is_contiguous() &&
                      payload.scalar_type() == torch::headeronly::ScalarType::Byte,
                  "payload is not a contiguous uint8 vector");
  check_memory(payload, "payload");
  const int64_t groups = payload.size(0) / record;
  STD_TORCH_CHECK(payload.size(0) == groups * record, "payload has ", payload.size(0),
                  " bytes; expected a multiple of ", record);
  return groups;
}

// Checks the residual of `groups` groups: records of 8 bits, symmetric, or bf16. Returns true for bf16.
inline bool check_residual(const Tensor& t, int64_t groups, int64_t group_size) {
  const bool wide = t.scalar_type() == torch::headeronly::ScalarType::BFloat16;
  STD_TORCH_CHECK(wide || t.scalar_type() == torch::headeronly::ScalarType::Byte,
                  "residual is neither uint8 nor bfloat16");
  const int64_t columns = wide ? group_size : record_bytes(8, static_cast<int>(group_size), kSymmetricCodes);
  STD_TORCH_CHECK(t.dim() == 2 && t.is_contiguous() && t.size(0) == groups && t.size(1) == columns,
                  "residual is not [", groups, ", ", columns, "] and contiguous");
  check_memory(t, "residual");
  return wide;
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
