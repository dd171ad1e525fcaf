// The codec of a CUDA device, on the host lane by lane (tests/host/warp.cpp), with any bytes: nothing outside
// of a buffer, nothing undefined, no address that a device would fault on, and the same bytes as csrc/cpu.
#include "../../csrc/cpu/codec_cpu.h"
#include "../host/warp.cpp"
#include "case.h"

namespace {

Counter decoded{"decoder executions"};

// 16 if it divides the address, else what does of 1, 2 and 4.
int divisor(const void* p, int64_t stride) {
  const auto bits = reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(stride);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

int records_align(const uint8_t* p, const Case& c, int options) {
  const int64_t stride = (c.ranks > 1 ? c.stride() : 0) | record_bytes(c.bits, c.group_size, options);
  const int found = divisor(p, stride);
  return found > 4 ? 4 : found;
}

const CodecKernels& on_the_host(const Codec& c, bool plain) {
  const Kernels& k = kernels_default();
  return (plain ? k.plain : k.with_options)[layout_index(c)][c.bits - kMinBits];
}

// A device's rows begin where an element may: at a multiple of its bytes.
int element_shift(const Case& c, int which) {
  return c.shifts[which] / (c.type == 0 ? 4 : 2) * (c.type == 0 ? 4 : 2);
}

void round_trip(const Input& in, const Case& c) {
  const Codec codec{c.bits, c.group_size, c.options, c.key, c.first_group};
  // A warp writes its records where two bytes may stand; a block copies them to where they go.
  Exact x(c.row_size(), element_shift(c, 0)), payload(static_cast<size_t>(c.row_bytes()), 0),
      again(payload.size, 0);
  in.fill(x.data, x.size);
  warp_encode_row(x.data, c.numel, c.type, divisor(x.data, 0) == 16, c.bits, c.group_size, c.options, c.key,
                  c.first_group, payload.data);
  on_the_host(codec, c.plain()).encode[c.type](x.data, c.numel, codec, again.data, 0, c.groups());
  if (!(payload == again)) found("the device encodes differently");
}

void sum(const Input& in, const Case& c) {
  const Codec codec{c.bits, c.group_size, c.options, c.key, c.first_group};
  Exact payloads(c.payloads_bytes(), c.shifts[0]), y(c.row_size(), element_shift(c, 1)), again(y.size, 0);
  in.fill(payloads.data, payloads.size);
  warp_decode_sum_row(payloads.data, c.ranks, c.stride(), records_align(payloads.data, c, c.options),
                      c.factor, c.numel, c.type, divisor(y.data, 0) == 16, c.bits, c.group_size, c.options,
                      y.data);
  const Payloads from{payloads.data, c.ranks, c.stride(), codec};
  on_the_host(codec, c.plain_decoding())
      .decode_sum[c.type](from, c.factor, again.data, c.numel, 0, c.groups());
  if (!(y == again)) found("the device decodes differently");
  ++decoded.count;
}

void sum_and_encode(const Input& in, const Case& c) {
  const int left = c.options & ~kHadamard;
  Exact payloads(c.payloads_bytes(), c.shifts[0]);
  Exact payload(static_cast<size_t>(c.groups() * record_bytes(c.gather_bits, c.group_size, left)), 0);
  in.fill(payloads.data, payloads.size);
  warp_decode_sum_encode_row(payloads.data, c.ranks, c.stride(), records_align(payloads.data, c, left),
                             c.factor, c.groups(), c.bits, c.gather_bits, c.group_size, c.options, c.key,
                             c.first_group, payload.data);
  ++decoded.count;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Case c(in);
  if (c.operation == 0) round_trip(in, c);
  if (c.operation == 1) sum(in, c);
  if (c.operation == 2) sum_and_encode(in, c);
  if (misaligned != 0) found("an address that a device would fault on");
  return 0;
}
