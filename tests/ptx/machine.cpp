#include "machine.h"

#include <algorithm>
#include <sstream>

namespace ptx {
namespace {

int lane_of(uint32_t lanes) { return __builtin_ctz(lanes); }

std::string hex(uint64_t value) {
  std::ostringstream text;
  text << std::hex << value;
  return text.str();
}

// The lanes that an instruction is for, of those that are at it.
uint32_t guarded(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (i.guard == -1) return lanes;
  const uint32_t* predicate = warp.slot<uint32_t>(i.guard);
  uint32_t found = 0;
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    const int lane = lane_of(left);
    if ((predicate[lane] != 0) != (i.negated != 0)) found |= 1u << lane;
  }
  return found;
}

}  // namespace

// ---- memory ---------------------------------------------------------------------------------------------

void Memory::allow(uint64_t first, uint64_t bytes, bool writable) {
  if (bytes != 0) ranges_[first] = {first + bytes, writable};
}

void Memory::check(uint64_t address, uint64_t bytes, bool writes) const {
  const auto refuse = [&](const std::string& why) {
    throw Fault((writes ? "a store of " : "a load of ") + std::to_string(bytes) + " bytes " + why);
  };
  if (address % bytes != 0) refuse("at the misaligned address " + hex(address));
  const auto after = ranges_.upper_bound(address);
  if (after == ranges_.begin()) refuse("out of bounds, before all tensors");
  const Range& range = std::prev(after)->second;
  if (address + bytes > range.end) {
    refuse("out of bounds, " + std::to_string(address + bytes - range.end) + " beyond the end of a tensor");
  }
  if (writes && !range.writable) refuse("to what is only read");
}

bool Shared::races(const Touch& before, const Touch& now) {
  if (before.thread == kNobody || before.thread == now.thread || before.barriers != now.barriers)
    return false;
  return before.warp != now.warp || before.warp_barriers == now.warp_barriers;
}

uint8_t* Shared::at(uint64_t address, uint64_t bytes, bool writes, const Warp& warp, int lane) {
  const auto refuse = [&](const std::string& what) {
    throw Fault(what + ": " + (writes ? "a store of " : "a load of ") + std::to_string(bytes) + " bytes at " +
                std::to_string(address) + " of shared memory");
  };
  if (address % bytes != 0) refuse("misaligned");
  if (address + bytes > bytes_.size()) refuse("out of bounds");
  const Touch now{warp.first_thread + static_cast<uint32_t>(lane), warp.first_thread / kLanes, warp.barriers,
                  warp.warp_barriers};
  for (uint64_t i = address; i < address + bytes; ++i) {
    Seen& seen = seen_[i];
    if (races(seen.write, now) || (writes && races(seen.read, now))) {
      const uint32_t other = races(seen.write, now) ? seen.write.thread : seen.read.thread;
      refuse("a race of lane " + std::to_string(lane) + " with " +
             (other == kMany ? "several threads" : "thread " + std::to_string(other)));
    }
    if (writes) {
      seen.write = now;
    } else if (races(seen.read, now)) {  // of two that read: a later store races with both
      seen.read = {kMany, seen.read.warp == now.warp ? now.warp : kMany, now.barriers, now.warp_barriers};
    } else {
      seen.read = now;
    }
  }
  return bytes_.data() + address;
}

// ---- warps ----------------------------------------------------------------------------------------------

const Kernel& Warp::kernel() const { return *block->launch->kernel; }

uint64_t Warp::run(uint64_t most) {
  const std::vector<Instruction>& program = kernel().instructions;
  uint64_t done = 0;
  const Instruction* i = nullptr;
  uint32_t lanes = 0;
  try {
    while (running != 0 && done < most) {
      int32_t at = INT32_MAX, next = INT32_MAX;  // of the lanes that are behind, and of the others
      for (uint32_t left = running; left != 0; left &= left - 1) {
        const int32_t there = place[lane_of(left)];
        if (there < at) next = at, at = there, lanes = 0;
        if (there == at) lanes |= left & -left;
        if (there > at) next = std::min(next, there);
      }
      const auto stay = [&](uint32_t those, int32_t there) {
        for (; those != 0; those &= those - 1) place[lane_of(those)] = there;
      };
      for (bool together = true; together;) {
        if (at >= next || done == most) {
          stay(lanes, at);
          break;
        }
        i = &program[at];
        const uint32_t does = guarded(*this, *i, lanes);
        ++done;
        ++machine().now;
        switch (i->opcode->kind) {
          case Kind::kPlain:
            if (does != 0) i->opcode->run(*this, *i, does);
            ++at;
            break;
          case Kind::kBranch:
            if (does == lanes) {
              at = i->at[0];
            } else if (does == 0) {
              ++at;
            } else {
              stay(does, i->at[0]);
              stay(lanes & ~does, at + 1);
              together = false;
            }
            break;
          case Kind::kReturn:
            running &= ~does;
            stay(lanes & ~does, at + 1);
            together = false;
            break;
          case Kind::kShuffle:
          case Kind::kWarpBarrier:
          case Kind::kBarrier:
            stay(does, at);
            stay(lanes & ~does, at + 1);
            running &= ~does;
            (i->opcode->kind == Kind::kBarrier ? at_barrier : meeting) |= does;
            meet(false);
            together = false;
            break;
        }
      }
      if (running == 0 && meeting != 0) meet(true);
      if (running == 0 && at_barrier != 0) {
        // Only whole warps wait at a barrier, all their lanes at the same.
        lanes = at_barrier;
        i = &program[place[lane_of(lanes)]];
        if (at_barrier != kAll) throw Fault("a barrier that some lanes of the warp do not reach");
        for (const int32_t there : place) {
          if (there != place[0]) throw Fault("lanes of a warp at different barriers");
        }
      }
    }
  } catch (const Fault& fault) {
    std::ostringstream where;
    where << "PTX: " << fault.what() << ". Line " << (i ? i->line : 0) << ", block " << block->index
          << ", warp " << first_thread / kLanes << ", lanes " << hex(lanes) << ", of " << kernel().name;
    throw Fault(where.str());
  }
  return done;
}

// Lets lanes exchange that wait for each other. last: no lane of the warp can come any more.
void Warp::meet(bool last) {
  for (uint32_t left = meeting; left != 0;) {
    const int32_t there = place[lane_of(left)];
    uint32_t here = 0;
    for (uint32_t rest = meeting; rest != 0; rest &= rest - 1) {
      if (place[lane_of(rest)] == there) here |= rest & -rest;
    }
    left &= ~here;
    const Instruction& i = kernel().instructions[there];
    const uint32_t* masks = slot<uint32_t>(i.at[i.opcode->kind == Kind::kShuffle ? 4 : 0]);
    const uint32_t mask = masks[lane_of(here)];
    for (uint32_t rest = here; rest != 0; rest &= rest - 1) {
      if (!(masks[lane_of(rest)] >> lane_of(rest) & 1))
        throw Fault("a lane that is not in the mask of its shuffle");
    }
    if ((mask & here) == mask) {
      for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        if (masks[lane_of(rest)] != mask) throw Fault("lanes that shuffle with different masks");
      }
      if (i.opcode->kind == Kind::kShuffle) {
        i.opcode->run(*this, i, mask);
      } else {
        ++warp_barriers;
      }
      for (uint32_t rest = mask; rest != 0; rest &= rest - 1) ++place[lane_of(rest)];
      meeting &= ~mask;
      running |= mask;
    } else if (last || (mask & ~(running | meeting)) != 0) {
      throw Fault("a shuffle that lanes " + hex(mask & ~here) + " of its mask do not reach");
    }
  }
}

// ---- blocks ---------------------------------------------------------------------------------------------

Block::Block(Launch* of, uint32_t number)
    : launch(of), index(number), shared(of->kernel->shared_bytes), warps(of->grid.threads / kLanes) {
  for (size_t w = 0; w < warps.size(); ++w) {
    warps[w].block = this;
    warps[w].first_thread = static_cast<uint32_t>(w * kLanes);
    warps[w].running = kAll;
  }
}

bool Block::ended() const {
  return std::all_of(warps.begin(), warps.end(), [](const Warp& w) { return w.ended(); });
}

bool Block::pass_barrier() {
  for (const Warp& w : warps) {
    if (w.at_barrier != kAll) return false;
  }
  const int32_t there = warps[0].place[0];
  for (const Warp& w : warps) {
    if (w.place[0] != there)
      throw Fault("PTX: warps of a block at different barriers, of " + launch->kernel->name);
  }
  const Instruction& i = launch->kernel->instructions[there];
  // Of the predicate that the barrier may reduce.
  const bool reduces = i.at[2] != 0, of_any = i.at[2] == 2;
  uint32_t result = of_any ? 0 : 1;
  for (Warp& w : warps) {
    const uint32_t* given = w.slot<uint32_t>(i.at[1]);
    for (int lane = 0; reduces && lane < kLanes; ++lane)
      result = of_any ? result | given[lane] : result & given[lane];
  }
  for (Warp& w : warps) {
    if (reduces) std::fill_n(w.slot<uint32_t>(i.at[0]), kLanes, result);
    for (int32_t& place : w.place) ++place;
    w.at_barrier = 0;
    w.running = kAll;
    ++w.barriers;
  }
  return true;
}

// ---- launches -------------------------------------------------------------------------------------------

namespace {

void prepare(Warp& warp) {
  if (warp.registers != nullptr) return;
  const auto slots = static_cast<size_t>(warp.kernel().slots);
  warp.registers.reset(static_cast<uint64_t*>(calloc(slots + 1, kLanes * sizeof(uint64_t))));
}

[[noreturn]] void stuck(const Block& block) {
  throw Fault("PTX: block " + std::to_string(block.index) +
              " waits at a barrier that not all of its threads reach, of " + block.launch->kernel->name);
}

constexpr uint64_t kEndless = uint64_t{1} << 32;  // instructions

}  // namespace

void Machine::launch(Launch launch) {
  if (queues) {
    streams_[launch.stream].push_back(std::move(launch));
  } else {
    run_alone(launch);
  }
}

void Machine::run_alone(Launch& launch) {
  for (uint32_t number = 0; number < launch.grid.blocks; ++number) {
    Block block(&launch, number);
    std::vector<Warp*> order;
    for (Warp& w : block.warps) order.push_back(&w);
    std::shuffle(order.begin(), order.end(), random);
    do {
      for (Warp* w : order) {
        prepare(*w);
        if (w->run(kEndless) == kEndless) throw Fault("PTX: a kernel without an end, " + launch.kernel->name);
      }
    } while (block.pass_barrier());
    if (!block.ended()) stuck(block);
  }
}

void Machine::run_streams() {
  std::map<uint64_t, std::vector<std::unique_ptr<Block>>> active;
  std::vector<std::pair<uint64_t, Warp*>> warps;
  const uint64_t start = now;
  const auto begin = [&](uint64_t stream) {
    std::deque<Launch>& queue = streams_[stream];
    for (uint32_t number = 0; number < queue.front().grid.blocks; ++number) {
      Block& block = *active[stream].emplace_back(new Block(&queue.front(), number));
      for (Warp& w : block.warps) warps.emplace_back(stream, &w);
    }
  };
  for (auto& [stream, queue] : streams_) {
    if (!queue.empty()) begin(stream);
  }
  while (!warps.empty()) {
    const size_t number = random() % warps.size();
    const auto [stream, warp] = warps[number];
    Block& block = *warp->block;
    if (held.count(stream) != 0 && now - start < held[stream]) {
      ++now;
      continue;
    }
    prepare(*warp);
    // Seldom long, so that others come at every place.
    warp->run(1 + random() % (random() % 8 == 0 ? 4000 : 100));
    if (warp->running != 0) continue;
    warps[number] = warps.back();
    warps.pop_back();
    if (warp->ended()) warp->registers.reset();
    if (block.pass_barrier()) {
      for (Warp& w : block.warps) warps.emplace_back(stream, &w);
      continue;
    }
    const bool all_stopped =
        std::none_of(block.warps.begin(), block.warps.end(), [](const Warp& w) { return w.running != 0; });
    if (all_stopped && !block.ended()) stuck(block);
    auto& blocks = active[stream];
    if (std::all_of(blocks.begin(), blocks.end(), [](const auto& b) { return b->ended(); })) {
      blocks.clear();
      streams_[stream].pop_front();
      if (!streams_[stream].empty()) begin(stream);
    }
  }
}

void Machine::clear() {
  streams_.clear();
  held.clear();
}

Machine& machine() {
  static Machine the_one;
  return the_one;
}

}  // namespace ptx
