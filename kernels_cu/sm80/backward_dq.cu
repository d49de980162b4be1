// dq alone, for one block of queries of one head. backward.cu then computes dk and dv only, and each sum has a fixed
// order (deterministic sums, L39).
//
//   s = q kᵀ, dp = dout vᵀ      per key tile
//   p = exp(s - lse)            ds = p (dp - delta) slope      in registers, see pointwise.cuh
//   dq += ds k
//
// Roles    As in forward.cu: every warp owns kBlockQ / kNumWarps queries and all keys, and all threads copy.
// Ring     kStages tiles of k and of v.
//          1 stage:   the next tile is fetched once every warp is done with this one
//          2 stages:  the next tile is fetched while this one is computed
// Barriers of the thread block, for each tile:
//          (A)  the tile has arrived, and with two stages every warp is done with the previous tile
//          (B)  with one stage: every warp is done with the tile
#include "../common/float_rows.cuh"
#include "gemm_ab.cuh"
#include "pointwise.cuh"
#include "rows.cuh"
#include "scores.cuh"

struct SharedStorage {
  alignas(128) char q[kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char dout[kBlockQ * kHeadDimV * kElementBytes];
  alignas(128) char k[kStages][kBlockK * kHeadDim * kElementBytes];
  alignas(128) char v[kStages][kBlockK * kHeadDimV * kElementBytes];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
using Params = WithMods<BackwardDqParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");
static_assert(kPaddedSlot % kBlockQ == 0, "a query tile would read the stats of another sequence");

using Scores = float[kFragments][kBlockK / 2];

// True if lse and delta are read again for each tile: before Hopper, holding them over all tiles spills (L3).
#if __CUDA_ARCH__ < 900
constexpr bool kReadsStatsAgain = kIsTf32 && kHeadDim == 256;
#else
constexpr bool kReadsStatsAgain = false;
#endif

// Sets stats[r] to lse and delta of the lane's row r.
__device__ __forceinline__ void read_stats(float2 (&stats)[2 * kFragments], const Params& params,
                                           const QueryBlock& work) {
  const float2* const of_lane = params.stats + work.sequence.rows_offset(work.head, params.stats_rows) + lane_row(work);
#pragma unroll
  for (int r = 0; r < 2 * kFragments; ++r) stats[r] = of_lane[8 * r];
}

// Replaces s and dp by p and ds. stats[r] is lse and delta of the lane's row r.
template <bool kPlain>
__device__ __forceinline__ void tile_p_and_ds(Scores& s, Scores& dp, const Score& score,
                                              const float2 (&stats)[2 * kFragments]) {
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int i = 0; i < kBlockK / 2; ++i) {
      const float2 x = stats[2 * m + i / 2 % 2];
      p_and_ds<kPlain>(s[m][i], dp[m][i], score, x.x, x.y);
    }
  }
}

// Replaces s and dp of key tile n by p and ds, with mods.
template <bool kAsksMask>
__device__ __forceinline__ void tile_p_and_ds_with_mods(Scores& s, Scores& dp, const QueryBlock& work, int n,
                                                        const float2 (&stats)[2 * kFragments]) {
  const int first = n * kBlockK, column_pair = fresh_thread() % 4;
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
    const LaneQueries queries{lane_row(work) + 16 * m};
    const Kept<kBlockK / 2> kept = work.dropout.kept<kBlockK % 32 == 0, kBlockK / 2>(queries, first, column_pair);
    const ModHead::Row rows[2] = {work.mod_head.row(queries[0], first + 2 * column_pair),
                                  work.mod_head.row(queries[1], first + 2 * column_pair)};
    ModHead::Pair pair;
#pragma unroll
    for (int i = 0; i < kBlockK / 2; ++i) {
      const int half = i / 2 % 2, column = i / 4 * 8 + i % 2;
      if (i % 2 == 0) pair = work.mod_head.pair(rows[half], column);
      const ModHead::Result result = work.mod_head.at(rows[half], pair, s[m][i], column);
      const float2 x = stats[2 * m + half];
      p_and_ds_with_mods<kAsksMask>(s[m][i], dp[m][i], work.score, result, kept.has(i), work.dropout.scale(), x.x, x.y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned q_smem = smem_address(storage.q), dout_smem = smem_address(storage.dout);
  const unsigned k_smem = smem_address(storage.k), v_smem = smem_address(storage.v);
  constexpr unsigned kBytesK = sizeof(SharedStorage::k[0]), kBytesV = sizeof(SharedStorage::v[0]);

  const ProblemParams& problem = params.problem;
  const QueryBlock work(params);
  if (kVarlen && work.rows.begin >= work.written_end()) return;
  const auto visible = [&] { return work.visible_tiles(); };
  const AnySequence& sequence = work.sequence;
  const KeyLoader<kHeadDimV> v_loader(params.v, sequence.keys(), work.kv_head, problem.head_dim_v);
  const TileLoader<kBlockQ, kHeadDimV> dout_loader(params.dout, sequence.queries(), work.head, problem.head_dim_v);
  auto fetch = [&](int n, int slot) {
    if (work.tiles.has(n)) {
      work.k_loader.load(k_smem + slot * kBytesK, n * kBlockK, sequence.visible_keys());
      v_loader.load(v_smem + slot * kBytesV, n * kBlockK, sequence.visible_keys());
    }
    cp_async_commit();
  };

  work.q_loader.load(q_smem, work.rows.begin, sequence.visible_queries());
  dout_loader.load(dout_smem, work.rows.begin, sequence.visible_queries());
  auto walk = walk_along(work.tiles, visible);
  fetch(walk.first(), 0);

  float2 stats[2 * kFragments];
  if constexpr (!kReadsStatsAgain) read_stats(stats, params, work);
  float dq[kFragments][kHeadDim / 2] = {};

  int slot = 0;
#pragma unroll 1
  for (; walk.has_tile(); walk.go_on()) {
    const int n = walk.n();
    walk.look_ahead();
    // 1. Wait for the tile; start the next loads.
    cp_async_wait<0>();
    __syncthreads();  // (A)
    if constexpr (kStages == 2) fetch(walk.next(), slot ^ 1);
    const unsigned k_tile = k_smem + slot * kBytesK, v_tile = v_smem + slot * kBytesV;

    // 2. s = q kᵀ, dp = dout vᵀ
    Scores s = {}, dp = {};
    const int warp_row = fresh_thread() / 32 * kRowsPerWarp;
    gemm_abt<QSwizzle, kHeadDim / kStepElements>(s, Rows<QSwizzle>(q_smem, warp_row), b_lane_address<QSwizzle>(k_tile));
    gemm_abt<VSwizzle, kHeadDimV / kStepElements>(dp, Rows<VSwizzle>(dout_smem, warp_row),
                                                  b_lane_address<VSwizzle>(v_tile));

    // 3. p and ds, dq += ds k
    if constexpr (kReadsStatsAgain) read_stats(stats, params, work);
    if constexpr (kModWeights) {
      work.score_and_mask<false>(s, n);
      if (kSkipsFullTiles && walk.is_full()) tile_p_and_ds_with_mods<false>(s, dp, work, n, stats);
      else tile_p_and_ds_with_mods<kMaskMod>(s, dp, work, n, stats);
    } else if (!work.score.changes() && !work.needs_mask(n)) {
      tile_p_and_ds<true>(s, dp, work.score, stats);
    } else {
      work.score_and_mask(s, n);
      tile_p_and_ds<false>(s, dp, work.score, stats);
    }
    gemm_weights<QSwizzle>(dq, dp, k_tile);
    if constexpr (kStages == 2) {
      slot ^= 1;
    } else {
      __syncthreads();  // (B)
      fetch(walk.next(), 0);
    }
  }
  cp_async_wait<0>();  // q may still be in flight if no key is visible

  const QueryWork& same = work.again(params);
  const Range visible_rows = same.sequence.visible_queries();
  char* const out = same.sequence.queries().address(params.dq, kAccumulates ? 4 : kElementBytes, same.head);
#pragma unroll
  for (int r = 0; r < 2 * kFragments; ++r) {
    const int i = lane_row(same) + 8 * r;
    const bool sees = i >= visible_rows.begin && i < visible_rows.end;
    if constexpr (kAccumulates) {
      float* const row = reinterpret_cast<float*>(out) + i * params.dq.stride_seqlen;
      if (sees) add_row<false>(row, dq[r / 2], r % 2, problem.score.softmax_scale, problem.head_dim, params.dq.aligned);
      continue;
    }
    sees ? scale_row(dq[r / 2], r % 2, problem.score.softmax_scale) : zero_row(dq[r / 2], r % 2);
    store_row(out + i * params.dq.stride_seqlen * kElementBytes, dq[r / 2], r % 2, problem.head_dim,
              i < same.written_end(), params.dq.aligned);
  }
}
