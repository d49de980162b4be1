// Accumulator fragments. A warp holds 16 x N floats as N / 2 registers per lane: register 4 j + 2 h + e is the element
// in row lane / 4 + 8 h and column 8 j + 2 (lane % 4) + e. mma.sync (m16n8) and wgmma (m64nN, per warp) both have this
// layout. A quad is four lanes that hold the same rows.
#pragma once
#include "numeric.cuh"

// Returns threadIdx.x by a volatile read, so that ptxas does not hoist values that derive from it (L4).
__device__ __forceinline__ int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Returns the maximum of row h over this lane's columns. NaN is ignored here; the sum of the row has it.
template <int kCount>
__device__ __forceinline__ float lane_row_max(const float (&s)[kCount], int h) {
  float m = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
  for (int j = 1; j < kCount / 4; ++j) m = fmaxf(m, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
  return m;
}

// Replaces row h by exp2(s * scale_log2 - max_log2). Returns its sum over this lane's columns.
template <int kCount>
__device__ __forceinline__ float exponentiate_row(float (&s)[kCount], int h, float scale_log2, float max_log2) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = s[4 * j + 2 * h + e];
      x = exp2_approx(fmaf(x, scale_log2, -max_log2));
      sum += x;
    }
  }
  return sum;
}

template <int kCount>
__device__ __forceinline__ void scale_row(float (&s)[kCount], int h, float factor) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) s[4 * j + 2 * h] *= factor, s[4 * j + 2 * h + 1] *= factor;
}

// Sets row h to zero. A product would not do: 0 * NaN is NaN, and a row without visible keys shares a tile with rows
// that may see a NaN.
template <int kCount>
__device__ __forceinline__ void zero_row(float (&s)[kCount], int h) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) s[4 * j + 2 * h] = s[4 * j + 2 * h + 1] = 0.0f;
}
