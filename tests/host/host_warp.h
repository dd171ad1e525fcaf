// The warp of csrc/cuda/codec_warp.h on the host: 32 lanes run in turn, a shuffle takes every lane's value
// before any lane continues.
#pragma once

#include "../../csrc/cuda/codec_warp.h"

namespace flash_allreduce {

struct HostWarp {
  Lane lanes[kWarpLanes] = {};

  template <class F>
  void each(F f) {
    for (int lane = 0; lane < kWarpLanes; ++lane) f(lane, lanes[lane]);
  }

  template <class Get, class F>
  void exchange(int mask, Get get, F f) {
    shuffle([mask](int lane) { return lane ^ mask; }, get, f);
  }

  template <class Get, class F>
  void from_first(int lanes_of_group, Get get, F f) {
    shuffle([lanes_of_group](int lane) { return lane & ~(lanes_of_group - 1); }, get, f);
  }

  void sync() {}  // lanes run in turn, phase by phase

 private:
  template <class From, class Get, class F>
  void shuffle(From from, Get get, F f) {
    decltype(get(lanes[0])) values[kWarpLanes];
    for (int lane = 0; lane < kWarpLanes; ++lane) values[lane] = get(lanes[lane]);
    for (int lane = 0; lane < kWarpLanes; ++lane) f(lane, lanes[lane], values[from(lane)]);
  }
};

}  // namespace flash_allreduce
