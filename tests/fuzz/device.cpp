// The codec of a CUDA device, on the host lane by lane (tests/host/warp.cpp), with any bytes: nothing outside
// of a buffer, nothing undefined, no address that a device would fault on, and the same bytes as csrc/cpu.
#include "../../csrc/cpu/feedback.h"
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
  encoder(kernels_default(), codec, c.type)(x.data, c.numel, codec, again.data, 0, c.groups());
  for (const int plain_too : {0, 1}) {
    warp_encode_row(plain_too, x.data, c.numel, c.type, divisor(x.data, 0) == 16, c.bits, c.group_size,
                    c.options, c.key, c.first_group, payload.data);
    if (!(payload == again)) found("the device encodes differently");
  }
}

void sum(const Input& in, const Case& c) {
  const Codec codec{c.bits, c.group_size, c.options, c.key, c.first_group};
  Exact payloads(c.payloads_bytes(), c.shifts[0]), y(c.row_size(), element_shift(c, 1)), again(y.size, 0);
  in.fill(payloads.data, payloads.size);
  const Payloads from{payloads.data, c.ranks, c.stride(), codec};
  decoder(kernels_default(), codec, c.type)(from, c.factor, again.data, c.numel, 0, c.groups());
  for (const int plain_too : {0, 1}) {
    warp_decode_sum_row(plain_too, payloads.data, c.ranks, c.stride(),
                        records_align(payloads.data, c, c.options), c.factor, c.numel, c.type,
                        divisor(y.data, 0) == 16, c.bits, c.group_size, c.options, y.data);
    if (!(y == again)) found("the device decodes differently");
  }
  ++decoded.count;
}

void sum_and_encode(const Input& in, const Case& c) {
  const int left = sum_options(c.options);
  Exact payloads(c.payloads_bytes(), c.shifts[0]);
  Exact payload(static_cast<size_t>(c.groups() * record_bytes(c.gather_bits, c.group_size, left)), 0);
  in.fill(payloads.data, payloads.size);
  Exact again(payload.size, 0);
  for (const int plain_too : {0, 1}) {
    warp_decode_sum_encode_row(plain_too, payloads.data, c.ranks, c.stride(),
                               records_align(payloads.data, c, left), c.factor, c.groups(), c.bits,
                               c.gather_bits, c.group_size, c.options, c.key, c.first_group,
                               plain_too ? payload.data : again.data);
  }
  if (!(payload == again)) found("the device's kernels of plain formats sum and encode differently");
  ++decoded.count;
}

// A residual begins where 16 divides its address, or 2 if it is of records.
int residual_shift(const Case& c) { return c.wide ? 0 : c.shifts[2] / 2 * 2; }

void feedback(const Input& in, const Case& c) {
  const Codec codec{c.bits, c.group_size, c.options, c.key, c.first_group};
  Exact x(c.row_size(), element_shift(c, 0)), payload(static_cast<size_t>(c.row_bytes()), 0),
      again(payload.size, 0);
  Exact residual(c.residual_size(), residual_shift(c)), residual_again(residual.size, 0);
  in.fill(x.data, x.size);
  in.fill(residual.data, residual.size);
  in.fill(residual_again.data, residual.size);
  warp_encode_feedback_row(x.data, c.numel, c.type, divisor(x.data, 0) == 16, c.momentum, c.bits,
                           c.group_size, c.options, c.key, static_cast<int64_t>(c.first_group), c.wide,
                           residual.data, payload.data);
  Feedback(kernels_default(), codec, c.wide, residual_again.data, c.momentum)
      .encode(x.data, c.type, c.numel, 0, c.groups(), again.data);
  if (!(payload == again)) found("the device encodes differently with error feedback");
  if (!(residual == residual_again)) found("the device keeps something else");
}

void sum_and_feedback(const Input& in, const Case& c) {
  const int left = sum_options(c.options);
  const Codec reduce{c.bits, c.group_size, left},
      gather{c.gather_bits, c.group_size, left, c.key, c.first_group};
  const int64_t numel = c.groups() * c.group_size;
  Exact payloads(c.payloads_bytes(), c.shifts[0]), sums(static_cast<size_t>(4 * numel), 0);
  Exact payload(static_cast<size_t>(c.groups() * record_bytes(gather)), 0), again(payload.size, 0);
  Exact residual(c.residual_size(), residual_shift(c)), residual_again(residual.size, 0);
  in.fill(payloads.data, payloads.size);
  in.fill(residual.data, residual.size);
  in.fill(residual_again.data, residual.size);
  warp_decode_sum_encode_feedback_row(
      payloads.data, c.ranks, c.stride(), records_align(payloads.data, c, left), c.factor, c.momentum,
      c.groups(), c.bits, c.gather_bits, c.group_size, c.options, c.key, static_cast<int64_t>(c.first_group),
      c.wide, residual.data, payload.data);
  ++decoded.count;
  decoder(kernels_default(), reduce, 0)({payloads.data, c.ranks, c.stride(), reduce}, c.factor, sums.data,
                                        numel, 0, c.groups());
  Feedback(kernels_default(), gather, c.wide, residual_again.data, c.momentum)
      .encode(sums.data, 0, numel, 0, c.groups(), again.data);
  if (!(payload == again)) found("the device sums and encodes differently with error feedback");
  if (!(residual == residual_again)) found("the device keeps something else of a sum");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Case c(in);
  if (c.operation == 0) round_trip(in, c);
  if (c.operation == 1) sum(in, c);
  if (c.operation == 2) sum_and_encode(in, c);
  if (c.operation == 3) feedback(in, c);
  if (c.operation == 4) sum_and_feedback(in, c);
  if (misaligned != 0) found("an address that a device would fault on");
  return 0;
}
