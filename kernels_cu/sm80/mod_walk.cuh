// The walk of a thread block over tiles of scores, for the gradient of a captured array.
//
// Sums are separate by some of sequence, head, query tile and key tile; these indices are fixed in a thread block. It
// walks over all others: sequences, heads, query tiles, and for each of these the visible key tiles. `parts` thread
// blocks divide a walk. A walk has a fixed order, and so have its sums.
#pragma once
#include "../common/varlen.cuh"
#include "../common/tile_range.cuh"
#include "config.cuh"

// The sequence of a tile. If varlen, it is in shared memory, in one of two slots: for the current tile, and for the
// next one.
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

  // All threads call it. The first barrier: threads may still read the slot's old sequence.
  __device__ __forceinline__ void find(int batch, int slot) const {
    __syncthreads();
    if (threadIdx.x == 0) slots[slot] = VarlenSequence(problem, batch);
    __syncthreads();
  }
  __device__ __forceinline__ const VarlenSequence& at(int, int slot) const { return slots[slot]; }
};

// A tile of the walk. All threads of the block have the same one.
struct WalkedTile {
  int step;  // step of the walk
  int batch, head, kv_head, q_tile, k_tile;
  int k_end;  // end of this step's key tiles
  int slot;   // slot of the sequence

  __device__ __forceinline__ int first_query() const { return q_tile * kBlockQ; }
  __device__ __forceinline__ int first_key() const { return k_tile * kBlockK; }

  // Returns the same tile, opaque to the compiler: otherwise it holds in registers all that derives from a tile that
  // stays.
  __device__ __forceinline__ WalkedTile forgotten() const {
    WalkedTile same = *this;
    asm volatile("" : "+r"(same.head), "+r"(same.kv_head), "+r"(same.q_tile), "+r"(same.k_tile));
    return same;
  }
};

struct ModWalk {
  const ModGradientParams& p;
  const WalkedSequences<kVarlen> sequences;
  int part, batch, head, q_tile, k_tile;  // fixed indices of the thread block; 0 for indices of the walk
  int end;                                // end of the part's steps

  __device__ __forceinline__ ModWalk(const ModGradientParams& params, WalkedSequences<kVarlen>::Memory& memory)
      : p(params), sequences(params.problem, memory) {
    unsigned rest = blockIdx.x;
    k_tile = p.by_key ? take(rest, p.num_k_tiles) : 0;
    q_tile = p.by_query ? take(rest, p.num_q_tiles) : 0;
    head = p.by_head ? take(rest, p.problem.heads_q) : 0;
    batch = p.by_sequence ? take(rest, p.problem.batch) : 0;
    part = rest, end = bound(part + 1);
  }

  // Sets `at` to the first tile; returns false if there is none.
  __device__ __forceinline__ bool begin(WalkedTile& at) const {
    at = {bound(part) - 1, -1, -1, 0, 0, 0, 0, 1};
    return next_step(at, 0);
  }

  // Advances to the next tile; returns false at the end.
  __device__ __forceinline__ bool advance(WalkedTile& at) const {
    if constexpr (ModTerm::kStays) return ++at.batch, ++at.step < end;  // all sequences have the same length
    return ++at.k_tile < at.k_end || next_step(at, at.slot ^ 1);
  }

 private:
  __device__ __forceinline__ static int take(unsigned& rest, int count) {
    const unsigned whole = rest / unsigned(count), found = rest - whole * unsigned(count);
    rest = whole;
    return found;
  }

  // Returns the first step of a part.
  __device__ __forceinline__ int bound(int part_idx) const {
    return static_cast<int>(static_cast<long long>(p.num_steps) * part_idx / p.parts);
  }

  // new_slot: the slot for another sequence.
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
      if (begin >= length) {  // only if varlen: the query tiles after this one do not exist either
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
