// The work of forward and lse on Hopper: query blocks of any heads, one after the other.
#pragma once
#include "decode_scheduler.cuh"

// A query block of a head. It has at least one key tile, if only to find that nothing is seen.
struct alignas(16) DenseQueryWork : AllKeys<kBlockSparse> {
  int row_begin;  // kNoWork once there is no more
  TileRange keys;
  int head, kv_head, batch;

  __device__ __forceinline__ static DenseQueryWork none() {
    DenseQueryWork work = {};
    work.row_begin = kNoWork;
    return work;
  }

  // As in VarlenQueryWork.
  __device__ __forceinline__ Range queries(const ProblemParams&, int begin, int end) const {
    return {row_begin + begin, row_begin + end};
  }
  __device__ __forceinline__ LaneQueries lane_queries(const ProblemParams&, int row) const { return {row_begin + row}; }

  __device__ __forceinline__ bool exists() const { return row_begin != kNoWork; }
  __device__ __forceinline__ Sequence sequence(const ProblemParams& problem) const { return {problem, batch}; }
  __device__ __forceinline__ int sequence_idx() const { return batch; }
  __device__ __forceinline__ int seqlen_k(const ProblemParams& problem) const { return problem.seqlen_k; }
};

// Schedules the work of a thread block.
struct DenseTileScheduler : WorkCounter {
  __device__ __forceinline__ void advance(const TiledForwardParams& params) { take_next(params, params.num_tiles); }

  __device__ __forceinline__ DenseQueryWork work(const WithMods<TiledForwardParams>& params) const {
    if (index >= params.num_tiles) return DenseQueryWork::none();
    const ProblemParams& problem = params.problem;
    const unsigned num_blocks = params.num_q_blocks;
    const Work work(lpt_order(index, num_blocks, params.num_tiles / num_blocks, params.heads_in_l2), problem.heads_q);
    const Sequence sequence{problem, work.batch};
    DenseQueryWork query_work;
    query_work.row_begin = (num_blocks - 1 - work.block) * kBlockQ;
    query_work.head = work.head, query_work.kv_head = work.head / problem.heads_per_kv, query_work.batch = work.batch;
    const int row_end = const_min(query_work.row_begin + kBlockQ, sequence.seqlen_q());
    query_work.keys = TileRange::touched(sequence.mask().key_range(query_work.row_begin, row_end), kBlockK);
    query_work.keys.end = const_max(query_work.keys.end, query_work.keys.begin + 1);
    number_visible(params, query_work);
    return query_work;
  }
};

template <bool kIsVarlen, bool kOfFewQueries>
struct TiledWorkOf {
  using Type = DenseQueryWork;
  using Scheduler = DenseTileScheduler;
};
template <>
struct TiledWorkOf<true, false> {
  using Type = VarlenQueryWork;
  using Scheduler = VarlenTileScheduler;
};
template <>
struct TiledWorkOf<true, true> {
  using Type = DecodeWork;
  using Scheduler = DecodeTileScheduler;
};
using QueryWork = TiledWorkOf<kVarlen, kDecode>::Type;
using TileScheduler = TiledWorkOf<kVarlen, kDecode>::Scheduler;
