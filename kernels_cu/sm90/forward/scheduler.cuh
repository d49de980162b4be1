// The tile scheduler of forward and lse on Hopper: query blocks of any heads, one after the other.
#pragma once
#include "varlen_scheduler.cuh"

// Schedules the work tiles of a thread block.
struct DenseTileScheduler : WorkCounter {
  __device__ __forceinline__ void advance(const TiledForwardParams& params) { take_next(params, params.num_tiles); }

  __device__ __forceinline__ DenseQueryWork work(const DenseParams& params) const {
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

using TileScheduler = Select<kVarlen, VarlenTileScheduler, DenseTileScheduler>;
