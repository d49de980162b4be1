// FLASH-D (Alexandridis et al. 2025, arXiv 2505.14201). There is no running maximum, and a sigmoid replaces the
// division. The state of a row is one lse. Each tile is normalised by itself, then blended into the output:
//   w = sigmoid(lse_tile - lse)   o' = o (1 - w) + o_tile w   lse' = lse + softplus(lse_tile - lse)
#pragma once
#include "../common/fragment.cuh"
#include "config.cuh"

template <int kFragments, int kCount>
struct SoftmaxFlashD {
  // log2 of the sum of exp over past keys is base + rest. Two floats: at scores of 10^4 one has no bits left for lse
  // (L45).
  float base[2 * kFragments], rest[2 * kFragments];

  __device__ __forceinline__ void setup() {
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) base[r] = -infinity(), rest[r] = 0.0f;
  }

  __device__ __forceinline__ bool update(float (&s)[kFragments][kCount], float scale_log2,
                                         float (&o_scale)[2 * kFragments]) {
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) {
      // The maximum of this tile alone; later tiles do not need it.
      const float tile_max = quad_max(lane_row_max(s[r / 2], r % 2)) * scale_log2;
      const float shift = tile_max == -infinity() ? 0.0f : tile_max;
      const float tile_sum = quad_sum(exponentiate_row(s[r / 2], r % 2, scale_log2, shift));
      float w = 0.0f;
      if (!(tile_sum == 0.0f)) {  // NaN takes this branch, too
        const float rest_tile = log2_approx(tile_sum);
        const float difference = (shift - base[r]) + (rest_tile - rest[r]);  // lse_tile - lse
        w = rcp_approx(1.0f + exp2_approx(-difference));
        // lse + softplus(difference) = the larger lse + log2(1 + 2^-|difference|)
        if (!(difference < 0.0f)) base[r] = shift, rest[r] = rest_tile;
        rest[r] += log2_approx(1.0f + exp2_approx(-fabsf(difference)));
        // The weights are w e^(s - lse_tile), and e^(tile_max - lse_tile) = 1 / tile_sum.
        scale_row(s[r / 2], r % 2, w * rcp_approx(tile_sum));
      }
      o_scale[r] = 1.0f - w;
    }
    return true;
  }

  // The output is normalised already.
  __device__ __forceinline__ void finish(int r, float& o_scale, float& lse) {
    o_scale = 1.0f;
    lse = (base[r] + rest[r]) * kLn2;
  }
};
