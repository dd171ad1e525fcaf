// A part of codec_kernels.h, inside its namespace and once for every instruction set.

// kLanes numbers of 16 bits, each in the low half of a lane.
FLASH_INLINE VecU widened(const uint8_t* p) {
#if FLASH_LANES == 4  // GCC 12 converts them one by one for aarch64
  using Halves = uint16_t __attribute__((vector_size(16)));
  const Halves x = cast<Halves>(Vec64{load<uint64_t>(p)});
#if defined(__clang__)
  return cast<VecU>(__builtin_shufflevector(x, Halves{}, 0, 8, 1, 9, 2, 10, 3, 11));
#else
  return cast<VecU>(__builtin_shuffle(x, Halves{}, Halves{0, 8, 1, 9, 2, 10, 3, 11}));
#endif
#else
  return __builtin_convertvector(load<VecU16>(p), VecU);
#endif
}
