// The kernels of csrc/cpu with any bytes: whatever the calls of case.h ask for, nothing may be read or
// written outside of a buffer, nothing may be undefined, and every instruction set and every split among
// threads gives the same bytes.
#include "../../csrc/cpu/feedback.h"
#include "case.h"

using namespace flash_allreduce;

namespace {

Counter decoded{"decoder executions"};

// As csrc/cpu/codec_cpu.cpp chooses, but that all sets that the processor has take turns.
const Kernels& kernels(int set, int group_size) {
#if defined(__x86_64__)
  if (set == 2 && group_size >= 64 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return kernels_avx512();
  }
  if (set >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kernels_avx2();
#else
  static_cast<void>(set);
  static_cast<void>(group_size);
#endif
  return kernels_default();
}

Codec codec_of(const Case& c, int bits, int options) {
  return {bits, c.group_size, options, c.key, c.first_group, static_cast<Ahead>(c.shifts[0] % 3)};
}

void encode(int set, const Case& c, const Codec& codec, const Exact& x, Exact& payload) {
  const auto kernel = encoder(kernels(set, c.group_size), codec, c.type);
  kernel(x.data, c.numel, codec, payload.data, 0, c.cut);
  kernel(x.data, c.numel, codec, payload.data, c.cut, c.groups());
  on_output(payload);
}

void decode_sum(int set, const Case& c, const Codec& codec, const Exact& payloads, int ranks, int type,
                Exact& y) {
  const auto kernel = decoder(kernels(set, c.group_size), codec, type);
  const Payloads from{payloads.data, ranks, c.stride(), codec};
  kernel(from, c.factor, y.data, c.numel, 0, c.cut);
  kernel(from, c.factor, y.data, c.numel, c.cut, c.groups());
  on_output(y);
  ++decoded.count;
}

// Any bits as elements: encoded, decoded.
void round_trip(const Input& in, const Case& c) {
  const Codec codec = codec_of(c, c.bits, c.options);
  Exact x(c.row_size(), c.shifts[0]), payload(static_cast<size_t>(c.row_bytes()), c.shifts[1]);
  Exact again(payload.size, 0), y(c.row_size(), c.shifts[2]);
  in.fill(x.data, x.size);
  encode(c.set, c, codec, x, payload);
  encode(0, c, codec, x, again);
  if (!(payload == again)) found("two instruction sets encode differently");
  decode_sum(c.set, c, codec, payload, 1, c.type, y);
}

// As decode_add: a sum in float, added to the elements of y.
void add(int set, const Case& c, const Exact& sums, Exact& y) {
  kernels(set, c.group_size).add[c.type](reinterpret_cast<const float*>(sums.data), y.data, c.numel);
  on_output(y);
}

// As encode_difference: sums - y, encoded.
void encode_difference(int set, const Case& c, const Codec& codec, const Exact& sums, const Exact& y,
                       Exact& payload) {
  Exact differences(sums.size, 0);
  kernels(set, c.group_size)
      .subtract[c.type](reinterpret_cast<const float*>(sums.data), y.data, c.numel,
                        reinterpret_cast<float*>(differences.data));
  Case of_floats = c;
  of_floats.type = 0;
  encode(set, of_floats, codec, differences, payload);
}

// Any bytes as the payloads of several ranks.
void sum(const Input& in, const Case& c) {
  const Codec codec = codec_of(c, c.bits, c.options);
  Exact payloads(c.payloads_bytes(), c.shifts[0]), y(c.row_size(), c.shifts[1]), again(y.size, 0);
  in.fill(payloads.data, payloads.size);
  decode_sum(c.set, c, codec, payloads, c.ranks, c.type, y);
  decode_sum(0, c, codec, payloads, c.ranks, c.type, again);
  if (!(y == again)) found("two instruction sets decode differently");
  Exact sums(static_cast<size_t>(4 * c.numel), 0);
  Exact payload(static_cast<size_t>(c.row_bytes()), 0), payload_again(payload.size, 0);
  decode_sum(0, c, codec, payloads, c.ranks, 0, sums);
  add(c.set, c, sums, y);
  add(0, c, sums, again);
  if (!(y == again)) found("two instruction sets add differently");
  encode_difference(c.set, c, codec, sums, y, payload);
  encode_difference(0, c, codec, sums, y, payload_again);
  if (!(payload == payload_again)) found("two instruction sets encode a difference differently");
}

// The same, the sum encoded again, as decode_sum_encode does it: whole groups of float, not rotated back.
void sum_and_encode(const Input& in, Case c) {
  c.numel = c.groups() * c.group_size;
  const int left = sum_options(c.options);
  const Codec reduce = codec_of(c, c.bits, left), gather = codec_of(c, c.gather_bits, left);
  Exact payloads(c.payloads_bytes(), c.shifts[0]), sums(static_cast<size_t>(4 * c.numel), 0);
  Exact payload(static_cast<size_t>(c.groups() * record_bytes(gather)), c.shifts[1]);
  in.fill(payloads.data, payloads.size);
  decode_sum(c.set, c, reduce, payloads, c.ranks, 0, sums);
  c.type = 0;
  encode(c.set, c, gather, sums, payload);
}

// Encoding that keeps what is lost, of elements of c.type; any bytes as the residual.
void encode_feedback(int set, const Case& c, const Codec& codec, const Exact& x, Exact& residual,
                     Exact& payload) {
  const Feedback feedback(kernels(set, c.group_size), codec, c.wide, residual.data, c.momentum);
  const int64_t cut = c.cut * c.group_size, item = c.type == 0 ? 4 : 2;
  feedback.encode(x.data, c.type, c.numel, 0, c.cut, payload.data);
  if (c.cut < c.groups()) {
    feedback.encode(x.data + cut * item, c.type, c.numel - cut, c.cut, c.groups(), payload.data);
  }
  on_output(payload);
  on_output(residual);
}

void keep_what_is_lost(const Input& in, const Case& c, const Codec& codec, const Exact& x) {
  const auto payload_size = static_cast<size_t>(c.groups() * record_bytes(codec));
  Exact residual(c.residual_size(), c.shifts[1]), residual_again(residual.size, 0);
  Exact payload(payload_size, c.shifts[2]), payload_again(payload_size, 0);
  in.fill(residual.data, residual.size);
  in.fill(residual_again.data, residual.size);
  encode_feedback(c.set, c, codec, x, residual, payload);
  encode_feedback(0, c, codec, x, residual_again, payload_again);
  if (!(payload == payload_again && residual == residual_again)) {
    found("two instruction sets encode differently with error feedback");
  }
}

// As encode_feedback, of any bits.
void feedback(const Input& in, const Case& c) {
  Exact x(c.row_size(), c.shifts[0]);
  in.fill(x.data, x.size);
  keep_what_is_lost(in, c, codec_of(c, c.bits, c.options), x);
}

// As decode_sum_encode_feedback, of any bytes as payloads.
void sum_and_feedback(const Input& in, Case c) {
  c.numel = c.groups() * c.group_size;
  const int left = sum_options(c.options);
  Exact payloads(c.payloads_bytes(), c.shifts[0]), sums(static_cast<size_t>(4 * c.numel), 0);
  in.fill(payloads.data, payloads.size);
  decode_sum(c.set, c, codec_of(c, c.bits, left), payloads, c.ranks, 0, sums);
  c.type = 0;
  keep_what_is_lost(in, c, codec_of(c, c.gather_bits, left), sums);
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
  return 0;
}
