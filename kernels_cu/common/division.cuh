// Division of whole numbers in few instructions.
#pragma once
#include "numeric.cuh"

// Divides numbers that are not negative and have a quotient below 2^21. why not by the operator: its code is twice as
// long, and all of it is read from memory once a launch (L50). The product is then at most one too large or too small.
struct FastDivmod {
  int by;
  float reciprocal;  // why kept: it is there before what is divided is known

  __device__ __forceinline__ FastDivmod(int number) : by(number), reciprocal(rcp_approx(static_cast<float>(number))) {}

  __device__ __forceinline__ int fast_div(int x) const {
    const int near = static_cast<int>(static_cast<float>(x) * reciprocal), rest = x - near * by;
    return near + (rest >= by) - (rest < 0);
  }
  __device__ __forceinline__ int ceil_quotient(int x) const { return fast_div(x + by - 1); }
};
__device__ __forceinline__ int fast_div(int x, int by) { return FastDivmod(by).fast_div(x); }
__device__ __forceinline__ int ceil_quotient(int x, int by) { return FastDivmod(by).ceil_quotient(x); }
