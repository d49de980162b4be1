// The producer of q for decode on Hopper, which copies by cp.async.
#pragma once
#include "../forward/producer.cuh"

// Loads rows of q of several heads, which lie anywhere. `filled` rows in shared memory are not zeros. One warp calls.
__device__ __forceinline__ void load_queries(const WithMods<DecodeParams>& params, const DecodeWork& work, int,
                                             unsigned target, unsigned barrier, int& filled, bool) {
  constexpr int kChunks = kHeadDim / 8;  // chunks of 16 bytes in a row
  const ProblemParams& problem = params.problem;
  const Place place{work.q_batch, work.q_begin};
  const int group = problem.heads_per_kv, rows = const_min(work.seqlen_q * group - work.row_begin, kBlockQ);
#pragma unroll 1
  for (int at = threadIdx.x % 32; at < (kWarpsSplitKeys ? rows : const_max(rows, filled)) * kChunks; at += 32) {
    const int row = at / kChunks, chunk = at % kChunks, of_heads = work.row_begin + row;
    const int query = of_heads / group, head = work.head * group + of_heads - query * group;
    const int bytes = row < rows ? clamped((problem.head_dim - 8 * chunk) * 2, 16) : 0;
    const char* const from = place.address(params.q, 2, head, bytes ? query : 0, bytes ? 8 * chunk : 0);
    cp_async_16_zfill(target + chunk / 8 * kPanelBytesQ + Swizzle<8>::offset(row, chunk % 8), from, bytes);
  }
  filled = const_max(rows, 0);
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();
  mbarrier_arrive(barrier);
}
