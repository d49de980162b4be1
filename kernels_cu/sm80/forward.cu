// Forward: out = softmax(mask(score(q kᵀ))) v and its lse, for one block of queries of one head.
//
//   s = mask(score(q kᵀ))       per key tile, by mma.sync with float32 accumulation; common/score.cuh, common/mask.cuh
//   p = softmax update of s     by the policy of this build (softmax_*.cuh), in the registers of s
//   o = o * o_scale + p v       with dropped weights at zero (common/dropout.cuh)
//
// Roles    Every warp owns kBlockQ / kNumWarps queries and all keys, so that its softmax needs no other warp. All
//          threads copy.
// Ring     kStages tiles of k and of v, filled by cp.async.
//          1 stage:   v of this tile is fetched while its scores are computed, k of the next one after that
//          2 stages:  k and v of the next tile are fetched while this one is computed
// Barriers of the thread block, for each tile:
//          (A)  k of the tile (with two stages its v, too) has arrived, and every warp is done with the previous tile
//          (B)  with one stage: v has arrived, and every warp is done with k
#include "../common/float_rows.cuh"
#include "gemm_ab.cuh"
#include "rows.cuh"
#include "scores.cuh"
#include "softmax_policy.cuh"

struct SharedStorage {
  alignas(128) char q[kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char k[kStages][kBlockK * kHeadDim * kElementBytes];
  alignas(128) char v[kStages][kBlockK * kHeadDimV * kElementBytes];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
using Params = WithMods<ForwardParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");

// Normalises and stores this lane's rows, and the lse of each row once.
template <typename Softmax>
__device__ __forceinline__ void store_rows(const Params& params, const QueryWork& work, const Dropout& dropout,
                                           float (&o)[kFragments][kHeadDimV / 2], Softmax& softmax) {
  const int column = work.part * kHeadDimV;
  char* const out = work.sequence.queries().address(params.out, kOutBytes, work.head, 0, column);
  float* const lse = params.lse + work.sequence.lse_offset(work.head);
#pragma unroll
  for (int r = 0; r < 2 * kFragments; ++r) {
    const int i = lane_row(work) + 8 * r;
    const bool is_used = i < work.rows.end, exists = i < work.written_end();
    float o_scale, row_lse;
    softmax.finish(r, o_scale, row_lse);
    if (kVarlen && !is_used) row_lse = -infinity();
    const bool sees = row_lse != -infinity();
    if constexpr (kAccumulates) {
      Sink(params, work.head).add(o_scale, row_lse);
      const bool changes = is_used && row_lse != -infinity();
      const Blend both(changes ? lse[i] : 0.0f, row_lse);
      __syncwarp();  // the lanes of a row have read its lse
      if (!changes) continue;
      if (!sees) zero_row(o[r / 2], r % 2);
      both.out(reinterpret_cast<float*>(out) + i * params.out.stride_seqlen, o[r / 2], r % 2, o_scale * dropout.scale(),
               params.problem.head_dim_v, params.out.aligned);
      if (threadIdx.x % 4 == 0) lse[i] = both.lse;
      continue;
    }
    if (!kVarlen || is_used) Sink(params, work.head).add(o_scale, row_lse);
    !sees ? zero_row(o[r / 2], r % 2) : scale_row(o[r / 2], r % 2, o_scale * dropout.scale());
    store_row(out + i * params.out.stride_seqlen * kOutBytes, o[r / 2], r % 2, params.problem.head_dim_v - column,
              is_used || (exists && params.problem.zero_unused_rows), params.out.aligned);
    if (params.lse != nullptr && work.part == 0 && threadIdx.x % 4 == 0 && exists) lse[i] = row_lse;
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned q_smem = smem_address(storage.q), k_smem = smem_address(storage.k), v_smem = smem_address(storage.v);
  constexpr unsigned kBytesK = sizeof(SharedStorage::k[0]), kBytesV = sizeof(SharedStorage::v[0]);

  const QueryBlock work(params);
  const auto visible = [&] { return work.visible_tiles(); };
  if (kVarlen && work.rows.begin >= work.written_end()) return;
  const KeyLoader<kHeadDimV> v_loader(params.v, work.sequence.keys(), work.kv_head, params.problem.head_dim_v,
                                      work.part * kHeadDimV);
  auto fetch_k = [&](int n, int slot) { work.fetch(work.k_loader, k_smem, n, slot); };
  auto fetch_v = [&](int n, int slot) { work.fetch(v_loader, v_smem, n, slot); };

  float o[kFragments][kHeadDimV / 2] = {};
  SoftmaxPolicy<kAlgorithm, kFragments, kBlockK / 2> softmax;
  softmax.setup();
  QFragments q(q_smem);

  // Prologue: q and the first tile.
  work.q_loader.load(q_smem, work.rows.begin, {0, work.sequence.seqlen_q()});
  auto walk = walk_along(work.tiles, visible);
  fetch_k(walk.first(), 0);
  if constexpr (kStages == 2) fetch_v(walk.first(), 0);
  cp_async_commit();

  int slot = 0;
#pragma unroll 1
  for (; walk.has_tile(); walk.go_on()) {
    const int n = walk.n();
    walk.look_ahead();
    // 1. Wait for the tile; start the next loads.
    cp_async_wait<0>();
    __syncthreads();  // (A)
    if constexpr (kStages == 2) fetch_k(walk.next(), slot ^ 1);
    fetch_v(kStages == 2 ? walk.next() : n, kStages == 2 ? slot ^ 1 : 0);
    cp_async_commit();

    // 2. s = mask(score(q kᵀ))
    if (walk.is_first()) q.load();
    float s[kFragments][kBlockK / 2] = {};
    compute_scores(s, q, k_smem + slot * kBytesK);
    if constexpr (kStages == 1) {
      cp_async_wait<0>();
      __syncthreads();  // (B)
      fetch_k(walk.next(), 0);
      cp_async_commit();
    }
    work.score_and_mask(s, n, walk.is_full());

    // 3. p = softmax update of s, o = o * o_scale + p v
    float o_scale[2 * kFragments];
    if (softmax.update(s, scale_log2_of(params.problem), o_scale)) {
#pragma unroll
      for (int r = 0; r < 2 * kFragments; ++r) scale_row(o[r / 2], r % 2, o_scale[r]);
    }
    if constexpr (kDropout) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        work.dropout.drop<kBlockK % 32 == 0>(s[m], LaneQueries{lane_row(work) + 16 * m}, n * kBlockK, threadIdx.x % 4);
      }
    }
    gemm_weights<VSwizzle>(o, s, v_smem + slot * kBytesV);
    if constexpr (kStages == 2) slot ^= 1;
  }
  cp_async_wait<0>();  // q may still be in flight if no key is visible
  store_rows(params, work.again(params), work.dropout, o, softmax);
}
