// The codec's kernels. A block runs the warps of codec_warp.h.
//
// A block is 8 warps, 8192 elements (Flash Communication, arXiv 2412.04964, section 4). An encoding block
// makes its payload in shared memory and copies it out whole: 8192 elements are whole records and a multiple
// of 16 bytes at every width, whatever the alignment of a record.
//
//   row of numel elements   | block 0: 8192      | block 1            | block 2, fewer |
//                             warp 0 | 1 | ... 7
//   shared memory             records of block 1, as they are sent
//   payload of the row      | 8192 / g records   | 8192 / g records   | the rest       |
//
// A decoding block has no shared memory: a lane reads its part of each rank's planes and writes 16 bytes at a
// time.
//
// With error feedback the block's part of the residual is copied to shared memory, for any address. Its warps
// read and replace it there, and the block copies it back:
//
//   residual of the row     | 8192 / g groups    | 8192 / g groups    | the rest       |
//   shared memory             groups of block 1, then the new ones; also the records of block 1
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device_warp.h"
#include "plain_warp.h"

namespace flash_allreduce {
namespace {

constexpr int kBlockWarps = 8;
constexpr int kBlockThreads = kBlockWarps * kWarpLanes;
constexpr int kBlockElements = kBlockWarps * kWarpElements;
// Groups of 32 with 8 bits and spikes have the most.
constexpr int kBlockBytes =
    kBlockElements / kMinGroupSize * static_cast<int>(record_bytes(kMaxBits, kMinGroupSize, kSpikes));

// A residual of bf16 is the larger one.
constexpr int kBlockResidualBytes = kBlockElements * element_bytes(DType::kBFloat16);

// Division by a number that the host knows, of numbers below 2^31: a multiplication and a shift (T. Granlund,
// P. Montgomery, "Division by invariant integers using multiplication", 1994).
struct Divisor {
  unsigned number;
  unsigned reciprocal;  // 2^(31 + log) / number, rounded up
  int log;              // of the next power of two

  explicit Divisor(unsigned number_) : number(number_), reciprocal(0), log(0) {
    const uint64_t by = number > 1 ? number : 1;
    while (uint64_t{1} << log < by) ++log;
    reciprocal = static_cast<unsigned>(((uint64_t{1} << (31 + log)) + by - 1) / by);
  }
  __device__ __forceinline__ unsigned quotient(unsigned n) const {
    return static_cast<unsigned>(static_cast<uint64_t>(n) * reciprocal >> (31 + log));
  }
};

// A Form that the compiler knows: nothing of it is asked for while the kernel runs. Also that 16 divides the
// addresses of its rows, and 4 those of its records.
template <int kBits, int kGroup, int kWithOptions>
struct Fixed {
  FLASH_HD constexpr operator Form() const {
    constexpr Form form(kBits, kGroup, kWithOptions);
    return form;
  }
};
template <class Given>
constexpr bool is_fixed = !std::is_same_v<Given, Form>;

// Of a multiprocessor: three leave a thread 80 registers, two 128.
template <class Given>
constexpr int kGeneralBlocks = is_fixed<Given> ? 3 : 2;

struct Rows {
  int64_t numel;
  int64_t stride;  // bytes
  bool fast;       // 16 divides the address of every row
  Divisor blocks;  // a row
};

// Which groups are a block's.
struct Span {
  int64_t row;
  int64_t first;  // group of the row
  int groups;

  // Block `block` of a row of `total` groups.
  __device__ __forceinline__ Span(int64_t row_, unsigned block, int64_t total, const Form& form) : row(row_) {
    const int whole = kBlockWarps * form.groups_a_warp();
    first = static_cast<int64_t>(block) * whole;
    groups = total - first < whole ? static_cast<int>(total - first) : whole;
  }

  // The first group of this thread's warp; there may be none.
  __device__ __forceinline__ int64_t of_warp(const Form& form) const {
    return first + static_cast<int>(threadIdx.x) / kWarpLanes * form.groups_a_warp();
  }
};

__device__ __forceinline__ Span span_of(const Rows& rows, const Form& form) {
  const unsigned row = rows.blocks.quotient(blockIdx.x);
  return Span(row, blockIdx.x - row * rows.blocks.number, form.groups(rows.numel), form);
}

__device__ __forceinline__ uint8_t* image_of_warp(uint8_t* image, const Form& form) {
  return image + static_cast<int>(threadIdx.x) / kWarpLanes * form.groups_a_warp() * form.record;
}

// By all threads of a block, to or from shared memory, to or from any address.
__device__ __forceinline__ void copy(const uint8_t* from, uint8_t* to, int bytes) {
  constexpr int wide = static_cast<int>(sizeof(Words));
  const int at =
      static_cast<int>((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % wide);
  const int whole = at == 0 ? bytes & ~(wide - 1) : 0;
#pragma unroll 1
  for (int i = threadIdx.x * wide; i < whole; i += kBlockThreads * wide) {
    put_words(to + i, get_words(from + i));
  }
  if (whole == bytes) return;
  // The rest, or a payload at an address that 16 does not divide.
  const int step = at % 4 == 0 ? 4 : at % 2 == 0 ? 2 : 1;
  const int stepped = whole + ((bytes - whole) & ~(step - 1));
  for (int i = whole + static_cast<int>(threadIdx.x) * step; i < stepped; i += kBlockThreads * step) {
    put(to + i, get(from + i, step, step), step, step);
  }
  for (int i = stepped + static_cast<int>(threadIdx.x); i < bytes; i += kBlockThreads) to[i] = from[i];
}

template <DType kType, bool kOptions, class Given>
__global__ void __launch_bounds__(kBlockThreads,
                                  kOptions || kType == DType::kFloat32 ? 2 : kGeneralBlocks<Given>)
    encode_kernel(const uint8_t* x, Rows rows, Given given, uint64_t key, uint64_t first_group,
                  uint64_t groups_a_row, uint8_t* payload, int64_t payload_stride) {
  __shared__ alignas(16) uint8_t image[kBlockBytes];
  const Form form = given;
  if (is_fixed<Given>) rows.fast = true;
  const Span span = span_of(rows, form);
  const int64_t group = span.of_warp(form);
  if (group < span.first + span.groups) {
    DeviceWarp warp;
    warp.lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    warp_encode<kType, kOptions>(warp, form, x + span.row * rows.stride, rows.numel, rows.fast, group, key,
                                 first_group + static_cast<uint64_t>(span.row) * groups_a_row,
                                 image_of_warp(image, form));
  }
  __syncthreads();
  copy(image, payload + span.row * payload_stride + span.first * form.record, span.groups * form.record);
}

// rows of output; each the sum of from.count payloads, those of the next row `row_stride` bytes further.
template <DType kType, bool kOptions, class Given>
__global__ void __launch_bounds__(kBlockThreads, kGeneralBlocks<Given>)
    decode_kernel(Sources from, int64_t row_stride, Given given, float factor, uint8_t* y, Rows rows) {
  const Form form = given;
  if (is_fixed<Given>) rows.fast = true, from.align = 4;
  const Span span = span_of(rows, form);
  const int64_t group = span.of_warp(form);
  if (group >= span.first + span.groups) return;
  from.data += span.row * row_stride;
  DeviceWarp warp;
  warp.lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  warp_decode_sum<kType, kOptions>(warp, form, from, factor, y + span.row * rows.stride, rows.numel,
                                   rows.fast, group);
}

template <bool kOptions, class Given>
__global__ void __launch_bounds__(kBlockThreads, kGeneralBlocks<Given>)
    decode_sum_encode_kernel(Sources from, Given reduced, Given gathered, float factor, int64_t total,
                             uint64_t key, uint64_t first_group, uint8_t* payload) {
  __shared__ alignas(16) uint8_t image[kBlockBytes];
  const Form reduce = reduced, gather = gathered;
  if (is_fixed<Given>) from.align = 4;
  const Span span(0, blockIdx.x, total, gather);
  const int64_t group = span.of_warp(gather);
  if (group < span.first + span.groups) {
    DeviceWarp warp;
    warp.lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    warp_decode_sum_encode<kOptions>(warp, reduce, gather, from, factor, group, total, key, first_group,
                                     image_of_warp(image, gather));
  }
  __syncthreads();
  copy(image, payload + span.first * gather.record, span.groups * gather.record);
}

// ---- plain_warp.h: the same kernels for most calls

// Blocks of a multiprocessor. Four leave a thread 64 registers, three leave it 80.
constexpr int kPlainBlocks = 4;

// An fp32 thread holds twice the bytes of a bf16 one: three blocks have more in flight than four of those.
constexpr int plain_encode_blocks(DType type) { return type == DType::kFloat32 ? 3 : kPlainBlocks; }

// A sum of 4 bits holds the codes of eight ranks, one of 8 bits those of two; for that the other layouts need a
// little more than 64 registers.
constexpr int plain_decode_blocks(int bits, Layout layout, bool sum) {
  return sum && (bits == 4 || layout != Layout::kAsymmetric) ? 3 : kPlainBlocks;
}

// Where a thread is. Numbers within a block are ints.
struct Place {
  unsigned warp = threadIdx.x / kWarpLanes;
  DeviceWarp lanes;
  __device__ __forceinline__ Place() { lanes.lane = static_cast<int>(threadIdx.x % kWarpLanes); }
  // How many of a block's elements are the warp's or those of warps after it.
  __device__ __forceinline__ int left(int of_block) const {
    return of_block - static_cast<int>(warp) * kWarpElements;
  }
};

// A block's row, which block of it it is, and how many elements it has.
struct BlockPart {
  unsigned row, block;
  int left;
  __device__ __forceinline__ BlockPart(int64_t numel, unsigned block_) : row(0), block(block_) {
    const int64_t rest = numel - static_cast<int64_t>(block) * kBlockElements;
    left = rest < kBlockElements ? static_cast<int>(rest) : kBlockElements;
  }
  __device__ __forceinline__ explicit BlockPart(const Rows& rows)
      : BlockPart(rows, rows.blocks.quotient(blockIdx.x)) {}
  __device__ __forceinline__ BlockPart(const Rows& rows, unsigned row_)
      : BlockPart(rows.numel, blockIdx.x - row_ * rows.blocks.number) {
    row = row_;
  }
};

// The records of a block's groups, from shared memory; all of them or fewer.
template <int kBits, Layout kLayout>
struct PlainImage {
  static constexpr int kRecord = static_cast<int>(record_bytes(kBits, kPlainGroup, options_of(kLayout)));
  static constexpr int kBytes = kBlockElements / kPlainGroup * kRecord;

  __device__ __forceinline__ static uint8_t* of_warp(uint8_t* image, const Place& place) {
    return image + place.warp * (kWarpElements / kPlainGroup * kRecord);
  }
  __device__ __forceinline__ static void send(const uint8_t* image, uint8_t* to, int left) {
    if (left < kBlockElements || reinterpret_cast<uintptr_t>(to) % sizeof(Words) != 0) {
      copy(image, to, (left + kPlainGroup - 1) / kPlainGroup * kRecord);
      return;
    }
    constexpr int step = kBlockThreads * static_cast<int>(sizeof(Words));
    const int at = static_cast<int>(threadIdx.x * sizeof(Words));
    FLASH_UNROLL
    for (int i = 0; i + step <= kBytes; i += step) put_words(to + at + i, get_words(image + at + i));
    constexpr int done = kBytes / step * step;
    if (at < kBytes - done) put_words(to + at + done, get_words(image + at + done));
  }
};

template <DType kType, int kBits, Layout kLayout>
__global__ void __launch_bounds__(kBlockThreads, plain_encode_blocks(kType))
    plain_encode_kernel(const uint8_t* x, Rows rows, uint8_t* payload, int64_t payload_stride) {
  using Image = PlainImage<kBits, kLayout>;
  __shared__ alignas(16) uint8_t image[Image::kBytes];
  const BlockPart part(rows);
  Place place;
  const int left = place.left(part.left);
  if (left > 0) {
    const int64_t first = static_cast<int64_t>(part.block) * kBlockElements + place.warp * kWarpElements;
    plain_encode<kType, kBits, kLayout>(place.lanes,
                                        x + part.row * rows.stride + first * element_bytes(kType), left,
                                        Image::of_warp(image, place));
  }
  __syncthreads();
  Image::send(image, payload + part.row * payload_stride + static_cast<int64_t>(part.block) * Image::kBytes,
              part.left);
}

template <DType kType, int kBits, Layout kLayout, bool kSum>
__global__ void __launch_bounds__(kBlockThreads, plain_decode_blocks(kBits, kLayout, kSum))
    plain_decode_kernel(Sources from, int64_t row_stride, float factor, uint8_t* y, Rows rows) {
  const BlockPart part(rows);
  Place place;
  const int left = place.left(part.left);
  if (left <= 0) return;
  const int64_t first = static_cast<int64_t>(part.block) * kBlockElements + place.warp * kWarpElements;
  from.data += part.row * row_stride + first / kPlainGroup * PlainImage<kBits, kLayout>::kRecord;
  plain_decode<kType, kBits, kLayout, kSum>(place.lanes, from, factor,
                                            y + part.row * rows.stride + first * element_bytes(kType), left);
}

template <int kReduceBits, int kGatherBits, Layout kLayout>
__global__ void __launch_bounds__(kBlockThreads, kPlainBlocks)
    plain_decode_sum_encode_kernel(Sources from, float factor, int64_t total, uint8_t* payload) {
  using Image = PlainImage<kGatherBits, kLayout>;
  __shared__ alignas(16) uint8_t image[Image::kBytes];
  const BlockPart part(total * kPlainGroup, blockIdx.x);
  Place place;
  const int left = place.left(part.left);
  const int64_t first =
      (static_cast<int64_t>(part.block) * kBlockElements + place.warp * kWarpElements) / kPlainGroup;
  if (left > 0) {
    from.data += first * PlainImage<kReduceBits, kLayout>::kRecord;
    plain_decode_sum_encode<kReduceBits, kGatherBits, kLayout>(place.lanes, from, factor, left,
                                                               Image::of_warp(image, place));
  }
  __syncthreads();
  Image::send(image, payload + static_cast<int64_t>(part.block) * Image::kBytes, part.left);
}

// ---- error feedback

// Blocks of a multiprocessor. Two blocks leave too few registers for x and an encoding with options.
constexpr int feedback_blocks(bool options) { return options ? 1 : 2; }

// Bytes of a group's residual.
__device__ __forceinline__ int residual_bytes(const Residual& residual, const Form& form) {
  return residual.wide ? element_bytes(DType::kBFloat16) * form.group_size : residual_form(form).record;
}

// The residual of this thread's warp; the block's lies at `image`.
__device__ __forceinline__ Residual residual_of_warp(const Residual& residual, const Form& form,
                                                     uint8_t* image) {
  const int first = static_cast<int>(threadIdx.x) / kWarpLanes * form.groups_a_warp();
  return {image + first * residual_bytes(residual, form), residual.wide, residual.stays, residual.adds};
}

template <DType kType, bool kOptions, class Given>
__global__ void __launch_bounds__(kBlockThreads, feedback_blocks(kOptions))
    encode_feedback_kernel(const uint8_t* x, Rows rows, Given given, Residual residual, uint64_t key,
                           uint64_t first_group, uint8_t* payload) {
  const Form form = given;
  if (is_fixed<Given>) rows.fast = true;
  __shared__ alignas(16) uint8_t image[kBlockBytes];
  __shared__ alignas(16) uint8_t kept[kBlockResidualBytes];
  const Span span = span_of(rows, form);
  uint8_t* lost = residual.data + span.first * residual_bytes(residual, form);
  copy(lost, kept, span.groups * residual_bytes(residual, form));
  __syncthreads();
  const int64_t group = span.of_warp(form);
  if (group < span.first + span.groups) {
    DeviceWarp warp;
    warp.lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    warp_encode_feedback<kType, kOptions>(warp, form, x, rows.numel, rows.fast, group,
                                          residual_of_warp(residual, form, kept), key, first_group,
                                          image_of_warp(image, form));
  }
  __syncthreads();
  copy(image, payload + span.first * form.record, span.groups * form.record);
  copy(kept, lost, span.groups * residual_bytes(residual, form));
}

template <bool kOptions, class Given>
__global__ void __launch_bounds__(kBlockThreads, feedback_blocks(kOptions))
    decode_sum_encode_feedback_kernel(Sources from, Given reduced, Given gathered, float factor,
                                      int64_t total, Residual residual, uint64_t key, uint64_t first_group,
                                      uint8_t* payload) {
  const Form reduce = reduced, gather = gathered;
  if (is_fixed<Given>) from.align = 4;
  __shared__ alignas(16) uint8_t image[kBlockBytes];
  __shared__ alignas(16) uint8_t kept[kBlockResidualBytes];
  const Span span(0, blockIdx.x, total, gather);
  uint8_t* lost = residual.data + span.first * residual_bytes(residual, gather);
  copy(lost, kept, span.groups * residual_bytes(residual, gather));
  __syncthreads();
  const int64_t group = span.of_warp(gather);
  if (group < span.first + span.groups) {
    DeviceWarp warp;
    warp.lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    warp_decode_sum_encode_feedback<kOptions>(warp, reduce, gather, from, factor, group, total,
                                              residual_of_warp(residual, gather, kept), key, first_group,
                                              image_of_warp(image, gather));
  }
  __syncthreads();
  copy(image, payload + span.first * gather.record, span.groups * gather.record);
  copy(kept, lost, span.groups * residual_bytes(residual, gather));
}

}  // namespace
}  // namespace flash_allreduce
