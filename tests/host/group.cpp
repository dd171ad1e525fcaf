// One group encoded and decoded element by element with the functions of csrc/codec_math.h and the offsets of
// csrc/wire_format.h: what a device kernel will do, on the host. tests/test_codec_math.py compares it with
// the codec.
#include "../../csrc/codec_math.h"

using namespace flash_allreduce;

// x [group_size] -> record.
extern "C" void encode_group(const float* x, int bits, int group_size, bool symmetric, uint8_t* record) {
  float lo = x[0], hi = x[0];
  bool finite = true;
  for (int i = 0; i < group_size; ++i) {
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
    finite = finite && (float_bits(x[i]) & 0x7fffffffu) < kInfBits;
  }
  const int half = code_half(bits, symmetric);
  const int levels = code_levels(bits, symmetric);
  const float zero = symmetric ? 0.0f : group_zero(lo);
  const uint32_t scale = finite ? group_scale(lo, hi, zero, symmetric ? half : levels, symmetric) : kNaNBits;
  memset(record, 0, static_cast<size_t>(record_bytes(bits, group_size, symmetric)));
  const uint16_t metadata[2] = {static_cast<uint16_t>(scale >> 16),
                                static_cast<uint16_t>(float_bits(zero) >> 16)};
  if (scale == kNaNBits) {
    memcpy(record, &kNaNScale, sizeof kNaNScale);
    return;
  }
  memcpy(record, metadata, static_cast<size_t>(metadata_bytes(symmetric)));
  uint8_t* planes = record + metadata_bytes(symmetric);
  for (int i = 0; i < group_size; ++i) {
    const uint32_t code = encode_element(x[i], zero, 1.0f / bits_float(scale), half);
    for (int width = 8; width >= 1; width /= 2) {
      if (!has_plane(bits, width)) continue;
      const uint32_t unit = (code >> plane_shift(bits, width)) & ((1u << width) - 1);
      planes[plane_offset(bits, width, group_size) + i * width / 8] |=
          static_cast<uint8_t>(unit << (i * width % 8));
    }
  }
}

// record -> y [group_size].
extern "C" void decode_group(const uint8_t* record, int bits, int group_size, bool symmetric, float* y) {
  uint16_t metadata[2] = {0, 0};
  memcpy(metadata, record, static_cast<size_t>(metadata_bytes(symmetric)));
  const uint8_t* planes = record + metadata_bytes(symmetric);
  for (int i = 0; i < group_size; ++i) {
    uint32_t code = 0;
    for (int width = 8; width >= 1; width /= 2) {
      if (!has_plane(bits, width)) continue;
      const uint32_t byte = planes[plane_offset(bits, width, group_size) + i * width / 8];
      code |= ((byte >> (i * width % 8)) & ((1u << width) - 1)) << plane_shift(bits, width);
    }
    const float value = decode_element(code, bf16_to_float(metadata[0]), bf16_to_float(metadata[1]),
                                       code_half(bits, symmetric));
    y[i] = canonical_nan(value);
  }
}
