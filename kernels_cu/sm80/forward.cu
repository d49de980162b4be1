// Forward: out = softmax(mask(cap(scale q kᵀ))) v and its lse, for one block of queries of one head.
//
//   s = q kᵀ            per key tile, mma.sync, float32 accumulation
//   p = softmax update  by the policy of this build (common/softmax_*.cuh); s is overwritten
//   o = o * o_scale + p v
//
// Roles: every warp owns kBlockQ / kNumWarps query rows and all keys, so softmax needs no other warp. All threads copy.
// Ring: kStages tiles of k and of v, filled by cp.async.
//   1 stage    k of the next tile is fetched once every warp has its scores, v of this tile meanwhile; two barriers a
//              tile.
//   2 stages   k and v of the next tile are fetched during the whole of this one; one barrier a tile.
#include "../common/softmax.cuh"
#include "gemm_ab.cuh"
#include "scores.cuh"

struct SharedStorage {
  alignas(128) char q[kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char k[kStages][kBlockK * kHeadDim * kElementBytes];
  alignas(128) char v[kStages][kBlockK * kHeadDimV * kElementBytes];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
static_assert(sizeof(ForwardParams) == kParamsBytes, "the host packs other parameters");

// Normalises and stores this lane's rows; lse once per row.
template <typename Softmax>
__device__ __forceinline__ void store_rows(const ForwardParams& params, float (&o)[kTiles][kHeadDimV / 2],
                                           Softmax& softmax) {
  const Tile tile(params);
  const int column = tile.slice * kHeadDimV;
  char* const out = static_cast<char*>(params.out.pointer) +
                    (tile.batch * params.out.stride_batch + tile.head * params.out.stride_head + column) * kOutBytes;
  float* const lse = params.lse + (tile.batch * params.heads_q + tile.head) * params.seqlen_q;
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) {
    const int i = lane_row(tile) + 16 * (r / 2) + 8 * (r % 2);
    const bool exists = i < tile.row_end;
    float o_scale, row_lse;
    softmax.finish(r, o_scale, row_lse);
    row_lse == -infinity() ? clear_row(o[r / 2], r % 2) : scale_row(o[r / 2], r % 2, o_scale);
    store_row(out + i * params.out.stride_seqlen * kOutBytes, o[r / 2], r % 2, params.head_dim_v - column, exists,
              params.aligned & 8);
    if (params.lse != nullptr && tile.slice == 0 && threadIdx.x % 4 == 0 && exists) lse[i] = row_lse;
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned q_smem = smem_address(storage.q), k_smem = smem_address(storage.k), v_smem = smem_address(storage.v);
  constexpr unsigned kBytesK = sizeof(SharedStorage::k[0]), kBytesV = sizeof(SharedStorage::v[0]);

  const Tile tile(params);
  const Mask mask(params);
  const KeyTiles tiles(mask, tile);
  const TileLoader<kBlockQ, kHeadDim> q_loader(params.q, tile.batch, tile.head, 0, params.head_dim, params.aligned & 1);
  const TileLoader<kBlockK, kHeadDim> k_loader(params.k, tile.batch, tile.kv_head, 0, params.head_dim,
                                               params.aligned & 2);
  const TileLoader<kBlockK, kHeadDimV> v_loader(params.v, tile.batch, tile.kv_head, tile.slice * kHeadDimV,
                                                params.head_dim_v, params.aligned & 4);
  // Tiles are taken from the last to the first; none is fetched before the first.
  auto fetch_k = [&](int n, int slot) {
    if (n >= tiles.begin) k_loader.load(k_smem + slot * kBytesK, n * kBlockK, params.key_begin, params.key_end);
  };
  auto fetch_v = [&](int n, int slot) {
    if (n >= tiles.begin) v_loader.load(v_smem + slot * kBytesV, n * kBlockK, params.key_begin, params.key_end);
  };

  float o[kTiles][kHeadDimV / 2] = {};
  SoftmaxOf<kAlgorithm, kTiles, kBlockK / 2> softmax;
  softmax.setup();
  QFragments q(q_smem);

  // Prologue: q and the first tile.
  q_loader.load(q_smem, tile.row_begin, 0, params.seqlen_q);
  fetch_k(tiles.end - 1, 0);
  if constexpr (kStages == 2) fetch_v(tiles.end - 1, 0);
  cp_async_commit();

  int slot = 0;
#pragma unroll 1
  for (int n = tiles.end - 1; n >= tiles.begin; --n) {
    // 1. k (with two stages v too) is here, and every warp is done with the tile before.
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages == 2) {
      fetch_k(n - 1, slot ^ 1);
      fetch_v(n - 1, slot ^ 1);
    } else {
      fetch_v(n, 0);
    }
    cp_async_commit();

    // 2. s = mask(cap(q kᵀ))
    if (n == tiles.end - 1) q.load();
    float s[kTiles][kBlockK / 2] = {};
    compute_scores(s, q, k_smem + slot * kBytesK);
    if constexpr (kStages == 1) {
      cp_async_wait<0>();
      __syncthreads();
      fetch_k(n - 1, 0);
      cp_async_commit();
    }
    cap_and_mask(s, params, mask, tile, n);

    // 3. p = softmax update, o = o * o_scale + p v
    float o_scale[2 * kTiles];
    if (softmax.update(s, params.scale_log2, o_scale)) {
#pragma unroll
      for (int r = 0; r < 2 * kTiles; ++r) scale_row(o[r / 2], r % 2, o_scale[r]);
    }
    gemm_weights<VSwizzle>(o, s, v_smem + slot * kBytesV);
    if constexpr (kStages == 2) slot ^= 1;
  }
  cp_async_wait<0>();  // q may still be under way when no key is visible
  store_rows(params, o, softmax);
}
