// The pointwise step of backward, from scores s and dp to weights p and ds, and what its two kernels share.
//   p = exp(s - lse)   ds = p (dp - delta), with a softcap also (1 - tanh²)
#pragma once
#include "../common/fragment.cuh"
#include "../common/params.cuh"

// Of a head: lse * log2(e) of each query, infinite where nothing is seen, and delta = rowsum(dout out) - dlse.
__device__ __forceinline__ const float2* stats_of(const BackwardParams& p, long long batch, int head) {
  return p.stats + (batch * p.heads_q + head) * p.stats_rows;
}

// Score s becomes weight p, and dp becomes ds. kPlain: there is no softcap, and everything is visible.
template <bool kPlain>
__device__ __forceinline__ void weigh(float& s, float& dp, const BackwardParams& params, float lse_log2, float delta) {
  const float p = exp2_approx(fmaf(s, params.scale_log2, -lse_log2));
  if constexpr (kPlain) {
    dp = p * (dp - delta);
    s = p;
  } else {
    // why: a hidden pair weighs nothing, whatever lse, dp and the slope are.
    const bool hidden = s == -infinity();
    const float slope = params.softcap_scale != 0.0f ? fmaf(-s, s, 1.0f) : 1.0f;
    dp = hidden ? 0.0f : p * (dp - delta) * slope;
    s = hidden ? 0.0f : p;
  }
}
