// lse = log sum exp(mask(cap(scale q kᵀ))): forward without v, for one block of queries of one head.
//
// Roles: as in forward.cu, every warp owns kBlockQ / kNumWarps query rows and all keys, and all threads copy.
// Ring: two tiles of k; the next is fetched during the whole of this one, with one barrier a tile.
#include "../common/softmax.cuh"
#include "scores.cuh"

struct SharedStorage {
  alignas(128) char q[kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char k[kStages][kBlockK * kHeadDim * kElementBytes];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
static_assert(sizeof(ForwardParams) == kParamsBytes, "the host packs other parameters");
static_assert(kStages == 2, "the ring of lse is two tiles deep");

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned q_smem = smem_address(storage.q), k_smem = smem_address(storage.k);
  constexpr unsigned kBytesK = sizeof(SharedStorage::k[0]);

  const Tile tile(params);
  const Mask mask(params);
  const KeyTiles tiles(mask, tile);
  const TileLoader<kBlockQ, kHeadDim> q_loader(params.q, tile.batch, tile.head, 0, params.head_dim, params.aligned & 1);
  const TileLoader<kBlockK, kHeadDim> k_loader(params.k, tile.batch, tile.kv_head, 0, params.head_dim,
                                               params.aligned & 2);
  auto fetch_k = [&](int n, int slot) {
    if (n >= tiles.begin) k_loader.load(k_smem + slot * kBytesK, n * kBlockK, params.key_begin, params.key_end);
  };

  SoftmaxOf<kAlgorithm, kTiles, kBlockK / 2> softmax;
  softmax.setup();
  QFragments q(q_smem);

  q_loader.load(q_smem, tile.row_begin, 0, params.seqlen_q);
  fetch_k(tiles.end - 1, 0);
  cp_async_commit();

  int slot = 0;
#pragma unroll 1
  for (int n = tiles.end - 1; n >= tiles.begin; --n, slot ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    fetch_k(n - 1, slot ^ 1);
    cp_async_commit();

    if (n == tiles.end - 1) q.load();
    float s[kTiles][kBlockK / 2] = {}, unused[2 * kTiles];
    compute_scores(s, q, k_smem + slot * kBytesK);
    cap_and_mask(s, params, mask, tile, n);
    softmax.update(s, params.scale_log2, unused);
  }
  cp_async_wait<0>();

  float* const lse = params.lse + (tile.batch * params.heads_q + tile.head) * params.seqlen_q;
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) {
    const int i = lane_row(tile) + 16 * (r / 2) + 8 * (r % 2);
    float unused, row_lse;
    softmax.finish(r, unused, row_lse);
    if (threadIdx.x % 4 == 0 && i < tile.row_end) lse[i] = row_lse;
  }
}
