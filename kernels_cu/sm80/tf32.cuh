// float32 numbers as pairs of TF32 numbers, which the tensor cores multiply.
#pragma once

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
