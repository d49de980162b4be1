// lse on Hopper: log sum exp(mask(cap(scale q kᵀ))), forward without v. Roles and barriers as in forward.cu; while one
// warpgroup weighs its scores, the others' products run.
#include "consumer.cuh"

struct LseConsumer : Consumer {
  using Consumer::Consumer;

  __device__ __forceinline__ void run() {
    for (;; ++i) {
      smem.await_tile(i);
      const Tile of = smem.tile(i);
      if (of.row_begin == kNoTile) break;
      KeyTiles keys(params.forward, of, group, true);
      keys.find_clear(params.forward, of, group);
      softmax.setup();
#pragma unroll 1
      for (int n = keys.end - 1; n >= keys.begin; --n) {
        const unsigned k_slot = n == keys.end - 1 ? begin_first_scores(keys) : begin_next_scores();
        float unused[2];
        weigh<0>(keys, n, unused);
        end_scores(keys, n, k_slot);
      }
      if (keys.skips_last) skip();
      float lse[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float unused;
        softmax.finish(h, unused, lse[h]);
      }
      store_lse(smem.tile(i), lse);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ TiledParams params) {
  run_roles<LseConsumer>(params);
}
