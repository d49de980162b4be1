// FLASH-D (Alexandridis et al. 2025, arXiv 2505.14201): no running maximum, the division hidden in a sigmoid. A row's
// state is one lse; a tile, normalised by itself, is blended in:
//   w = sigmoid(lse_tile - lse)   o' = o (1 - w) + o_tile w   lse' = lse + softplus(lse_tile - lse)
#pragma once
#include "fragment.cuh"

template <int kTiles, int kCount>
struct SoftmaxFlashD {
  // log2 of the sum of exp over the keys so far, as base + rest: scores of 10^4 leave one float no bits for the rest.
  float base[2 * kTiles], rest[2 * kTiles];

  __device__ __forceinline__ void setup() {
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) base[r] = -infinity(), rest[r] = 0.0f;
  }

  // Scores become weights; the output so far must be multiplied by o_scale before it takes the tile in.
  __device__ __forceinline__ bool update(float (&s)[kTiles][kCount], float scale_log2, float (&o_scale)[2 * kTiles]) {
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      // The tile's own maximum, forgotten after the tile.
      const float tile_max = quad_max(lane_row_max(s[r / 2], r % 2)) * scale_log2;
      const float shift = tile_max == -infinity() ? 0.0f : tile_max;
      const float tile_sum = quad_sum(exponentiate_row(s[r / 2], r % 2, scale_log2, shift));
      float w = 0.0f;
      if (!(tile_sum == 0.0f)) {  // also taken by NaN
        const float rest_tile = log2_approx(tile_sum);
        const float difference = (shift - base[r]) + (rest_tile - rest[r]);  // lse_tile - lse
        w = rcp_approx(1.0f + exp2_approx(-difference));
        // lse + softplus(difference) = the larger lse + log2(1 + 2^-|difference|)
        if (!(difference < 0.0f)) base[r] = shift, rest[r] = rest_tile;
        rest[r] += log2_approx(1.0f + exp2_approx(-fabsf(difference)));
        // w e^(s - lse_tile), as e^(tile_max - lse_tile) = 1 / tile_sum
        scale_row(s[r / 2], r % 2, w * rcp_approx(tile_sum));
      }
      o_scale[r] = 1.0f - w;
    }
    return true;
  }

  // The output is already normalised.
  __device__ __forceinline__ void finish(int r, float& o_scale, float& lse) {
    o_scale = 1.0f;
    lse = (base[r] + rest[r]) * kLn2;
  }
};
