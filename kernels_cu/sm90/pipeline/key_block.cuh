// Key blocks of backward on Hopper, and how thread blocks share them.
#pragma once
#include "../../common/query_tiles.cuh"
#include "../../common/tile_scheduler.cuh"
#include "../config.cuh"
#include "visible_sequence.cuh"

using Params = WithMods<Select<kAccumulates, TiledBackwardSumsParams, TiledBackwardParams>>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");
static_assert(!kVarlen || kPaddedSlot % kBlockQ == 0, "a query tile would read the stats of another sequence");

using QueryTiles = QueryTilesOf<kBlockQ, kBlockK>;

// 2 to this power thread blocks share the query heads of each key block. A variant, as a parameter of zero costs up
// to 1.7 % at d 64 (L53).
__device__ __forceinline__ unsigned parts_log2(const TiledBackwardParams& p) { return kSharesHeads ? p.parts_log2 : 0; }

// Returns a part's query heads, counted from the first one of the kv head.
__device__ __forceinline__ Range heads_of_part(const TiledBackwardParams& p, int part) {
  const unsigned log2 = parts_log2(p);
  const int heads = p.problem.heads_per_kv;
  return {heads * part >> log2, heads * (part + 1) >> log2};
}

// A key block of dense sequences.
struct AnyKeyBlock {
  const Params& params;
  int batch, kv_head, block;
  Range steps;  // steps of this thread block; unused if block-sparse

  __device__ __forceinline__ explicit AnyKeyBlock(const Params& p) : params(p) {}

  // Goes to a key block, whose index counts over batch and kv heads.
  __device__ __forceinline__ void go_to(int index) {
    const ProblemParams& problem = params.problem;
    const Work work(head_by_head(index, params.num_k_blocks), unsigned(problem.heads_q / problem.heads_per_kv));
    batch = work.batch, kv_head = work.head, block = work.block;
  }

  __device__ __forceinline__ Sequence sequence() const { return {params.problem, batch}; }
  __device__ __forceinline__ WholeSequence whole_sequence() const {
    return {batch, params.problem.seqlen_q, params.problem.seqlen_k, 0, 0};
  }

  __device__ __forceinline__ QueryTiles query_tiles() const { return QueryTiles(*this, sequence().mask(), block); }
  __device__ __forceinline__ int num_query_tiles() const { return params.num_q_blocks; }

  // Nothing to schedule: each warp computes its key blocks itself, or pops them with their steps.
  __device__ __forceinline__ void schedule() const {}

  // Counters behind the semaphores of all dq tiles: of shared key blocks, then of work tiles taken.
  __device__ __forceinline__ unsigned* semaphores_behind() const {
    return params.semaphores + Sequence::num_query_heads(params.problem) * params.num_q_blocks;
  }
};
