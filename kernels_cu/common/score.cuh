// Scores: what becomes of the raw products q·k before the softmax. The only change is the softcap:
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

  // Products become scores. All lanes of a warp call.
  template <int kCount>
  __device__ __forceinline__ void apply(float (&s)[kCount]) const {
    if (!changes()) return;
    if constexpr (kAlwaysChanges && kDType != DType::kFloat32) {
      constexpr int kPiece = kCount % 16 == 0 ? 16 : kCount;  // why in pieces: registers
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

  // The factor from the gradient of a score to that of its product. It is 1 without a softcap, as inverse_cap is then
  // 0. why saturated: the score of a hidden pair is -inf, and its slope must be 0. The instruction does so for nothing.
  __device__ __forceinline__ float slope(float score) const {
    const float x = score * params.inverse_cap;
    return __saturatef(fmaf(-x, x, 1.0f));
  }

 private:
  // Up to this product / cap the polynomial serves.
  static constexpr float kSmall = 0.5f;

  // Takes tanh only if one of the warp's products is over half of the cap. why: it is two MUFU, of which an SM does an
  // eighth as many as of other instructions. why the polynomial of (product / cap)², which is off by up to 7e-7 of the
  // result, follows in any case, and then changes nothing: with a choice between two arms, calls whose products are
  // small take 5 % more time.
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
    asm volatile("" : "+f"(inverse_cap));  // why: knowing that it is 0, the compiler might make two arms
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = polynomial(s[i], inverse_cap);
      asm volatile("" : "+f"(s[i]));  // why: mixed with each other, the scores spill registers
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
