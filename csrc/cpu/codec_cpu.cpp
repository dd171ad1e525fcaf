// The CPU operators: check the arguments, choose the instruction set, share the groups among threads.
//
// Groups are independent, so the threads (torch's own, torch.set_num_threads) take contiguous ranges of
// them and every split gives the same bytes.
#include "codec_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#include "../checks.h"
#include "feedback.h"

namespace flash_allreduce {
namespace {

constexpr int64_t kGrainElements = 1 << 15;  // fewer than this are not worth another thread
constexpr int64_t kSumElements = 4096;       // 16 KiB of float

enum class Capability { kDefault, kAvx2, kAvx512 };

// ATEN_CPU_CAPABILITY is torch's own variable: avx512, avx2 or default lowers the choice.
Capability choose() {
#if defined(__x86_64__)
  const char* wish = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string limit = wish == nullptr ? "avx512" : wish;
  __builtin_cpu_init();
  if (limit == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Capability::kAvx512;
  }
  if ((limit == "avx512" || limit == "avx2") && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma")) {
    return Capability::kAvx2;
  }
#endif
  return Capability::kDefault;
}

Capability capability() {
  static const Capability chosen = choose();
  return chosen;
}

// A Xeon reads memory fastest through the first level, AMD's Zen 4 through the second.
Ahead choose_ahead() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("amd")) return Ahead::kSecondLevel;
#endif
  return Ahead::kFirstLevel;
}

Ahead ahead() {
  static const Ahead chosen = choose_ahead();
  return chosen;
}

const Kernels& kernels(int group_size) {
#if defined(__x86_64__)
  if (capability() == Capability::kAvx512 && group_size >= 64) return kernels_avx512();
  if (capability() != Capability::kDefault) return kernels_avx2();
#endif
  return kernels_default();
}

Encode encoder(const Codec& c, int type) { return encoder(kernels(c.group_size), c, type); }
DecodeSum decoder(const Codec& c, int type) { return decoder(kernels(c.group_size), c, type); }

Codec make_codec(int64_t bits, int64_t group_size, int64_t options) {
  check_codec(bits, group_size, options);
  Codec codec{static_cast<int>(bits), static_cast<int>(group_size), static_cast<int>(options)};
  codec.ahead = ahead();
  return codec;
}

int64_t row_bytes(int64_t numel, const Codec& c) {
  check_numel(numel);
  return payload_bytes(numel, c.bits, c.group_size, c.options);
}

// f(row, begin, end) over the groups of `rows` rows of `groups` groups.
template <typename F>
void for_groups(int64_t rows, int64_t groups, int group_size, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / group_size);
  torch::stable::parallel_for(0, rows * groups, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / groups;
      const int64_t stop = std::min(end, (row + 1) * groups);
      f(row, begin - row * groups, stop - row * groups);
      begin = stop;
    }
  });
}

void encode(const Tensor input, Tensor payload, int64_t bits, int64_t group_size, int64_t options,
            int64_t key, int64_t first_group, int64_t groups_a_row) {
  const Codec codec = make_codec(bits, group_size, options);
  check_rows(input, "input");
  const int type = element_type(input, "input");
  const int64_t numel = input.size(1);
  check_payload(payload, "payload", input.size(0), row_bytes(numel, codec));
  check_rows_apart(payload, "payload");
  const auto* x = static_cast<const uint8_t*>(input.const_data_ptr());
  auto* out = static_cast<uint8_t*>(payload.mutable_data_ptr());
  const int64_t x_stride = row_stride(input) * (type == 0 ? 4 : 2);
  const int64_t out_stride = row_stride(payload);
  const auto kernel = encoder(codec, type);
  for_groups(input.size(0), num_groups(numel, codec.group_size), codec.group_size,
             [&](int64_t row, int64_t begin, int64_t end) {
               Codec of_row = codec;
               of_row.key = static_cast<uint64_t>(key);
               of_row.first_group = static_cast<uint64_t>(first_group) +
                                    static_cast<uint64_t>(row) * static_cast<uint64_t>(groups_a_row);
               kernel(x + row * x_stride, numel, of_row, out + row * out_stride, begin, end);
             });
}

void decode(const Tensor payload, Tensor output, int64_t bits, int64_t group_size, int64_t options) {
  const Codec codec = make_codec(bits, group_size, options);
  check_rows(output, "output");
  const int type = element_type(output, "output");
  const int64_t numel = output.size(1);
  check_payload(payload, "payload", output.size(0), row_bytes(numel, codec));
  check_rows_apart(output, "output");
  const auto* in = static_cast<const uint8_t*>(payload.const_data_ptr());
  auto* y = static_cast<uint8_t*>(output.mutable_data_ptr());
  const int64_t in_stride = row_stride(payload);
  const int64_t y_stride = row_stride(output) * (type == 0 ? 4 : 2);
  const auto kernel = decoder(codec, type);
  for_groups(output.size(0), num_groups(numel, codec.group_size), codec.group_size,
             [&](int64_t row, int64_t begin, int64_t end) {
               kernel({in + row * in_stride, 1, 0, codec}, 1.0f, y + row * y_stride, numel, begin, end);
             });
}

Payloads sources(const Tensor& payloads, int64_t numel, const Codec& codec) {
  check_payloads(payloads, row_bytes(numel, codec));
  return {static_cast<const uint8_t*>(payloads.const_data_ptr()), payloads.size(0), row_stride(payloads),
          codec};
}

void decode_sum(const Tensor payloads, Tensor output, double factor, int64_t bits, int64_t group_size,
                int64_t options) {
  const Codec codec = make_codec(bits, group_size, options);
  check_vector(output, "output");
  const int type = element_type(output, "output");
  const int64_t numel = output.size(0);
  const Payloads in = sources(payloads, numel, codec);
  auto* y = static_cast<uint8_t*>(output.mutable_data_ptr());
  const auto kernel = decoder(codec, type);
  for_groups(1, num_groups(numel, codec.group_size), codec.group_size,
             [&](int64_t, int64_t begin, int64_t end) {
               kernel(in, static_cast<float>(factor), y, numel, begin, end);
             });
}

void decode_sum_encode(const Tensor payloads, Tensor payload, double factor, int64_t reduce_bits,
                       int64_t gather_bits, int64_t group_size, int64_t options, int64_t key,
                       int64_t first_group) {
  const int left = sum_options(make_codec(reduce_bits, group_size, options).options);
  const Codec reduce = make_codec(reduce_bits, group_size, left);
  Codec gather = make_codec(gather_bits, group_size, left);
  gather.key = static_cast<uint64_t>(key);
  const int64_t record = record_bytes(gather);
  const int64_t groups = check_records(payload, record);
  const Payloads in = sources(payloads, groups * group_size, reduce);
  auto* out = static_cast<uint8_t*>(payload.mutable_data_ptr());
  const auto sum = decoder(reduce, static_cast<int>(DType::kFloat32));
  const auto encode = encoder(gather, static_cast<int>(DType::kFloat32));
  const int64_t in_record = record_bytes(reduce);
  // A few groups at a time, so that the sums stay in the first-level cache. The padding of a ragged last
  // group needs no care: a copy of the first element on every rank, its sum is a copy of the first sum.
  const int64_t step = kSumElements / reduce.group_size;
  for_groups(1, groups, reduce.group_size, [&](int64_t, int64_t begin, int64_t end) {
    alignas(64) uint8_t sums[4 * kSumElements];
    for (int64_t i = begin; i < end; i += step) {
      const int64_t count = std::min(step, end - i);
      const Payloads part{in.data + i * in_record, in.count, in.stride, reduce};
      sum(part, static_cast<float>(factor), sums, count * group_size, 0, count);
      Codec of_part = gather;
      of_part.first_group = static_cast<uint64_t>(first_group) + static_cast<uint64_t>(i);
      encode(sums, count * group_size, of_part, out + i * record, 0, count);
    }
  });
}

// residual: [groups, bytes of 8-bit symmetric records] of uint8, or [groups, group_size] of bf16.
Feedback feedback_of(const Codec& codec, Tensor& residual, int64_t groups, double momentum) {
  const bool wide = check_residual(residual, groups, codec.group_size);
  STD_TORCH_CHECK(momentum >= 0.0 && momentum < 1.0, "momentum is ", momentum,
                  "; expected 0 or more and below 1");
  return {kernels(codec.group_size), codec, wide, static_cast<uint8_t*>(residual.mutable_data_ptr()),
          momentum};
}

void encode_feedback(const Tensor input, Tensor payload, Tensor residual, double momentum, int64_t bits,
                     int64_t group_size, int64_t options, int64_t key, int64_t first_group) {
  Codec codec = make_codec(bits, group_size, options);
  codec.key = static_cast<uint64_t>(key);
  codec.first_group = static_cast<uint64_t>(first_group);
  check_rows(input, "input");
  STD_TORCH_CHECK(input.size(0) == 1, "input has ", input.size(0), " rows; expected 1");
  const int type = element_type(input, "input");
  const int64_t numel = input.size(1), groups = num_groups(numel, codec.group_size);
  check_payload(payload, "payload", 1, row_bytes(numel, codec));
  const Feedback feedback = feedback_of(codec, residual, groups, momentum);
  const auto* x = static_cast<const uint8_t*>(input.const_data_ptr());
  auto* out = static_cast<uint8_t*>(payload.mutable_data_ptr());
  const int64_t item = type == 0 ? 4 : 2;
  for_groups(1, groups, codec.group_size, [&](int64_t, int64_t begin, int64_t end) {
    const int64_t first = begin * group_size;
    feedback.encode(x + first * item, type, numel - first, begin, end, out);
  });
}

void decode_sum_encode_feedback(const Tensor payloads, Tensor payload, Tensor residual, double factor,
                                double momentum, int64_t reduce_bits, int64_t gather_bits, int64_t group_size,
                                int64_t options, int64_t key, int64_t first_group) {
  const int left = sum_options(make_codec(reduce_bits, group_size, options).options);
  const Codec reduce = make_codec(reduce_bits, group_size, left);
  Codec gather = make_codec(gather_bits, group_size, left);
  gather.key = static_cast<uint64_t>(key);
  gather.first_group = static_cast<uint64_t>(first_group);
  const int64_t groups = check_records(payload, record_bytes(gather));
  const Payloads in = sources(payloads, groups * group_size, reduce);
  const Feedback feedback = feedback_of(gather, residual, groups, momentum);
  auto* out = static_cast<uint8_t*>(payload.mutable_data_ptr());
  constexpr int kFloat = static_cast<int>(DType::kFloat32);
  const auto sum = decoder(reduce, kFloat);
  const int64_t in_record = record_bytes(reduce), step = Feedback::kElements / group_size;
  for_groups(1, groups, reduce.group_size, [&](int64_t, int64_t begin, int64_t end) {
    alignas(64) uint8_t sums[4 * Feedback::kElements];
    for (int64_t i = begin; i < end; i += step) {
      const int64_t count = std::min(step, end - i), n = count * group_size;
      sum({in.data + i * in_record, in.count, in.stride, reduce}, static_cast<float>(factor), sums, n, 0,
          count);
      feedback.encode(sums, kFloat, n, i, i + count, out);
    }
  });
}

// master, held [rows, numel] -> payload [rows, bytes] of their difference; whether every difference is
// finite.
bool encode_difference(const Tensor master, const Tensor held, Tensor payload, int64_t bits,
                       int64_t group_size, int64_t options, int64_t key, int64_t first_group) {
  const Codec codec = make_codec(bits, group_size, options);
  check_rows(master, "master");
  check_rows(held, "held");
  STD_TORCH_CHECK(element_type(master, "master") == static_cast<int>(DType::kFloat32),
                  "master is not float32");
  STD_TORCH_CHECK(master.size(0) == 1 && held.size(0) == 1 && master.size(1) == held.size(1), "master has ",
                  master.size(1), " elements and held ", held.size(1),
                  "; expected one row of the same number");
  const int64_t numel = held.size(1);
  check_payload(payload, "payload", 1, row_bytes(numel, codec));
  const auto* exact = static_cast<const float*>(master.const_data_ptr());
  const int type = element_type(held, "held");
  const int64_t item = type == 0 ? 4 : 2;
  const auto* now = static_cast<const uint8_t*>(held.const_data_ptr());
  auto* out = static_cast<uint8_t*>(payload.mutable_data_ptr());
  const auto subtract = kernels(codec.group_size).subtract[type];
  const auto encode = encoder(codec, static_cast<int>(DType::kFloat32));
  const int64_t record = record_bytes(codec);
  const int64_t step = kSumElements / codec.group_size;
  std::atomic<bool> finite{true};
  for_groups(
      1, num_groups(numel, codec.group_size), codec.group_size, [&](int64_t, int64_t begin, int64_t end) {
        alignas(64) float differences[kSumElements];
        for (int64_t i = begin; i < end; i += step) {
          const int64_t count = std::min(step, end - i), first = i * group_size;
          const int64_t n = std::min(count * group_size, numel - first);
          subtract(exact + first, now + first * item, n, differences);
          Codec of_part = codec;
          of_part.key = static_cast<uint64_t>(key);
          of_part.first_group = static_cast<uint64_t>(first_group) + static_cast<uint64_t>(i);
          encode(reinterpret_cast<const uint8_t*>(differences), n, of_part, out + i * record, 0, count);
          for (int64_t j = i; j < i + count; ++j) {  // a group that is not finite has a scale of NaN
            uint16_t scale;
            __builtin_memcpy(&scale, out + j * record, sizeof scale);
            if (scale == kNaNScale) finite.store(false, std::memory_order_relaxed);
          }
        }
      });
  return finite.load();
}

// Adds the decoded payload [rows, bytes] to held [rows, numel], in float32.
void decode_add(const Tensor payload, Tensor held, int64_t bits, int64_t group_size, int64_t options) {
  const Codec codec = make_codec(bits, group_size, options);
  check_rows(held, "held");
  const int type = element_type(held, "held");
  const int64_t numel = held.size(1);
  check_payload(payload, "payload", held.size(0), row_bytes(numel, codec));
  check_rows_apart(held, "held");
  const auto* in = static_cast<const uint8_t*>(payload.const_data_ptr());
  auto* y = static_cast<uint8_t*>(held.mutable_data_ptr());
  const int64_t item = type == 0 ? 4 : 2;
  const int64_t in_stride = row_stride(payload), y_stride = row_stride(held) * item;
  const auto decode = decoder(codec, static_cast<int>(DType::kFloat32));
  const auto add = kernels(codec.group_size).add[type];
  const int64_t record = record_bytes(codec);
  const int64_t step = kSumElements / codec.group_size;
  for_groups(held.size(0), num_groups(numel, codec.group_size), codec.group_size,
             [&](int64_t row, int64_t begin, int64_t end) {
               alignas(64) float differences[kSumElements];
               for (int64_t i = begin; i < end; i += step) {
                 const int64_t count = std::min(step, end - i), first = i * group_size;
                 const int64_t n = std::min(count * group_size, numel - first);
                 const Payloads part{in + row * in_stride + i * record, 1, 0, codec};
                 decode(part, 1.0f, reinterpret_cast<uint8_t*>(differences), n, 0, count);
                 add(differences, y + row * y_stride + first * item, n);
               }
             });
}

int64_t payload_bytes_op(int64_t numel, int64_t bits, int64_t group_size, int64_t options) {
  return row_bytes(numel, make_codec(bits, group_size, options));
}

int64_t wire_version() { return kWireVersion; }

std::string cpu_capability() {
  switch (capability()) {
    case Capability::kAvx512:
      return "avx512";
    case Capability::kAvx2:
      return "avx2";
    default:
      return "default";
  }
}

}  // namespace
}  // namespace flash_allreduce

STABLE_TORCH_LIBRARY_IMPL(flash_allreduce, CPU, m) {
  m.impl("encode", TORCH_BOX(&flash_allreduce::encode));
  m.impl("decode", TORCH_BOX(&flash_allreduce::decode));
  m.impl("decode_sum", TORCH_BOX(&flash_allreduce::decode_sum));
  m.impl("decode_sum_encode", TORCH_BOX(&flash_allreduce::decode_sum_encode));
  m.impl("encode_feedback", TORCH_BOX(&flash_allreduce::encode_feedback));
  m.impl("decode_sum_encode_feedback", TORCH_BOX(&flash_allreduce::decode_sum_encode_feedback));
  m.impl("encode_difference", TORCH_BOX(&flash_allreduce::encode_difference));
  m.impl("decode_add", TORCH_BOX(&flash_allreduce::decode_add));
}

STABLE_TORCH_LIBRARY_IMPL(flash_allreduce, CompositeExplicitAutograd, m) {
  m.impl("payload_bytes", TORCH_BOX(&flash_allreduce::payload_bytes_op));
  m.impl("wire_version", TORCH_BOX(&flash_allreduce::wire_version));
  m.impl("cpu_capability", TORCH_BOX(&flash_allreduce::cpu_capability));
}
