// The fused all-reduce of csrc/cuda/two_shot.h on the host: every block of every rank is a thread, the ranks
// share their workspaces, and nothing orders them but the words through which the blocks meet. The blocks of
// a rank wait for each other between two calls, as the kernels of a stream do.
// tests/collectives/test_two_shot.py compares the results with the codec. With -DTWO_SHOT_MAIN it is a
// program for a race detector.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

// Accesses on which a device would fault.
static std::atomic<long> misaligned{0};
#define FLASH_ALIGNED(p, bytes) \
  (reinterpret_cast<uintptr_t>(p) % (bytes) != 0 ? static_cast<void>(++misaligned) : static_cast<void>(0))

#include "../../csrc/cuda/two_shot.h"
#include "host_warp.h"

using namespace flash_allreduce;

// A call as all ranks make it: inputs, expected and results of rank r lie `numel` elements after those of
// rank r - 1. The results begin `offset` elements after an address that 64 divides.
struct HostCall {
  const uint8_t* inputs;
  const uint8_t* expected;  // of every rank; null: not compared
  int64_t numel;
  int32_t type, bits, gather_bits, group_size, options, offset, one_shot, staged;
  float factor;
  uint64_t gather_key;
  uint64_t reduce_keys[kMostRanks];
};

// How a group runs.
struct HostRun {
  int32_t world, blocks;
  int64_t half;       // bytes of half a workspace
  uint32_t count;     // meetings before the first call
  uint32_t seed;      // of the delays; 0: none
  int32_t slow_rank;  // waits in each call; -1: none
  int32_t dead_rank;  // makes no call; -1: none
  int32_t broken;  // 1, 2: no block waits at the first, the second meeting; 4: one half for all calls; 8: the
                   // count starts again with each call; 16: blocks count for themselves alone
  int32_t multicast;  // there is one address of all workspaces
  uint64_t timeout;   // ns
  uint32_t reports[kMostRanks];
  int64_t lost;  // elements of results that are NaN
};

namespace {

constexpr int kGuard = 64;  // bytes around a tensor and a workspace

void sleep_ns(long ns) {
  const timespec time{0, ns};
  nanosleep(&time, nullptr);
}

struct HostMemory {
  void store(uint8_t* to, uint32_t value) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(to), value, __ATOMIC_RELEASE);
  }
  uint32_t load(const uint8_t* from) {
    return __atomic_load_n(reinterpret_cast<const uint32_t*>(from), __ATOMIC_ACQUIRE);
  }
  uint64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
  }
  void pause() { std::this_thread::yield(); }
};

// The end of a kernel: blocks of a rank wait for each other.
class Stream {
 public:
  explicit Stream(int blocks) : blocks_(blocks) {}
  void end_of_call() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int call = call_;
    if (++waiting_ == blocks_) {
      waiting_ = 0;
      ++call_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return call_ != call; });
    }
  }

 private:
  int blocks_, waiting_ = 0, call_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

struct HostBlock {
  const TwoShot& call;
  HostRun& run;
  std::minstd_rand& random;
  int index, blocks;
  HostMemory memory = {};

  uint8_t* word(int64_t at) const { return call.workspaces[call.rank] + at; }
  uint32_t count() { return run.broken & 8 ? run.count : memory.load(word(kCountsAt + index * 4)); }
  void set_count(uint32_t n) {
    const int step = run.broken & 16 ? kMostBlocks : blocks;
    for (int other = index; other < kMostBlocks; other += step) memory.store(word(kCountsAt + other * 4), n);
  }
  bool failed() { return memory.load(word(kFailedAt)) != 0; }

  template <class F>
  void each_item(int items, F f) {
    delay();
    for (int item = 0; item < items; ++item) {
      HostWarp warp;
      alignas(16) uint8_t image[kMostPieceBytes] = {};
      f(warp, item, image);
    }
  }

  void copy(const uint8_t* image, uint8_t* to, int bytes) {
    for (int i = 0; i < bytes; i += static_cast<int>(sizeof(Words))) put_words(to + i, get_words(image + i));
  }

  void copy_to_all(const uint8_t* image, uint8_t* to, int bytes) {
    for (int peer = 0; peer < call.world; ++peer) {
      copy(image, call.workspaces[peer] + (to - call.multicast), bytes);
    }
  }

  bool meet(uint32_t n) {
    delay();
    for (int peer = 0; peer < call.world; ++peer) {
      if (peer != call.rank) tell(memory, call, index, peer, n);
    }
    if (run.broken & (n % 2 ? 1 : 2)) return true;
    bool came = true;
    for (int peer = 0; peer < call.world; ++peer) {
      if (peer == call.rank || await(memory, call, index, peer, n)) continue;
      came = false;
      uint32_t none = 0;
      __atomic_compare_exchange_n(&run.reports[call.rank], &none, report_of(peer, index, n), false,
                                  __ATOMIC_RELAXED, __ATOMIC_RELAXED);
      memory.store(word(kFailedAt), 1);
    }
    return came;
  }

  void delay() {
    if (call.rank == run.slow_rank) sleep_ns(100000);
    if (run.seed == 0) return;
    const unsigned chance = random() % 16;
    if (chance == 0) sleep_ns(1000 * (random() % 100));
    if (chance < 4) std::this_thread::yield();
  }
};

template <class F>
void with_type(int type, F f) {
  if (type == 0) f(std::integral_constant<DType, DType::kFloat32>());
  if (type == 1) f(std::integral_constant<DType, DType::kBFloat16>());
  if (type == 2) f(std::integral_constant<DType, DType::kFloat16>());
}

// An area between guards.
struct Area {
  std::vector<uint8_t> bytes;
  size_t size;
  uint8_t* data;
  explicit Area(size_t n) : bytes(n + 3 * kGuard, 0xA5), size(n) {
    const auto at = reinterpret_cast<uintptr_t>(bytes.data());
    data = bytes.data() + kGuard + (kGuard - at % kGuard) % kGuard;
  }
  bool guarded() const {
    for (const uint8_t* p = bytes.data(); p < bytes.data() + bytes.size(); ++p) {
      if ((p < data || p >= data + size) && *p != 0xA5) return false;
    }
    return true;
  }
};

}  // namespace

// Runs the calls in the given order. Returns how many results, of a call on a rank, are not the expected
// ones, or -1 if something was written outside of its place or read or written where a device would fault.
extern "C" int64_t two_shot_run(HostRun* run, const HostCall* calls, const int32_t* order, int64_t count) {
  size_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const HostCall& c = calls[order[i]];
    most = std::max(most, static_cast<size_t>((c.numel + c.offset) * (c.type == 0 ? 4 : 2)));
  }
  misaligned = 0;
  std::vector<Area> workspaces, tensors;
  for (int rank = 0; rank < run->world; ++rank) {
    workspaces.emplace_back(static_cast<size_t>(kHeaderBytes + 2 * run->half));
    tensors.emplace_back(most);
    memset(workspaces[static_cast<size_t>(rank)].data, 0, kHeaderBytes);
    auto* words = reinterpret_cast<uint32_t*>(workspaces[static_cast<size_t>(rank)].data);
    for (int64_t i = 0; i < kFailedAt / 4; ++i) words[i] = run->count;
  }
  std::vector<std::unique_ptr<Stream>> streams;
  for (int rank = 0; rank < run->world; ++rank) streams.push_back(std::make_unique<Stream>(run->blocks));
  std::atomic<int64_t> wrong{0}, lost{0};

  const auto block_of_rank = [&](int rank, int index) {
    std::minstd_rand random(run->seed + static_cast<unsigned>(rank * run->blocks + index));
    for (int64_t i = 0; i < count; ++i) {
      const HostCall& c = calls[order[i]];
      const int64_t bytes = c.numel * (c.type == 0 ? 4 : 2);
      uint8_t* tensor = tensors[static_cast<size_t>(rank)].data + c.offset * (c.type == 0 ? 4 : 2);
      TwoShot call{tensor,
                   c.numel,
                   c.offset == 0,
                   Form(c.bits, c.group_size, c.options),
                   Form(c.gather_bits, c.group_size, c.options),
                   c.factor,
                   c.reduce_keys[rank],
                   c.gather_key,
                   rank,
                   run->world,
                   c.one_shot != 0,
                   c.staged != 0,
                   {},
                   // Nothing lies there: only copy_to_all() may use it.
                   run->multicast ? reinterpret_cast<uint8_t*>(uintptr_t{1} << 60) : nullptr,
                   run->broken & 4 ? 0 : run->half,
                   run->timeout};
      for (int peer = 0; peer < run->world; ++peer) {
        call.workspaces[peer] = workspaces[static_cast<size_t>(peer)].data;
      }
      if (index == 0) memcpy(tensor, c.inputs + rank * bytes, static_cast<size_t>(bytes));
      streams[static_cast<size_t>(rank)]->end_of_call();
      const int blocks = std::min(stripes_of(c.numel, run->world, call.one_shot), run->blocks);
      HostBlock block{call, *run, random, index, blocks};
      if (index < blocks)
        with_type(c.type, [&](auto t) {
          if (c.options & ~(kSymmetricCodes | kCompact)) {
            two_shot<t.value, true>(block, call);
          } else {
            two_shot<t.value, false>(block, call);
          }
        });
      streams[static_cast<size_t>(rank)]->end_of_call();
      if (index != 0) continue;
      if (c.expected) wrong += memcmp(tensor, c.expected, static_cast<size_t>(bytes)) != 0;
      with_type(c.type, [&](auto t) {
        constexpr int size = element_bytes(t.value);
        for (int64_t k = 0; k < c.numel; ++k) {
          const float x = to_float<t.value>(get(tensor + k * size, size, size));
          lost += x != x;
        }
      });
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < run->world; ++rank) {
    for (int index = 0; rank != run->dead_rank && index < run->blocks; ++index) {
      threads.emplace_back(block_of_rank, rank, index);
    }
  }
  for (std::thread& thread : threads) thread.join();
  run->lost = lost;
  bool guarded = misaligned == 0;
  for (const Area& area : workspaces) guarded = guarded && area.guarded();
  for (const Area& area : tensors) guarded = guarded && area.guarded();
  return guarded ? wrong.load() : -1;
}

extern "C" int64_t two_shot_half_bytes(int64_t numel, int world, int one_shot, int bits, int gather_bits,
                                       int group_size, int options) {
  return half_bytes(numel, world, one_shot != 0, Form(bits, group_size, options),
                    Form(gather_bits, group_size, options));
}

extern "C" int64_t two_shot_header_bytes() { return kHeaderBytes; }
extern "C" int two_shot_most_blocks() { return kMostBlocks; }

#if defined(TWO_SHOT_MAIN)
#include <cstdio>

// Random calls. Their results equal those of the same calls without delays and with one block.
int main(int argc, char** argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 200, broken = argc > 2 ? atoi(argv[2]) : 0;
  for (int world = 2; world <= kMostRanks; world += 3) {
    std::minstd_rand random(static_cast<unsigned>(world));
    std::vector<HostCall> calls;
    std::vector<std::vector<float>> inputs;
    std::vector<int32_t> order;
    for (int i = 0; i < count; ++i) {
      HostCall c{};
      c.numel = i % 7 ? random() % 20000 : 0;
      c.bits = 2 + static_cast<int>(random() % 7);
      c.gather_bits = 2 + static_cast<int>(random() % 7);
      c.group_size = 32 << random() % 6;
      c.options = random() % 2 ? 0 : kSpikes | kHadamard | kCompact;
      c.one_shot = random() % 3 == 0;
      c.staged = static_cast<int>(random() % 2);
      c.factor = 0.5f;
      inputs.emplace_back(static_cast<size_t>(c.numel * world) + 1);
      for (float& x : inputs.back()) x = static_cast<float>(random() % 2001) - 1000.0f;
      c.inputs = reinterpret_cast<const uint8_t*>(inputs.back().data());
      calls.push_back(c);
      order.push_back(i);
    }
    HostRun run{
        world, 3, 600000, 0, 1, world / 2, -1, broken, world / 3 % 2, broken ? 500000000u : 60000000000u,
        {},    0};
    printf("world %d: %ld\n", world,
           static_cast<long>(two_shot_run(&run, calls.data(), order.data(), count)));
  }
}
#endif
