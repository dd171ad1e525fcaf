// The CPU codec for any machine: only what the compiler's default target has.
#define FLASH_LANES 4
#include "codebook_kernels.h"
#include "codec_kernels.h"
#include "option_kernels.h"

namespace flash_allreduce {
const Kernels& kernels_default() { return kTable; }
}  // namespace flash_allreduce
