// The two-shot kernel on the device: a launch of the blocks of two_shot.h on torch's current stream. Nothing
// synchronizes, nothing allocates, so that a graph can capture it.
//
//   block, 8 warps    each item of two_shot.h is a warp's: 1024 elements
//   shared memory     an image a warp: the records of a piece as sent; copied out 16 bytes a lane
//   thread p < world  meets peer p
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <type_traits>
#include <vector>

#include "../checks.h"
#include "device_warp.h"
#include "two_shot.h"

namespace flash_allreduce {
namespace {

constexpr int kTwoShotWarps = 8;
constexpr int kTwoShotThreads = kTwoShotWarps * kWarpLanes;
static_assert(kTwoShotThreads >= kMostRanks, "a thread meets a peer");
static_assert(kTwoShotThreads >= kMostBlocks, "a thread counts for a block");

struct DeviceMemory {
  __device__ __forceinline__ void store(uint8_t* to, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  }
  __device__ __forceinline__ uint32_t load(const uint8_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
  }
  __device__ __forceinline__ uint64_t now() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
    return ns;
  }
  __device__ __forceinline__ void pause() {}
};

struct DeviceBlock {
  const TwoShot& call;
  uint8_t* images;
  uint32_t* report;  // in the host's memory
  int index = static_cast<int>(blockIdx.x);
  int blocks = static_cast<int>(gridDim.x);
  DeviceMemory memory = {};

  __device__ __forceinline__ uint32_t* word(int64_t at) const {
    return reinterpret_cast<uint32_t*>(call.workspaces[call.rank] + at);
  }
  __device__ __forceinline__ uint32_t count() const { return *word(kCountsAt + index * 4); }
  // After meet(), before which all threads have read it. A block counts for every blocks-th after it.
  __device__ __forceinline__ void set_count(uint32_t n) {
    __syncthreads();
    const int other = index + static_cast<int>(threadIdx.x) * blocks;
    if (other < kMostBlocks) *word(kCountsAt + other * 4) = n;
  }
  // The same for all threads, though another block may be about to fail.
  __device__ __forceinline__ bool failed() const {
    return __syncthreads_or(*const_cast<volatile uint32_t*>(word(kFailedAt)) != 0);
  }

  template <class F>
  __device__ __forceinline__ void each_item(int items, F f) {
    const int number = static_cast<int>(threadIdx.x) / kWarpLanes;
    for (int item = number; item < items; item += kTwoShotWarps) {
      DeviceWarp warp;
      warp.lane = static_cast<int>(threadIdx.x) % kWarpLanes;
      // Keeps the compiler from holding values that depend on the lane alone (the signs of a rotation) in
      // registers over all items.
      asm volatile("" : "+r"(warp.lane));
      f(warp, item, images + number * kMostPieceBytes);
    }
  }

  // The image may be written again once it returns.
  __device__ __forceinline__ void copy(const uint8_t* image, uint8_t* to, int bytes) {
    constexpr int step = static_cast<int>(sizeof(Words));
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x) % kWarpLanes * step; i < bytes; i += kWarpLanes * step) {
      put_words(to + i, get_words(image + i));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void copy_to_all(const uint8_t* image, uint8_t* to, int bytes) {
    constexpr int step = static_cast<int>(sizeof(Words));
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x) % kWarpLanes * step; i < bytes; i += kWarpLanes * step) {
      const Words words = get_words(image + i);
#if __CUDA_ARCH__ >= 900
      asm volatile("multimem.st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + i), "r"(words.w[0]),
                   "r"(words.w[1]), "r"(words.w[2]), "r"(words.w[3])
                   : "memory");
#else
      __trap();  // the host has no such address on these GPUs
#endif
    }
    __syncwarp();
  }

  // Release is cumulative: a rank that sees the word sees the block's writes before __syncthreads().
  __device__ __forceinline__ bool meet(uint32_t n) {
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    bool came = true;
    if (peer < call.world && peer != call.rank) {
      // Peers read through their own address the bytes written to the multicast address (PTX ISA, proxies).
      if (call.multicast != nullptr) asm volatile("fence.proxy.alias;" ::: "memory");
      tell(memory, call, index, peer, n);
      came = await(memory, call, index, peer, n);
      if (!came && atomicExch(word(kFailedAt), 1u) == 0) {
        *const_cast<volatile uint32_t*>(report) = report_of(peer, index, n);
        __threadfence_system();
      }
    }
    return __syncthreads_and(came);
  }
};

template <DType kType, bool kOptions>
__global__ void __launch_bounds__(kTwoShotThreads, 1)
    two_shot_kernel(const __grid_constant__ TwoShot call, uint32_t* report) {
  __shared__ alignas(16) uint8_t images[kTwoShotWarps * kMostPieceBytes];
  DeviceBlock block{call, images, report};
  two_shot<kType, kOptions>(block, call);
}

using Kernel = void (*)(const TwoShot, uint32_t*);

// By DType, and by options besides the layout: off, on.
constexpr Kernel kKernels[][2] = {
    {two_shot_kernel<DType::kFloat32, false>, two_shot_kernel<DType::kFloat32, true>},
    {two_shot_kernel<DType::kBFloat16, false>, two_shot_kernel<DType::kBFloat16, true>},
    {two_shot_kernel<DType::kFloat16, false>, two_shot_kernel<DType::kFloat16, true>},
};

void two_shot_all_reduce(Tensor tensor, const std::vector<int64_t> workspaces, int64_t workspace_bytes,
                         int64_t multicast, int64_t report, int64_t rank, int64_t blocks, bool staged,
                         bool one_shot, double factor, int64_t reduce_bits, int64_t gather_bits,
                         int64_t group_size, int64_t options, int64_t reduce_key, int64_t gather_key,
                         int64_t timeout_ms) {
  check_codec(reduce_bits, group_size, options);
  check_codec(gather_bits, group_size, options);
  check_vector(tensor, "tensor");
  STD_TORCH_CHECK(tensor.is_cuda(), "tensor is not on a GPU");
  const int type = element_type(tensor, "tensor");
  const auto world = static_cast<int64_t>(workspaces.size());
  STD_TORCH_CHECK(world >= 2 && world <= kMostRanks, "workspaces has ", world, " addresses; expected 2 to ",
                  kMostRanks);
  STD_TORCH_CHECK(blocks >= 1 && blocks <= kMostBlocks, "blocks is ", blocks, "; expected 1 to ",
                  kMostBlocks);
  STD_TORCH_CHECK(rank >= 0 && rank < world, "rank is ", rank, "; expected 0 to ", world - 1);
  const auto form = [&](int64_t bits) {
    return Form(static_cast<int>(bits), static_cast<int>(group_size), static_cast<int>(options));
  };
  auto* data = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  TwoShot call{data,
               tensor.numel(),
               reinterpret_cast<uintptr_t>(data) % 16 == 0,
               form(reduce_bits),
               form(gather_bits),
               static_cast<float>(factor),
               static_cast<uint64_t>(reduce_key),
               static_cast<uint64_t>(gather_key),
               static_cast<int>(rank),
               static_cast<int>(world),
               one_shot,
               staged,
               {},
               reinterpret_cast<uint8_t*>(multicast),
               (workspace_bytes - kHeaderBytes) / 2 / kPieceAlign * kPieceAlign,
               static_cast<uint64_t>(timeout_ms) * 1000000u};
  STD_TORCH_CHECK(call.numel <= int64_t{1} << 30, "tensor has ", call.numel,
                  " elements; expected 2^30 at most");
  const int64_t needed = half_bytes(call.numel, call.world, one_shot, call.reduce, call.gather);
  STD_TORCH_CHECK(needed <= call.half, "half a workspace has ", call.half, " bytes; a tensor of ", call.numel,
                  " elements needs ", needed);
  for (int64_t i = 0; i < world; ++i) {
    STD_TORCH_CHECK(workspaces[i] != 0 && workspaces[i] % kPieceAlign == 0, "workspace ", i,
                    " is at an address that 16 does not divide");
    call.workspaces[i] = reinterpret_cast<uint8_t*>(workspaces[i]);
  }
  STD_TORCH_CHECK(multicast % kPieceAlign == 0, "multicast is an address that 16 does not divide");
  if (call.numel == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  void* stream = nullptr;
  STD_TORCH_CHECK(
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
      "torch has no current stream on GPU ", tensor.get_device_index());
  const Kernel kernel = kKernels[type][(options & ~int64_t{kSymmetricCodes | kCompact}) != 0];
  const int stripes = stripes_of(call.numel, call.world, one_shot);
  const auto grid = static_cast<unsigned>(blocks < stripes ? blocks : stripes);
  kernel<<<grid, kTwoShotThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      call, reinterpret_cast<uint32_t*>(report));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Every kernel is loaded on the tensor's GPU. One that is loaded at its first launch may wait for a kernel
// that runs, and that one for a peer that waits for this launch.
void load_two_shot(const Tensor workspace) {
  const torch::stable::accelerator::DeviceGuard guard(workspace.get_device_index());
  for (const auto& of_type : kKernels) {
    for (const Kernel kernel : of_type) {
      cudaFuncAttributes attributes;
      STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
    }
  }
}

// Where a GPU reaches a pinned tensor.
int64_t device_address(const Tensor pinned) {
  void* address = nullptr;
  STD_CUDA_CHECK(cudaHostGetDevicePointer(&address, pinned.mutable_data_ptr(), 0));
  return reinterpret_cast<int64_t>(address);
}

}  // namespace
}  // namespace flash_allreduce

STABLE_TORCH_LIBRARY_FRAGMENT(flash_allreduce, m) {
  m.def(
      "two_shot_all_reduce(Tensor(a!) tensor, int[] workspaces, int workspace_bytes, int multicast, int "
      "report, "
      "int rank, int blocks, bool staged, bool one_shot, float factor, int reduce_bits, int gather_bits, "
      "int group_size, int options, int reduce_key, int gather_key, int timeout_ms) -> ()");
  m.def("load_two_shot(Tensor workspace) -> ()");
  m.def("device_address(Tensor pinned) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(flash_allreduce, CUDA, m) {
  m.impl("two_shot_all_reduce", TORCH_BOX(&flash_allreduce::two_shot_all_reduce));
  m.impl("load_two_shot", TORCH_BOX(&flash_allreduce::load_two_shot));
}

STABLE_TORCH_LIBRARY_IMPL(flash_allreduce, CPU, m) {
  m.impl("device_address", TORCH_BOX(&flash_allreduce::device_address));
}
