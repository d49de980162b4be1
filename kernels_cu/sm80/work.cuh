// The work of a block of threads of this family: a block of queries, or a block of keys.
#pragma once
#include "../common/sequence.cuh"
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
struct QueryWork : Work {
  Sequence sequence;
  Range rows;
  int kv_head;

  template <class Params>
  __device__ __forceinline__ explicit QueryWork(const Params& p)
      : Work(head_by_head(opaque_block_index(), p.num_q_blocks), unsigned(p.problem.heads_q), unsigned(p.num_slices)),
        sequence{p.problem, batch} {
    kv_head = head / p.problem.heads_per_kv;
    rows.begin = (p.num_q_blocks - 1 - block) * kBlockQ;
    rows.end = smaller(rows.begin + kBlockQ, sequence.seqlen_q());
  }
};

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
