// The warp of csrc/cuda/codec_warp.h on the host: 32 lanes run in turn, a shuffle takes every lane's value
// before any lane continues. tests/codec/test_codec_warp.py compares the results with the codec.
//
// plain: calls that plain_warp.h supports use it, as in codec.cu; all other calls, and all without plain, use
// codec_warp.h.
#include <cstdint>
#include <type_traits>

// Accesses on which a device would fault, since the library was loaded.
extern "C" {
long misaligned = 0;
}
#define FLASH_ALIGNED(p, bytes) (misaligned += reinterpret_cast<uintptr_t>(p) % (bytes) != 0)

#include "../../csrc/cuda/plain_warp.h"
#include "host_warp.h"

using namespace flash_allreduce;

namespace {

// f(the type, as a value); f is generic.
template <class F>
void with_type(int type, F f) {
  if (type == 0) f(std::integral_constant<DType, DType::kFloat32>());
  if (type == 1) f(std::integral_constant<DType, DType::kBFloat16>());
  if (type == 2) f(std::integral_constant<DType, DType::kFloat16>());
}

template <class F>
void for_warps(int64_t groups, const Form& form, F f) {
  for (int64_t group = 0; group < groups; group += kWarpElements / form.group_size) f(group);
}

// Returns the residual of the warp that starts at group `group`. momentum: as the operators take it.
Residual residual_of(uint8_t* residual, int wide, double momentum, const Form& form, int64_t group) {
  const int bytes = wide ? 2 * form.group_size : residual_form(form).record;
  return {residual + group * bytes, wide != 0, static_cast<float>(momentum),
          static_cast<float>(1.0 - momentum)};
}

int up_to_warp(int64_t elements) {
  return static_cast<int>(elements < kWarpElements ? elements : kWarpElements);
}

bool plain(int options) { return (options & ~(kSymmetricCodes | kCompact)) == 0; }

}  // namespace

extern "C" void warp_encode_row(int plain_too, const uint8_t* row, int64_t numel, int type, int fast,
                                int bits, int group_size, int options, uint64_t key, int64_t number,
                                uint8_t* payload) {
  const Form form(bits, group_size, options);
  const auto of_plain = [&](auto width, auto layout) {
    for_warps(num_groups(numel, group_size), form, [&](int64_t group) {
      HostWarp warp;
      with_type(type, [&](auto t) {
        const int64_t first = group * kPlainGroup;
        plain_encode<t.value, width.value, layout.value>(warp, row + first * element_bytes(t.value),
                                                         up_to_warp(numel - first),
                                                         payload + group * form.record);
      });
    });
  };
  if (plain_too && fast && choose_plain(form, options, of_plain)) return;
  for_warps(num_groups(numel, group_size), form, [&](int64_t group) {
    HostWarp warp;
    uint8_t* image = payload + group * form.record;
    with_type(type, [&](auto t) {
      if (plain(options)) {
        warp_encode<t.value, false>(warp, form, row, numel, fast, group, key, number, image);
      } else {
        warp_encode<t.value, true>(warp, form, row, numel, fast, group, key, number, image);
      }
    });
  });
}

extern "C" void warp_decode_sum_row(int plain_too, const uint8_t* payloads, int64_t count, int64_t stride,
                                    int align, float factor, int64_t numel, int type, int fast, int bits,
                                    int group_size, int options, uint8_t* row) {
  const Form form(bits, group_size, options);
  const Sources from{payloads, count, stride, align};
  const auto of_plain = [&](auto width, auto layout) {
    for_warps(num_groups(numel, group_size), form, [&](int64_t group) {
      HostWarp warp;
      const int64_t first = group * kPlainGroup;
      const Sources of_warp{payloads + group * form.record, count, stride, align};
      with_type(type, [&](auto t) {
        uint8_t* at = row + first * element_bytes(t.value);
        if (count == 1 && factor == 1.0f) {
          plain_decode<t.value, width.value, layout.value, false>(warp, of_warp, factor, at,
                                                                  up_to_warp(numel - first));
        } else {
          plain_decode<t.value, width.value, layout.value, true>(warp, of_warp, factor, at,
                                                                 up_to_warp(numel - first));
        }
      });
    });
  };
  const bool aligned = fast && align >= plain_align(layout_of(options));
  if (plain_too && aligned && choose_plain(form, options & ~(kMse | kStochastic), of_plain)) return;
  for_warps(num_groups(numel, group_size), form, [&](int64_t group) {
    HostWarp warp;
    with_type(type, [&](auto t) {
      if (plain(options)) {
        warp_decode_sum<t.value, false>(warp, form, from, factor, row, numel, fast, group);
      } else {
        warp_decode_sum<t.value, true>(warp, form, from, factor, row, numel, fast, group);
      }
    });
  });
}

extern "C" void warp_decode_sum_encode_row(int plain_too, const uint8_t* payloads, int64_t count,
                                           int64_t stride, int align, float factor, int64_t groups,
                                           int reduce_bits, int gather_bits, int group_size, int options,
                                           uint64_t key, int64_t number, uint8_t* payload) {
  const int left = sum_options(options);
  const Form reduce(reduce_bits, group_size, left), gather(gather_bits, group_size, left);
  const Sources from{payloads, count, stride, align};
  const auto of_plain = [&](auto gathered, auto layout) {
    choose_plain_bits(reduce_bits, [&](auto reduced) {
      for_warps(groups, gather, [&](int64_t group) {
        HostWarp warp;
        const Sources of_warp{payloads + group * reduce.record, count, stride, align};
        const int left = up_to_warp((groups - group) * kPlainGroup);
        plain_decode_sum_encode<reduced.value, gathered.value, layout.value>(warp, of_warp, factor, left,
                                                                             payload + group * gather.record);
      });
    });
  };
  const bool aligned = align >= plain_align(layout_of(left)) && (reduce_bits == 8 || reduce_bits == 4);
  if (plain_too && aligned && choose_plain(gather, left, of_plain)) return;
  for_warps(groups, gather, [&](int64_t group) {
    HostWarp warp;
    uint8_t* image = payload + group * gather.record;
    if (plain(left)) {
      warp_decode_sum_encode<false>(warp, reduce, gather, from, factor, group, groups, key, number, image);
    } else {
      warp_decode_sum_encode<true>(warp, reduce, gather, from, factor, group, groups, key, number, image);
    }
  });
}

extern "C" void warp_encode_feedback_row(const uint8_t* row, int64_t numel, int type, int fast,
                                         double momentum, int bits, int group_size, int options, uint64_t key,
                                         int64_t number, int wide, uint8_t* residual, uint8_t* payload) {
  const Form form(bits, group_size, options);
  for_warps(num_groups(numel, group_size), form, [&](int64_t group) {
    HostWarp warp;
    uint8_t* image = payload + group * form.record;
    const Residual kept = residual_of(residual, wide, momentum, form, group);
    with_type(type, [&](auto t) {
      if (plain(options)) {
        warp_encode_feedback<t.value, false>(warp, form, row, numel, fast, group, kept, key, number, image);
      } else {
        warp_encode_feedback<t.value, true>(warp, form, row, numel, fast, group, kept, key, number, image);
      }
    });
  });
}

extern "C" void warp_decode_sum_encode_feedback_row(const uint8_t* payloads, int64_t count, int64_t stride,
                                                    int align, float factor, double momentum, int64_t groups,
                                                    int reduce_bits, int gather_bits, int group_size,
                                                    int options, uint64_t key, int64_t number, int wide,
                                                    uint8_t* residual, uint8_t* payload) {
  const int left = sum_options(options);
  const Form reduce(reduce_bits, group_size, left), gather(gather_bits, group_size, left);
  const Sources from{payloads, count, stride, align};
  for_warps(groups, gather, [&](int64_t group) {
    HostWarp warp;
    uint8_t* image = payload + group * gather.record;
    const Residual kept = residual_of(residual, wide, momentum, gather, group);
    if (plain(left)) {
      warp_decode_sum_encode_feedback<false>(warp, reduce, gather, from, factor, group, groups, kept, key,
                                             number, image);
    } else {
      warp_decode_sum_encode_feedback<true>(warp, reduce, gather, from, factor, group, groups, kept, key,
                                            number, image);
    }
  });
}
