// Runs the calls of a file, and writes what the kernels have written: scripts/check_arm.py compares machines.
//
//   replay < calls > results
//
// Both are records: their length in 4 bytes, little endian, then a fuzzer's bytes (case.h), or the buffers of
// the call one after the other. After a finding the results end with the call before it.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "case.h"

using namespace flash_allreduce;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

std::vector<uint8_t> result;

bool read_call(std::vector<uint8_t>& call) {
  uint32_t size = 0;
  if (std::fread(&size, sizeof size, 1, stdin) != 1) return false;
  call.resize(size);
  if (std::fread(call.data(), 1, size, stdin) != size) found("a call that ends early");
  return true;
}

void write_result() {
  const auto size = static_cast<uint32_t>(result.size());
  std::fwrite(&size, sizeof size, 1, stdout);
  std::fwrite(result.data(), 1, result.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

int main() {
  on_output = [](const Exact& buffer) {
    result.insert(result.end(), buffer.data, buffer.data + buffer.size);
  };
  std::vector<uint8_t> call;
  while (read_call(call)) {
    result.clear();
    LLVMFuzzerTestOneInput(call.data(), call.size());
    write_result();
  }
  return 0;
}
