// The CPU codec for any machine: only what the compiler's default target has.
#define FLASH_LANES 4
#include "codec_kernels.h"
#include "option_kernels.h"

#include "codebook_kernels.h"  // after the others, whose table it makes

namespace flash_allreduce {
const Kernels& kernels_default() { return kTable; }
}  // namespace flash_allreduce
