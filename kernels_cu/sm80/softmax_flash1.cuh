// FlashAttention (Dao et al. 2022, arXiv 2205.14135, algorithm 1). The output is normalised at every tile.
//   m' = max(m, max s)   l' = l e^(m - m') + Σ e^(s - m')   o' = o l e^(m - m') / l' + (e^(s - m') / l') v
#pragma once
#include "../common/fragment.cuh"
#include "config.cuh"

template <int kFragments, int kCount>
struct SoftmaxFlash1 {
  float max_log2[2 * kFragments];  // running maximum of score * scale_log2
  float sum[2 * kFragments];       // running sum over the whole row

  __device__ __forceinline__ void setup() {
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) max_log2[r] = -infinity(), sum[r] = 0.0f;
  }

  __device__ __forceinline__ bool update(float (&s)[kFragments][kCount], float scale_log2,
                                         float (&o_scale)[2 * kFragments]) {
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) {
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

  __device__ __forceinline__ void finish(int r, float& o_scale, float& lse) {
    o_scale = 1.0f;
    lse = sum[r] == 0.0f ? -infinity() : max_log2[r] * kLn2 + logf(sum[r]);
  }
};
