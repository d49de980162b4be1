// FlashAttention (Dao et al. 2022, arXiv 2205.14135, algorithm 1): the output is normalised at every tile.
//   m' = max(m, max s)   l' = l e^(m - m') + sum e^(s - m')   o' = o l e^(m - m') / l' + (e^(s - m') / l') v
#pragma once
#include "fragment.cuh"

template <int kTiles, int kCount>
struct SoftmaxFlash1 {
  float max_log2[2 * kTiles];  // running maximum of score * scale_log2
  float sum[2 * kTiles];       // running sum of the whole row

  __device__ __forceinline__ void setup() {
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) max_log2[r] = -infinity(), sum[r] = 0.0f;
  }

  // Scores become weights; the output so far must be multiplied by o_scale before it takes the tile in.
  __device__ __forceinline__ bool update(float (&s)[kTiles][kCount], float scale_log2, float (&o_scale)[2 * kTiles]) {
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      const float row_max = fmaxf(max_log2[r], quad_max(lane_row_max(s[r / 2], r % 2)) * scale_log2);
      const float shift = row_max == -infinity() ? 0.0f : row_max;
      const float kept = sum[r] * exp2_approx(max_log2[r] - shift);
      sum[r] = kept + quad_sum(exponentiate_row(s[r / 2], r % 2, scale_log2, shift));
      max_log2[r] = row_max;
      const float inverse = sum[r] == 0.0f ? 0.0f : rcp_approx(sum[r]);
      scale_row(s[r / 2], r % 2, inverse);
      o_scale[r] = kept * inverse;
    }
    return true;
  }

  // The factor that turns the accumulated output into the result, and the row's lse.
  __device__ __forceinline__ void finish(int r, float& o_scale, float& lse) {
    o_scale = 1.0f;
    lse = sum[r] == 0.0f ? -infinity() : max_log2[r] * kLn2 + logf(sum[r]);
  }
};
