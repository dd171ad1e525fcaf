// The kernels of csrc/cpu with any bytes: whatever the calls of case.h ask for, nothing may be read or
// written outside of a buffer, nothing may be undefined, and every instruction set and every split among
// threads gives the same bytes.
#include "../../csrc/cpu/codec_cpu.h"
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
  if (set >= 1 && __builtin_cpu_supports("avx2")) return kernels_avx2();
#else
  static_cast<void>(set);
  static_cast<void>(group_size);
#endif
  return kernels_default();
}

Codec codec_of(const Case& c, int bits, int options) {
  return {bits, c.group_size, options, c.key, c.first_group};
}

Encode encoder(int set, const Codec& c, int type) {
  const Kernels& k = kernels(set, c.group_size);
  const bool plain = (c.options & ~(kSymmetricCodes | kCompact)) == 0;
  return (plain ? k.plain : k.with_options)[layout_index(c)][c.bits - kMinBits].encode[type];
}

DecodeSum decoder(int set, const Codec& c, int type) {
  const Kernels& k = kernels(set, c.group_size);
  const bool plain = (c.options & (kSpikes | kHadamard)) == 0;
  return (plain ? k.plain : k.with_options)[layout_index(c)][c.bits - kMinBits].decode_sum[type];
}

void encode(int set, const Case& c, const Codec& codec, const Exact& x, Exact& payload) {
  const auto kernel = encoder(set, codec, c.type);
  kernel(x.data, c.numel, codec, payload.data, 0, c.cut);
  kernel(x.data, c.numel, codec, payload.data, c.cut, c.groups());
}

void decode_sum(int set, const Case& c, const Codec& codec, const Exact& payloads, int ranks, int type,
                Exact& y) {
  const auto kernel = decoder(set, codec, type);
  const Payloads from{payloads.data, ranks, c.stride(), codec};
  kernel(from, c.factor, y.data, c.numel, 0, c.cut);
  kernel(from, c.factor, y.data, c.numel, c.cut, c.groups());
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

// Any bytes as the payloads of several ranks.
void sum(const Input& in, const Case& c) {
  const Codec codec = codec_of(c, c.bits, c.options);
  Exact payloads(c.payloads_bytes(), c.shifts[0]), y(c.row_size(), c.shifts[1]), again(y.size, 0);
  in.fill(payloads.data, payloads.size);
  decode_sum(c.set, c, codec, payloads, c.ranks, c.type, y);
  decode_sum(0, c, codec, payloads, c.ranks, c.type, again);
  if (!(y == again)) found("two instruction sets decode differently");
}

// The same, the sum encoded again, as decode_sum_encode does it: whole groups of float, not rotated back.
void sum_and_encode(const Input& in, Case c) {
  c.numel = c.groups() * c.group_size;
  const int left = c.options & ~kHadamard;
  const Codec reduce = codec_of(c, c.bits, left), gather = codec_of(c, c.gather_bits, left);
  Exact payloads(c.payloads_bytes(), c.shifts[0]), sums(static_cast<size_t>(4 * c.numel), 0);
  Exact payload(static_cast<size_t>(c.groups() * record_bytes(gather)), c.shifts[1]);
  in.fill(payloads.data, payloads.size);
  decode_sum(c.set, c, reduce, payloads, c.ranks, 0, sums);
  c.type = 0;
  encode(c.set, c, gather, sums, payload);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Case c(in);
  if (c.operation == 0) round_trip(in, c);
  if (c.operation == 1) sum(in, c);
  if (c.operation == 2) sum_and_encode(in, c);
  return 0;
}
