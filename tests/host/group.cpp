// One group encoded and decoded element by element with the functions of csrc/codec_math.h and the offsets of
// csrc/wire_format.h: the arithmetic of a device kernel, on the host. tests/codec/test_codec_math.py compares
// it with the codec.
#include "../../csrc/codec_math.h"

using namespace flash_allreduce;

namespace {

void rotate(float* x, int group_size) {
  for (int stride = 1; stride < group_size; stride *= 2) {
    for (int i = 0; i < group_size; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
}

float flipped(float x, int i) { return rotation_flips(static_cast<uint32_t>(i)) ? -x : x; }

void put_place(uint8_t* to, int group_size, int place) {
  to[0] = static_cast<uint8_t>(place);
  if (place_bytes(group_size) == 2) to[1] = static_cast<uint8_t>(place >> 8);
}

int place_at(const uint8_t* from, int group_size) {
  return (place_bytes(group_size) == 2 ? from[0] | from[1] << 8 : from[0]) & (group_size - 1);
}

void pack(uint32_t code, int i, int bits, int group_size, uint8_t* planes) {
  for (int width = 8; width >= 1; width /= 2) {
    if (!has_plane(bits, width)) continue;
    const uint32_t unit = (code >> plane_shift(bits, width)) & ((1u << width) - 1);
    planes[plane_offset(bits, width, group_size) + i * width / 8] |=
        static_cast<uint8_t>(unit << (i * width % 8));
  }
}

float largest(const float* x, int count) {  // a NaN is larger than Inf
  uint32_t most = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return bits_float(most);
}

// Encodes x to its record, rotated if the options say so.
void encode_codebook(const float* x, int bits, int group_size, int options, uint8_t* record) {
  const Book book = book_of(bits);
  const int part = group_size / kParts;
  memset(record, 0, static_cast<size_t>(record_bytes(bits, group_size, options)));
  const uint32_t scale_bits = codebook_scale(largest(x, group_size) / book.reach);
  if (scale_bits == kNaNBits) {
    memcpy(record, &kNaNScale, sizeof kNaNScale);
    return;
  }
  const float scale = bits_float(scale_bits);
  bool with_zero = false;
  for (int i = 0; i < group_size; ++i) with_zero = with_zero || x[i] == 0.0f;
  const float shift = with_zero ? book.shift : 0.0f;
  uint64_t front = scale_bits >> 16 | (with_zero ? kWhole : 0u);
  for (int p = 0; p < kParts; ++p) {
    const float* of_part = x + p * part;
    const int widest = widest_part(largest(of_part, part) / book.reach, scale);
    int number = at_least_0(widest - book.lower);
    float least = 0;
    for (int lower = 0; options & kMse && lower < kTriedSteps; ++lower) {
      const int tried = at_least_0(widest - lower);
      const float inverse = 1.0f / (part_scale(tried) * scale);
      float error = 0;
      for (int i = 0; i < part; ++i) error += codebook_error(of_part[i] * inverse + shift, shift, bits);
      error *= part_scale(tried) * part_scale(tried);
      if (lower == 0 || error < least) {
        number = tried;
        least = error;
      }
    }
    front |= static_cast<uint64_t>(number) << (16 + 6 * p);
    const float inverse = 1.0f / (part_scale(number) * scale);
    for (int i = 0; i < part; ++i) {
      pack(codebook_code(of_part[i] * inverse + shift, bits), p * part + i, bits, group_size, record + 8);
    }
  }
  memcpy(record, &front, sizeof front);
}

}  // namespace

// input [group_size] -> record. number: of the group in its call.
extern "C" void encode_group(const float* input, int bits, int group_size, int options, uint64_t key,
                             int64_t number, uint8_t* record) {
  float x[kMaxGroupSize];
  for (int i = 0; i < group_size; ++i) x[i] = options & kHadamard ? flipped(input[i], i) : input[i];
  if (options & kHadamard) rotate(x, group_size);
  if (options & kCodebook) {
    encode_codebook(x, bits, group_size, options, record);
    return;
  }
  bool finite = true;
  int least = 0, greatest = 0;
  for (int i = 0; i < group_size; ++i) {
    if (x[i] < x[least]) least = i;
    if (x[i] > x[greatest]) greatest = i;
    finite = finite && (float_bits(x[i]) & 0x7fffffffu) < kInfBits;
  }
  memset(record, 0, static_cast<size_t>(record_bytes(bits, group_size, options)));
  uint8_t* spikes = record + spikes_offset(options);
  if (options & kSpikes) {
    const uint64_t of_group = group_key(key, number);
    uint16_t values[2] = {bf16_nearest(x[least] + 0.0f), bf16_nearest(x[greatest] + 0.0f)};
    if (options & kStochastic) {
      values[0] = bf16_random(x[least] + 0.0f, spike_random(of_group, group_size, false));
      values[1] = bf16_random(x[greatest] + 0.0f, spike_random(of_group, group_size, true));
    }
    finite = finite && bf16_is_finite(values[0]) && bf16_is_finite(values[1]);
    memcpy(spikes, values, sizeof values);
    put_place(spikes + 4, group_size, least);
    put_place(spikes + 4 + place_bytes(group_size), group_size, greatest);
    int other = 0;
    while (other == least || other == greatest) ++other;
    x[least] = x[greatest] = x[other];
  }
  float lo = x[0], hi = x[0];
  bool with_zero = false;
  for (int i = 0; i < group_size; ++i) {
    with_zero = with_zero || x[i] == 0.0f;
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
  }
  const Layout layout = layout_of(options);
  const float slack = slack_of(options);
  const int half = code_half(bits, layout);
  const Range whole = whole_range(lo, hi, bits, layout, slack);
  Range best = whole;
  float least_error = bits_float(kInfBits);
  for (int scale = 0; options & kMse && scale < scales_of(layout); ++scale) {
    const uint32_t tried = tried_scale(scale, whole.scale, lo, hi, bits, layout);
    for (int place = 0; place < places_of(scale, bits, layout); ++place) {
      const Range range = tried_range(scale, place, tried, whole.zero, lo, hi, bits, layout);
      const float inverse = 1.0f / bits_float(tried), origin = search_origin(lo, layout);
      const uint32_t shift = search_shift(origin, range.zero, inverse);
      float error = 0;
      for (int i = 0; i < group_size; ++i) error += squared_error(x[i], origin, inverse, shift);
      const float ratio = search_ratio(range.scale, whole.scale);
      error *= ratio * ratio;
      if (error < least_error) {
        best = range;
        least_error = error;
      }
    }
  }
  if (with_zero && may_miss_zero(bits, layout)) best = range_with_zero(lo, hi, bits, layout, slack);
  if (!finite || best.scale == kNaNBits) {
    memset(record, 0, static_cast<size_t>(record_bytes(bits, group_size, options)));
    memcpy(record, &kNaNScale, sizeof kNaNScale);
    return;
  }
  memcpy(record, &best.metadata, static_cast<size_t>(spikes_offset(options)));
  uint8_t* planes = record + metadata_bytes(group_size, options);
  const float inverse = 1.0f / bits_float(best.scale);
  const uint64_t of_group = group_key(key, number);
  for (int i = 0; i < group_size; ++i) {
    uint32_t code = encode_element(x[i], best.zero, inverse, half);
    if (options & kStochastic) {
      const float offset = rounding_offset(element_random(of_group, i, group_size));
      code = float_bits((x[i] - best.zero) * inverse + offset + kRoundMagic) - kRoundMagicBits +
             static_cast<uint32_t>(half);
    }
    pack(code, i, bits, group_size, planes);
  }
}

// record -> y [group_size].
extern "C" void decode_group(const uint8_t* record, int bits, int group_size, int options, float* y) {
  const Layout layout = layout_of(options);
  const bool codebook = layout == Layout::kCodebook;
  uint64_t front = 0;
  if (codebook) memcpy(&front, record, sizeof front);
  const float scale = bits_float(static_cast<uint32_t>(front & 0x7fffu) << 16);
  const Metadata m = codebook ? Metadata{scale, 0.0f} : read_metadata(record, bits, layout);
  const uint8_t* planes = record + metadata_bytes(group_size, options);
  for (int i = 0; i < group_size; ++i) {
    uint32_t code = 0;
    for (int width = 8; width >= 1; width /= 2) {
      if (!has_plane(bits, width)) continue;
      const uint32_t byte = planes[plane_offset(bits, width, group_size) + i * width / 8];
      code |= ((byte >> (i * width % 8)) & ((1u << width) - 1)) << plane_shift(bits, width);
    }
    const int number = static_cast<int>(front >> (16 + 6 * (i / (group_size / kParts))) & 63u);
    y[i] = codebook ? level(bits, (front & kWhole) != 0, code) * (part_scale(number) * m.scale)
                    : decode_element(code, m.scale, m.zero, code_half(bits, layout));
  }
  if (options & kSpikes && m.scale == m.scale) {
    const uint8_t* spikes = record + spikes_offset(options);
    uint16_t values[2];
    memcpy(values, spikes, sizeof values);
    for (int k = 0; k < 2; ++k) {
      y[place_at(spikes + 4 + k * place_bytes(group_size), group_size)] = bf16_to_float(values[k]);
    }
  }
  if (options & kHadamard) {
    rotate(y, group_size);
    for (int i = 0; i < group_size; ++i) y[i] = flipped(y[i] * (1.0f / static_cast<float>(group_size)), i);
  }
  for (int i = 0; i < group_size; ++i) y[i] = canonical_nan(y[i]);
}
