// The part of the CUDA runtime that the operators of csrc/cuda call. The machine runs their launches.
//
// nvcc compiles csrc/cuda/*.cu as always, device code and host code. The host code is linked with this file
// instead of libcudart: the operators choose kernels, grids and parameters as on a GPU, and a launch comes
// here.
//
//   operator (codec.cu) -> stub by nvcc -> __cudaLaunchKernel -> Machine::launch
//
// Python defines the kernels (define), each when it is launched for the first time, and says which memory a
// launch may touch. A kernel's fault is the operator's own error: torch asks for the text of a failed
// launch.
#include <cstdlib>
#include <utility>

#include "machine.h"

using namespace ptx;

namespace {

struct Configuration {
  uint32_t grid[3], block[3];
  size_t shared_bytes;
  void* stream;
};

std::map<const void*, std::string>& stubs() {  // of the host, and the kernels they launch
  static std::map<const void*, std::string> all;
  return all;
}

std::map<std::string, Kernel> kernels;
int (*define_kernel)(const char* name) = nullptr;  // Python's
std::vector<Configuration> configurations;
std::string failure;
void* current_stream = nullptr;

constexpr int kLaunchFailure = 719;  // cudaErrorLaunchFailure

const Kernel& kernel_of(const std::string& name) {
  const auto found = kernels.find(name);
  if (found != kernels.end()) return found->second;
  if (define_kernel == nullptr || define_kernel(name.c_str()) != 0) {
    throw Fault("PTX: there is no program for " + name);
  }
  return kernels.at(name);
}

// The result of a call of the runtime. torch will ask for its text.
template <class F>
int guarded(const F& f) {
  try {
    f();
    return 0;
  } catch (const Fault& fault) {
    if (failure.empty()) failure = fault.what();
    return kLaunchFailure;
  }
}

}  // namespace

extern "C" {

// ---- functions that nvcc's host code calls --------------------------------------------------------------

struct dim3 {
  uint32_t x, y, z;
};

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, void*, void*, void*,
                            void*, int*) {
  stubs()[stub] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configurations.push_back({{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, stream});
  return 0;
}

int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void** stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = {last.grid[0], last.grid[1], last.grid[2]};
  *block = {last.block[0], last.block[1], last.block[2]};
  *shared_bytes = last.shared_bytes;
  *stream = last.stream;
  return 0;
}

int __cudaGetKernel(const void** kernel, const void* stub) {
  *kernel = stub;
  return 0;
}

int cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                     void* stream) {
  return guarded([&] {
    const Kernel& kernel = kernel_of(stubs().at(stub));
    if (grid.y * grid.z * block.y * block.z != 1 || shared_bytes != 0 || block.x % kLanes != 0 ||
        grid.x == 0) {
      throw Fault("PTX: a launch of a form that the machine does not have, of " + kernel.name);
    }
    Launch launch{&kernel, {grid.x, block.x}, {}, reinterpret_cast<uint64_t>(stream)};
    launch.parameters.resize(static_cast<size_t>(kernel.parameter_bytes), 0xcd);
    for (size_t i = 0; i < kernel.parameters.size(); ++i) {
      const auto [offset, bytes] = kernel.parameters[i];
      memcpy(launch.parameters.data() + offset, arguments[i], static_cast<size_t>(bytes));
    }
    machine().launch(std::move(launch));
  });
}

int __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t bytes,
                       void* stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, bytes, stream);
}

// Loads the kernel, like the driver. Its result is not used.
int cudaFuncGetAttributes(void*, const void* stub) {
  return guarded([&] { kernel_of(stubs().at(stub)); });
}

int cudaGetLastError() { return failure.empty() ? 0 : kLaunchFailure; }

int cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return 0;
}

// ---- functions of torch_cuda ----------------------------------------------------------------------------

int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = current_stream;
  return 0;
}

int32_t aoti_torch_create_device_guard(int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}

int32_t aoti_torch_delete_device_guard(void*) { return 0; }

void torch_c10_cuda_check_msg(int32_t error, const char*, const char*, uint32_t, bool, char** message) {
  *message = error == 0 ? nullptr : strdup(failure.c_str());
  failure.clear();
}

void torch_c10_cuda_free_error_msg(char* message) { free(message); }

// ---- functions that Python calls ------------------------------------------------------------------------

// Bytes of the operands of an instruction, a digit each; null: no instruction has this name.
const char* ptx_widths(const char* name) {
  const Opcode* found = opcode(name);
  return found == nullptr ? nullptr : found->widths.c_str();
}

void ptx_define_with(int (*define)(const char*)) { define_kernel = define; }

// opcodes: names that the rows number. A row: opcode, guard, whether it is negated, line, and the 8 of `at`.
void ptx_define(const char* name, const char* const* opcodes, const int32_t* rows, int64_t count,
                const uint64_t* constants, const uint8_t* wide, int64_t constants_count, int32_t slots,
                int64_t shared_bytes, const int32_t* parameters, int32_t parameters_count,
                int32_t parameter_bytes) {
  Kernel& kernel = kernels[name] = {};
  kernel.name = name;
  kernel.slots = slots;
  kernel.shared_bytes = static_cast<uint64_t>(shared_bytes);
  kernel.parameter_bytes = parameter_bytes;
  for (int32_t i = 0; i < parameters_count; ++i)
    kernel.parameters.push_back({parameters[2 * i], parameters[2 * i + 1]});
  for (const int32_t* row = rows; row < rows + 12 * count; row += 12) {
    Instruction i{opcode(opcodes[row[0]]), row[1], row[2], row[3], {}};
    memcpy(i.at.data(), row + 4, sizeof i.at);
    kernel.instructions.push_back(i);
  }
  for (int64_t c = 0; c < constants_count; ++c) {
    const uint64_t value = wide[c] ? constants[c] : (constants[c] & 0xffffffffu) * 0x100000001u;
    kernel.constants.insert(kernel.constants.end(), kLanes, value);
  }
}

void ptx_forget_kernels() { kernels.clear(); }
void ptx_allow(uint64_t first, uint64_t bytes, int writable) {
  machine().memory.allow(first, bytes, writable != 0);
}
void ptx_forget(uint64_t first) { machine().memory.forget(first); }
void ptx_multicast(uint64_t first, uint64_t bytes, const uint64_t* copies, int32_t count) {
  Memory& memory = machine().memory;
  memory.multicast = first, memory.multicast_bytes = bytes;
  memory.copies.assign(copies, copies + count);
}
void ptx_seed(uint32_t seed) { machine().random.seed(seed); }

// From now on launches wait in the current stream. Each rank has its own.
void ptx_queue(int on) { machine().queues = on != 0; }
void ptx_set_stream(uint64_t stream) { current_stream = reinterpret_cast<void*>(stream); }
void ptx_hold(uint64_t stream, uint64_t ns) { machine().held[stream] = ns; }

// Runs the waiting launches. Returns the text of an error; null: none.
const char* ptx_run_streams() {
  static std::string text;
  const int error = guarded([] { machine().run_streams(); });
  machine().clear();
  text = std::exchange(failure, {});
  return error == 0 ? nullptr : text.c_str();
}

uint64_t ptx_now() { return machine().now; }
}
