// float32 functions of one instruction, and conversions of 16-bit floats.
#pragma once

// Returns the minimum; NaN if either argument is NaN.
__device__ __forceinline__ float min_nan_f32(float x, float y) {
  float smallest;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smallest) : "f"(x), "f"(y));
  return smallest;
}

// Returns the maximum; NaN if either argument is NaN.
__device__ __forceinline__ float max_nan_f32(float x, float y) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(x), "f"(y));
  return largest;
}

// Returns tanh(x) with an error of up to 2^-11 of the result.
__device__ __forceinline__ float tanh_approx_f32(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float cvt_f32_f16(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

__device__ __forceinline__ unsigned short cvt_rn_f16_f32(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ unsigned short cvt_rn_bf16_f32(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
