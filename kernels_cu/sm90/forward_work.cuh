// The work of forward and lse on Hopper: query blocks of any heads, one after the other.
#pragma once
#include "../common/sequence.cuh"
#include "../common/tile_range.cuh"
#include "../common/work.cuh"
#include "config.cuh"

static_assert(sizeof(TiledForwardParams) == kParamsBytes, "the host packs other parameters");

constexpr int kNoWork = -1;

// A query block of a head. It has at least one key tile, if only to find that nothing is seen.
struct QueryWork {
  int row_begin;  // kNoWork once there is no more
  TileRange keys;
  int head, kv_head, batch;

  __device__ __forceinline__ bool exists() const { return row_begin != kNoWork; }
  __device__ __forceinline__ Sequence sequence(const ProblemParams& problem) const { return {problem, batch}; }
};

// Deals out the work of a block of threads: the first by the block's index; the others as the counter hands them out
// or, without a counter, at a fixed distance.
struct WorkQueue {
  unsigned index = blockIdx.x;

  __device__ __forceinline__ void advance(const TiledForwardParams& params) {
    if (params.counter == nullptr) {
      index += gridDim.x;
    } else {
      unsigned taken = 0;
      if (threadIdx.x == 0) {
        taken = atomicAdd(params.counter, 1u);
        // why: the counter must be zero for the next launch. Each piece of work beyond the first of a block counts
        // once, and so does the last question of each block, which finds none.
        if (taken == params.num_tiles - 1) atomicExch(params.counter, 0u);
      }
      taken = __shfl_sync(0xffffffffu, taken, 0);
      index = gridDim.x + taken;
    }
  }

  __device__ __forceinline__ QueryWork work(const TiledForwardParams& params) const {
    if (index >= params.num_tiles) return {kNoWork};
    const ProblemParams& problem = params.problem;
    const unsigned num_blocks = params.num_q_blocks;
    const Work work(longest_first(index, num_blocks, params.num_tiles / num_blocks, params.heads_together),
                    problem.heads_q);
    const Sequence sequence{problem, work.batch};
    QueryWork query_work;
    query_work.row_begin = (num_blocks - 1 - work.block) * kBlockQ;
    query_work.head = work.head, query_work.kv_head = work.head / problem.heads_per_kv, query_work.batch = work.batch;
    const int row_end = smaller(query_work.row_begin + kBlockQ, sequence.seqlen_q());
    query_work.keys = TileRange::touched(sequence.mask().key_range(query_work.row_begin, row_end), kBlockK);
    query_work.keys.end = larger(query_work.keys.end, query_work.keys.begin + 1);
    return query_work;
  }
};
