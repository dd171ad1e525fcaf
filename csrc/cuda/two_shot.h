// The two-shot kernel, an all-reduce in one launch for ranks that can write each other's memory: the code of
// one block of one rank. One text for the device (two_shot.cu) and the host (tests/host/two_shot.cpp), as
// codec_warp.h, which has the arithmetic.
//
// A piece is the 1024 elements of a warp; piece q is owned by rank q mod world, which sums it. `world` pieces
// that follow each other, one of each owner, are a stripe. On every rank block s mod blocks works on stripe s.
// (With NCCL a rank owns a contiguous shard instead. The owner does not change the bits of a sum, and this way
// small calls use all ranks and many blocks, without padding.)
//
//   tensor    | piece 0    | piece 1    | piece 2    | piece 3    | piece 4    | ...      (world = 3)
//   owner       rank 0       rank 1       rank 2       rank 0       rank 1
//               stripe 0, block 0                      stripe 1, block 1
//
//   encode    every rank encodes its elements of piece q into the owner's inbox          (peers' memory)
//   meet      with the blocks of the same number
//   sum       the owner sums a piece's records in rank order, encodes the sum, and writes
//             it into every rank's sums                                                  (peers' memory)
//   meet
//   decode    every rank decodes all sums, its own included
//
// One shot. In a call of few bytes a meeting takes longer than the wire. There every rank owns every piece, a
// piece is a stripe, and every rank encodes into the inboxes of all ranks. Every rank sums all pieces and
// encodes the sums for itself, and needs no second meeting. The bits are the same: every rank sums and encodes
// the same records.
//
//   encode    every rank encodes its elements of piece q into every rank's inbox         (peers' memory)
//   meet
//   sum       every rank sums a piece's records, encodes the sum, and writes it into its own sums
//   decode
//
// The order of the peers. Where every transfer crosses PCIe's root, ranks that write to all others together
// reach a fraction of the speed of one at a time (flashinfer 4393). There all blocks of a rank write the pieces
// of one owner after those of another, and start with the rank after it: one stream out of each rank and one
// into it, while the ranks keep step, and no remote reads. Elsewhere blocks start with different owners, which
// keeps all links of an NVLink mesh busy.
//
// Multicast. If the GPUs share a multicast address (NVLink SHARP), a store to all ranks is one store.
//
// Workspace of a rank, written by its peers. A piece's records begin at a multiple of 16 bytes:
//
//   | arrived [most blocks][8] | counts [most blocks] | failed | ... 4096 bytes | half 0 | half 1 |
//   half:  inbox  | stripe 0: from rank 0 | from rank 1 | ... | stripe 1: from rank 0 | ...
//          sums   | piece 0 | piece 1 | piece 2 | ...
//
// Meeting. Every block counts its meetings: counts[b], in its own rank's memory, two for each call. A call
// has a block for each stripe, up to a number that the ranks have agreed upon; its blocks count for those
// that are not launched too, so that between two calls all counts of all ranks are the same. The numbers are
// on the device and not the host's, so that a graph can be replayed. To meet for the n-th time, block b of
// rank r writes n to arrived[b][r] of every peer (release) and waits until its own arrived[b][*] are all n or
// more (acquire). A word has one writer and only grows: no word is reset, a peer that is ahead by one meeting
// does no harm, and no atomic has to cross a PCIe link. (Torch's signal pads must be left zero, which takes a
// compare-and-swap by both sides; these words lie in our own allocation instead. Differences are taken modulo
// 2^32: they may wrap.)
//
// Why two halves and no further meeting. Call n uses half n mod 2. Rank r writes that half again in call
// n + 2. No peer still reads it then:
//
//   1  rank r begins call n + 2 after its own call n + 1 has ended: kernels of a stream do not overlap;
//   2  in call n + 1 its block 0 met block 0 of every peer: each peer had begun call n + 1;
//   3  so each peer had ended call n, and with it its reads of half n mod 2.
//
// Block 0 meets in every call, because a call has at least one stripe. The layout of a half may differ between
// calls. Within a call, inbox and sums are separate, and a block reads only the writes of blocks with its
// number before their meeting. The same block reads and writes the tensor.
//
// A missing peer. A wait ends after the group's timeout. The block then reports the peer, marks the workspace
// as failed and writes NaN to its pieces, so that a half-reduced tensor is noticed. Every later call of the
// workspace, in replayed graphs too, writes NaN immediately. The host reads the report before its next call and
// raises. No trap: it would destroy the CUDA context of the process, and the error message.
#pragma once

#include "codec_warp.h"

namespace flash_allreduce {

constexpr int kMostRanks = 8;
// The blocks of a call must be resident together, because a block waits for its peers'. To be measured.
constexpr int kMostBlocks = 64;
constexpr int kPieceElements = kWarpElements;
constexpr int kPieceAlign = 16;

constexpr int64_t kCountsAt = int64_t{kMostBlocks} * kMostRanks * 4;
constexpr int64_t kFailedAt = kCountsAt + kMostBlocks * 4;
constexpr int64_t kHeaderBytes = 4096;
static_assert(kFailedAt + 4 <= kHeaderBytes, "the halves begin behind the header");

FLASH_HD constexpr int64_t arrived_at(int block, int source) {
  return (int64_t{block} * kMostRanks + source) * 4;
}

FLASH_HD constexpr int padded_bytes(int64_t bytes) {
  return static_cast<int>((bytes + kPieceAlign - 1) / kPieceAlign * kPieceAlign);
}

// Bytes of a piece in an inbox or among the sums.
FLASH_HD int piece_bytes(const Form& form) {
  return padded_bytes(int64_t{kPieceElements / form.group_size} * form.record);
}

// Groups of 32 with 8 bits and spikes have the most.
constexpr int kMostPieceBytes =
    padded_bytes(kPieceElements / kMinGroupSize * record_bytes(kMaxBits, kMinGroupSize, kSpikes));

FLASH_HD constexpr int pieces_a_stripe(int world, bool one_shot) { return one_shot ? 1 : world; }

FLASH_HD int stripes_of(int64_t numel, int world, bool one_shot) {
  const int width = pieces_a_stripe(world, one_shot);
  const int64_t pieces = (numel + kPieceElements - 1) / kPieceElements;
  return static_cast<int>((pieces + width - 1) / width);
}

// The bytes that a call needs of half a workspace.
FLASH_HD int64_t half_bytes(int64_t numel, int world, bool one_shot, const Form& reduce, const Form& gather) {
  return int64_t{stripes_of(numel, world, one_shot)} *
         (world * piece_bytes(reduce) + pieces_a_stripe(world, one_shot) * piece_bytes(gather));
}

// A call, on one rank. The forms differ in their width alone.
struct TwoShot {
  uint8_t* tensor;
  int64_t numel;
  bool fast;  // 16 divides the tensor's address
  Form reduce, gather;
  float factor;
  uint64_t reduce_key, gather_key;
  int rank, world;
  bool one_shot, staged;
  uint8_t* workspaces[kMostRanks];  // of every rank, at this rank's addresses
  uint8_t* multicast;               // of all together; null: there is none
  int64_t half;                     // bytes
  uint64_t timeout;                 // ns
};

// n or a later meeting; 2^31 of them may lie between.
FLASH_HD constexpr bool has_come(uint32_t arrived, uint32_t n) {
  return static_cast<int32_t>(arrived - n) >= 0;
}

// Memory: store (release) and load (acquire) of a word as all ranks see it, now() in ns, pause().
template <class Memory>
FLASH_HD void tell(Memory& memory, const TwoShot& call, int block, int peer, uint32_t n) {
  memory.store(call.workspaces[peer] + arrived_at(block, call.rank), n);
}

template <class Memory>
FLASH_HD bool await(Memory& memory, const TwoShot& call, int block, int peer, uint32_t n) {
  const uint8_t* arrived = call.workspaces[call.rank] + arrived_at(block, peer);
  if (has_come(memory.load(arrived), n)) return true;
  for (const uint64_t start = memory.now(); memory.now() - start <= call.timeout; memory.pause()) {
    if (has_come(memory.load(arrived), n)) return true;
  }
  return false;
}

// The work of a block of a rank in a call. The block provides:
//
//   index, blocks                   the number of the block, and of all blocks: a stripe each, or more
//   count(), set_count(n)           its meetings so far; also for the blocks that are not launched
//   failed()                        true if a call has failed in this workspace
//   each_item(n, f)                 a warp calls f(warp, item, image) for each item 0 ... n - 1, the same
//                                   warp for the same n
//                                   image: kMostPieceBytes of memory of the warp alone
//   copy(image, to, bytes)          a warp copies 16 bytes at a time, for the whole warp to see
//   copy_to_all(image, to, bytes)   the same, to a multicast address
//   meet(n)                         all warps of the block: peers can read the writes before it;
//                                   false: a peer is missing
template <DType kType, bool kOptions, class Block>
FLASH_HD void two_shot(Block& block, const TwoShot& call) {
  const int world = call.world, rank = call.rank, groups_a_piece = kPieceElements / call.reduce.group_size;
  const int width = pieces_a_stripe(world, call.one_shot);
  const int stripes = stripes_of(call.numel, world, call.one_shot);
  const int mine = (stripes - block.index - 1) / block.blocks + 1;
  const uint32_t count = block.count();
  const int64_t inbox = kHeaderBytes + (count / 2 % 2 ? call.half : 0);
  const int reduce_bytes = piece_bytes(call.reduce), gather_bytes = piece_bytes(call.gather);
  const int64_t sums = inbox + int64_t{stripes} * world * reduce_bytes;
  uint8_t* const own = call.workspaces[rank];

  const auto stripe_of = [&](int number) { return block.index + number * block.blocks; };
  // Elements from the piece's first to the tensor's end; 0 or less: there is no such piece.
  const auto left_of = [&](int piece) { return call.numel - int64_t{piece} * kPieceElements; };
  const auto row_of = [&](int piece) {
    return call.tensor + int64_t{piece} * kPieceElements * element_bytes(kType);
  };
  const auto sent_bytes = [&](int64_t left, const Form& form) {
    const int64_t groups = num_groups(left, form.group_size);
    return padded_bytes((groups < groups_a_piece ? groups : groups_a_piece) * form.record);
  };
  const auto align_of = [](const Form& form) { return form.record % 4 == 0 ? 4 : 2; };
  // f(warp, piece, elements from its first on, image) for the pieces of the block's stripes, owner after
  // owner.
  const int first_owner = rank + 1 + (call.staged ? 0 : block.index);
  const auto each_piece = [&](auto f) {
    block.each_item(mine * width, [&](auto& warp, int item, uint8_t* image) {
      const int piece = stripe_of(item % mine) * width + (first_owner + item / mine) % width;
      if (left_of(piece) > 0) f(warp, piece, left_of(piece), image);
    });
  };
  // A piece's records, to one rank or to all, the next one first.
  const auto send = [&](const uint8_t* image, int64_t at, int bytes, bool all, int to) {
    if (all && call.multicast != nullptr) {
      block.copy_to_all(image, call.multicast + at, bytes);
      return;
    }
    for (int step = 0; step < (all ? world : 1); ++step) {
      block.copy(image, call.workspaces[all ? (rank + 1 + step) % world : to] + at, bytes);
    }
  };

  bool complete = !block.failed();
  if (complete) {
    each_piece([&](auto& warp, int piece, int64_t left, uint8_t* image) {
      warp_encode<kType, kOptions>(warp, call.reduce, row_of(piece), left, call.fast, 0, call.reduce_key,
                                   int64_t{piece} * groups_a_piece, image);
      const int64_t at = inbox + (int64_t{piece / width} * world + rank) * reduce_bytes;
      send(image, at, sent_bytes(left, call.reduce), call.one_shot, piece % width);
    });
    complete = block.meet(count + 1);
  }
  if (complete) {
    block.each_item(mine, [&](auto& warp, int item, uint8_t* image) {
      const int stripe = stripe_of(item), piece = stripe * width + (call.one_shot ? 0 : rank);
      const int64_t left = left_of(piece);
      if (left <= 0) return;
      const Sources from{own + inbox + int64_t{stripe} * world * reduce_bytes, world, reduce_bytes,
                         align_of(call.reduce)};
      warp_decode_sum_encode<kOptions>(warp, call.reduce, call.gather, from, call.factor, 0,
                                       num_groups(left, call.gather.group_size), call.gather_key,
                                       int64_t{piece} * groups_a_piece, image);
      send(image, sums + int64_t{piece} * gather_bytes, sent_bytes(left, call.gather), !call.one_shot, rank);
    });
    // In one shot a warp reads its own writes.
    if (!call.one_shot) complete = block.meet(count + 2);
  }
  if (complete) {
    each_piece([&](auto& warp, int piece, int64_t left, uint8_t*) {
      const Sources from{own + sums + int64_t{piece} * gather_bytes, 1, 0, align_of(call.gather)};
      warp_decode_sum<kType, kOptions>(warp, call.gather, from, 1.0f, row_of(piece), left, call.fast, 0);
    });
    block.set_count(count + 2);
    return;
  }
  each_piece([&](auto& warp, int piece, int64_t left, uint8_t*) {
    warp.each([&](int lane, Lane& lost) {
      FLASH_UNROLL
      for (float& x : lost.x) x = bits_float(kNaNBits);
      store_lane<kType>(lost, lane, call.reduce, row_of(piece), left, lane / call.reduce.lanes, call.fast);
    });
  });
}

// The report of a block to the host: the missing peer, and the place. Never 0.
FLASH_HD constexpr uint32_t report_of(int peer, int block, uint32_t n) {
  return 1u | static_cast<uint32_t>(peer) << 8 | static_cast<uint32_t>(block) << 16 |
         (n & 1u ? 0u : 1u) << 24;
}

}  // namespace flash_allreduce
