// The pointwise step of backward, from s and dp to weights p and ds.
//   p = exp(s - lse)   ds = p (dp - delta) slope
// The slope is the softcap's (common/score.cuh) times the score_mod's. Dropout acts inside the step. dp is dropped and
// scaled before ds is computed; p is dropped after that. lse and delta need no change for dropout, and lse includes a
// sink.
#pragma once
#include "../common/dropout.cuh"
#include "../common/fragment.cuh"
#include "../common/mods.cuh"
#include "../common/score.cuh"

// True if the step has more to do than the softcap and the mask.
constexpr bool kModWeights = kScoreMod || kMaskMod || kDropout;

// Returns exp2(s * scale_log2 - lse * log2(e)); `stat` is delta.cu's number for lse. float32 subtracts two floats: at
// scores of 10^4 the last bit of one is 10^-3 of the weight.
__device__ __forceinline__ float weight(float s, float scale_log2, float stat) {
  if constexpr (kDType != DType::kFloat32) return exp2_approx(fmaf(s, scale_log2, -stat));
  const float big = stat * kLog2E, small = fminf(fmaf(stat, kLog2E, -big), infinity());  // inf, not NaN, if big is
  return exp2_approx(fmaf(s, scale_log2, -big) - small);
}

// Replaces score s by weight p, and dp by ds. kPlain: scores are products, and all pairs are visible.
template <bool kPlain>
__device__ __forceinline__ void p_and_ds(float& s, float& dp, const Score& score, float stat, float delta) {
  const float p = weight(s, score.params.scale_log2, stat);
  if constexpr (kPlain) {
    dp = p * (dp - delta);
    s = p;
  } else {
    // A masked pair weighs nothing, whatever lse, dp and the slope are.
    const bool hidden = s == -infinity();
    dp = hidden ? 0.0f : p * (dp - delta) * score.slope(s);
    s = hidden ? 0.0f : p;
  }
}

// Replaces s and dp by p and ds with mods. s is a product (after the softcap), or hidden_product for a masked pair;
// `mod_result` is the mods' result. If dropout keeps the weight (`kept`), dp is multiplied by `scale`. kAsksMask:
// evaluates the mask_mod.
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
  // Also for zeros: where the weight underflows to zero, the slope may be inf or NaN.
  if constexpr (kScoreModGrad) hidden |= dp == 0.0f, dp *= mod_result.slope;
  dp = hidden ? 0.0f : dp;
}
