// Scores from products q·k. The only change is the softcap:
//   score = cap * tanh(product / cap)        d score / d product = 1 - (score / cap)²
// Products and scores have the same unit: the exponent is score * scale_log2 with or without a softcap.
#pragma once
#include "numeric.cuh"

struct ScoreParams {
  float softmax_scale, scale_log2;  // scale_log2 = softmax_scale * log2(e): the exponent per unit of q·k
  float cap, inverse_cap;           // softcap / softmax_scale (in units of q·k) and its inverse; 0 without a softcap
};

struct Score {
  // True if scores always differ from products, as a constant.
  static constexpr bool kAlwaysChanges = kSoftcap == Softcap::kAlways;

  const ScoreParams& params;

  // True if scores differ from products: a constant, or read from the parameters.
  __device__ __forceinline__ bool changes() const {
    return kSoftcap == Softcap::kAtRunTime ? params.inverse_cap != 0.0f : kAlwaysChanges;
  }

  // Replaces products by scores. All lanes of a warp call it.
  template <int kCount>
  __device__ __forceinline__ void apply(float (&s)[kCount]) const {
    if (!changes()) return;
    if constexpr (kAlwaysChanges && kDType != DType::kFloat32) {
      constexpr int kPiece = kCount % 16 == 0 ? 16 : kCount;  // pieces of 16 save registers
#pragma unroll
      for (int first = 0; first < kCount; first += kPiece) cap_piece<kPiece>(s + first);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = capped(s[i]);
    }
  }

  template <int kFragments, int kCount>
  __device__ __forceinline__ void apply(float (&s)[kFragments][kCount]) const {
    if (!changes()) return;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) apply(s[m]);
  }

  // Returns d score / d product: 1 without a softcap, where inverse_cap is 0. Saturated at no cost: the score of a
  // masked pair is -inf, and its slope must be 0.
  __device__ __forceinline__ float slope(float score) const {
    const float x = score * params.inverse_cap;
    return __saturatef(fmaf(-x, x, 1.0f));
  }

 private:
  // The largest |product / cap| for which the polynomial is accurate.
  static constexpr float kSmall = 0.5f;

  // Computes tanh only if one of the warp's products exceeds half the cap: tanh takes two MUFU operations, at an eighth
  // of the usual rate. The polynomial (error up to 7e-7 of the result) always follows, and is then the identity. A
  // branch with two arms costs 5 % where products are small.
  template <int kCount>
  __device__ __forceinline__ void cap_piece(float* s) const {
    float largest = 0.0f, inverse_cap = params.inverse_cap;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(s[i]));
    if (__any_sync(0xffffffffu, largest * inverse_cap > kSmall)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        s[i] = fabsf(s[i] * params.inverse_cap) > kSmall ? of_tanh(s[i]) : polynomial(s[i], params.inverse_cap);
      }
      inverse_cap = 0.0f;
    }
    asm volatile("" : "+f"(inverse_cap));  // opaque: with a constant 0 the compiler might emit two arms
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = polynomial(s[i], inverse_cap);
      asm volatile("" : "+f"(s[i]));  // in order: interleaved scores spill registers
    }
  }

  __device__ __forceinline__ static float polynomial(float product, float inverse_cap) {
    const float x = product * inverse_cap, square = x * x;
    return product * fmaf(square, fmaf(square, fmaf(square, -0.04475044f, 0.13205354f), -0.33328159f), 1.0f);
  }

  __device__ __forceinline__ float of_tanh(float product) const {
    const float x = product * params.inverse_cap;
    return fmaf(-2.0f * params.cap, rcp_approx(1.0f + exp2_approx(x * 2.885390081777926815f)), params.cap);
  }

  // Returns one capped score. 16-bit operands use exp2, with an absolute error of about 2e-7 of the cap. The error of
  // tanh.approx is 5e-4, which changes a weight by 2 % at a cap of 50.
  __device__ __forceinline__ float capped(float s) const {
    const float x = s * params.inverse_cap;
    if constexpr (kDType == DType::kFloat32) {
      return params.cap * tanhf(x);
    } else {
      // Two forms: the cap multiplies the absolute error of `direct`, so small |x| take the series (L44).
      const float square = x * x;
      const float series = s * fmaf(square, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
      const float direct =
          fmaf(-2.0f * params.cap, rcp_approx(1.0f + exp2_approx(x * 2.885390081777926815f)), params.cap);
      return fabsf(x) < 0.0625f ? series : direct;
    }
  }
};
