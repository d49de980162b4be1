// lse on Hopper: log sum exp(mask(score(q kᵀ))), i.e. forward without v.
//
//   s = mask(score(q kᵀ))           wgmma, as in forward.cu
//   lse = shift + log sum exp       softmax.cuh
//
// Roles    As in forward.cu. One warpgroup computes its softmax while products of the others run.
// Barriers As in forward.cu, without kIssue and edge_full. The ring holds k alone.
#include "consumer.cuh"
#include "roles.cuh"

struct LseConsumer : Consumer {
  using Consumer::Consumer;

  __device__ __forceinline__ void run() {
    for (;; ++i) {
      smem.wait_work(i);
      const QueryWork work = smem.work(i);
      if (!work.exists()) break;
      GroupKeys keys(params.problem, work, group);
      keys.find_unmasked(params.problem, work, group);
      softmax.setup();
      const DescendingTiles tiles = keys.tiles;
#pragma unroll 1
      for (int n = tiles.first(); tiles.has(n); n = tiles.next(n)) {
        const unsigned k_slot = n == tiles.first() ? issue_first_qk(keys) : issue_next_qk();
        float unused[2];
        softmax_tile<0>(keys, n, k_slot, unused);
        release_k(keys, n, k_slot);
      }
      if (keys.skips_last) skip();
      float unused[2], lse[2];
      finish(smem.work(i), softmax, unused, lse);
      store_lse(smem.work(i), lse);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ KernelParams params) {
  run_roles<LseConsumer>(params);
}
