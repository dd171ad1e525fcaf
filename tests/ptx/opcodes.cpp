// The effect of every instruction on a lane. A name that is not here is unknown to the machine.
//
// Names are PTX's, without the parts that do not matter to one machine that runs one thing after another
// (translate.py). A register holds bits: only the instructions for floats read it as a float, so that a NaN
// that is only moved keeps its bits. There is no fma: a kernel that has one was compiled so that its results
// depend on the compiler. mad, the same operation, is in a kernel only if the source names it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "machine.h"

namespace ptx {
namespace {

template <class To, class From>
To bits_as(From value) {
  To result;
  static_assert(sizeof result == sizeof value);
  memcpy(&result, &value, sizeof value);
  return result;
}

// ---- lanes ----------------------------------------------------------------------------------------------

template <class T>
using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
T taken(Word<T> word) {
  if constexpr (std::is_same_v<T, float>) return bits_as<float>(word);
  return static_cast<T>(word);
}

template <class T>
Word<T> kept(T value) {
  if constexpr (std::is_same_v<T, float>)
    return value != value ? 0x7fffffffu : bits_as<uint32_t>(value);  // one NaN
  else if constexpr (std::is_same_v<T, bool>)
    return value;
  else
    return static_cast<std::make_unsigned_t<T>>(value);
}

template <class F>
void each(uint32_t lanes, const F& f) {
  if (lanes == kAll) {
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) f(__builtin_ctz(lanes));
  }
}

// The handler of a function of values: at[0] = f(at[1], at[2], ...), for every lane.
template <class F, class R, class... A, size_t... n>
void apply(Warp& warp, const Instruction& i, uint32_t lanes, R (F::*)(A...) const,
           std::index_sequence<n...>) {
  Word<R>* to = warp.slot<Word<R>>(i.at[0]);
  const auto from = std::make_tuple(static_cast<const Word<A>*>(warp.slot<Word<A>>(i.at[n + 1]))...);
  each(lanes, [&](int lane) { to[lane] = kept<R>(F()(taken<A>(std::get<n>(from)[lane])...)); });
}

template <class R, class... A, class F>
std::string widths_of(R (F::*)(A...) const) {
  const auto digit = [](bool predicate, size_t bytes) {
    return static_cast<char>('0' + (predicate ? 0 : bytes));
  };
  return {digit(std::is_same_v<R, bool>, sizeof(R)), digit(std::is_same_v<A, bool>, sizeof(A))...};
}

template <class R, class... A, class F>
constexpr auto numbers_of(R (F::*)(A...) const) {
  return std::index_sequence_for<A...>();
}

template <class F>
Opcode op(F) {
  constexpr auto call = &F::operator();
  const Handler handler = [](Warp& warp, const Instruction& i, uint32_t lanes) {
    apply<F>(warp, i, lanes, &F::operator(), decltype(numbers_of(&F::operator()))());
  };
  return {Kind::kPlain, handler, widths_of(call)};
}

// ---- memory ---------------------------------------------------------------------------------------------

enum class Space { kParameter, kShared, kGlobal, kGeneric };

template <Space space>
uint8_t* address(Warp& warp, uint64_t at, uint64_t bytes, bool writes, int lane) {
  [[maybe_unused]] const bool windowed = at >= kSharedWindow;
  if constexpr (space == Space::kParameter) {
    std::vector<uint8_t>& parameters = warp.block->launch->parameters;
    if (at + bytes > parameters.size()) throw Fault("a load from beyond the parameters");
    return parameters.data() + at;
  }
  if constexpr (space == Space::kShared) {
    return warp.block->shared.at(windowed ? at - kSharedWindow : at, bytes, writes, warp, lane);
  }
  if (space == Space::kGeneric && windowed) {
    return warp.block->shared.at(at - kSharedWindow, bytes, writes, warp, lane);
  }
  machine().memory.check(at, bytes, writes);
  return reinterpret_cast<uint8_t*>(at);
}

// at: the slot of the base, whether that is 64 bits wide, the offset, then the slots of the values.
// Register: of the values, as wide as T or wider.
template <Space space, bool writes, class T, int count, class Register = Word<T>>
void access(Warp& warp, const Instruction& i, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    const uint64_t base = i.at[1] ? warp.slot<uint64_t>(i.at[0])[lane] : warp.slot<uint32_t>(i.at[0])[lane];
    uint64_t where = base + static_cast<uint64_t>(static_cast<int64_t>(i.at[2]));
    if (space == Space::kShared && !i.at[1]) where &= 0xffffffffu;
    uint8_t* p = address<space>(warp, where, sizeof(T) * count, writes, lane);
    for (int n = 0; n < count; ++n, p += sizeof(T)) {
      Register* word = warp.slot<Register>(i.at[3 + n]) + lane;
      T value = static_cast<T>(*word);
      if (writes) {
        memcpy(p, &value, sizeof value);
      } else {
        memcpy(&value, p, sizeof value);
        // Signed values fill the register with their sign.
        *word = static_cast<Register>(value);
      }
    }
  }
}

// Like a store, to the memory of every rank behind a multicast address.
void store_to_all(Warp& warp, const Instruction& i, uint32_t lanes) {
  const Memory& memory = machine().memory;
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    uint32_t values[4];
    for (int n = 0; n < 4; ++n) values[n] = warp.slot<uint32_t>(i.at[3 + n])[lane];
    if (!i.at[1]) throw Fault("a multicast address of 32 bits");
    const uint64_t at =
        warp.slot<uint64_t>(i.at[0])[lane] + static_cast<uint64_t>(int64_t{i.at[2]}) - memory.multicast;
    if (at + sizeof values > memory.multicast_bytes) throw Fault("a multimem store to no multicast address");
    for (const uint64_t copy : memory.copies) {
      memory.check(copy + at, sizeof values, true);
      memcpy(reinterpret_cast<uint8_t*>(copy + at), values, sizeof values);
    }
  }
}

template <class T>
void exchange(Warp& warp, const Instruction& i, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    const uint64_t where =
        warp.slot<uint64_t>(i.at[1])[lane] + static_cast<uint64_t>(static_cast<int64_t>(i.at[2]));
    uint8_t* p = address<Space::kGlobal>(warp, where, sizeof(T), true, lane);
    T old, value = static_cast<T>(warp.slot<Word<T>>(i.at[3])[lane]);
    memcpy(&old, p, sizeof old);
    memcpy(p, &value, sizeof value);
    warp.slot<Word<T>>(i.at[0])[lane] = old;
  }
}

// ---- between lanes --------------------------------------------------------------------------------------

// at: the result, the value, which lane or a mask, the clamp, and the mask of members, in the order of PTX.
template <auto source>
void shuffle(Warp& warp, const Instruction& i, uint32_t lanes) {
  uint32_t values[kLanes];
  std::copy_n(warp.slot<uint32_t>(i.at[1]), kLanes, values);
  const uint32_t *which = warp.slot<uint32_t>(i.at[2]), *clamp = warp.slot<uint32_t>(i.at[3]);
  uint32_t* to = warp.slot<uint32_t>(i.at[0]);
  each(lanes, [&](int lane) {
    if (clamp[lane] != 31) throw Fault("a shuffle of a part of a warp");
    const uint32_t from = source(static_cast<uint32_t>(lane), which[lane]);
    if (from >= kLanes || (lanes >> from & 1) == 0)
      throw Fault("a shuffle from a lane that is not in its mask");
    to[lane] = values[from];
  });
}

// ---- arithmetic -----------------------------------------------------------------------------------------

// prmt: bytes of b:a by their numbers, 4 bits each; the highest bit asks for its sign.
uint32_t permuted(uint32_t a, uint32_t b, uint32_t numbers) {
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t number = numbers >> (4 * i) & 15u;
    uint8_t byte = static_cast<uint8_t>(both >> (8 * (number & 7u)));
    if (number & 8u) byte = byte & 0x80u ? 0xffu : 0;
    result |= static_cast<uint32_t>(byte) << (8 * i);
  }
  return result;
}

// bfi: the low `count` bits of a, put into b from bit `first` on.
template <class T>
T inserted(T a, T b, uint32_t first, uint32_t count) {
  for (uint32_t i = 0; i < (count & 255u) && (first & 255u) + i < 8 * sizeof(T); ++i) {
    const uint32_t bit = (first & 255u) + i;
    b = (b & ~(T{1} << bit)) | (a >> i & T{1}) << bit;
  }
  return b;
}

// bfe: `count` bits of a from bit `first` on.
uint32_t extracted(uint32_t a, uint32_t first, uint32_t count) {
  first &= 255u, count &= 255u;
  const uint64_t there = first < 32 ? a >> first : 0;
  return static_cast<uint32_t>(count < 32 ? there & ((uint64_t{1} << count) - 1) : there);
}

// lop3: the bit of the table that the three bits number.
uint32_t looked_up(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i)
    result |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1u) << i;
  return result;
}

// Rounds towards zero. Out of range: the nearest int; a NaN: 0.
template <class T, class Round>
T to_int(float x, const Round& round) {
  if (x != x) return 0;
  const double whole = round(static_cast<double>(x));
  if (whole <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (whole >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(whole);
}

template <class T>
T divided(T a, T b) {
  if (b == 0) throw Fault("a division of an integer by 0");
  return static_cast<T>(a / b);
}

template <class T>
T remainder(T a, T b) {
  if (b == 0) throw Fault("a division of an integer by 0");
  return static_cast<T>(a % b);
}

template <class T>
constexpr uint32_t kBits = 8 * sizeof(T);

// ---- elements of 16 bits ----------------------------------------------------------------------------------

float bf16_value(uint32_t bits) { return bits_as<float>(bits << 16); }

float f16_value(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31u);
  const auto mantissa = static_cast<float>(bits & 1023u);
  const float size =
      exponent == 31
          ? (mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity())
          : std::ldexp(exponent == 0 ? mantissa : mantissa + 1024.0f, std::max(exponent, 1) - 25);
  return bits & 0x8000u ? -size : size;
}

// Rounds to the nearest, a tie to even. digits: of the mantissa, with the first one; least: the exponent of
// the smallest number; most: the largest number. Exact in double.
uint32_t rounded(float x, int digits, int least, double most, int mantissa_bits) {
  const uint32_t sign = bits_as<uint32_t>(x) >> 31 << 15,
                 infinite = 0x7fffu >> mantissa_bits << mantissa_bits;
  if (x != x) return 0x7fffu;
  const double size = std::fabs(static_cast<double>(x));
  if (size == 0) return sign;
  if (std::isinf(size)) return sign | infinite;
  const int unit = std::max(std::ilogb(size) - digits + 1, least);
  const double whole = std::nearbyint(std::ldexp(size, -unit));
  if (std::ldexp(whole, unit) > most) return sign | infinite;
  // Subnormals have exponent 0, and 2^(digits - 1) is the first number that has 1.
  return sign |
         static_cast<uint32_t>(static_cast<double>(unit - least) * std::ldexp(1.0, mantissa_bits) + whole);
}

uint32_t bf16_bits(float x) {
  return rounded(x, 8, -133, static_cast<double>(bits_as<float>(0x7f7f0000u)), 7);
}
uint32_t f16_bits(float x) { return rounded(x, 11, -24, 65504.0, 10); }

// The lesser and the greater of two numbers; a NaN if one of them is a NaN. -0 is less than 0.
float least_of(float a, float b) {
  return a != a ? a : b != b ? b : a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
}
float most_of(float a, float b) {
  return a != a ? a : b != b ? b : a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
}

// f of the lower and of the upper elements.
template <auto value, auto bits, auto f>
uint32_t of_pairs(uint32_t a, uint32_t b) {
  return bits(f(value(a & 0xffffu), value(b & 0xffffu))) | bits(f(value(a >> 16), value(b >> 16))) << 16;
}

using Table = std::unordered_map<std::string, Opcode>;

// The lesser of two magnitudes, with the sign of the product.
float least_magnitude(float a, float b) {
  return std::copysign(least_of(std::fabs(a), std::fabs(b)),
                       std::signbit(a) != std::signbit(b) ? -1.0f : 1.0f);
}

template <auto value, auto bits>
void add_pairs(Table& t, const std::string& type) {
  t["min.NaN." + type] = op([](uint32_t a, uint32_t b) { return of_pairs<value, bits, least_of>(a, b); });
  t["max.NaN." + type] = op([](uint32_t a, uint32_t b) { return of_pairs<value, bits, most_of>(a, b); });
  t["min.NaN.xorsign.abs." + type] =
      op([](uint32_t a, uint32_t b) { return of_pairs<value, bits, least_magnitude>(a, b); });
  t["abs." + type] = op([](uint32_t a) { return a & 0x7fff7fffu; });
  t["cvt.rn." + type + ".f32"] = op([](float high, float low) { return bits(low) | bits(high) << 16; });
}

template <Space space, bool writes, class T>
void add_accesses(Table& t, const std::string& name, const std::string& type) {
  t[name + "." + type] = {Kind::kPlain, access<space, writes, T, 1>, ""};
  t[name + "." + type + ".wide"] = {Kind::kPlain, access<space, writes, T, 1, uint64_t>, ""};
  t[name + ".v2." + type] = {Kind::kPlain, access<space, writes, T, 2>, ""};
  t[name + ".v4." + type] = {Kind::kPlain, access<space, writes, T, 4>, ""};
}

template <Space space>
void add_space(Table& t, const std::string& name) {
  for (const char* kind : {"u", "b"}) {
    const std::string k = kind;
    add_accesses<space, false, uint8_t>(t, "ld" + name, k + "8");
    add_accesses<space, false, uint16_t>(t, "ld" + name, k + "16");
    add_accesses<space, false, uint32_t>(t, "ld" + name, k + "32");
    add_accesses<space, false, uint64_t>(t, "ld" + name, k + "64");
    if (space == Space::kParameter) continue;
    add_accesses<space, true, uint8_t>(t, "st" + name, k + "8");
    add_accesses<space, true, uint16_t>(t, "st" + name, k + "16");
    add_accesses<space, true, uint32_t>(t, "st" + name, k + "32");
    add_accesses<space, true, uint64_t>(t, "st" + name, k + "64");
  }
  add_accesses<space, false, int8_t>(t, "ld" + name, "s8");
  add_accesses<space, false, int16_t>(t, "ld" + name, "s16");
  add_accesses<space, false, int32_t>(t, "ld" + name, "s32");
  add_accesses<space, false, uint32_t>(t, "ld" + name, "f32");
  add_accesses<space, true, uint32_t>(t, "st" + name, "f32");
}

// Instructions on bits, whatever these mean.
template <class T>
void add_moves(Table& t, const std::string& type) {
  t["mov." + type] = op([](T a) { return a; });
  t["selp." + type] = op([](T a, T b, bool first) { return first ? a : b; });
}

template <class T>
void add_bitwise(Table& t, const std::string& type) {
  t["and." + type] = op([](T a, T b) { return static_cast<T>(a & b); });
  t["or." + type] = op([](T a, T b) { return static_cast<T>(a | b); });
  t["xor." + type] = op([](T a, T b) { return static_cast<T>(a ^ b); });
}

template <class T>
void add_comparisons(Table& t, const std::string& type) {
  t["setp.eq." + type] = op([](T a, T b) { return a == b; });
  t["setp.lt." + type] = op([](T a, T b) { return a < b; });
  t["setp.le." + type] = op([](T a, T b) { return a <= b; });
  t["setp.gt." + type] = op([](T a, T b) { return a > b; });
  t["setp.ge." + type] = op([](T a, T b) { return a >= b; });
  if constexpr (std::is_same_v<T, float>) {
    t["setp.ne.f32"] = op([](T a, T b) { return a < b || a > b; });
    t["setp.nan.f32"] = op([](T a, T b) { return a != a || b != b; });
    t["setp.num.f32"] = op([](T a, T b) { return a == a && b == b; });
    t["setp.equ.f32"] = op([](T a, T b) { return !(a < b || a > b); });
    t["setp.neu.f32"] = op([](T a, T b) { return !(a == b); });
    t["setp.ltu.f32"] = op([](T a, T b) { return !(a >= b); });
    t["setp.leu.f32"] = op([](T a, T b) { return !(a > b); });
    t["setp.gtu.f32"] = op([](T a, T b) { return !(a <= b); });
    t["setp.geu.f32"] = op([](T a, T b) { return !(a < b); });
  } else {
    t["setp.ne." + type] = op([](T a, T b) { return a != b; });
  }
}

// T: signed or not; U: its unsigned, in which sums wrap around.
template <class T>
void add_integers(Table& t, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  add_moves<T>(t, type);
  add_comparisons<T>(t, type);
  t["add." + type] = op([](U a, U b) { return static_cast<U>(a + b); });
  t["sub." + type] = op([](U a, U b) { return static_cast<U>(a - b); });
  t["mul.lo." + type] = op([](U a, U b) { return static_cast<U>(uint64_t{a} * b); });
  t["mad.lo." + type] = op([](U a, U b, U c) { return static_cast<U>(uint64_t{a} * b + c); });
  t["neg." + type] = op([](U a) { return static_cast<U>(0 - a); });
  t["min." + type] = op([](T a, T b) { return std::min(a, b); });
  t["max." + type] = op([](T a, T b) { return std::max(a, b); });
  t["div." + type] = op([](T a, T b) { return divided(a, b); });
  t["rem." + type] = op([](T a, T b) { return remainder(a, b); });
  t["shr." + type] = op([](T a, uint32_t by) {
    return static_cast<T>(by < kBits<T> ? a >> by : a < 0 ? -1 : 0);
  });
  if constexpr (sizeof(T) < 8) {
    using Wide = std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 4, int64_t, int32_t>,
                                    std::conditional_t<sizeof(T) == 4, uint64_t, uint32_t>>;
    t["mul.wide." + type] = op([](T a, T b) { return static_cast<Wide>(a) * static_cast<Wide>(b); });
    t["mad.wide." + type] = op([](T a, T b, Wide c) {
      using Sum = std::make_unsigned_t<Wide>;
      return static_cast<Wide>(static_cast<Sum>(static_cast<Wide>(a) * static_cast<Wide>(b)) +
                               static_cast<Sum>(c));
    });
    t["mul.hi." + type] =
        op([](T a, T b) { return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> kBits<T>); });
  }
}

template <class T>
void add_bits(Table& t, const std::string& type) {
  add_moves<T>(t, type);
  add_bitwise<T>(t, type);
  t["not." + type] = op([](T a) { return static_cast<T>(~a); });
  t["shl." + type] = op([](T a, uint32_t by) { return static_cast<T>(by < kBits<T> ? a << by : 0); });
  t["shr." + type] = op([](T a, uint32_t by) { return static_cast<T>(by < kBits<T> ? a >> by : 0); });
  t["setp.eq." + type] = op([](T a, T b) { return a == b; });
  t["setp.ne." + type] = op([](T a, T b) { return a != b; });
}

template <class To, class From>
void add_conversion(Table& t, const std::string& to, const std::string& from) {
  t["cvt." + to + "." + from] = op([](From a) { return static_cast<To>(a); });
  // From the lower part of a register of 64 bits.
  t["cvt." + to + "." + from + ".wide"] =
      op([](uint64_t a) { return static_cast<To>(static_cast<From>(a)); });
}

template <class From>
void add_conversions(Table& t, const std::string& from) {
  add_conversion<uint8_t, From>(t, "u8", from);
  add_conversion<int8_t, From>(t, "s8", from);
  add_conversion<uint16_t, From>(t, "u16", from);
  add_conversion<int16_t, From>(t, "s16", from);
  add_conversion<uint32_t, From>(t, "u32", from);
  add_conversion<int32_t, From>(t, "s32", from);
  add_conversion<uint64_t, From>(t, "u64", from);
  add_conversion<int64_t, From>(t, "s64", from);
  t["cvt.rn.f32." + from] = op([](From a) { return static_cast<float>(a); });
}

template <class T>
void add_type(Table& t, const std::string& type) {
  add_conversions<T>(t, type);
  if constexpr (sizeof(T) > 1) add_integers<T>(t, type);
}

// A register of a thread's place, equal in 32 lanes or not.
template <class F>
Opcode special(F) {
  return {Kind::kPlain,
          [](Warp& warp, const Instruction& i, uint32_t lanes) {
            auto* to = warp.slot<decltype(F()(warp, 0))>(i.at[0]);
            each(lanes, [&](int lane) { to[lane] = F()(warp, lane); });
          },
          sizeof(F()(std::declval<Warp&>(), 0)) == 8 ? "8" : "4"};
}

Opcode barrier(const std::string& widths) { return {Kind::kBarrier, nullptr, widths}; }

Opcode nothing() {
  return {Kind::kPlain, [](Warp&, const Instruction&, uint32_t) {}, ""};
}

Table make_table() {
  Table t;
  t["bra"] = {Kind::kBranch, nullptr, ""};
  t["ret"] = t["exit"] = {Kind::kReturn, nullptr, ""};
  t["bar.sync"] = barrier("");
  t["bar.red.and.pred"] = t["bar.red.or.pred"] = barrier("00");
  t["bar.warp.sync"] = {Kind::kWarpBarrier, nullptr, "4"};
  t["shfl.sync.bfly.b32"] = {Kind::kShuffle,
                             shuffle<[](uint32_t lane, uint32_t mask) { return lane ^ mask; }>, "44444"};
  t["shfl.sync.idx.b32"] = {Kind::kShuffle, shuffle<[](uint32_t, uint32_t which) { return which & 31u; }>,
                            "44444"};
  // Instructions run one after another: there is nothing to order.
  t["membar.sys"] = t["membar.gl"] = t["membar.cta"] = t["fence.proxy.alias"] = nothing();
  t["tid.x"] = special([](const Warp& w, int lane) { return w.first_thread + static_cast<uint32_t>(lane); });
  t["ctaid.x"] = special([](const Warp& w, int) { return w.block->index; });
  t["nctaid.x"] = special([](const Warp& w, int) { return w.block->launch->grid.blocks; });
  t["ntid.x"] = special([](const Warp& w, int) { return w.block->launch->grid.threads; });
  t["globaltimer"] = special([](const Warp&, int) { return machine().now; });
  add_space<Space::kParameter>(t, ".param");
  add_space<Space::kShared>(t, ".shared");
  add_space<Space::kGlobal>(t, ".global");
  add_space<Space::kGeneric>(t, "");
  t["trap"] = {Kind::kPlain, [](Warp&, const Instruction&, uint32_t) { throw Fault("a trap"); }, ""};
  t["multimem.st.global.v4.f32"] = {Kind::kPlain, store_to_all, ""};
  t["atom.global.exch.b32"] = {Kind::kPlain, exchange<uint32_t>, ""};
  t["cvta.shared.u64"] = op([](uint64_t a) { return a + kSharedWindow; });
  t["cvta.to.shared.u64"] = op([](uint64_t a) { return a - kSharedWindow; });
  t["cvta.to.global.u64"] = op([](uint64_t a) { return a; });
  t["cvta.global.u64"] = op([](uint64_t a) { return a; });

  add_type<uint8_t>(t, "u8"), add_type<int8_t>(t, "s8");
  add_type<uint16_t>(t, "u16"), add_type<int16_t>(t, "s16");
  add_type<uint32_t>(t, "u32"), add_type<int32_t>(t, "s32");
  add_type<uint64_t>(t, "u64"), add_type<int64_t>(t, "s64");
  add_bits<uint16_t>(t, "b16"), add_bits<uint32_t>(t, "b32"), add_bits<uint64_t>(t, "b64");
  add_moves<uint32_t>(t, "f32"), add_moves<bool>(t, "pred");
  add_bitwise<bool>(t, "pred");
  t["not.pred"] = op([](bool a) { return !a; });

  // Join two halves, or return one of them; the lower half first.
  t["pack.b32"] = op([](uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; });
  t["low.b32"] = op([](uint32_t a) { return static_cast<uint16_t>(a); });
  t["high.b32"] = op([](uint32_t a) { return static_cast<uint16_t>(a >> 16); });
  t["pack.b64"] = op([](uint32_t low, uint32_t high) { return low | static_cast<uint64_t>(high) << 32; });
  t["low.b64"] = op([](uint64_t a) { return static_cast<uint32_t>(a); });
  t["high.b64"] = op([](uint64_t a) { return static_cast<uint32_t>(a >> 32); });

  add_comparisons<float>(t, "f32");
  t["add.rn.f32"] = op([](float a, float b) { return a + b; });
  t["sub.rn.f32"] = op([](float a, float b) { return a - b; });
  t["mul.rn.f32"] = op([](float a, float b) { return a * b; });
  t["mad.rn.f32"] = op([](float a, float b, float c) { return std::fma(a, b, c); });
  t["div.rn.f32"] = op([](float a, float b) { return a / b; });
  t["rcp.rn.f32"] = op([](float a) { return 1.0f / a; });
  t["sqrt.rn.f32"] = op([](float a) { return std::sqrt(a); });
  t["neg.f32"] = op([](uint32_t a) { return a ^ 0x80000000u; });
  t["abs.f32"] = op([](uint32_t a) { return a & 0x7fffffffu; });
  // With one NaN the other number; -0 is less than 0.
  t["min.f32"] = op([](float a, float b) {
    return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
  });
  t["max.f32"] = op([](float a, float b) {
    return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
  });
  t["min.NaN.f32"] = op([](float a, float b) { return least_of(a, b); });
  t["max.NaN.f32"] = op([](float a, float b) { return most_of(a, b); });
  add_pairs<bf16_value, bf16_bits>(t, "bf16x2");
  add_pairs<f16_value, f16_bits>(t, "f16x2");
  t["cvt.f32.f16"] = op([](uint16_t a) { return f16_value(a); });
  t["cvt.rzi.s32.f32"] =
      op([](float a) { return to_int<int32_t>(a, [](double x) { return std::trunc(x); }); });
  t["cvt.rzi.u32.f32"] =
      op([](float a) { return to_int<uint32_t>(a, [](double x) { return std::trunc(x); }); });
  t["cvt.rni.s32.f32"] =
      op([](float a) { return to_int<int32_t>(a, [](double x) { return std::nearbyint(x); }); });

  t["abs.s32"] = op([](uint32_t a) { return static_cast<int32_t>(a) < 0 ? 0 - a : a; });
  t["prmt.b32"] = op([](uint32_t a, uint32_t b, uint32_t c) { return permuted(a, b, c); });
  t["bfi.b32"] = op([](uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return inserted(a, b, c, d); });
  t["bfi.b64"] = op([](uint64_t a, uint64_t b, uint32_t c, uint32_t d) { return inserted(a, b, c, d); });
  t["bfe.u32"] = op([](uint32_t a, uint32_t b, uint32_t c) { return extracted(a, b, c); });
  t["lop3.b32"] = op([](uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return looked_up(a, b, c, d); });
  t["shf.l.wrap.b32"] = op([](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) << (c & 31) >> 32);
  });
  t["shf.r.wrap.b32"] = op([](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) >> (c & 31));
  });
  t["popc.b32"] = op([](uint32_t a) { return static_cast<uint32_t>(__builtin_popcount(a)); });
  t["clz.b32"] = op([](uint32_t a) { return static_cast<uint32_t>(a == 0 ? 32 : __builtin_clz(a)); });
  t["brev.b32"] = op([](uint32_t a) {
    uint32_t result = 0;
    for (int i = 0; i < 32; ++i) result |= (a >> i & 1u) << (31 - i);
    return result;
  });
  return t;
}

}  // namespace

const Opcode* opcode(const std::string& name) {
  static const Table table = make_table();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace ptx
