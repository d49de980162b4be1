// dq alone, for one block of queries of one head: with backward.cu left to dk and dv, gradients without atomics, whose
// every sum has a fixed order.
//
//   s = q kᵀ, dp = dout vᵀ      per key tile
//   p = exp(s - lse)            ds = p (dp - delta)
//   dq += ds k
//
// Roles: as in forward.cu, every warp owns kBlockQ / kNumWarps query rows and all keys, and all threads copy.
// Ring: kStages tiles of k and of v. With two, the next is fetched during the whole of this one, with one barrier a
// tile; with one, once every warp is done with this one.
#include "gemm_ab.cuh"
#include "gradient.cuh"
#include "scores.cuh"

struct SharedStorage {
  alignas(128) char q[kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char dout[kBlockQ * kHeadDimV * kElementBytes];
  alignas(128) char k[kStages][kBlockK * kHeadDim * kElementBytes];
  alignas(128) char v[kStages][kBlockK * kHeadDimV * kElementBytes];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
static_assert(sizeof(BackwardParams) == kParamsBytes, "the host packs other parameters");

using Scores = float[kTiles][kBlockK / 2];

// s and dp become p and ds; stats[r] are those of the lane's row r.
template <bool kPlain>
__device__ __forceinline__ void weigh_tile(Scores& s, Scores& dp, const BackwardParams& params,
                                           const float2 (&stats)[2 * kTiles]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < kBlockK / 2; ++i) {
      const float2 x = stats[2 * m + i / 2 % 2];
      weigh<kPlain>(s[m][i], dp[m][i], params, x.x, x.y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned q_smem = smem_address(storage.q), dout_smem = smem_address(storage.dout);
  const unsigned k_smem = smem_address(storage.k), v_smem = smem_address(storage.v);
  constexpr unsigned kBytesK = sizeof(SharedStorage::k[0]), kBytesV = sizeof(SharedStorage::v[0]);

  const Tile tile(params);
  const Mask mask(params);
  const KeyTiles tiles(mask, tile);
  const TileLoader<kBlockK, kHeadDim> k_loader(params.k, tile.batch, tile.kv_head, 0, params.head_dim,
                                               params.aligned & 2);
  const TileLoader<kBlockK, kHeadDimV> v_loader(params.v, tile.batch, tile.kv_head, 0, params.head_dim_v,
                                                params.aligned & 4);
  auto fetch = [&](int n, int slot) {
    if (n >= tiles.begin) {
      k_loader.load(k_smem + slot * kBytesK, n * kBlockK, params.key_begin, params.key_end);
      v_loader.load(v_smem + slot * kBytesV, n * kBlockK, params.key_begin, params.key_end);
    }
    cp_async_commit();
  };

  {
    const TileLoader<kBlockQ, kHeadDim> q_loader(params.q, tile.batch, tile.head, 0, params.head_dim,
                                                 params.aligned & 1);
    const TileLoader<kBlockQ, kHeadDimV> dout_loader(params.dout, tile.batch, tile.head, 0, params.head_dim_v,
                                                     params.aligned & 8);
    q_loader.load(q_smem, tile.row_begin, params.row_begin, params.row_end);
    dout_loader.load(dout_smem, tile.row_begin, params.row_begin, params.row_end);
  }
  fetch(tiles.end - 1, 0);

  float2 stats[2 * kTiles];
  {
    const float2* const of_head = stats_of(params, tile.batch, tile.head) + lane_row(tile);
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) stats[r] = of_head[8 * r];
  }
  float dq[kTiles][kHeadDim / 2] = {};

  int slot = 0;
#pragma unroll 1
  for (int n = tiles.end - 1; n >= tiles.begin; --n) {
    // 1. The tile is here, and with two stages every warp is done with the one before.
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages == 2) fetch(n - 1, slot ^ 1);
    const unsigned k_tile = k_smem + slot * kBytesK, v_tile = v_smem + slot * kBytesV;

    // 2. s = q kᵀ, dp = dout vᵀ
    Scores s = {}, dp = {};
    const int warp_row = fresh_thread() / 32 * kRowsPerWarp;
    gemm_abt<QSwizzle, kHeadDim / kStepElements>(s, Rows<QSwizzle>(q_smem, warp_row), b_lane_address<QSwizzle>(k_tile));
    gemm_abt<VSwizzle, kHeadDimV / kStepElements>(dp, Rows<VSwizzle>(dout_smem, warp_row),
                                                  b_lane_address<VSwizzle>(v_tile));

    // 3. ds = p (dp - delta), dq += ds k
    if (params.softcap_scale == 0.0f && !needs_mask(mask, tile, n)) {
      weigh_tile<true>(s, dp, params, stats);
    } else {
      cap_and_mask(s, params, mask, tile, n);
      weigh_tile<false>(s, dp, params, stats);
    }
    gemm_weights<QSwizzle>(dq, dp, k_tile);
    if constexpr (kStages == 2) {
      slot ^= 1;
    } else {
      __syncthreads();
      fetch(n - 1, 0);
    }
  }
  cp_async_wait<0>();  // q may still be under way when no key is visible

  const Tile same(params);
  char* const out = static_cast<char*>(params.dq.pointer) +
                    (same.batch * params.dq.stride_batch + same.head * params.dq.stride_head) * kElementBytes;
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) {
    const int i = lane_row(same) + 8 * r;
    const bool sees = i >= params.row_begin && i < params.row_end;
    sees ? scale_row(dq[r / 2], r % 2, params.softmax_scale) : clear_row(dq[r / 2], r % 2);
    store_row(out + i * params.dq.stride_seqlen * kElementBytes, dq[r / 2], r % 2, params.head_dim, i < same.row_end,
              params.aligned & 32);
  }
}
