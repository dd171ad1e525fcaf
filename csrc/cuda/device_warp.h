// The warp of codec_warp.h on the device: a lane is a thread, a shuffle is a shuffle.
#pragma once

#include "codec_warp.h"

namespace flash_allreduce {

struct DeviceWarp {
  Lane own;
  int lane;

  template <class F>
  __device__ __forceinline__ void each(F f) {
    f(lane, own);
  }

  template <class Get, class F>
  __device__ __forceinline__ void exchange(int mask, Get get, F f) {
    f(lane, own, __shfl_xor_sync(0xffffffffu, get(own), mask));
  }

  template <class Get, class F>
  __device__ __forceinline__ void from_first(int lanes, Get get, F f) {
    f(lane, own, __shfl_sync(0xffffffffu, get(own), lane & ~(lanes - 1)));
  }

  __device__ __forceinline__ void sync() { __syncwarp(); }
};

}  // namespace flash_allreduce
