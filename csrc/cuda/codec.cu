// The CUDA operators: launches of the kernels of codec_kernels.h on torch's current stream. Nothing synchronizes,
// nothing allocates, so that a graph can capture them.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <algorithm>

#include "../checks.h"
#include "codec_kernels.h"

namespace flash_allreduce {
namespace {

// f(dtype), as a constant.
template <class F>
void choose(int type, const F& f) {
  if (type == static_cast<int>(DType::kFloat32)) f(std::integral_constant<DType, DType::kFloat32>());
  if (type == static_cast<int>(DType::kBFloat16)) f(std::integral_constant<DType, DType::kBFloat16>());
  if (type == static_cast<int>(DType::kFloat16)) f(std::integral_constant<DType, DType::kFloat16>());
}

// f(form, whether options are on): form as a constant where it is one of those that presets ask for, or a width in
// groups of 128, and `aligned`. kFeedback: 8 and 4 bits too, which have kernels of their own otherwise.
template <bool kFeedback, class F>
void choose_form(const Form& form, int options, bool aligned, const F& f) {
  bool found = false;
  const auto known = [&](auto fixed, auto with_options) {
    const Form one = fixed;
    if (found || !aligned || form.bits != one.bits || form.group_size != one.group_size ||
        options != one.options) {
      return;
    }
    found = true;
    f(fixed, with_options);
  };
  constexpr int spikes = kCodebook | kSpikes;
  known(Fixed<8, 256, spikes>(), std::true_type());
  known(Fixed<6, 128, spikes>(), std::true_type());
  known(Fixed<4, 128, spikes>(), std::true_type());
  known(Fixed<2, 128, spikes>(), std::true_type());
  known(Fixed<7, 128, 0>(), std::false_type());
  known(Fixed<6, 128, 0>(), std::false_type());
  known(Fixed<5, 128, 0>(), std::false_type());
  known(Fixed<3, 128, 0>(), std::false_type());
  known(Fixed<2, 128, 0>(), std::false_type());
  if constexpr (kFeedback) {
    known(Fixed<8, 128, 0>(), std::false_type());
    known(Fixed<4, 128, 0>(), std::false_type());
  } else {
    known(Fixed<6, 128, kStochastic>(), std::true_type());  // the backward passes of presets
  }
  if (found) return;
  if ((options & ~(kSymmetricCodes | kCompact)) != 0) {
    f(form, std::true_type());
  } else {
    f(form, std::false_type());
  }
}

// The same of two forms of the same options.
template <bool kFeedback, class F>
void choose_forms(const Form& reduce, const Form& gather, bool aligned, const F& f) {
  choose_form<kFeedback>(gather, gather.options, aligned && reduce.bits == gather.bits,
                         [&](auto given, auto with_options) {
                           if constexpr (is_fixed<decltype(given)>) {
                             f(given, given, with_options);
                           } else {
                             f(reduce, gather, with_options);
                           }
                         });
}

Form make_form(int64_t bits, int64_t group_size, int64_t options) {
  check_codec(bits, group_size, options);
  return {static_cast<int>(bits), static_cast<int>(group_size), static_cast<int>(options)};
}

int64_t row_bytes(int64_t numel, const Form& form) {
  check_numel(numel);
  return form.groups(numel) * form.record;
}

int64_t blocks_of(int64_t groups, const Form& form) {
  const int64_t a_block = kBlockElements / form.group_size;
  return (groups + a_block - 1) / a_block;
}

unsigned grid(int64_t blocks) {
  STD_TORCH_CHECK(blocks < (int64_t{1} << 31), "a call of ", blocks, " blocks of 8192 elements is too large");
  return static_cast<unsigned>(blocks);
}

cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
                  "torch has no current stream on GPU ", t.get_device_index());
  return static_cast<cudaStream_t>(stream);
}

void check_same_device(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.is_cuda() && b.is_cuda() && a.get_device_index() == b.get_device_index(),
                  "input and output are on different devices; expected one GPU");
}

// The power of two, 16 at most, that divides the address and every stride in use.
int64_t alignment(const void* data, int64_t rows, int64_t stride) {
  const int64_t bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data)) | (rows > 1 ? stride : 0) | 16;
  return bits & -bits;
}

Rows rows_of(const Tensor& t, const void* data, int type, const Form& form) {
  const int64_t stride = t.dim() == 2 ? row_stride(t) * (type == 0 ? 4 : 2) : 0;
  const int64_t rows = t.dim() == 2 ? t.size(0) : 1, numel = t.size(t.dim() - 1);
  return {numel, stride, alignment(data, rows, stride) == 16,
          Divisor(grid(blocks_of(form.groups(numel), form)))};
}

// Payloads [rows, bytes]: of `count` ranks, or one a row of the output.
Sources sources_of(const Tensor& payloads, int64_t count, const Form& form) {
  const auto* data = static_cast<const uint8_t*>(payloads.const_data_ptr());
  const int64_t of_rows = alignment(data, payloads.size(0), row_stride(payloads));
  const int64_t of_records = of_rows | form.record;
  return {data, count, row_stride(payloads),
          static_cast<int>(std::min<int64_t>(of_records & -of_records, 4))};
}

// As plain_warp.h reads records.
bool is_aligned(const Sources& from, const Form& form) {
  return from.align >= plain_align(layout_of(form.options));
}

void encode(const Tensor input, Tensor payload, int64_t bits, int64_t group_size, int64_t options,
            int64_t key, int64_t first_group, int64_t groups_a_row) {
  const Form form = make_form(bits, group_size, options);
  check_same_device(input, payload);
  check_rows(input, "input");
  const int type = element_type(input, "input");
  check_payload(payload, "payload", input.size(0), row_bytes(input.size(1), form));
  check_rows_apart(payload, "payload");
  const auto* x = static_cast<const uint8_t*>(input.const_data_ptr());
  const Rows rows = rows_of(input, x, type, form);
  const int64_t blocks = input.size(0) * rows.blocks.number;
  if (blocks == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const bool plain =
      rows.fast && choose_plain(form, form.options, [&](auto width, auto layout) {
        choose(type, [&](auto t) {
          plain_encode_kernel<t.value, width.value, layout.value>
              <<<grid(blocks), kBlockThreads, 0, current_stream(input)>>>(
                  x, rows, static_cast<uint8_t*>(payload.mutable_data_ptr()), row_stride(payload));
        });
      });
  if (!plain) {
    choose_form<false>(form, form.options, rows.fast, [&](auto given, auto with_options) {
      choose(type, [&](auto t) {
        encode_kernel<t.value, with_options.value><<<grid(blocks), kBlockThreads, 0, current_stream(input)>>>(
            x, rows, given, static_cast<uint64_t>(key), static_cast<uint64_t>(first_group),
            static_cast<uint64_t>(groups_a_row), static_cast<uint8_t*>(payload.mutable_data_ptr()),
            row_stride(payload));
      });
    });
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Rows of output, each of `count` payloads.
void launch_decode(const Tensor& payloads, int64_t count, Tensor& output, float factor, const Form& form) {
  const int type = element_type(output, "output");
  auto* y = static_cast<uint8_t*>(output.mutable_data_ptr());
  const Rows rows = rows_of(output, y, type, form);
  const int64_t blocks = (output.dim() == 2 ? output.size(0) : 1) * rows.blocks.number;
  if (blocks == 0) return;
  const Sources from = sources_of(payloads, count, form);
  const torch::stable::accelerator::DeviceGuard guard(output.get_device_index());
  const int options = form.options & ~(kMse | kStochastic);  // they leave no trace in records
  const bool plain =
      rows.fast && is_aligned(from, form) && choose_plain(form, options, [&](auto bits, auto layout) {
        choose(type, [&](auto t) {
          const auto launch = [&](auto sum) {
            plain_decode_kernel<t.value, bits.value, layout.value, sum.value>
                <<<grid(blocks), kBlockThreads, 0, current_stream(output)>>>(from, from.stride, factor, y,
                                                                             rows);
          };
          count == 1 && factor == 1.0f ? launch(std::false_type()) : launch(std::true_type());
        });
      });
  if (!plain) {
    choose_form<false>(form, options, rows.fast && from.align == 4, [&](auto given, auto with_options) {
      choose(type, [&](auto t) {
        decode_kernel<t.value, with_options.value>
            <<<grid(blocks), kBlockThreads, 0, current_stream(output)>>>(from, from.stride, given, factor, y,
                                                                         rows);
      });
    });
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void decode(const Tensor payload, Tensor output, int64_t bits, int64_t group_size, int64_t options) {
  const Form form = make_form(bits, group_size, options);
  check_same_device(payload, output);
  check_rows(output, "output");
  check_payload(payload, "payload", output.size(0), row_bytes(output.size(1), form));
  check_rows_apart(output, "output");
  launch_decode(payload, 1, output, 1.0f, form);
}

void decode_sum(const Tensor payloads, Tensor output, double factor, int64_t bits, int64_t group_size,
                int64_t options) {
  const Form form = make_form(bits, group_size, options);
  check_same_device(payloads, output);
  check_vector(output, "output");
  check_payloads(payloads, row_bytes(output.size(0), form));
  launch_decode(payloads, payloads.size(0), output, static_cast<float>(factor), form);
}

void decode_sum_encode(const Tensor payloads, Tensor payload, double factor, int64_t reduce_bits,
                       int64_t gather_bits, int64_t group_size, int64_t options, int64_t key,
                       int64_t first_group) {
  const int left = sum_options(make_form(reduce_bits, group_size, options).options);
  const Form reduce = make_form(reduce_bits, group_size, left),
             gather = make_form(gather_bits, group_size, left);
  check_same_device(payloads, payload);
  const int64_t groups = check_records(payload, gather.record);
  check_payloads(payloads, groups * reduce.record);
  if (groups == 0) return;
  const Sources from = sources_of(payloads, payloads.size(0), reduce);
  const torch::stable::accelerator::DeviceGuard guard(payload.get_device_index());
  const auto launch_plain = [&](auto gathered, auto layout) {
    choose_plain_bits(reduce.bits, [&](auto reduced) {
      plain_decode_sum_encode_kernel<reduced.value, gathered.value, layout.value>
          <<<grid(blocks_of(groups, gather)), kBlockThreads, 0, current_stream(payload)>>>(
              from, static_cast<float>(factor), groups, static_cast<uint8_t*>(payload.mutable_data_ptr()));
    });
  };
  const bool plain = (reduce.bits == 8 || reduce.bits == 4) && is_aligned(from, reduce) &&
                     choose_plain(gather, left, launch_plain);
  const auto launch = [&](auto reduced, auto gathered, auto with_options) {
    decode_sum_encode_kernel<with_options.value>
        <<<grid(blocks_of(groups, gather)), kBlockThreads, 0, current_stream(payload)>>>(
            from, reduced, gathered, static_cast<float>(factor), groups, static_cast<uint64_t>(key),
            static_cast<uint64_t>(first_group), static_cast<uint8_t*>(payload.mutable_data_ptr()));
  };
  if (!plain) choose_forms<false>(reduce, gather, from.align == 4, launch);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// residual: [groups, bytes of records of 8 bits, symmetric] of uint8, or [groups, group_size] of bf16.
Residual residual_of(Tensor& residual, int64_t groups, int64_t group_size, double momentum) {
  STD_TORCH_CHECK(momentum >= 0.0 && momentum < 1.0, "momentum is ", momentum,
                  "; expected 0 or more and below 1");
  const bool wide = check_residual(residual, groups, group_size);
  auto* data = static_cast<uint8_t*>(residual.mutable_data_ptr());
  return {data, wide, static_cast<float>(momentum), static_cast<float>(1.0 - momentum)};
}

void encode_feedback(const Tensor input, Tensor payload, Tensor residual, double momentum, int64_t bits,
                     int64_t group_size, int64_t options, int64_t key, int64_t first_group) {
  const Form form = make_form(bits, group_size, options);
  check_same_device(input, payload);
  check_same_device(input, residual);
  check_rows(input, "input");
  STD_TORCH_CHECK(input.size(0) == 1, "input has ", input.size(0), " rows; expected 1");
  const int type = element_type(input, "input");
  check_payload(payload, "payload", 1, row_bytes(input.size(1), form));
  const Residual kept = residual_of(residual, form.groups(input.size(1)), group_size, momentum);
  const auto* x = static_cast<const uint8_t*>(input.const_data_ptr());
  const Rows rows = rows_of(input, x, type, form);
  if (rows.blocks.number == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  choose_form<true>(form, form.options, rows.fast, [&](auto given, auto with_options) {
    choose(type, [&](auto t) {
      encode_feedback_kernel<t.value, with_options.value>
          <<<rows.blocks.number, kBlockThreads, 0, current_stream(input)>>>(
              x, rows, given, kept, static_cast<uint64_t>(key), static_cast<uint64_t>(first_group),
              static_cast<uint8_t*>(payload.mutable_data_ptr()));
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void decode_sum_encode_feedback(const Tensor payloads, Tensor payload, Tensor residual, double factor,
                                double momentum, int64_t reduce_bits, int64_t gather_bits, int64_t group_size,
                                int64_t options, int64_t key, int64_t first_group) {
  const int left = sum_options(make_form(reduce_bits, group_size, options).options);
  const Form reduce = make_form(reduce_bits, group_size, left),
             gather = make_form(gather_bits, group_size, left);
  check_same_device(payloads, payload);
  check_same_device(payloads, residual);
  const int64_t groups = check_records(payload, gather.record);
  check_payloads(payloads, groups * reduce.record);
  const Residual kept = residual_of(residual, groups, group_size, momentum);
  if (groups == 0) return;
  const Sources from = sources_of(payloads, payloads.size(0), reduce);
  const torch::stable::accelerator::DeviceGuard guard(payload.get_device_index());
  choose_forms<true>(reduce, gather, from.align == 4, [&](auto reduced, auto gathered, auto with_options) {
    decode_sum_encode_feedback_kernel<with_options.value>
        <<<grid(blocks_of(groups, gather)), kBlockThreads, 0, current_stream(payload)>>>(
            from, reduced, gathered, static_cast<float>(factor), groups, kept, static_cast<uint64_t>(key),
            static_cast<uint64_t>(first_group), static_cast<uint8_t*>(payload.mutable_data_ptr()));
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace flash_allreduce

STABLE_TORCH_LIBRARY_IMPL(flash_allreduce, CUDA, m) {
  m.impl("encode", TORCH_BOX(&flash_allreduce::encode));
  m.impl("decode", TORCH_BOX(&flash_allreduce::decode));
  m.impl("decode_sum", TORCH_BOX(&flash_allreduce::decode_sum));
  m.impl("decode_sum_encode", TORCH_BOX(&flash_allreduce::decode_sum_encode));
  m.impl("encode_feedback", TORCH_BOX(&flash_allreduce::encode_feedback));
  m.impl("decode_sum_encode_feedback", TORCH_BOX(&flash_allreduce::decode_sum_encode_feedback));
}
