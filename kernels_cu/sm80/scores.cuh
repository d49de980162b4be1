// Scores of a warp's queries with one key tile, as forward, lse and dq make them.
#pragma once
#include "../common/mask.cuh"
#include "../common/score.cuh"
#include "../common/tile_range.cuh"
#include "gemm.cuh"
#include "tile.cuh"
#include "work.cuh"

static_assert(kBlockQ % (16 * kNumWarps) == 0, "each warp owns whole 16-row fragments");
constexpr int kRowsPerWarp = kBlockQ / kNumWarps, kFragments = kRowsPerWarp / 16;  // of a warp (L26)

// This lane's first query. Its others are 8 and multiples of 16 further.
__device__ __forceinline__ int lane_row(const QueryWork& work) {
  return work.rows.begin + threadIdx.x / 32 * kRowsPerWarp + threadIdx.x % 32 / 4;
}

// The key tiles that some query of the block sees.
__device__ __forceinline__ DescendingTiles key_tiles(const Mask& mask, const QueryWork& work) {
  return TileRange::covering(mask.key_range(work.rows.begin, work.rows.end), kBlockK);
}

// Whether some query of the block does not see all keys of tile n.
__device__ __forceinline__ bool needs_mask(const Mask& mask, const QueryWork& work, int n) {
  return !mask.all_visible(work.rows, {n * kBlockK, (n + 1) * kBlockK});
}

// The warp's rows of q, which are held in registers over all tiles, or read from shared memory for each.
struct QFragments {
  FragmentA held[kQInRegisters ? kHeadDim / kStepElements : 1][kFragments];
  Rows<QSwizzle> rows;

  __device__ explicit QFragments(unsigned q_smem) : rows(q_smem, threadIdx.x / 32 * kRowsPerWarp) {}

  // To be called once q has arrived.
  __device__ __forceinline__ void load() {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int kk = 0; kk < kHeadDim / kStepElements; ++kk) rows(held[kk], kk);
    }
  }

  __device__ __forceinline__ void operator()(FragmentA (&a)[kFragments], int kk) const {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) a[m] = held[kk][m];
    } else {
      rows(a, kk);
    }
  }
};

// s = q kᵀ
__device__ __forceinline__ void compute_scores(float (&s)[kFragments][kBlockK / 2], const QFragments& q,
                                               unsigned k_smem) {
  gemm_abt<QSwizzle, kHeadDim / kStepElements>(s, q, b_lane_address<QSwizzle>(k_smem));
}

// s = mask(score(s)), where there is something to do.
__device__ __forceinline__ void score_and_mask(float (&s)[kFragments][kBlockK / 2], const Score& score,
                                               const Mask& mask, const QueryWork& work, int n) {
  score.apply(s);
  if (needs_mask(mask, work, n)) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) mask.apply(s[m], lane_row(work) + 16 * m, n * kBlockK, threadIdx.x % 4);
  }
}
