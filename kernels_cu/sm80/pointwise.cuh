// The pointwise step of backward, from scores s and dp to weights p and ds.
//   p = exp(s - lse)   ds = p (dp - delta) slope
// The slope is that of common/score.cuh, times that of a score_mod. Dropout comes between p and v: dp is dropped before
// the step, and p after it. lse and delta know nothing of it, and a sink is in lse.
#pragma once
#include "../common/dropout.cuh"
#include "../common/fragment.cuh"
#include "../common/mods.cuh"
#include "../common/score.cuh"

// Whether a step has more to do than the softcap and the mask.
constexpr bool kModWeights = kScoreMod || kMaskMod || kDropout;

// exp2(s * scale_log2 - lse * log2(e)), where `stat` is what delta.cu writes of lse. why two floats for float32: where
// scores are 10^4 the last bit of one is 10^-3 of the weight.
__device__ __forceinline__ float weight(float s, float scale_log2, float stat) {
  if constexpr (kDType != DType::kFloat32) return exp2_approx(fmaf(s, scale_log2, -stat));
  const float big = stat * kLog2E, small = fminf(fmaf(stat, kLog2E, -big), infinity());  // inf, not NaN, if big is
  return exp2_approx(fmaf(s, scale_log2, -big) - small);
}

// Score s becomes weight p, and dp becomes ds. kPlain: scores are products, and everything is visible.
template <bool kPlain>
__device__ __forceinline__ void p_and_ds(float& s, float& dp, const Score& score, float stat, float delta) {
  const float p = weight(s, score.params.scale_log2, stat);
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

// The same where s is a product, or what the softcap made of it, or hidden_product where the mask hides the pair;
// `mod_result` is what the mods make of it, and `kept` whether dropout keeps the weight, whose dp is then multiplied by
// `scale`. kAsksMask: the mask among the functions may hide the pair.
template <bool kAsksMask>
__device__ __forceinline__ void p_and_ds_with_mods(float& s, float& dp, const Score& score,
                                                   const ModHead::Result& mod_result, bool kept, float scale,
                                                   float stat, float delta) {
  const float p = kScoreMod ? weight(mod_result.score, 1.0f, stat) : weight(s, score.params.scale_log2, stat);
  bool hidden = is_hidden_product(s);
  if constexpr (kScoreMod) hidden |= mod_result.score <= kLeastScore;
  if constexpr (kAsksMask) hidden |= !mod_result.visible;
  if constexpr (kDropout) dp = kept ? dp * scale : 0.0f;
  dp = p * (dp - delta) * score.slope(s);
  s = hidden || !kept ? 0.0f : p;
  // why also of zeros: where the weight is so small that it is zero, the slope may be anything, too.
  if constexpr (kScoreModGrad) hidden |= dp == 0.0f, dp *= mod_result.slope;
  dp = hidden ? 0.0f : dp;
}
