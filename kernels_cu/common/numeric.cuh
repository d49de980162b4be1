// Conversions and the fast functions that softmax stands on.
#pragma once
#include "config.cuh"

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.442695040888963407f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh for softcap. 16-bit: by exp2, absolute error about 2e-7 (tanh.approx has 5e-4, which a cap of 50 would turn into
// 2 % of a weight); float32: CUDA's tanhf.
__device__ __forceinline__ float softcap_tanh(float x) {
  if constexpr (kDType == DType::kFloat32) {
    return tanhf(x);
  } else {
    // why: a large cap multiplies the absolute error of the exp2 form; near 0 three terms of the series are exact
    // enough.
    const float square = x * x;
    const float series = x * fmaf(square, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
    const float direct = 1.0f - 2.0f * rcp_approx(1.0f + exp2_approx(x * 2.885390081777926815f));
    return fabsf(x) < 0.0625f ? series : direct;
  }
}

// Two floats to a pair of 16-bit numbers, `low` in the lower half.
__device__ __forceinline__ unsigned pack2(float low, float high) {
  unsigned pair;
  if constexpr (kDType == DType::kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// x = big + small, each rounded to TF32, so that the remainder is under 2^-22 of x; NaN stays NaN in both.
// Source: Ootomo and Yokota, arXiv 2203.03341.
struct Tf32Pair {
  unsigned big, small;
};

__device__ __forceinline__ unsigned round_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ Tf32Pair split_tf32(float x) {
  const unsigned big = round_tf32(x);
  return {big, round_tf32(x - __uint_as_float(big))};
}
