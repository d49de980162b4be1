// The work of a block of threads of this family: a block of queries, or a block of keys.
#pragma once
#include "../common/ragged.cuh"
#include "../common/work.cuh"
#include "config.cuh"

// The block's index. why opaque to the compiler: L5, for the rows that the epilogue stores.
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
    rows.end = smaller(rows.begin + kBlockQ, sequence.seqlen_q());
  }

  // The same work for the epilogue. why made again: its rows are then not held in registers over the loop.
  template <class Params>
  __device__ __forceinline__ DenseQueryWork again(const Params& p) const {
    return DenseQueryWork(p);
  }

  // Rows of out and lse that this block writes, of which those from rows.end on are not used.
  __device__ int written_end() const { return rows.end; }
};

// The same for sequences of several lengths, of which num_q_blocks counts all blocks of a head. why in shared memory: it
// is found by reading from memory, and a thread has no registers for it over the loop.
struct RaggedQueryWork {
  struct Found {
    Territory territory;
    RaggedSequence sequence;
    Range rows;
    int head, kv_head, part;

    template <class Params>
    __device__ Found(const Params& p, HeadBlock at)
        : territory(Territory::of_slot(p.problem, at.block, kBlockQ)),
          sequence(p.problem, territory),
          head(at.head / unsigned(p.num_slices)),
          kv_head(head / p.problem.heads_per_kv),
          part(at.head - head * p.num_slices) {
      rows.begin = territory.block * kBlockQ;
      rows.end = smaller(rows.begin + kBlockQ, sequence.seqlen_q());
    }
  };

  const Territory& territory;
  const RaggedSequence& sequence;
  const Range& rows;
  const int &head, &kv_head, &part;

  template <class Params>
  __device__ __forceinline__ explicit RaggedQueryWork(const Params& p) : RaggedQueryWork(found(p)) {}

  template <class Params>
  __device__ __forceinline__ const RaggedQueryWork& again(const Params&) const {
    return *this;
  }

  __device__ int written_end() const { return smaller(rows.begin + kBlockQ, territory.end - territory.begin); }

 private:
  __device__ __forceinline__ explicit RaggedQueryWork(const Found& x)
      : territory(x.territory), sequence(x.sequence), rows(x.rows), head(x.head), kv_head(x.kv_head), part(x.part) {}

  template <class Params>
  __device__ __forceinline__ static const Found& found(const Params& p) {
    __shared__ alignas(Found) char memory[sizeof(Found)];
    Found& shared = reinterpret_cast<Found&>(memory);
    if (threadIdx.x < 32) {
      const Found made(p, head_by_head(blockIdx.x, p.num_q_blocks));
      if (threadIdx.x == 0) shared = made;
    }
    __syncthreads();
    return shared;
  }
};

template <bool kOfSeveralLengths>
struct QueryWorkOf {
  using Type = DenseQueryWork;
};
template <>
struct QueryWorkOf<true> {
  using Type = RaggedQueryWork;
};
using QueryWork = QueryWorkOf<kLengths>::Type;

// A block of keys of one kv head, and the query heads that it takes; `part` is the share of them (a split).
struct KeyWork : Work {
  Sequence sequence;
  Range keys;
  Range heads;  // query heads

  __device__ __forceinline__ explicit KeyWork(const BackwardParams& p)
      : Work(longest_first(opaque_block_index(), p.num_k_blocks,
                           p.problem.batch * (p.problem.heads_q / p.problem.heads_per_kv) * p.splits, p.heads_together),
             unsigned(p.problem.heads_q / p.problem.heads_per_kv), unsigned(p.splits)),
        sequence{p.problem, batch} {
    const ProblemParams& problem = p.problem;
    keys.begin = block * kBlockK;
    keys.end = smaller(keys.begin + kBlockK, sequence.seqlen_k());
    const int heads_of_split = (problem.heads_per_kv + p.splits - 1) / p.splits;
    heads.begin = head * problem.heads_per_kv + part * heads_of_split;
    heads.end = smaller(heads.begin + heads_of_split, (head + 1) * problem.heads_per_kv);
  }
};
