// Integer division in few instructions.
#pragma once
#include "numeric.cuh"

// Divides non-negative integers whose quotient is below 2^21; the estimated quotient is then off by at most one. The
// division operator has twice as much code, which every launch reads from memory (cold code, L50).
struct FastDivmod {
  int by;
  float reciprocal;  // kept, so that it is ready before the dividend is known

  __device__ __forceinline__ FastDivmod(int number) : by(number), reciprocal(rcp_approx(static_cast<float>(number))) {}

  __device__ __forceinline__ int fast_div(int x) const {
    const int near = static_cast<int>(static_cast<float>(x) * reciprocal), rest = x - near * by;
    return near + (rest >= by) - (rest < 0);
  }
  __device__ __forceinline__ int ceil_quotient(int x) const { return fast_div(x + by - 1); }
};
__device__ __forceinline__ int fast_div(int x, int by) { return FastDivmod(by).fast_div(x); }
__device__ __forceinline__ int ceil_quotient(int x, int by) { return FastDivmod(by).ceil_quotient(x); }
