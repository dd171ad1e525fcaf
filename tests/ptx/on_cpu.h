// Read before csrc/cuda/*.cu and csrc/ops.cpp, which are compiled as they are: their operators are registered
// for CPU tensors, in a library of another name, next to those of the CPU codec.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#undef STABLE_TORCH_LIBRARY
#undef STABLE_TORCH_LIBRARY_FRAGMENT
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY(name, m) _STABLE_TORCH_LIBRARY_FRAGMENT(flash_allreduce_ptx, m, C10_UID)
#define STABLE_TORCH_LIBRARY_FRAGMENT(name, m) _STABLE_TORCH_LIBRARY_FRAGMENT(flash_allreduce_ptx, m, C10_UID)
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) \
  _STABLE_TORCH_LIBRARY_IMPL(flash_allreduce_ptx, CPU, m, C10_UID)

// The device of a tensor: here CPU tensors are those of the device.
#define is_cuda is_cpu
