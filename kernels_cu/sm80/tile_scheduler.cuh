// The work tile of an sm80 thread block: a block of queries, or a block of keys.
#pragma once
#include "../common/select.cuh"
#include "../common/varlen.cuh"
#include "../common/tile_scheduler.cuh"
#include "config.cuh"

// Returns the block's index, opaque to the compiler: the epilogue computes its rows again, instead of holding them
// (L5).
__device__ __forceinline__ unsigned opaque_block_index() {
  unsigned index = blockIdx.x;
  asm volatile("" : "+r"(index));
  return index;
}

// A block of queries of one query head; `part` is the slice of kHeadDimV columns of v and out. The last block of a
// head, the longest under a causal mask, comes first.
struct DenseQueryWork : Work {
  Sequence sequence;
  Range rows;
  int kv_head;

  template <class Params>
  __device__ __forceinline__ explicit DenseQueryWork(const Params& p)
      : Work(head_by_head(opaque_block_index(), p.num_q_blocks), unsigned(p.problem.heads_q), unsigned(p.num_slices)),
        sequence{p.problem, batch} {
    kv_head = head / p.problem.heads_per_kv;
    rows.begin = (p.num_q_blocks - 1 - block) * kBlockQ;
    rows.end = const_min(rows.begin + kBlockQ, sequence.seqlen_q());
  }

  // Returns the same work for the epilogue, computed again so that its rows hold no registers over the loop.
  template <class Params>
  __device__ __forceinline__ DenseQueryWork again(const Params& p) const {
    return DenseQueryWork(p);
  }

  // Returns the end of the rows of out and lse that this block writes; rows from rows.end on are unused.
  __device__ int written_end() const { return rows.end; }
  __device__ int sequence_idx() const { return batch; }
};

// Returns work that one warp finds and shares with the thread block. Shared memory, because it is read from global
// memory, and threads have no registers for it over the loop.
template <class Found, class Params>
__device__ __forceinline__ const Found& shared_by_block(const Params& p, HeadBlock at) {
  __shared__ alignas(Found) char memory[sizeof(Found)];
  Found& shared = reinterpret_cast<Found&>(memory);
  if (threadIdx.x < 32) {
    const Found found(p, at);
    if (threadIdx.x == 0) shared = found;
  }
  __syncthreads();
  return shared;
}

// A block of queries of a variable-length sequence. num_q_blocks counts the blocks of a head over all sequences.
struct VarlenQueryWork {
  struct Found {
    RowSlots row_slots;
    VarlenSequence sequence;
    Range rows;
    int head, kv_head, part;

    template <class Params>
    __device__ Found(const Params& p, HeadBlock at)
        : row_slots(RowSlots::of_slot(axis_of_queries(p.problem), at.block, kBlockQ)),
          sequence(p.problem, row_slots.sequence),
          head(at.head / unsigned(p.num_slices)),
          kv_head(head / p.problem.heads_per_kv),
          part(at.head - head * p.num_slices) {
      if (sequence.seqlen_q() == 0) sequence.q_place.begin = row_slots.begin;
      rows.begin = row_slots.row_from_end(at.block, kBlockQ);
      rows.end = const_min(rows.begin + kBlockQ, sequence.seqlen_q());
    }
  };

  const RowSlots& row_slots;
  const VarlenSequence& sequence;
  const Range& rows;
  const int &head, &kv_head, &part;

  template <class Params>
  __device__ __forceinline__ explicit VarlenQueryWork(const Params& p)
      : VarlenQueryWork(shared_by_block<Found>(p, head_by_head(blockIdx.x, p.num_q_blocks))) {}

  template <class Params>
  __device__ __forceinline__ const VarlenQueryWork& again(const Params&) const {
    return *this;
  }

  __device__ int written_end() const { return const_min(rows.begin + kBlockQ, row_slots.num_rows()); }
  // Not below 0: rows without a sequence do not use mods, but mods may load by this index.
  __device__ int sequence_idx() const { return const_max(row_slots.sequence, 0); }

 private:
  __device__ __forceinline__ explicit VarlenQueryWork(const Found& x)
      : row_slots(x.row_slots), sequence(x.sequence), rows(x.rows), head(x.head), kv_head(x.kv_head), part(x.part) {}
};

// A block of keys of one kv head, and its query heads; `part` is the split of the group's query heads.
struct DenseKeyWork : Work {
  Sequence sequence;
  Range keys;
  Range heads;  // query heads

  __device__ __forceinline__ explicit DenseKeyWork(const BackwardParams& p)
      : Work(lpt_order(opaque_block_index(), p.num_k_blocks,
                       p.problem.batch * (p.problem.heads_q / p.problem.heads_per_kv) * p.splits, p.heads_in_l2),
             unsigned(p.problem.heads_q / p.problem.heads_per_kv), unsigned(p.splits)),
        sequence{p.problem, batch} {
    keys.begin = block * kBlockK;
    keys.end = const_min(keys.begin + kBlockK, sequence.seqlen_k());
    heads = query_heads(p, head, part);
  }

  __device__ __forceinline__ static Range query_heads(const BackwardParams& p, int head, int part) {
    const int group = p.problem.heads_per_kv, heads_of_split = (group + p.splits - 1) / p.splits;
    const int begin = head * group + part * heads_of_split;
    return {begin, const_min(begin + heads_of_split, (head + 1) * group)};
  }

  // Returns the same work for the epilogue: see DenseQueryWork.
  __device__ __forceinline__ DenseKeyWork again(const BackwardParams& p) const { return DenseKeyWork(p); }

  __device__ __forceinline__ static constexpr bool exists() { return true; }
  __device__ __forceinline__ Place place_of_keys() const { return sequence.keys(); }
  __device__ __forceinline__ int sequence_idx() const { return batch; }
};

// A block of keys of a variable-length sequence. num_k_blocks counts the blocks of a head over all sequences. `keys`
// are the sequence's keys, used or not.
struct VarlenKeyWork {
  struct Found {
    RowSlots row_slots;
    VarlenSequence sequence;
    Range keys, heads;
    int head, part;

    __device__ Found(const BackwardParams& p, HeadBlock at)
        : row_slots(RowSlots::of_slot(axis_of_keys(p.problem), at.block, kBlockK)),
          sequence(p.problem, row_slots.sequence),
          head(at.head / unsigned(p.splits)),
          part(at.head - head * p.splits) {
      if (sequence.seqlen_k() == 0) sequence.k_place.begin = row_slots.begin;
      keys.begin = row_slots.row(at.block, kBlockK);
      keys.end = const_min(keys.begin + kBlockK, row_slots.num_rows());
      heads = DenseKeyWork::query_heads(p, head, part);
    }
  };

  const RowSlots& row_slots;
  const VarlenSequence& sequence;
  const Range &keys, &heads;
  const int &head, &part;

  __device__ __forceinline__ explicit VarlenKeyWork(const BackwardParams& p)
      : VarlenKeyWork(shared_by_block<Found>(p, head_by_head(blockIdx.x, p.num_k_blocks))) {}

  __device__ __forceinline__ const VarlenKeyWork& again(const BackwardParams&) const { return *this; }

  __device__ __forceinline__ bool exists() const { return keys.begin < sequence.seqlen_k(); }
  __device__ __forceinline__ const Place& place_of_keys() const { return sequence.k_place; }
  __device__ __forceinline__ int sequence_idx() const {
    return const_max(row_slots.sequence, 0);
  }  // not below 0: see VarlenQueryWork

 private:
  __device__ __forceinline__ explicit VarlenKeyWork(const Found& x)
      : row_slots(x.row_slots), sequence(x.sequence), keys(x.keys), heads(x.heads), head(x.head), part(x.part) {}
};

using QueryWork = Select<kVarlen, VarlenQueryWork, DenseQueryWork>;
using KeyWork = Select<kVarlen, VarlenKeyWork, DenseKeyWork>;
