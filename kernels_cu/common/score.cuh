// Scores: what becomes of the raw products q·k before the softmax. Its one client is the softcap:
//   score = cap * tanh(product / cap)        d score / d product = 1 - (score / cap)²
// Products and scores have the same unit: an exponent is score * scale_log2 with or without a softcap.
#pragma once
#include "numeric.cuh"

struct ScoreParams {
  float softmax_scale, scale_log2;  // scale_log2 = softmax_scale * log2(e): the exponent of a score in units of q·k
  float cap, inverse_cap;           // softcap in units of q·k, softcap / softmax_scale, and its inverse; 0 without one
};

struct Score {
  // Whether the compiler knows that scores differ from products.
  static constexpr bool kAlwaysChanges = kSoftcap == Softcap::kAlways;

  const ScoreParams& params;

  // Whether scores differ from products: a constant, or a question to the parameters.
  __device__ __forceinline__ bool changes() const {
    return kSoftcap == Softcap::kAtRunTime ? params.inverse_cap != 0.0f : kAlwaysChanges;
  }

  // Products become scores.
  template <int kCount>
  __device__ __forceinline__ void apply(float (&s)[kCount]) const {
    if (!changes()) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = capped(s[i]);
  }

  template <int kFragments, int kCount>
  __device__ __forceinline__ void apply(float (&s)[kFragments][kCount]) const {
    if (!changes()) return;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) apply(s[m]);
  }

  // The factor from the gradient of a score to that of its product. It is 1 without a softcap, as inverse_cap is then
  // 0. why saturated: the score of a hidden pair is -inf, and its slope must be 0. The instruction does so for nothing.
  __device__ __forceinline__ float slope(float score) const {
    const float x = score * params.inverse_cap;
    return __saturatef(fmaf(-x, x, 1.0f));
  }

 private:
  // 16-bit operands use exp2, whose absolute error is about 2e-7 of the cap. why not tanh.approx: its error is 5e-4,
  // which a cap of 50 turns into 2 % of a weight.
  __device__ __forceinline__ float capped(float s) const {
    const float x = s * params.inverse_cap;
    if constexpr (kDType == DType::kFloat32) {
      return params.cap * tanhf(x);
    } else {
      // why two forms: L44.
      const float square = x * x;
      const float series = s * fmaf(square, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
      const float direct =
          fmaf(-2.0f * params.cap, rcp_approx(1.0f + exp2_approx(x * 2.885390081777926815f)), params.cap);
      return fabsf(x) < 0.0625f ? series : direct;
    }
  }
};
