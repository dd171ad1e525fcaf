// A GPU's part that runs a kernel: warps of 32 lanes, blocks of warps, and the memory that each may touch.
//
//   lane         0    1    2   ...  31
//   slot 0     [  one register: a value a lane, 32 or 64 bits each  ]
//   slot 1     [                                                    ]
//   place      [ which instruction each lane is at                  ]
//
// An instruction runs for all lanes that are at the same place, in one loop. Where lanes part at a branch,
// the lanes behind run first, until they have caught up; so lanes that part meet again. A lane that
// shuffles waits for the lanes of its mask, a thread at a barrier for its block.
//
// Behaviour undefined on a real GPU is a Fault here, which ends the launch: an address out of bounds or
// misaligned, a shuffle that a lane of its mask does not reach, threads at different barriers, words of
// shared memory that one thread writes and another touches with no barrier between.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAll = 0xffffffffu;
// Generic addresses from here on are of shared memory.
constexpr uint64_t kSharedWindow = uint64_t{1} << 60;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Warp;
struct Block;

// The effect of an instruction on its lanes, apart from values: they jump to another place, or wait.
enum class Kind { kPlain, kBranch, kReturn, kShuffle, kWarpBarrier, kBarrier };

struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, uint32_t lanes);

struct Opcode {
  Kind kind;
  Handler run;
  // Bytes of the result and of its operands, a digit each: "844" is 64 bits from two operands of 32; 0 is a
  // predicate.
  std::string widths;
};

// A row of numbers that translate.py wrote. at: slots, or ~number of a constant, or a number of its own.
struct Instruction {
  const Opcode* opcode;
  int32_t guard;  // slot of the predicate; -1: none
  int32_t negated;
  int32_t line;  // of the PTX
  std::array<int32_t, 8> at;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> instructions;
  std::vector<uint64_t> constants;  // a slot each
  int slots = 0;
  uint64_t shared_bytes = 0;
  std::vector<std::array<int, 2>> parameters;  // offset and bytes of each
  int parameter_bytes = 0;
};

struct Dim {
  uint32_t blocks, threads;
};

// Which bytes kernels may touch.
class Memory {
 public:
  // A multicast address, and the memory of each rank that receives a store there.
  uint64_t multicast = 0, multicast_bytes = 0;
  std::vector<uint64_t> copies;

  void allow(uint64_t first, uint64_t bytes, bool writable);
  void forget(uint64_t first) { ranges_.erase(first); }
  void check(uint64_t address, uint64_t bytes, bool writes) const;

 private:
  struct Range {
    uint64_t end;
    bool writable;
  };
  std::map<uint64_t, Range> ranges_;
};

// Shared memory of a block, and who touched each byte last: two threads that touch a byte, one to write, need
// a barrier between, or, in one warp, a __syncwarp().
class Shared {
 public:
  explicit Shared(uint64_t bytes) : bytes_(bytes, 0xcd), seen_(bytes) {}
  uint8_t* at(uint64_t address, uint64_t bytes, bool writes, const Warp& warp, int lane);

 private:
  static constexpr uint32_t kNobody = kAll, kMany = kAll - 1;
  struct Touch {
    uint32_t thread = kNobody, warp = kNobody;
    uint32_t barriers = 0, warp_barriers = 0;  // of its warp, until then
  };
  struct Seen {
    Touch write, read;
  };
  static bool races(const Touch& before, const Touch& now);
  std::vector<uint8_t> bytes_;
  std::vector<Seen> seen_;
};

struct Warp {
  Block* block = nullptr;
  uint32_t first_thread = 0;
  // Zeros that take no memory until they are touched: of many warps most end soon.
  std::unique_ptr<uint64_t, decltype(&free)> registers{nullptr, &free};
  std::array<int32_t, kLanes> place{};
  uint32_t running = 0, meeting = 0, at_barrier = 0;  // lanes; in none of them: they have ended
  uint32_t barriers = 0, warp_barriers = 0;           // so far

  const Kernel& kernel() const;
  // T of 32 lanes. Predicates and values with 16 bits or fewer have 32.
  template <class T>
  T* slot(int32_t number);

  // Runs up to `most` instructions, while a lane can. Returns how many it ran.
  uint64_t run(uint64_t most);
  bool ended() const { return (running | meeting | at_barrier) == 0; }

 private:
  void meet(bool last);
};

struct Launch;

struct Block {
  Launch* launch;
  uint32_t index;
  Shared shared;
  std::vector<Warp> warps;
  explicit Block(Launch* of, uint32_t number);
  // Releases all threads that wait for each other at a barrier. Returns true if it released any.
  bool pass_barrier();
  bool ended() const;
};

struct Launch {
  const Kernel* kernel;
  Dim grid;
  std::vector<uint8_t> parameters;
  uint64_t stream;
};

// The machine: its memory, its time, and the launches that wait in its streams.
class Machine {
 public:
  Memory memory;
  uint64_t now = 0;  // ns, one for every instruction of a warp
  bool queues = false;
  std::minstd_rand random{1};

  // Runs it, block after block; or puts it at the end of its stream, where the machine queues.
  void launch(Launch launch);
  // Runs the waiting launches: the first of every stream at the same time, warps interleaved at random. A
  // stream that is held begins that much later.
  void run_streams();
  void clear();
  std::map<uint64_t, uint64_t> held;  // stream -> ns

 private:
  void run_alone(Launch& launch);
  std::map<uint64_t, std::deque<Launch>> streams_;
};

Machine& machine();
const Opcode* opcode(const std::string& name);  // null: unknown

template <class T>
T* Warp::slot(int32_t number) {
  uint64_t* words = number >= 0 ? registers.get() : const_cast<uint64_t*>(kernel().constants.data());
  return reinterpret_cast<T*>(words + static_cast<size_t>(number >= 0 ? number : ~number) * kLanes);
}

}  // namespace ptx
