// The codec as a warp does it. The same text for the device and, with the warp of tests/host/warp.cpp, for
// the host, where every lane, shuffle and address is tested without a GPU. The arithmetic is codec_math.h's.
//
// A lane holds 32 elements of one group, four times 8 neighbours (16 bytes of bf16), so a group of g elements
// has g / 32 lanes and a warp 1024 elements:
//
//   g = 128     lane 0        lane 1        lane 2        lane 3      | lane 4 ...
//   x[0..7]     0  ...  7     8  ... 15     16 ... 23     24 ... 31   | the next group
//   x[8..15]    32 ... 39     40 ... 47     48 ... 55     56 ... 63   |
//   x[16..23]   64 ... 71     ...                                     |
//   x[24..31]   96 ... 103    ...                         120 ... 127 |
//
// Bounds, errors and the worst code of a group are reduced by shuffles between its lanes. A lane packs w bytes
// of a plane of w bits for each 8 elements, next to those of its neighbour lanes.
//
// Code is written in phases, functions of one lane that a warp runs for each of its lanes, with shuffles
// between them:
//
//   warp.each(f)                    f(lane, own)
//   warp.exchange(mask, get, f)     f(lane, own, get of the lane whose number differs by mask)
//   warp.from_first(lanes, get, f)  f(lane, own, get of the first lane of its group)
//   warp.sync()                     all lanes see the writes before it
#pragma once

#include "../codec_math.h"

namespace flash_allreduce {

// A lane's elements are registers only where every index is known: loops over them are unrolled.
#if defined(__CUDACC__)
#define FLASH_UNROLL _Pragma("unroll")
#else
#define FLASH_UNROLL
#endif

constexpr int kWarpLanes = 32;
constexpr int kLaneElements = 32;
constexpr int kLogLaneElements = 5;
constexpr int kNeighbours = 8;
constexpr int kWarpElements = kWarpLanes * kLaneElements;

// The parameters of an encoding or decoding, equal for all groups of a row. Group sizes are powers of two, so a
// device shifts instead of dividing.
struct Form {
  int bits;
  int group_size;
  int options;
  int record;     // bytes
  int lanes;      // of a group
  int log_lanes;  // its logarithm

  FLASH_HD constexpr Form(int bits_, int group_size_, int options_)
      : bits(bits_),
        group_size(group_size_),
        options(options_),
        record(static_cast<int>(record_bytes(bits_, group_size_, options_))),
        lanes(group_size_ / kLaneElements),
        log_lanes(0) {
    while (1 << log_lanes < lanes) ++log_lanes;
  }

  // The group of the warp that a lane's elements are of.
  FLASH_HD constexpr int group_of(int lane) const { return lane >> log_lanes; }
  FLASH_HD constexpr int groups_a_warp() const { return kWarpLanes >> log_lanes; }
  // Of a row of numel elements.
  FLASH_HD constexpr int64_t groups(int64_t numel) const {
    return (numel + group_size - 1) >> (log_lanes + kLogLaneElements);
  }
};

// With the codebook, of the parts of a lane's elements: each row of 8 neighbours lies in one part.
constexpr int kRows = kLaneElements / kNeighbours;
struct PartRows {
  uint32_t most[kRows];  // bits of the greatest |x|
  int widest[kRows], number[kRows];
  float errors[kRows], least_errors[kRows];
  uint32_t front[2];  // numbers of parts 0 to 3 and 4 to 7, 24 bits each
};

struct Lane {
  float x[kLaneElements];
  float lo, hi;
  uint32_t low_at, high_at;  // where they are in the group; kept for spikes
  float least, greatest;     // the spikes
  uint64_t found;
  uint32_t taken[2], taken_at[2];  // with the codebook: bits of the short floats, and their places
  uint32_t with_zero;              // whether its group holds one
  float stand_in;
  Range range, best;
  float whole_zero;  // of the range without a search
  uint32_t whole_scale;
  float error, least_error;
  uint32_t codes[kLaneElements];
  uint32_t worst;                             // of the codes
  float sent[kLaneElements];                  // error feedback: the encoded values
  PartRows rows;                              // codebook
  uint32_t least_word, most_word, near_word;  // plain_warp.h: bounds, of elements in their dtype
};

// Where in its group element i of a lane is.
FLASH_HD uint32_t place_of(int lane, int i, int lanes) {
  return static_cast<uint32_t>((i / kNeighbours * lanes + (lane & (lanes - 1))) * kNeighbours +
                               i % kNeighbours);
}

// A bit for each element of a lane: that of the one at a place of its group, none in other lanes. So told, the
// compiler makes predicates of it; of a number it makes a jump.
FLASH_HD uint32_t element_at(int lane, uint32_t place, const Form& form) {
  const uint32_t row = place >> (form.log_lanes + 3), in_group = lane & (form.lanes - 1);
  const bool mine = (place / kNeighbours & (form.lanes - 1)) == in_group;
  return mine ? 1u << (row * kNeighbours + place % kNeighbours) : 0u;
}

// Codebook: the part of row i of a lane. A row of neighbours of all lanes of a group is a quarter of it.
FLASH_HD int part_of(int lane, int row, int lanes) {
  return 2 * row + ((lane & (lanes - 1)) >= lanes / 2 ? 1 : 0);
}

// ---- memory ---------------------------------------------------------------------------------------------

struct alignas(16) Words {
  uint32_t w[4];
};

// A device faults at a misaligned read; the host does not, so it checks with this macro.
#if !defined(FLASH_ALIGNED)
#define FLASH_ALIGNED(p, bytes)
#endif

// n bytes, 1, 2 or 4, of an address that `align`, 1, 2 or 4, divides.
FLASH_HD uint32_t get(const uint8_t* p, int n, int align) {
  const int step = n < align ? n : align;
  FLASH_ALIGNED(p, step);
#if defined(__CUDA_ARCH__)
  if (step == 4) return *reinterpret_cast<const uint32_t*>(p);
  if (step == 2) {
    const auto* half = reinterpret_cast<const uint16_t*>(p);
    return n == 2 ? half[0] : half[0] | static_cast<uint32_t>(half[1]) << 16;
  }
#endif
  uint32_t value = 0;
  for (int i = 0; i < n; ++i) value |= static_cast<uint32_t>(p[i]) << (8 * i);
  return value;
}

FLASH_HD void put(uint8_t* p, uint32_t value, int n, int align) {
  const int step = n < align ? n : align;
  FLASH_ALIGNED(p, step);
#if defined(__CUDA_ARCH__)
  if (step == 4) {
    *reinterpret_cast<uint32_t*>(p) = value;
    return;
  }
  if (step == 2) {
    auto* half = reinterpret_cast<uint16_t*>(p);
    half[0] = static_cast<uint16_t>(value);
    if (n == 4) half[1] = static_cast<uint16_t>(value >> 16);
    return;
  }
#endif
  for (int i = 0; i < n; ++i) p[i] = static_cast<uint8_t>(value >> (8 * i));
}

FLASH_HD Words get_words(const uint8_t* p) {
  FLASH_ALIGNED(p, 16);
  Words words;
#if defined(__CUDA_ARCH__)
  words = *reinterpret_cast<const Words*>(p);
#else
  memcpy(&words, p, sizeof words);
#endif
  return words;
}

FLASH_HD void put_words(uint8_t* p, const Words& words) {
  FLASH_ALIGNED(p, 16);
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<Words*>(p) = words;
#else
  memcpy(p, &words, sizeof words);
#endif
}

FLASH_HD constexpr int element_bytes(DType type) { return type == DType::kFloat32 ? 4 : 2; }

template <DType kType>
FLASH_HD float to_float(uint32_t bits) {
  if constexpr (kType == DType::kFloat32) return bits_float(bits);
  if constexpr (kType == DType::kBFloat16) return bits_float(bits << 16);
  return half_to_float(static_cast<uint16_t>(bits));
}

FLASH_HD float magnitude(float x) {
#if defined(__CUDA_ARCH__)
  asm("abs.f32 %0, %0;" : "+f"(x));
  return x;
#else
  return bits_float(float_bits(x) & 0x7fffffffu);
#endif
}

// Rounded to nearest even, every NaN the same NaN.
template <DType kType>
FLASH_HD uint32_t from_float(float x) {
  if constexpr (kType == DType::kFloat32) return float_bits(canonical_nan(x));
  if constexpr (kType == DType::kBFloat16) return bf16_nearest(x);
  return half_nearest(x);
}

// 8 neighbours; fast: at an address that 16 divides.
template <DType kType>
FLASH_HD void read_neighbours(const uint8_t* p, bool fast, float* x) {
  constexpr int bytes = element_bytes(kType);
  if (!fast) {
    FLASH_UNROLL
    for (int k = 0; k < kNeighbours; ++k) x[k] = to_float<kType>(get(p + k * bytes, bytes, bytes));
    return;
  }
  FLASH_UNROLL
  for (int half = 0; half < bytes / 2; ++half) {
    const Words words = get_words(p + 16 * half);
    FLASH_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (bytes == 4) {
        x[4 * half + i] = bits_float(words.w[i]);
      } else {
        x[2 * i] = to_float<kType>(words.w[i] & 0xffffu);
        x[2 * i + 1] = to_float<kType>(words.w[i] >> 16);
      }
    }
  }
}

template <DType kType>
FLASH_HD void write_neighbours(uint8_t* p, bool fast, const float* x) {
  constexpr int bytes = element_bytes(kType);
  if (!fast) {
    FLASH_UNROLL
    for (int k = 0; k < kNeighbours; ++k) put(p + k * bytes, from_float<kType>(x[k]), bytes, bytes);
    return;
  }
  FLASH_UNROLL
  for (int half = 0; half < bytes / 2; ++half) {
    Words words;
    FLASH_UNROLL
    for (int i = 0; i < 4; ++i) {
      if constexpr (bytes == 4) {
        words.w[i] = from_float<kType>(x[4 * half + i]);
      } else {
        words.w[i] = from_float<kType>(x[2 * i]) | from_float<kType>(x[2 * i + 1]) << 16;
      }
    }
    put_words(p + 16 * half, words);
  }
}

// The elements of a lane's group out of a row of `numel`. A ragged group is padded with its first element.
template <DType kType>
FLASH_HD void load_lane(Lane& own, int lane, const Form& form, const uint8_t* row, int64_t numel,
                        int64_t group, bool fast) {
  constexpr int bytes = element_bytes(kType);
  const int64_t first = group * form.group_size;
  if (first + form.group_size <= numel) {
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; i += kNeighbours) {
      read_neighbours<kType>(row + (first + place_of(lane, i, form.lanes)) * bytes, fast, own.x + i);
    }
    return;
  }
  FLASH_UNROLL
  for (int i = 0; i < kLaneElements; ++i) {
    const int64_t at = first + place_of(lane, i, form.lanes);
    own.x[i] =
        first < numel ? to_float<kType>(get(row + (at < numel ? at : first) * bytes, bytes, bytes)) : 0.0f;
  }
}

template <DType kType>
FLASH_HD void store_lane(const Lane& own, int lane, const Form& form, uint8_t* row, int64_t numel,
                         int64_t group, bool fast) {
  constexpr int bytes = element_bytes(kType);
  const int64_t first = group * form.group_size;
  if (first + form.group_size <= numel) {
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; i += kNeighbours) {
      write_neighbours<kType>(row + (first + place_of(lane, i, form.lanes)) * bytes, fast, own.x + i);
    }
    return;
  }
  FLASH_UNROLL
  for (int i = 0; i < kLaneElements; ++i) {
    const int64_t at = first + place_of(lane, i, form.lanes);
    if (at < numel) put(row + at * bytes, from_float<kType>(own.x[i]), bytes, bytes);
  }
}

// ---- rotation -------------------------------------------------------------------------------------------

FLASH_HD void flip(Lane& own, int lane, int lanes) {
  FLASH_UNROLL
  for (int i = 0; i < kLaneElements; ++i) {
    if (rotation_flips(place_of(lane, i, lanes))) own.x[i] = -own.x[i];
  }
}

// Sums and differences of elements of one lane, `stride` apart in it.
FLASH_HD void butterfly(float* x, int stride) {
  FLASH_UNROLL
  for (int i = 0; i < kLaneElements; ++i) {
    if (i & stride) continue;
    const float a = x[i], b = x[i + stride];
    x[i] = a + b;
    x[i + stride] = a - b;
  }
}

// Strides 1, 2, 4 lie in a lane's neighbours, 8 ... g / 8 between lanes, g / 4 and g / 2 between its rows of
// neighbours.
template <class Warp>
FLASH_HD void rotate(Warp& warp, int lanes) {
  warp.each([](int, Lane& own) {
    butterfly(own.x, 1);
    butterfly(own.x, 2);
    butterfly(own.x, 4);
  });
  for (int mask = 1; mask < lanes; mask *= 2) {
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; ++i) {
      warp.exchange(
          mask, [i](const Lane& own) { return own.x[i]; },
          [i, mask](int lane, Lane& own, float other) {
            own.x[i] = lane & mask ? other - own.x[i] : own.x[i] + other;
          });
    }
  }
  warp.each([](int, Lane& own) {
    butterfly(own.x, 8);
    butterfly(own.x, 16);
  });
}

// ---- encoding -------------------------------------------------------------------------------------------

template <class Warp>
FLASH_HD void find_bounds(Warp& warp, int lanes) {
  warp.each([](int, Lane& own) {
    own.lo = own.hi = own.x[0];
    FLASH_UNROLL
    for (int i = 1; i < kLaneElements; ++i) {
      own.lo = own.x[i] < own.lo ? own.x[i] : own.lo;
      own.hi = own.x[i] > own.hi ? own.x[i] : own.hi;
    }
  });
  for (int mask = 1; mask < lanes; mask *= 2) {
    warp.exchange(
        mask, [](const Lane& own) { return own.lo; },
        [](int, Lane& own, float other) { own.lo = other < own.lo ? other : own.lo; });
    warp.exchange(
        mask, [](const Lane& own) { return own.hi; },
        [](int, Lane& own, float other) { own.hi = other > own.hi ? other : own.hi; });
  }
}

template <class Warp>
FLASH_HD void find_zeros(Warp& warp, int lanes) {
  warp.each([](int, Lane& own) {
    own.with_zero = 0;
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; ++i) own.with_zero |= own.x[i] == 0.0f ? 1u : 0u;
  });
  for (int mask = 1; mask < lanes; mask *= 2) {
    warp.exchange(
        mask, [](const Lane& own) { return own.with_zero; },
        [](int, Lane& own, uint32_t other) { own.with_zero |= other; });
  }
}

// The extremes out of the groups, the first of equals, and a third element in their places. number: of the
// warp's first group in its call.
template <class Warp>
FLASH_HD void take_spikes(Warp& warp, const Form& form, uint64_t key, uint64_t number) {
  const int lanes = form.lanes;
  find_bounds(warp, lanes);
  warp.each([lanes](int lane, Lane& own) {
    own.low_at = own.high_at = kMaxGroupSize;
    FLASH_UNROLL
    for (int i = kLaneElements - 1; i >= 0; --i) {
      const uint32_t place = place_of(lane, i, lanes);
      if (own.x[i] == own.lo) own.low_at = place;
      if (own.x[i] == own.hi) own.high_at = place;
    }
  });
  for (int mask = 1; mask < lanes; mask *= 2) {
    warp.exchange(
        mask, [](const Lane& own) { return own.low_at; },
        [](int, Lane& own, uint32_t other) { own.low_at = other < own.low_at ? other : own.low_at; });
    warp.exchange(
        mask, [](const Lane& own) { return own.high_at; },
        [](int, Lane& own, uint32_t other) { own.high_at = other < own.high_at ? other : own.high_at; });
  }
  warp.each([&](int lane, Lane& own) {
    own.least = own.lo + 0.0f;
    own.greatest = own.hi + 0.0f;
    if (form.options & kStochastic) {
      const uint64_t of_group = group_key(key, number + form.group_of(lane));
      own.least = bf16_to_float(bf16_random(own.least, spike_random(of_group, form.group_size, false)));
      own.greatest = bf16_to_float(bf16_random(own.greatest, spike_random(of_group, form.group_size, true)));
    }
    // One of the group's first three elements, which its first lane holds.
    const auto taken = [&](uint32_t i) { return i == own.low_at || i == own.high_at; };
    own.stand_in = !taken(0) ? own.x[0] : !taken(1) ? own.x[1] : own.x[2];
  });
  warp.from_first(
      lanes, [](const Lane& own) { return own.stand_in; },
      [lanes](int lane, Lane& own, float other) {
        FLASH_UNROLL
        for (int i = 0; i < kLaneElements; ++i) {
          const uint32_t place = place_of(lane, i, lanes);
          if (place == own.low_at || place == own.high_at) own.x[i] = other;
        }
      });
}

// With the codebook, twice: the element of greatest magnitude of each group, the first of equals, is rounded to
// a short float, which is subtracted there. In a group of 128:
//
//   lane 0   the first of its greatest:  |x| = 5  place 3   +
//   lane 1                               |x| = 9  place 12  -   the group's: this lane subtracts
//   lane 2                               |x| = 9  place 16  +
//   lane 3                               |x| = 2  place 24  -
//
// A group that is rotated afterwards holds an exact 0 if it does then; another one, if it does now.
template <class Warp>
FLASH_HD void take_short_spikes(Warp& warp, const Form& form) {
  if (!(form.options & kHadamard)) find_zeros(warp, form.lanes);
  FLASH_UNROLL
  for (int k = 0; k < 2; ++k) {
    warp.each([&](int lane, Lane& own) {
      float most = own.x[0];
      int at = 0;
      FLASH_UNROLL
      for (int i = 1; i < kLaneElements; ++i) {
        if (!(magnitude(own.x[i]) > magnitude(most))) continue;
        most = own.x[i];
        at = i;
      }
      const uint32_t places_after = kMaxGroupSize - 1 - place_of(lane, at, form.lanes);
      own.found = static_cast<uint64_t>(float_bits(magnitude(most))) << 32 | places_after << 1 |
                  float_bits(most) >> 31;
    });
    for (int mask = 1; mask < form.lanes; mask *= 2) {
      warp.exchange(
          mask, [](const Lane& own) { return own.found; },
          [](int, Lane& own, uint64_t other) { own.found = other > own.found ? other : own.found; });
    }
    warp.each([&](int lane, Lane& own) {
      const uint32_t most = static_cast<uint32_t>(own.found >> 32), rest = static_cast<uint32_t>(own.found);
      const int least = k == 0 ? kLeastSpike : least_second_spike(own.taken[0]);
      own.taken[k] = taken_spike(most | rest << 31, spike_mantissa(form.group_size), least);
      own.taken_at[k] = kMaxGroupSize - 1 - rest / 2;
      const uint32_t at = element_at(lane, own.taken_at[k], form);
      FLASH_UNROLL
      for (int i = 0; i < kLaneElements; ++i) {
        if (at >> i & 1u) own.x[i] = own.x[i] - bits_float(own.taken[k]);
      }
    });
  }
}

// Leaves in `best` the range with the least sum of squared errors, the first of equals.
template <class Warp>
FLASH_HD void search_range(Warp& warp, const Form& form) {
  const Layout layout = layout_of(form.options);
  const int bits = form.bits;
  warp.each([&](int, Lane& own) {
    own.best = whole_range(own.lo, own.hi, bits, layout, kInside);
    own.whole_zero = own.best.zero;
    own.whole_scale = own.best.scale;
    own.least_error = bits_float(kInfBits);
  });
  for (int scale = 0; scale < scales_of(layout); ++scale) {
    for (int place = 0; place < places_of(scale, bits, layout); ++place) {
      warp.each([&](int, Lane& own) {
        const uint32_t tried = tried_scale(scale, own.whole_scale, own.lo, own.hi, bits, layout);
        const float inverse = 1.0f / bits_float(tried), origin = search_origin(own.lo, layout);
        own.range = tried_range(scale, place, tried, own.whole_zero, own.lo, own.hi, bits, layout);
        const uint32_t shift = search_shift(origin, own.range.zero, inverse);
        own.error = 0.0f;
        FLASH_UNROLL
        for (int i = 0; i < kLaneElements; ++i) own.error += squared_error(own.x[i], origin, inverse, shift);
      });
      for (int mask = 1; mask < form.lanes; mask *= 2) {
        warp.exchange(
            mask, [](const Lane& own) { return own.error; },
            [](int, Lane& own, float other) { own.error += other; });
      }
      warp.each([](int, Lane& own) {
        const float ratio = search_ratio(own.range.scale, own.whole_scale);
        const float error = own.error * (ratio * ratio);
        if (error < own.least_error) {  // not so if it does not serve: NaN
          own.best = own.range;
          own.least_error = error;
        }
      });
    }
  }
}

// Units of `width` bits, 1, 2 or 4, of the codes of 8 neighbours: `width` bytes.
FLASH_HD uint32_t pack(const uint32_t* codes, int width, int shift) {
  uint32_t units = 0;
  FLASH_UNROLL
  for (int k = 0; k < kNeighbours; ++k) units |= (codes[k] >> shift & ((1u << width) - 1)) << (k * width);
  return units;
}

// Codebook: of the exponents of spikes.
FLASH_HD int base_of(const Form& form) {
  return spike_base(form.bits, form.group_size, (form.options & kHadamard) != 0);
}

// The record of a lane's group, as far as it is the lane's. image: where record 0 of the warp begins, 2
// divides it.
template <bool kOptions>
FLASH_HD void write_record(const Lane& own, int lane, const Form& form, bool lost, uint8_t* image) {
  uint8_t* record = image + form.group_of(lane) * form.record;
  const int front = spikes_offset(form.options), in_group = lane & (form.lanes - 1);
  const int align = form.record % 4 == 0 ? 4 : 2;
  if (kOptions && in_group == 0 && layout_of(form.options) == Layout::kCodebook) {
    const uint32_t *numbers = own.rows.front, scale = own.best.metadata;
    put(record, lost ? kNaNScale : scale | numbers[0] << 16, 4, align);
    put(record + 4, lost ? 0 : numbers[0] >> 16 | numbers[1] << 8, 4, align);
    if (form.options & kSpikes) {
      const int base = base_of(form), size = form.group_size;
      const uint32_t first = spike_word(own.taken[0], own.taken_at[0], own.best.scale, base, size);
      const uint32_t second = spike_word(own.taken[1], own.taken_at[1], own.best.scale, base, size);
      put(record + front, lost ? 0 : first | second << 16, 4, align);
    }
  } else if (in_group == 0) {
    put(record, lost ? kNaNScale : own.best.metadata, front, 2);
    if (kOptions && form.options & kSpikes) {
      const int bytes = place_bytes(form.group_size);
      put(record + front, lost ? 0 : bf16_nearest(own.least), 2, 2);
      put(record + front + 2, lost ? 0 : bf16_nearest(own.greatest), 2, 2);
      put(record + front + 4, lost ? 0 : own.low_at, bytes, bytes);
      put(record + front + 4 + bytes, lost ? 0 : own.high_at, bytes, bytes);
    }
  }
  uint8_t* planes = record + metadata_bytes(form.group_size, form.options);
  FLASH_UNROLL
  for (int i = 0; i < kLaneElements; i += kNeighbours) {
    const int at = i / kNeighbours * form.lanes + in_group;  // in neighbours of 8
    const uint32_t* codes = own.codes + i;
    if (form.bits == 8) {
      FLASH_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t four = 0;
        FLASH_UNROLL
        for (int k = 0; k < 4; ++k) four |= codes[4 * half + k] << (8 * k);
        put(planes + 8 * at + 4 * half, lost ? 0 : four, 4, align);
      }
      continue;
    }
    FLASH_UNROLL
    for (int width = 4; width >= 1; width /= 2) {
      if (!has_plane(form.bits, width)) continue;
      const uint32_t units = pack(codes, width, plane_shift(form.bits, width));
      put(planes + plane_offset(form.bits, width, form.group_size) + width * at, lost ? 0 : units, width,
          width == 4 ? align : width);
    }
  }
}

// Calls f(own, row, value of the lane whose number differs by mask) for each row. get(own, row): the value.
template <class Warp, class Get, class F>
FLASH_HD void exchange_rows(Warp& warp, int mask, Get get, F f) {
  FLASH_UNROLL
  for (int r = 0; r < kRows; ++r) {
    warp.exchange(
        mask, [=](const Lane& own) { return get(own, r); },
        [=](int, Lane& own, auto other) { f(own, r, other); });
  }
}

FLASH_HD float shift_of(const Lane& own, int bits) { return own.with_zero ? book_of(bits).shift : 0.0f; }

FLASH_HD float inverse_step(const Lane& own, int number) {
  return 1.0f / (part_scale(number) * bits_float(own.best.scale));
}

// Leaves in `number` the steps with the least sums of squared errors, the first of equals.
template <class Warp>
FLASH_HD void search_steps(Warp& warp, const Form& form) {
  for (int lower = 0; lower < kTriedSteps; ++lower) {
    warp.each([&](int, Lane& own) {
      const float shift = shift_of(own, form.bits);
      FLASH_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float inverse = inverse_step(own, at_least_0(own.rows.widest[r] - lower));
        own.rows.errors[r] = 0.0f;
        FLASH_UNROLL
        for (int k = 0; k < kNeighbours; ++k) {
          own.rows.errors[r] +=
              codebook_error(own.x[r * kNeighbours + k] * inverse + shift, shift, form.bits);
        }
      }
    });
    for (int mask = 1; mask < form.lanes / 2; mask *= 2) {
      exchange_rows(
          warp, mask, [](const Lane& own, int r) { return own.rows.errors[r]; },
          [](Lane& own, int r, float other) { own.rows.errors[r] += other; });
    }
    warp.each([lower](int, Lane& own) {
      FLASH_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int number = at_least_0(own.rows.widest[r] - lower);
        const float error = own.rows.errors[r] * (part_scale(number) * part_scale(number));
        if (lower != 0 && !(error < own.rows.least_errors[r])) continue;
        own.rows.number[r] = number;
        own.rows.least_errors[r] = error;
      }
    });
  }
}

// As encode_groups, with the codebook.
template <class Warp>
FLASH_HD void encode_codebook(Warp& warp, const Form& form, int groups, uint8_t* image) {
  const Book book = book_of(form.bits);
  const int lanes = form.lanes;
  const bool spikes = form.options & kSpikes;
  if (!spikes || form.options & kHadamard) find_zeros(warp, lanes);  // else take_short_spikes has
  warp.each([](int, Lane& own) {
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; ++i) {
      const uint32_t bits = float_bits(own.x[i]) & 0x7fffffffu;
      uint32_t& most = own.rows.most[i / kNeighbours];
      most = i % kNeighbours == 0 || bits > most ? bits : most;
    }
  });
  for (int mask = 1; mask < lanes / 2; mask *= 2) {
    exchange_rows(
        warp, mask, [](const Lane& own, int r) { return own.rows.most[r]; },
        [](Lane& own, int r, uint32_t other) {
          own.rows.most[r] = other > own.rows.most[r] ? other : own.rows.most[r];
        });
  }
  warp.each([](int, Lane& own) {
    own.worst = 0;
    FLASH_UNROLL
    for (int r = 0; r < kRows; ++r) own.worst = own.rows.most[r] > own.worst ? own.rows.most[r] : own.worst;
  });
  warp.exchange(
      lanes / 2, [](const Lane& own) { return own.worst; },
      [](int, Lane& own, uint32_t other) { own.worst = other > own.worst ? other : own.worst; });
  warp.each([&](int, Lane& own) {
    own.best.scale = codebook_scale(bits_float(own.worst) / book.reach);
    if (spikes) own.best.scale = scale_for_spike(own.best.scale, own.taken[0], base_of(form));
    own.best.metadata = own.best.scale >> 16 | (own.with_zero ? kWhole : 0u);
    FLASH_UNROLL
    for (int r = 0; r < kRows; ++r) {
      own.rows.widest[r] = widest_part(bits_float(own.rows.most[r]) / book.reach, bits_float(own.best.scale));
      own.rows.number[r] = at_least_0(own.rows.widest[r] - book.lower);
    }
  });
  if (form.options & kMse) search_steps(warp, form);
  warp.each([&](int lane, Lane& own) {
    const float shift = shift_of(own, form.bits);
    own.rows.front[0] = own.rows.front[1] = 0;
    FLASH_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float inverse = inverse_step(own, own.rows.number[r]);
      FLASH_UNROLL
      for (int k = 0; k < kNeighbours; ++k) {
        uint32_t& code = own.codes[r * kNeighbours + k];
        code = codebook_code(own.x[r * kNeighbours + k] * inverse + shift, form.bits);
      }
      own.rows.front[r / 2] |= static_cast<uint32_t>(own.rows.number[r])
                               << (6 * (part_of(lane, r, lanes) % 4));
    }
  });
  FLASH_UNROLL
  for (int half = 0; half < 2; ++half) {
    warp.exchange(
        lanes / 2, [half](const Lane& own) { return own.rows.front[half]; },
        [half](int, Lane& own, uint32_t other) { own.rows.front[half] |= other; });
  }
  warp.each([&](int lane, Lane& own) {
    if (form.group_of(lane) >= groups) return;
    write_record<true>(own, lane, form, own.best.scale == kNaNBits, image);
  });
}

// Runs before encode_groups: takes short spikes out of the groups, and rotates the rest.
template <class Warp>
FLASH_HD void prepare_groups(Warp& warp, const Form& form) {
  if (has_short_spikes(form.options)) take_short_spikes(warp, form);
  if (!(form.options & kHadamard)) return;
  warp.each([&](int lane, Lane& own) { flip(own, lane, form.lanes); });
  rotate(warp, form.lanes);
}

// The groups that a warp holds, to records at `image`, an address that 2 divides. groups: how many of them
// there are; number: of the first one in its call. kOptions: others than the layout may be on. Overwrites the
// lanes.
template <bool kOptions, class Warp>
FLASH_HD void encode_groups(Warp& warp, const Form& form, int groups, uint64_t key, uint64_t number,
                            uint8_t* image) {
  const Layout layout = layout_of(form.options);
  if (kOptions && layout == Layout::kCodebook) {
    encode_codebook(warp, form, groups, image);
    return;
  }
  if (kOptions && form.options & kSpikes) take_spikes(warp, form, key, number);
  find_bounds(warp, form.lanes);
  if (kOptions && form.options & kMse) {
    search_range(warp, form);
  } else {
    const float slack = kOptions ? slack_of(form.options) : kInside;
    warp.each([&](int, Lane& own) { own.best = whole_range(own.lo, own.hi, form.bits, layout, slack); });
  }
  if (may_miss_zero(form.bits, layout)) {
    find_zeros(warp, form.lanes);
    const float slack = kOptions ? slack_of(form.options) : kInside;
    warp.each([&](int, Lane& own) {
      if (own.with_zero) own.best = range_with_zero(own.lo, own.hi, form.bits, layout, slack);
    });
  }
  const int half = code_half(form.bits, layout);
  warp.each([&](int lane, Lane& own) {
    const float inverse = 1.0f / bits_float(own.best.scale);
    const uint64_t of_group = group_key(key, number + form.group_of(lane));
    own.worst = 0;
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; ++i) {
      float t = (own.x[i] - own.best.zero) * inverse;
      if (kOptions && form.options & kStochastic) {
        const int place = static_cast<int>(place_of(lane, i, form.lanes));
        t = t + rounding_offset(element_random(of_group, place, form.group_size));
      }
      const uint32_t code = float_bits(t + kRoundMagic) - (kRoundMagicBits - static_cast<uint32_t>(half));
      own.worst = code > own.worst ? code : own.worst;
      own.codes[i] = code;
    }
  });
  for (int mask = 1; mask < form.lanes; mask *= 2) {
    warp.exchange(
        mask, [](const Lane& own) { return own.worst; },
        [](int, Lane& own, uint32_t other) { own.worst = other > own.worst ? other : own.worst; });
  }
  warp.each([&](int lane, Lane& own) {
    if (form.group_of(lane) >= groups) return;
    bool lost = own.worst > static_cast<uint32_t>(code_levels(form.bits, layout));
    if (kOptions && form.options & kSpikes) {
      lost = lost || !bf16_is_finite(bf16_nearest(own.least)) || !bf16_is_finite(bf16_nearest(own.greatest));
    }
    write_record<kOptions>(own, lane, form, lost, image);
  });
}

// ---- decoding -------------------------------------------------------------------------------------------

// Adds one rank's values of a lane's elements to x. align: 1, 2 or 4 divides the address of every record.
template <bool kOptions>
FLASH_HD void add_record(Lane& own, int lane, const Form& form, const uint8_t* record, int align) {
  const Layout layout = layout_of(form.options);
  const int front = spikes_offset(form.options), in_group = lane & (form.lanes - 1);
  const bool codebook = kOptions && layout == Layout::kCodebook;
  const uint32_t word = get(record, codebook ? 4 : front, align);
  const uint32_t numbers = codebook ? get(record + 4, 4, align) : 0;  // of the parts from bit 16 of word on
  const Metadata m =
      codebook ? Metadata{bits_float((word & 0x7fffu) << 16), 0.0f} : metadata_of(word, form.bits, layout);
  const int half = code_half(form.bits, layout);
  const bool spikes = kOptions && !codebook && form.options & kSpikes && m.scale == m.scale;
  float values[2] = {0.0f, 0.0f};
  uint32_t at[2] = {0, 0};
  if (spikes) {
    const int bytes = place_bytes(form.group_size);
    FLASH_UNROLL
    for (int k = 0; k < 2; ++k) {
      values[k] = bf16_to_float(static_cast<uint16_t>(get(record + front + 2 * k, 2, align)));
      at[k] = get(record + front + 4 + k * bytes, bytes, align) & static_cast<uint32_t>(form.group_size - 1);
    }
  }
  const uint8_t* planes = record + metadata_bytes(form.group_size, form.options);
  FLASH_UNROLL
  for (int i = 0; i < kLaneElements; i += kNeighbours) {
    const int neighbours = i / kNeighbours * form.lanes + in_group;
    uint32_t codes[kNeighbours] = {};
    if (form.bits == 8) {
      FLASH_UNROLL
      for (int part = 0; part < 2; ++part) {
        const uint32_t four = get(planes + 8 * neighbours + 4 * part, 4, align);
        FLASH_UNROLL
        for (int k = 0; k < 4; ++k) codes[4 * part + k] = four >> (8 * k) & 0xffu;
      }
    } else {
      FLASH_UNROLL
      for (int width = 4; width >= 1; width /= 2) {
        if (!has_plane(form.bits, width)) continue;
        const uint8_t* plane = planes + plane_offset(form.bits, width, form.group_size);
        const uint32_t units = get(plane + width * neighbours, width, align);
        const int shift = plane_shift(form.bits, width);
        FLASH_UNROLL
        for (int k = 0; k < kNeighbours; ++k)
          codes[k] |= (units >> (k * width) & ((1u << width) - 1)) << shift;
      }
    }
    float step = 0.0f;
    if (codebook) {
      const uint64_t both = word | static_cast<uint64_t>(numbers) << 32;
      const int part = part_of(lane, i / kNeighbours, form.lanes);
      step = part_scale(static_cast<int>(both >> (16 + 6 * part) & 63u)) * m.scale;
    }
    FLASH_UNROLL
    for (int k = 0; k < kNeighbours; ++k) {
      float value = codebook ? level(form.bits, (word & kWhole) != 0, codes[k]) * step
                             : decode_element(codes[k], m.scale, m.zero, half);
      if (spikes) {
        const uint32_t place = place_of(lane, i + k, form.lanes);
        value = place == at[1] ? values[1] : place == at[0] ? values[0] : value;
      }
      own.x[i + k] = own.x[i + k] + value;
    }
  }
}

// Payloads of the same elements, one a rank, `stride` bytes apart.
struct Sources {
  const uint8_t* data;
  int64_t count;
  int64_t stride;
  int align;  // 1, 2 or 4 divides the address of every record
};

// The sums of a warp's groups, in rank order, left in its lanes. The first group is `group` of `total`. Rotated
// groups stay rotated.
template <bool kOptions, class Warp>
FLASH_HD void sum_groups(Warp& warp, const Form& form, const Sources& from, int64_t group, int64_t total) {
  warp.each([&](int lane, Lane& own) {
    const int64_t mine = group + form.group_of(lane);
    if (mine >= total) {
      FLASH_UNROLL
      for (float& x : own.x) x = 0.0f;
      return;
    }
    FLASH_UNROLL
    for (float& x : own.x) x = -0.0f;  // to which every number is added as it is, -0 too
    const uint8_t* record = from.data + mine * form.record;
    for (int64_t rank = 0; rank < from.count; ++rank) {
      add_record<kOptions>(own, lane, form, record + rank * from.stride, from.align);
    }
  });
}

template <class Warp>
FLASH_HD void turn_back(Warp& warp, const Form& form) {
  rotate(warp, form.lanes);
  const float shrink = 1.0f / static_cast<float>(form.group_size);
  warp.each([&](int lane, Lane& own) {
    FLASH_UNROLL
    for (float& x : own.x) x = x * shrink;
    flip(own, lane, form.lanes);
  });
}

// The short spikes of all ranks, to sums that are turned back: in rank order, the first of a rank before its
// second. Each lane reads all words of its group; the one that has a place adds.
template <class Warp>
FLASH_HD void add_short_spikes(Warp& warp, const Form& form, const Sources& from, int64_t group,
                               int64_t total) {
  const int front = spikes_offset(form.options), base = base_of(form), size = form.group_size;
  warp.each([&](int lane, Lane& own) {
    const int64_t mine = group + form.group_of(lane);
    if (mine >= total) return;
    const uint8_t* record = from.data + mine * form.record;
    for (int64_t rank = 0; rank < from.count; ++rank, record += from.stride) {
      const uint32_t scale = get(record, 2, from.align) << 16, words = get(record + front, 4, from.align);
      FLASH_UNROLL
      for (int k = 0; k < 2; ++k) {
        const uint32_t word = words >> (16 * k) & 0xffffu;
        const float value = spike_value(word, scale, base, size);
        const uint32_t at = element_at(lane, spike_place(word, size), form);
        FLASH_UNROLL
        for (int i = 0; i < kLaneElements; ++i) {
          if (at >> i & 1u) own.x[i] = own.x[i] + value;
        }
      }
    }
  });
}

// Runs after sum_groups for elements as output: rotates back, then adds the short spikes.
template <class Warp>
FLASH_HD void restore_groups(Warp& warp, const Form& form, const Sources& from, int64_t group,
                             int64_t total) {
  if (form.options & kHadamard) turn_back(warp, form);
  if (has_short_spikes(form.options)) add_short_spikes(warp, form, from, group, total);
}

template <class Warp>
FLASH_HD void multiply(Warp& warp, float factor) {
  warp.each([factor](int, Lane& own) {
    FLASH_UNROLL
    for (float& x : own.x) x = x * factor;
  });
}

// ---- error feedback ---------------------------------------------------------------------------------------
//
//   input, residual  -> x = input + carried   -> encode   -> record, in the image of the block
//   record, residual -> lost = x - decoded record, and a share of carried               -> residual, in place
//
// A lane holds the same elements of all of them. x stays in registers meanwhile; the residual is read again,
// from where it is near.

// The residual of a warp's groups. data: start of the first group; 16 divides the address if it is wide, else
// 2 does.
struct Residual {
  uint8_t* data;
  bool wide;    // bf16; otherwise records of 8 bits, symmetric
  float stays;  // the share that a new loss leaves of it: the momentum
  float adds;   // the share of the new loss: the rest
};

FLASH_HD Form residual_form(const Form& form) {
  Form own = form;
  own.bits = 8;
  own.options = kSymmetricCodes;
  own.record = spikes_offset(kSymmetricCodes) + form.group_size;
  return own;
}

// Reads the residual of 8 neighbours from element i of a lane on. The lane's group must exist.
FLASH_HD void read_carried(const Residual& residual, int lane, const Form& form, int i, float* carried) {
  const int place = static_cast<int>(place_of(lane, i, form.lanes));
  if (residual.wide) {
    const int at = form.group_of(lane) * form.group_size + place;
    read_neighbours<DType::kBFloat16>(residual.data + 2 * at, true, carried);
    FLASH_UNROLL
    for (int k = 0; k < kNeighbours; ++k) carried[k] += 0.0f;  // -0 is 0
    return;
  }
  const Form own = residual_form(form);
  const Layout layout = Layout::kSymmetric;
  const uint8_t* record = residual.data + form.group_of(lane) * own.record;
  const int front = spikes_offset(own.options);
  const Metadata m = metadata_of(get(record, front, 2), own.bits, layout);
  FLASH_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint32_t four = get(record + front + place + 4 * half, 4, 2);
    FLASH_UNROLL
    for (int k = 0; k < 4; ++k) {
      const uint32_t code = four >> (8 * k) & 0xffu;
      carried[4 * half + k] = decode_element(code, m.scale, m.zero, code_half(own.bits, layout));
    }
  }
}

// Pads a ragged group with its first element. left: elements from the warp's first group on.
template <class Warp>
FLASH_HD void fill_up(Warp& warp, const Form& form, int left) {
  if (left >= kWarpElements) return;
  warp.from_first(
      form.lanes, [](const Lane& own) { return own.x[0]; },
      [&](int lane, Lane& own, float first) {
        const int there = left - form.group_of(lane) * form.group_size;
        FLASH_UNROLL
        for (int i = 0; i < kLaneElements; ++i) {
          if (static_cast<int>(place_of(lane, i, form.lanes)) >= there) own.x[i] = first;
        }
      });
}

// Encodes the groups in the lanes. total: elements of the row from the first of them on. An exact zero is
// encoded as zero and keeps its residual: x is -0 there, which no other sum is. A rotated zero does not decode
// to zero: its error is carried over as that of any other element.
template <bool kOptions, class Warp>
FLASH_HD void encode_with_feedback(Warp& warp, const Form& form, const Residual& residual, int64_t total,
                                   uint64_t key, uint64_t number, uint8_t* image) {
  const int left = total < kWarpElements ? static_cast<int>(total) : kWarpElements;
  const int groups = static_cast<int>(form.groups(left));
  const bool rotated = kOptions && form.options & kHadamard;
  warp.each([&](int lane, Lane& own) {
    if (form.group_of(lane) >= groups) return;
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; i += kNeighbours) {
      float carried[kNeighbours];
      read_carried(residual, lane, form, i, carried);
      FLASH_UNROLL
      for (int k = 0; k < kNeighbours; ++k) {
        const bool waits = !rotated && own.x[i + k] == 0.0f;
        own.x[i + k] = waits ? -0.0f : carried[k] + own.x[i + k];
      }
    }
  });
  fill_up(warp, form, left);
  warp.each([](int, Lane& own) {
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; ++i) own.sent[i] = own.x[i];
  });
  if (kOptions) prepare_groups(warp, form);
  encode_groups<kOptions>(warp, form, groups, key, number, image);
  warp.sync();  // all lanes read the first lane's part of a record
  const Sources sent{image, 1, 0, form.record % 4 == 0 ? 4 : 2};
  sum_groups<kOptions>(warp, form, sent, 0, groups);
  if (kOptions) restore_groups(warp, form, sent, 0, groups);
  warp.each([&](int lane, Lane& own) {
    if (form.group_of(lane) >= groups) return;
    FLASH_UNROLL
    for (int i = 0; i < kLaneElements; i += kNeighbours) {
      float carried[kNeighbours];
      read_carried(residual, lane, form, i, carried);
      FLASH_UNROLL
      for (int k = 0; k < kNeighbours; ++k) {
        const float sent = own.sent[i + k], arrives = own.x[i + k];
        const bool is_zero = float_bits(sent) == float_bits(-0.0f);
        const float now =
            is_zero && arrives == arrives ? 0.0f : sent - arrives;  // a lost group keeps nothing
        const float lost = now * residual.adds + (is_zero ? carried[k] : carried[k] * residual.stays);
        own.x[i + k] = (float_bits(lost) & 0x7fffffffu) < kInfBits ? lost : 0.0f;
      }
    }
  });
  fill_up(warp, form, left);
  if (residual.wide) {
    warp.each([&](int lane, Lane& own) {
      if (form.group_of(lane) >= groups) return;
      store_lane<DType::kBFloat16>(own, lane, form, residual.data, kWarpElements, form.group_of(lane), true);
    });
    return;
  }
  warp.sync();  // all have read the scale before one writes it
  encode_groups<false>(warp, residual_form(form), groups, 0, 0, residual.data);
}

// ---- the warp of each kernel ------------------------------------------------------------------------------

template <DType kType, bool kOptions, class Warp>
FLASH_HD void warp_encode(Warp& warp, const Form& form, const uint8_t* row, int64_t numel, bool fast,
                          int64_t group, uint64_t key, uint64_t number, uint8_t* image) {
  warp.each([&](int lane, Lane& own) {
    load_lane<kType>(own, lane, form, row, numel, group + form.group_of(lane), fast);
  });
  if (kOptions) prepare_groups(warp, form);
  const int64_t left = form.groups(numel) - group;
  const int groups = left < kWarpLanes ? static_cast<int>(left) : kWarpLanes;
  encode_groups<kOptions>(warp, form, groups, key, number + group, image);
}

template <DType kType, bool kOptions, class Warp>
FLASH_HD void warp_decode_sum(Warp& warp, const Form& form, const Sources& from, float factor, uint8_t* row,
                              int64_t numel, bool fast, int64_t group) {
  const int64_t total = form.groups(numel);
  sum_groups<kOptions>(warp, form, from, group, total);
  if (kOptions) restore_groups(warp, form, from, group, total);
  multiply(warp, factor);
  warp.each([&](int lane, Lane& own) {
    store_lane<kType>(own, lane, form, row, numel, group + form.group_of(lane), fast);
  });
}

// The two forms differ in their width alone. Rotated sums are encoded as they are, those of short spikes are
// not: the spikes of all ranks are no spikes of the sum.
template <bool kOptions, class Warp>
FLASH_HD void warp_decode_sum_encode(Warp& warp, const Form& reduce, const Form& gather, const Sources& from,
                                     float factor, int64_t group, int64_t total, uint64_t key,
                                     uint64_t number, uint8_t* image) {
  sum_groups<kOptions>(warp, reduce, from, group, total);
  const bool whole = kOptions && has_short_spikes(reduce.options);
  if (whole) restore_groups(warp, reduce, from, group, total);
  multiply(warp, factor);
  if (whole) prepare_groups(warp, gather);
  const int64_t left = total - group;
  const int groups = left < kWarpLanes ? static_cast<int>(left) : kWarpLanes;
  encode_groups<kOptions>(warp, gather, groups, key, number + group, image);
}

// residual: of the warp's groups, as image.
template <DType kType, bool kOptions, class Warp>
FLASH_HD void warp_encode_feedback(Warp& warp, const Form& form, const uint8_t* row, int64_t numel, bool fast,
                                   int64_t group, const Residual& residual, uint64_t key, uint64_t number,
                                   uint8_t* image) {
  warp.each([&](int lane, Lane& own) {
    load_lane<kType>(own, lane, form, row, numel, group + form.group_of(lane), fast);
  });
  encode_with_feedback<kOptions>(warp, form, residual, numel - group * form.group_size, key, number + group,
                                 image);
}

template <bool kOptions, class Warp>
FLASH_HD void warp_decode_sum_encode_feedback(Warp& warp, const Form& reduce, const Form& gather,
                                              const Sources& from, float factor, int64_t group, int64_t total,
                                              const Residual& residual, uint64_t key, uint64_t number,
                                              uint8_t* image) {
  sum_groups<kOptions>(warp, reduce, from, group, total);
  const bool whole = kOptions && has_short_spikes(reduce.options);
  if (whole) restore_groups(warp, reduce, from, group, total);
  multiply(warp, factor);
  encode_with_feedback<kOptions>(warp, gather, residual, (total - group) * gather.group_size, key,
                                 number + group, image);
}

}  // namespace flash_allreduce
