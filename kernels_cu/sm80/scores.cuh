// Scores of a warp's rows with one key tile: what forward and lse share.
#pragma once
#include "../common/mask.cuh"
#include "../common/scheduler.cuh"
#include "gemm.cuh"
#include "tile.cuh"

static_assert(kBlockQ % (16 * kNumWarps) == 0, "each warp owns whole 16-row fragments");
constexpr int kRowsPerWarp = kBlockQ / kNumWarps;
constexpr int kTiles = kRowsPerWarp / 16;  // 16-row fragments of a warp

// This lane's first row; its others are 8 and multiples of 16 further.
__device__ __forceinline__ int lane_row(const Tile& tile) {
  return tile.row_begin + threadIdx.x / 32 * kRowsPerWarp + threadIdx.x % 32 / 4;
}

// The key tiles of a block, in units of kBlockK: some row of the block sees keys of [begin, end).
struct KeyTiles {
  int begin, end;

  __device__ KeyTiles(const Mask& mask, const Tile& tile) {
    const KeyRange keys = mask.key_range(tile.row_begin, tile.row_end);
    begin = keys.begin / kBlockK;
    end = keys.begin < keys.end ? (keys.end + kBlockK - 1) / kBlockK : begin;
  }
};

// Whether some row of the block does not see all keys of tile n.
__device__ __forceinline__ bool needs_mask(const Mask& mask, const Tile& tile, int n) {
  const KeyRange full = mask.full_range(tile.row_begin, tile.row_end);
  return n * kBlockK < full.begin || (n + 1) * kBlockK > full.end;
}

// The warp's rows of q: held in registers over all tiles, or read from shared memory for each.
struct QFragments {
  FragmentA held[kQInRegisters ? kHeadDim / kStepElements : 1][kTiles];
  Rows<QSwizzle> rows;

  __device__ explicit QFragments(unsigned q_smem) : rows(q_smem, threadIdx.x / 32 * kRowsPerWarp) {}

  // Once q has arrived.
  __device__ __forceinline__ void load() {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int kk = 0; kk < kHeadDim / kStepElements; ++kk) rows(held[kk], kk);
    }
  }

  __device__ __forceinline__ void operator()(FragmentA (&a)[kTiles], int kk) const {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) a[m] = held[kk][m];
    } else {
      rows(a, kk);
    }
  }
};

// s = q kᵀ
__device__ __forceinline__ void compute_scores(float (&s)[kTiles][kBlockK / 2], const QFragments& q, unsigned k_smem) {
  gemm_abt<QSwizzle, kHeadDim / kStepElements>(s, q, b_lane_address<QSwizzle>(k_smem));
}

// s = mask(cap(s)), where there is something to do.
template <class Params>
__device__ __forceinline__ void cap_and_mask(float (&s)[kTiles][kBlockK / 2], const Params& params, const Mask& mask,
                                             const Tile& tile, int n) {
  if (params.softcap_scale != 0.0f) cap(s, params.softcap_scale);
  if (needs_mask(mask, tile, n)) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) mask.apply(s[m], lane_row(tile) + 16 * m, n * kBlockK, threadIdx.x % 4);
  }
}
