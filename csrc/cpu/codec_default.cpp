// The CPU codec for any machine: the instructions of the compiler's default target only.
// Four lanes are a register of SSE2 or NEON: with 8, GCC 12 makes 3 to 6 times the instructions for aarch64.
#define FLASH_LANES 4
#include "codec_kernels.h"
#include "option_kernels.h"

#include "codebook_kernels.h"  // after the others: it makes the table of their kernels

namespace flash_allreduce {
const Kernels& kernels_default() { return kTable; }
}  // namespace flash_allreduce
