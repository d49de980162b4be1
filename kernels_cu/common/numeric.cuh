// Constants, conversions and approximate functions of the softmax. Divisions use rcp_approx: an IEEE division is a call
// that needs registers (L6).
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

// Packs two floats as 16-bit numbers, `low` in the lower half.
__device__ __forceinline__ unsigned pack2(float low, float high) {
  unsigned pair;
  if constexpr (kDType == DType::kFloat16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
