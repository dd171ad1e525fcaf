// Runs kernels that translate.py made of PTX: a thread is a fiber, which waits for others where its warp
// shuffles and where its block meets. Every address is checked.
//
//   block 0 | thread 0 ... 31 | 32 ... 63 | ...      each runs until it waits or ends, in turn; then the
//   warps
//           | warp 0            warp 1               whose lanes all wait exchange, then the block
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A GPU writes one NaN, of these bits.
inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return x != x ? 0x7fffffffu : bits;
}

template <class T>
T read(const uint8_t* p) {
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
void write(uint8_t* p, T value) {
  memcpy(p, &value, sizeof value);
}

// prmt: bytes of b:a by their numbers, 4 bits each; the highest bit asks for its sign.
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t numbers) {
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
inline uint32_t inserted(uint32_t a, uint32_t b, uint32_t first, uint32_t count) {
  for (uint32_t i = 0; i < (count & 255u) && (first & 255u) + i < 32; ++i) {
    const uint32_t bit = (first & 255u) + i;
    b = (b & ~(1u << bit)) | (a >> i & 1u) << bit;
  }
  return b;
}

constexpr int kThreads = 256, kLanes = 32;
constexpr size_t kStackBytes = 128 * 1024;

struct Memory {
  uint64_t first, bytes;
  bool writable;
};

std::vector<Memory> memories;
long errors = 0;
uint8_t nowhere[64];

enum class State { kRuns, kShuffles, kAtBarrier, kEnded };

struct Thread {
  uint32_t index, block, blocks;
  uint8_t** parameters;
  std::vector<uint8_t>* block_memory;
  ucontext_t* scheduler;
  ucontext_t fiber;
  State state = State::kRuns;
  int site = 0;
  uint32_t given = 0, from = 0, received = 0;

  uint32_t lane() const { return index % kLanes; }

  void fail(const char* what) const {
    if (errors++ < 10) fprintf(stderr, "PTX: %s, block %u, thread %u, site %d\n", what, block, index, site);
  }

  uint8_t* global(uint64_t address, uint64_t bytes, bool writes) const {
    if (address % bytes != 0) fail("a misaligned address");
    for (const Memory& m : memories) {
      if (address < m.first || address + bytes > m.first + m.bytes) continue;
      if (writes && !m.writable) fail("a store to what is only read");
      return reinterpret_cast<uint8_t*>(address);
    }
    fail(writes ? "a store out of bounds" : "a load out of bounds");
    return nowhere;
  }

  uint8_t* shared(uint32_t address, uint32_t bytes) const {
    if (address % bytes != 0) fail("a misaligned address in shared memory");
    if (address + bytes <= block_memory->size()) return block_memory->data() + address;
    fail("an access out of shared memory");
    return nowhere;
  }

  uint32_t shuffle(int where, uint32_t value, uint32_t from_lane, bool all_lanes) {
    if (!all_lanes) fail("a shuffle of some lanes");
    given = value;
    from = from_lane;
    wait(State::kShuffles, where);
    return received;
  }

  void barrier(int where) { wait(State::kAtBarrier, where); }

 private:
  void wait(State what, int where) {
    state = what;
    site = where;
    swapcontext(&fiber, scheduler);
  }
};

struct Kernel {
  const char* name;
  void (*run)(Thread&);
  size_t shared_bytes;
};

Thread* entering;
void (*entered)(Thread&);

void enter() {
  Thread& t = *entering;
  entered(t);
  t.state = State::kEnded;
  setcontext(t.scheduler);
}

// Lanes or threads that all wait: whether they wait for the same; they go on.
bool meet(Thread* threads, int count, State what) {
  for (int i = 0; i < count; ++i) {
    if (threads[i].state != what) return false;
  }
  for (int i = 0; i < count; ++i) {
    if (threads[i].site != threads[0].site) threads[i].fail("others wait elsewhere");
    if (what == State::kShuffles) threads[i].received = threads[threads[i].from % kLanes].given;
  }
  for (int i = 0; i < count; ++i) threads[i].state = State::kRuns;
  return true;
}

void run_block(const Kernel& kernel, uint32_t block, uint32_t blocks, uint8_t** parameters) {
  static std::vector<uint8_t> stacks(kThreads * kStackBytes);
  std::vector<uint8_t> shared(kernel.shared_bytes, 0xcd);
  const std::unique_ptr<Thread[]> threads(new Thread[kThreads]);
  ucontext_t scheduler;
  for (uint32_t i = 0; i < kThreads; ++i) {
    Thread& t = threads[i];
    t.index = i, t.block = block, t.blocks = blocks;
    t.parameters = parameters;
    t.block_memory = &shared;
    t.scheduler = &scheduler;
    getcontext(&t.fiber);
    t.fiber.uc_stack.ss_sp = stacks.data() + i * kStackBytes;
    t.fiber.uc_stack.ss_size = kStackBytes;
    t.fiber.uc_link = nullptr;
    makecontext(&t.fiber, enter, 0);
  }
  entered = kernel.run;
  for (bool any = true; any;) {
    any = false;
    for (int i = 0; i < kThreads; ++i) {
      if (threads[i].state != State::kRuns) continue;
      any = true;
      entering = &threads[i];
      swapcontext(&scheduler, &threads[i].fiber);
    }
    for (int i = 0; i < kThreads; i += kLanes) any |= meet(&threads[i], kLanes, State::kShuffles);
    any |= meet(threads.get(), kThreads, State::kAtBarrier);
  }
  for (int i = 0; i < kThreads; ++i) {
    if (threads[i].state != State::kEnded) threads[i].fail("a thread that waits for others that do not come");
  }
}

extern const std::vector<Kernel> kernels;  // of translate.py

extern "C" {

// What the next launch may touch.
void allow(uint64_t first, uint64_t bytes, int writable) {
  memories.push_back({first, bytes, writable != 0});
}

// The kernel whose name has `part` in it, on `blocks` blocks of 256 threads. How many errors there were; -1:
// there is no such kernel.
long launch(const char* part, uint32_t blocks, uint8_t** parameters) {
  errors = 0;
  const Kernel* found = nullptr;
  for (const Kernel& kernel : kernels) {
    if (strstr(kernel.name, part) != nullptr) found = &kernel;
  }
  if (found == nullptr) return -1;
  for (uint32_t block = 0; block < blocks; ++block) run_block(*found, block, blocks, parameters);
  memories.clear();
  return errors;
}
}
