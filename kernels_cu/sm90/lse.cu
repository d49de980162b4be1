// lse on Hopper: log sum exp(mask(cap(scale q kᵀ))), forward without v. Roles and barriers as in forward.cu; while one
// warpgroup weighs its scores, the others' products run.
#include "consumer.cuh"

struct LseConsumer : Consumer {
  using Consumer::Consumer;

  // This lane's rows.
  __device__ __forceinline__ void store(const Tile& of) const {
    const ForwardParams& forward = params.forward;
    const int row = of.row_begin + block_row() + threadIdx.x % 32 / 4;
    float* const rows = forward.lse + (static_cast<long long>(of.batch) * forward.heads_q + of.head) * forward.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float unused, lse;
      softmax.finish(h, unused, lse);
      if (threadIdx.x % 4 == 0 && row + 8 * h < forward.seqlen_q) rows[row + 8 * h] = lse;
    }
  }

  __device__ __forceinline__ void run() {
    for (;; ++i) {
      await_tile(i);
      const Tile of = tile(i);
      if (of.row_begin == kNoTile) break;
      const KeyTiles keys(params.forward, of, group);
      softmax.setup();
#pragma unroll 1
      for (int n = keys.end - 1; n >= keys.begin; --n) {
        const unsigned k_slot = n == keys.end - 1 ? begin_first_scores(keys) : begin_next_scores();
        wgmma_wait<0>();
        wgmma_pin(s);
        end_scores(keys, n, k_slot);
        float unused[2];
        weigh(keys, n, unused);
      }
      store(tile(i));
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ TiledParams params) {
  run_roles<LseConsumer>(params);
}
