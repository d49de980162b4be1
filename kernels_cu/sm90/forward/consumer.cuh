// The common part of the consumers of forward and lse on Hopper: key tiles, pipeline state and scores.
#pragma once
#include "../../common/score.cuh"
#include "../../ptx/warpgroup.cuh"
#include "tile_mods.cuh"
#include "producer.cuh"
#include "../pipeline/products.cuh"
#include "softmax.cuh"

using Scores = float[kBlockK / 2];

// Issues s = q kᵀ. Columns of q come from registers where they are there, which takes less energy (L20).
__device__ __forceinline__ void issue_qk(Scores& s, const Query& q, unsigned q_smem, unsigned k_smem) {
  const unsigned long long q_begin = wgmma_descriptor(q_smem), k_begin = wgmma_descriptor(k_smem);
  issue_abt<kHeadDim, kQSteps>(s, q, q_begin, kPanelBytesQ, k_begin, kPanelBytesK);
}

// True if a warpgroup may skip its first and its last key tile when they are fully masked. Only query blocks longer
// than a key tile gain (L33).
constexpr bool kSkipsTiles = kBlockQ > kBlockK && !kBlockSparse;

// The key tiles of a query block as one warpgroup sees them. Tiles go down, so the first one has the last keys. With
// skips_first the ring holds one more tile before them, with skips_last one more after them.
struct GroupKeys {
  TileRange tiles;  // tiles that the group computes
  bool skips_first = false, skips_last = false;
  TileRange unmasked;  // tiles that need no mask, as key tiles even if block-sparse
  int last_common;     // tile of the last key that all rows see, if any

  // Skipping depends on this work tile alone. A computed tile may add NaN from its v, and bits must not depend on the
  // previous work tile.
  __device__ __forceinline__ GroupKeys(const ProblemParams& problem, const QueryWork& work, int group)
      : tiles(work.keys) {
    if constexpr (kSkipsTiles) {
      const Range rows = group_rows(problem, work, group);
      const Range keys = work.sequence(problem).mask().key_range(rows.begin, rows.end);
      const TileRange visible = TileRange::touched(keys, kBlockK);
      // At most one tile a side: the group skips it while it holds a slot of v, and the ring is short.
      skips_first = tiles.count() > 1 && visible.end < tiles.end;
      tiles.end -= skips_first;
      skips_last = tiles.count() > 1 && visible.begin > tiles.begin;
      tiles.begin += skips_last;
    }
  }

  // Separate from the constructor, as it runs beside products (L31).
  __device__ __forceinline__ void find_unmasked(const ProblemParams& problem, const QueryWork& work, int group) {
    const Range rows = group_rows(problem, work, group);
    const Range common = work.sequence(problem).mask().full_range(rows.begin, rows.end);
    unmasked = TileRange::inside(common, kBlockK);
    if constexpr (!kAlwaysUpdatesMax) {
      last_common = (common.end - 1) / kBlockK;
      // Bounded here, as the loop over these tiles would do it in each iteration.
      unmasked.begin = const_max(unmasked.begin, tiles.begin);
    }
  }

 private:
  __device__ static Range group_rows(const ProblemParams& problem, const QueryWork& work, int group) {
    const int begin = kGroupRows * group;
    const Range queries = work.queries(problem, begin, begin + kGroupRows);
    return {queries.begin, const_min(queries.end, work.sequence(problem).seqlen_q())};
  }
};

// One consumer warp. `i` counts the work tiles of the thread block.
struct Consumer : Role {
  const int group, warp;  // the consumer's number; the warp's number within it
  unsigned i = 0;
  PipelineState ring;
  Query q;
  Scores s;
  Softmax softmax;

  __device__ __forceinline__ Consumer(const Role& role, int warp_idx)
      : Role(role), group(warp_idx / 4), warp(warp_idx % 4) {}

  __device__ __forceinline__ float scale_log2() const { return scale_log2_of(params.problem); }

  // Waits for a tile of the ring, and returns its address.
  __device__ __forceinline__ unsigned wait(const PipelineState& at) const {
    mbarrier_wait(smem.kv_full + 8 * at.slot, at.parity);
    return smem.kv + at.slot * kBytesSlot;
  }

  // Releases a tile that only products have read. No __syncwarp is needed: all lanes have waited for these products.
  __device__ __forceinline__ void release(unsigned slot) const {
    if (is_leader) mbarrier_arrive(smem.kv_empty + 8 * slot);
  }

  __device__ __forceinline__ void release_query() const {
    if (kLanesOfQ > 1 || is_leader) mbarrier_arrive(smem.q_empty(i, group));
  }

  __device__ __forceinline__ void skip() {
    wait(ring);
    release(ring.advance().slot);
  }

  // The warp's first row in the query block, this lane's queries, the mask, and the warp's rows of q.
  __device__ __forceinline__ int block_row() const { return group * kGroupRows + warp * 16; }
  __device__ __forceinline__ auto lane_queries(const QueryWork& work) const {
    return work.lane_queries(params.problem, block_row() + fresh_thread() % 32 / 4);
  }
  __device__ __forceinline__ Mask mask(const QueryWork& work) const { return work.sequence(params.problem).mask(); }
  __device__ __forceinline__ MissingPages missing_pages(unsigned k_slot) const { return {params, smem, k_slot}; }
  __device__ __forceinline__ unsigned q_smem() const { return smem.q_rows(i, group) + warp * 16 * 128; }

  // Issues s = q kᵀ of the next tile in the ring, and returns the tile's slot.
  __device__ __forceinline__ unsigned issue_next_qk() {
    issue_qk(s, q, smem.q_rows(i, group), wait(ring));
    return ring.advance().slot;
  }

  __device__ __forceinline__ void wait_query() {
    mbarrier_wait(smem.q_full(i, group), i / kQStages & 1);
    load_rows<kQSteps>(q, row_address(q_smem()), kPanelBytesQ);
  }

  // Issues s = q kᵀ of the first key tile that this warpgroup computes.
  __device__ __forceinline__ unsigned issue_first_qk(const GroupKeys& keys) {
    if (keys.skips_first) skip();
    wait_query();
    return issue_next_qk();
  }

  // Releases k of tile n (numbered as Step::n) once its scores are used. q is released after the last tile or, if it is
  // in registers, after the first. An earlier arrival would not wait for the loads (L40).
  __device__ __forceinline__ void release_k(const GroupKeys& keys, int n, unsigned k_slot) const {
    __syncwarp();  // all lanes have loaded q (see mbarrier_arrive_warp)
    release(k_slot);
    if (n == (kQInRegisters ? keys.tiles.end - 1 : keys.tiles.begin)) release_query();
  }

  // Waits for s of key tile n and turns it into weights, with any mask and a new maximum. The caller multiplies o by
  // o_scale. At most kPending groups of later products may still run.
  template <int kPending>
  __device__ __forceinline__ void softmax_tile(const GroupKeys& keys, int n, unsigned k_slot, float (&o_scale)[2]) {
    const QueryWork work = smem.work(i);  // read while products run (L31)
    const auto rows = lane_queries(work);
    const auto at = smem.tile(n, k_slot);
    const int tile = at.n();
    const TileMods tile_mods(params, work);
    const auto mod_tile = tile_mods.tile(rows, tile * kBlockK);
    wgmma_wait<kPending>(s);
    Score{params.problem.score}.apply(s);
    tile_mods.apply(mod_tile, s, at.is_full(group));
    if (tile >= keys.unmasked.end) {
      mask(work).apply_end(s, rows, tile * kBlockK, fresh_thread() % 4);
      // Tests the warp's first row, which sees the fewest of these keys. A test for each lane's row takes 1 % of a
      // step.
      const auto first = work.lane_queries(params.problem, block_row());
      if (kPacksLimits || mask(work).end(first[0]) < tile * kBlockK + kFewKeys)
        softmax.begin_with_few(rows, mask(work));
    }
    if (tile < keys.unmasked.begin) mask(work).apply_begin(s, rows, tile * kBlockK, fresh_thread() % 4);
    missing_pages(k_slot).apply(s, fresh_thread() % 4);
    softmax.update_max(s, scale_log2(), o_scale);
    float sums[2];
    softmax.exponentiate(s, scale_log2(), sums);
    softmax.add(sums);
  }

  // Computes the factors that normalise this lane's rows of o, and their lse. Rows without visible keys get the factor
  // 0. Rows that no sequence uses see no sink either.
  __device__ __forceinline__ void finish(const QueryWork& work, const Softmax& softmax, float (&o_scale)[2],
                                         float (&lse)[2]) const {
    const auto rows = lane_queries(work);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.finish(h, o_scale[h], lse[h]);
      TileMods(params, work).finish(o_scale[h], lse[h]);
      if (kVarlen && rows[h] >= work.sequence(params.problem).seqlen_q()) o_scale[h] = 0.0f, lse[h] = -infinity();
    }
  }

  // Stores lse of this lane's rows.
  __device__ __forceinline__ void store_lse(const QueryWork& work, const float (&lse)[2]) const {
    const auto sequence = work.sequence(params.problem);
    const int lane = fresh_thread() % 32, row = work.row_begin + block_row() + lane / 4;
    float* const rows = params.lse + sequence.lse_offset(work.head);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (lane % 4 == 0 && row + 8 * h < sequence.written_end()) rows[row + 8 * h] = lse[h];
  }
};
