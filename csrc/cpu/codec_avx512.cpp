// The CPU codec for AVX-512; called only where the processor has it.
#if defined(__x86_64__)
#include <immintrin.h>

#include "codec_cpu.h"  // before the target is set: its declarations are shared with the other files

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,prefer-vector-width=512")
#endif

#define FLASH_LANES 16
#include "codec_kernels.h"
#include "option_kernels.h"

#include "codebook_kernels.h"  // after the others: it makes the table of their kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace flash_allreduce {
const Kernels& kernels_avx512() { return kTable; }
}  // namespace flash_allreduce
#endif
