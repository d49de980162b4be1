// lse = log sum exp(mask(score(q kᵀ))): forward without v, for one block of queries of one head.
//
//   s = mask(score(q kᵀ))       per key tile, as in forward.cu
//   lse = softmax update of s   by the policy of this build, whose weights are not used
//
// Roles    As in forward.cu: every warp owns kBlockQ / kNumWarps queries and all keys, and all threads copy.
// Ring     Two tiles of k. The next tile is fetched while this one is computed.
// Barriers of the thread block, for each tile:
//          (A)  the tile has arrived, and every warp is done with the previous tile
#include "scores.cuh"
#include "softmax_policy.cuh"

struct SharedStorage {
  alignas(128) char q[kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char k[kStages][kBlockK * kHeadDim * kElementBytes];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
using Params = WithMods<ForwardParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");
static_assert(kStages == 2, "the ring of lse is two tiles deep");

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned q_smem = smem_address(storage.q), k_smem = smem_address(storage.k);
  constexpr unsigned kBytesK = sizeof(SharedStorage::k[0]);

  const QueryBlock work(params);
  if (kVarlen && work.rows.begin >= work.written_end()) return;
  const auto visible = [&] { return work.visible_tiles(); };
  auto fetch_k = [&](int n, int slot) { work.fetch(work.k_loader, k_smem, n, slot); };

  SoftmaxPolicy<kAlgorithm, kFragments, kBlockK / 2> softmax;
  softmax.setup();
  QFragments q(q_smem);

  work.q_loader.load(q_smem, work.rows.begin, {0, work.sequence.seqlen_q()});
  auto walk = walk_along(work.tiles, visible);
  fetch_k(walk.first(), 0);
  cp_async_commit();

  int slot = 0;
#pragma unroll 1
  for (; walk.has_tile(); walk.go_on(), slot ^= 1) {
    const int n = walk.n();
    walk.look_ahead();
    cp_async_wait<0>();
    __syncthreads();  // (A)
    fetch_k(walk.next(), slot ^ 1);
    cp_async_commit();

    if (walk.is_first()) q.load();
    float s[kFragments][kBlockK / 2] = {}, unused[2 * kFragments];
    compute_scores(s, q, k_smem + slot * kBytesK);
    work.score_and_mask(s, n, walk.is_full());
    softmax.update(s, scale_log2_of(params.problem), unused);
  }
  cp_async_wait<0>();  // q may still be in flight if no key is visible

  const QueryWork& same = work.again(params);
  float* const lse = params.lse + same.sequence.lse_offset(same.head);
#pragma unroll
  for (int r = 0; r < 2 * kFragments; ++r) {
    const int i = lane_row(same) + 8 * r;
    float unused, row_lse;
    softmax.finish(r, unused, row_lse);
    if (!kVarlen || i < same.rows.end) Sink(params, same.head).add(unused, row_lse);
    else row_lse = -infinity();
    if (threadIdx.x % 4 == 0 && i < same.written_end()) lse[i] = row_lse;
  }
}
