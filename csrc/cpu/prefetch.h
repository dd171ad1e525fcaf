// Reading ahead: how far, into which cache, and where it pays.
#pragma once

#include "vectors.h"

namespace flash_allreduce {
namespace {

// The processor's own prefetching stops at the end of a page; this far ahead it need not start again there.
constexpr int kPrefetchBytes = 12288;

// `bytes` from `further` bytes behind x on.
template <int kCache>
FLASH_INLINE void prefetch_into(const uint8_t* x, int further, int bytes) {
  for (int k = 0; k < bytes; k += 64) {
    // As a number: a pointer may not point there.
    __builtin_prefetch(
        reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) + static_cast<uintptr_t>(further + k)),
        0, kCache);
  }
}
FLASH_INLINE void prefetch(const uint8_t* x, int further, int bytes, Ahead ahead) {
  if (ahead == Ahead::kFirstLevel) prefetch_into<3>(x, further, bytes);
  if (ahead == Ahead::kSecondLevel) prefetch_into<2>(x, further, bytes);
}

// Whether to take the bounds of the next batch while this one is encoded. On AMD's processors (kSecondLevel) the plain
// encoding reads a batch, then encodes it, but for fp32 with AVX-512: with AVX2 at 64 MiB 16.6 GB/s, where it had 10.4.
template <int kBytes>
FLASH_INLINE bool reads_ahead(const Codec& c) {
  if (c.ahead == Ahead::kSecondLevel && is_plain(c) && (kLanes == 8 || kBytes == 2)) {
    return (c.options & kMse) != 0;
  }
  return c.ahead != Ahead::kNot;
}

}  // namespace
}  // namespace flash_allreduce
