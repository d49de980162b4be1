// The tiles of scores that a thread block goes over for the gradient of a captured array.
//
// Sums stand apart by some of sequence, head, query tile and key tile: these are the block's own. It walks over all
// others: sequences, heads, query tiles, and for each of these the key tiles that some of its queries see. `parts`
// thread blocks share a walk. What is walked has one order, so that sums have it, too.
#pragma once
#include "../common/varlen.cuh"
#include "../common/tile_range.cuh"
#include "config.cuh"

// The sequence of a tile. If varlen, it lies in memory, in one of two slots: that of the tile at hand, and that of the
// tile after it.
template <bool kIsVarlen>
struct WalkedSequences {
  struct Memory {};
  const ProblemParams& problem;

  __device__ __forceinline__ WalkedSequences(const ProblemParams& p, Memory&) : problem(p) {}
  __device__ __forceinline__ void find(int, int) const {}
  __device__ __forceinline__ Sequence at(int batch, int) const { return {problem, batch}; }
};
template <>
struct WalkedSequences<true> {
  struct Memory {
    alignas(VarlenSequence) char slots[2][sizeof(VarlenSequence)];
  };
  const ProblemParams& problem;
  VarlenSequence* slots;

  __device__ __forceinline__ WalkedSequences(const ProblemParams& p, Memory& memory)
      : problem(p), slots(reinterpret_cast<VarlenSequence*>(memory.slots)) {}

  // All threads call. why the first barrier: some may still read what the slot held.
  __device__ __forceinline__ void find(int batch, int slot) const {
    __syncthreads();
    if (threadIdx.x == 0) slots[slot] = VarlenSequence(problem, batch);
    __syncthreads();
  }
  __device__ __forceinline__ const VarlenSequence& at(int, int slot) const { return slots[slot]; }
};

// A tile. All threads of the block are at the same one.
struct WalkedTile {
  int step;  // of the walk
  int batch, head, kv_head, q_tile, k_tile;
  int k_end;  // the end of the key tiles of this step
  int slot;   // of the sequence

  __device__ __forceinline__ int first_query() const { return q_tile * kBlockQ; }
  __device__ __forceinline__ int first_key() const { return k_tile * kBlockK; }

  // The same, of which the compiler does not know so. why: what is made of a tile that stays would be held in
  // registers.
  __device__ __forceinline__ WalkedTile forgotten() const {
    WalkedTile same = *this;
    asm volatile("" : "+r"(same.head), "+r"(same.kv_head), "+r"(same.q_tile), "+r"(same.k_tile));
    return same;
  }
};

struct ModWalk {
  const ModGradientParams& p;
  const WalkedSequences<kVarlen> sequences;
  int part, batch, head, q_tile, k_tile;  // of the block, 0 where it walks
  int end;                                // of the steps of the part

  __device__ __forceinline__ ModWalk(const ModGradientParams& params, WalkedSequences<kVarlen>::Memory& memory)
      : p(params), sequences(params.problem, memory) {
    unsigned rest = blockIdx.x;
    k_tile = p.by_key ? take(rest, p.num_k_tiles) : 0;
    q_tile = p.by_query ? take(rest, p.num_q_tiles) : 0;
    head = p.by_head ? take(rest, p.problem.heads_q) : 0;
    batch = p.by_sequence ? take(rest, p.problem.batch) : 0;
    part = rest, end = bound(part + 1);
  }

  // Goes to the first tile. False: there is none.
  __device__ __forceinline__ bool begin(WalkedTile& at) const {
    at = {bound(part) - 1, -1, -1, 0, 0, 0, 0, 1};
    return next_step(at, 0);
  }

  // Goes to the tile after this one.
  __device__ __forceinline__ bool advance(WalkedTile& at) const {
    if constexpr (ModTerm::kStays) return ++at.batch, ++at.step < end;  // all sequences are equally long
    return ++at.k_tile < at.k_end || next_step(at, at.slot ^ 1);
  }

 private:
  __device__ __forceinline__ static int take(unsigned& rest, int count) {
    const unsigned whole = rest / unsigned(count), found = rest - whole * unsigned(count);
    rest = whole;
    return found;
  }

  // The first step of a part.
  __device__ __forceinline__ int bound(int part_idx) const {
    return static_cast<int>(static_cast<long long>(p.num_steps) * part_idx / p.parts);
  }

  // new_slot: where another sequence is to be scheduled.
  __device__ __forceinline__ bool next_step(WalkedTile& at, int new_slot) const {
#pragma unroll 1
    while (++at.step < end) {
      unsigned rest = at.step;
      at.q_tile = p.by_query ? q_tile : take(rest, p.num_q_tiles);
      const int new_head = p.by_head ? head : take(rest, p.problem.heads_q);
      if (new_head != at.head) at.head = new_head, at.kv_head = new_head / p.problem.heads_per_kv;
      const int new_batch = p.by_sequence ? batch : static_cast<int>(rest);
      if (new_batch != at.batch) {
        at.batch = new_batch, at.slot = new_slot;
        sequences.find(new_batch, new_slot);
      }
      const auto& sequence = sequences.at(at.batch, at.slot);
      const int begin = at.first_query(), length = sequence.seqlen_q();
      if (begin >= length) {  // only if varlen: no query tile after this one is there
        if (!p.by_query) at.step += p.num_q_tiles - 1 - at.q_tile;
        continue;
      }
      const Range keys = sequence.mask().key_range(begin, const_min(begin + kBlockQ, length));
      const TileRange tiles = TileRange::covering(keys, kBlockK);
      at.k_tile = p.by_key ? k_tile : tiles.begin, at.k_end = p.by_key ? k_tile + 1 : tiles.end;
      if (at.k_tile >= tiles.begin && at.k_tile < tiles.end) return true;
    }
    return false;
  }
};
