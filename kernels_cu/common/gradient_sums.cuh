// Helpers for the gradients of captured arrays: stores of any dtype, and sums with a fixed order.
#pragma once
#include "../ptx/float_math.cuh"

// The dtype of a captured array. The first three values are the values of DType.
enum class NumberKind { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

__device__ __forceinline__ void store_number(void* array, long long index, float x, int kind) {
  switch (static_cast<NumberKind>(kind)) {
    case NumberKind::kFloat16: static_cast<unsigned short*>(array)[index] = cvt_rn_f16_f32(x); break;
    case NumberKind::kBFloat16: static_cast<unsigned short*>(array)[index] = cvt_rn_bf16_f32(x); break;
    case NumberKind::kFloat32: static_cast<float*>(array)[index] = x; break;
    case NumberKind::kFloat64: static_cast<double*>(array)[index] = x; break;
  }
}

// Returns the sum over all lanes of a warp, in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
