// Accumulator fragments. A warp holds 16 x N floats as N / 2 registers a lane: register 4 j + 2 h + e is row lane / 4 +
// 8 h, column 8 j + 2 (lane % 4) + e. mma.sync (m16n8) and wgmma (m64nN, per warp) give the same layout.
#pragma once
#include "numeric.cuh"

// threadIdx.x. why: volatile, so that addresses derived from it are formed where they are used, not held in registers
// over a loop whose accumulators need them all.
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

// Row h of a fragment: maximum over this lane's columns (NaN is passed over: it shows in the row sum).
template <int kCount>
__device__ __forceinline__ float lane_row_max(const float (&s)[kCount], int h) {
  float m = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
  for (int j = 1; j < kCount / 4; ++j) m = fmaxf(m, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
  return m;
}

// Row h becomes exp2(s * scale_log2 - max_log2); returns the sum over this lane's columns.
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
  for (int j = 0; j < kCount / 4; ++j) {
    s[4 * j + 2 * h] *= factor;
    s[4 * j + 2 * h + 1] *= factor;
  }
}

// why: 0 * NaN is NaN, and a row that sees nothing shares products with rows that may see one.
template <int kCount>
__device__ __forceinline__ void clear_row(float (&s)[kCount], int h) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) s[4 * j + 2 * h] = s[4 * j + 2 * h + 1] = 0.0f;
}

// Scores become tanh(s softmax_scale / softcap); the softcap itself is part of scale_log2.
template <int kCount>
__device__ __forceinline__ void cap(float (&s)[kCount], float softcap_scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = softcap_tanh(s[i] * softcap_scale);
}

template <int kTiles, int kCount>
__device__ __forceinline__ void cap(float (&s)[kTiles][kCount], float softcap_scale) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) cap(s[m], softcap_scale);
}

// Row h of columns 32 g … 32 g + 31 as 16-bit numbers, 16 bytes a lane: the lanes of a quad exchange pairs, after which
// lane t holds columns 32 g + 8 t … + 7. A 4x4 transposition by two butterflies.
template <int kCount>
__device__ __forceinline__ uint4 gather_row_16bit(const float (&o)[kCount], int g, int h) {
  const int t = threadIdx.x % 4;
  unsigned r[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = pack2(o[16 * g + 4 * i + 2 * h], o[16 * g + 4 * i + 2 * h + 1]);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, t & 1 ? r[i] : r[i + 1], 1);
    if (t & 1) r[i] = got;
    else r[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, t & 2 ? r[i] : r[i + 2], 2);
    if (t & 2) r[i] = got;
    else r[i + 2] = got;
  }
  return make_uint4(r[0], r[1], r[2], r[3]);
}

// Row h of columns 16 g … 16 g + 15 as floats, 16 bytes a lane: lane t then holds columns 16 g + 8 (t % 2) + 4 (t / 2)
// … + 3.
template <int kCount>
__device__ __forceinline__ uint4 gather_row_float(const float (&o)[kCount], int g, int h) {
  const bool odd = threadIdx.x & 1;
  const float* first = &o[8 * g + 2 * h];
  const float* second = &o[8 * g + 4 + 2 * h];
  const float x = __shfl_xor_sync(0xffffffffu, odd ? first[0] : second[0], 1);
  const float y = __shfl_xor_sync(0xffffffffu, odd ? first[1] : second[1], 1);
  const float4 row = odd ? make_float4(x, y, second[0], second[1]) : make_float4(first[0], first[1], x, y);
  return make_uint4(__float_as_uint(row.x), __float_as_uint(row.y), __float_as_uint(row.z), __float_as_uint(row.w));
}
