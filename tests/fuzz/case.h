// A call of the codec made of a fuzzer's bytes: every width, group size, layout, option, type and length;
// what is left of the bytes is the content of the tensors and payloads, over and over.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>

#include "../../csrc/codec_math.h"

namespace flash_allreduce {

// A finding that no sanitizer sees.
[[noreturn]] inline void found(const char* what) {
  std::fprintf(stderr, "found: %s\n", what);
  std::abort();
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  // The next `bytes` bytes as a number; zeros where the input has ended.
  uint64_t number(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes && left_ > 0; ++i, --left_) value |= uint64_t{*data_++} << (8 * i);
    return value;
  }
  int below(int end) { return static_cast<int>(number(end > 256 ? 2 : 1) % static_cast<unsigned>(end)); }

  void fill(uint8_t* to, size_t size) const {
    if (left_ == 0) std::memset(to, 0, size);
    for (size_t i = 0; i < size && left_ > 0; i += left_)
      std::memcpy(to + i, data_, size - i < left_ ? size - i : left_);
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Memory of exactly this size: a sanitizer sees a byte too far. It begins `shift` bytes, up to 7, after what
// malloc gives, and these are watched.
class Exact {
 public:
  Exact(size_t size, int shift)
      : size(size),
        shift_(shift),
        all_(static_cast<uint8_t*>(std::malloc(size + static_cast<size_t>(shift)))) {
    data = all_ + shift;
    std::memset(all_, kWatched, static_cast<size_t>(shift));
  }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  ~Exact() {
    for (int i = 0; i < shift_; ++i) {
      if (all_[i] != kWatched) found("something was written in front of a buffer");
    }
    std::free(all_);
  }
  bool operator==(const Exact& other) const {
    return size == other.size && std::memcmp(data, other.data, size) == 0;
  }

  size_t size;
  uint8_t* data;

 private:
  static constexpr uint8_t kWatched = 0xA5;
  int shift_;
  uint8_t* all_;
};

// Called with each buffer that kernels have filled: replay.cpp writes them to a file.
inline void (*on_output)(const Exact&) = [](const Exact&) {};

struct Case {
  int operation, set;
  int bits, gather_bits, group_size, options, type;
  int ranks, gap;  // payloads of ranks lie `gap` bytes apart
  int shifts[3];
  int64_t numel;
  int64_t cut;  // groups of the first of two calls
  float factor;
  uint64_t key, first_group;
  bool wide;  // a residual of bf16
  double momentum;

  explicit Case(Input& in) {
    operation = in.below(5);
    set = in.below(3);
    bits = kMinBits + in.below(kMaxBits - kMinBits + 1);
    gather_bits = kMinBits + in.below(kMaxBits - kMinBits + 1);
    group_size = kMinGroupSize << in.below(6);
    options = in.below(kAllOptions + 1);
#ifdef FUZZ_WIDTHS  // the only ones that scripts/fuzz.py has built
    const int widths[] = {FUZZ_WIDTHS};
    bits = widths[bits % std::size(widths)];
    gather_bits = widths[gather_bits % std::size(widths)];
#endif
    if (options & kCodebook) {
      options &= kCodebook | kSpikes | kHadamard | kMse;
      if (group_size < kMinCodebookGroupSize) group_size = kMinCodebookGroupSize;
    }
    if (options & kSymmetricCodes) options &= ~kCompact;
    if (options & kMse) options &= ~kStochastic;
    type = in.below(3);
    ranks = 1 + in.below(4);
    gap = in.below(20) * in.below(2);
    for (int& shift : shifts) shift = in.below(8) * in.below(2);
    // Around a few groups, and now and then around several batches of 4096 elements.
    const int range = in.below(64);
    numel = range == 0 ? in.below(9000) : range < 4 ? in.below(2100) : in.below(300);
    cut = in.below(256);
    const uint32_t any = static_cast<uint32_t>(in.number(4));
    const float factors[4] = {1.0f, 0.5f, 1.0f / 3, bits_float(any)};
    factor = factors[in.below(4)];
    key = in.number(8);
    first_group = in.number(8);
    wide = in.below(2) == 1;
    const double momenta[4] = {0.0, 0.8, 0.9, 0.999};
    momentum = momenta[in.below(4)];
    if (cut > groups()) cut = groups();
  }

  int64_t groups() const { return num_groups(numel, group_size); }
  int64_t row_bytes() const { return payload_bytes(numel, bits, group_size, options); }
  int64_t stride() const { return row_bytes() + gap; }
  // The payloads of all ranks; nothing lies behind the last one.
  size_t payloads_bytes() const { return static_cast<size_t>(stride() * (ranks - 1) + row_bytes()); }
  size_t row_size() const { return static_cast<size_t>(numel * (type == 0 ? 4 : 2)); }
  size_t residual_size() const {
    return static_cast<size_t>(groups() *
                               (wide ? 2 * group_size : record_bytes(8, group_size, kSymmetricCodes)));
  }
};

// Printed at the end.
struct Counter {
  const char* what;
  uint64_t count = 0;
  ~Counter() { std::fprintf(stderr, "%s: %llu\n", what, static_cast<unsigned long long>(count)); }
};

}  // namespace flash_allreduce
