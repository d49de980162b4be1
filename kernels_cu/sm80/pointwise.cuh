// The pointwise step of backward, from scores s and dp to weights p and ds.
//   p = exp(s - lse)   ds = p (dp - delta) slope, where slope is that of common/score.cuh
#pragma once
#include "../common/fragment.cuh"
#include "../common/score.cuh"

// Score s becomes weight p, and dp becomes ds. kPlain: scores are products, and everything is visible.
template <bool kPlain>
__device__ __forceinline__ void weigh(float& s, float& dp, const Score& score, float lse_log2, float delta) {
  const float p = exp2_approx(fmaf(s, score.params.scale_log2, -lse_log2));
  if constexpr (kPlain) {
    dp = p * (dp - delta);
    s = p;
  } else {
    // why: a hidden pair weighs nothing, whatever lse, dp and the slope are.
    const bool hidden = s == -infinity();
    dp = hidden ? 0.0f : p * (dp - delta) * score.slope(s);
    s = hidden ? 0.0f : p;
  }
}
