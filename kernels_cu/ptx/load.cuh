// Predicated loads of global memory that no kernel writes; the result is zero without a load.
#pragma once

// Not volatile, so that the compiler merges two equal loads. The predicate is in PTX: a condition in C++ makes two
// loads.
__device__ __forceinline__ unsigned short load_or_zero(const unsigned short* from, bool exists) {
  unsigned short x;
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b16 %0, 0;\n"
      "@p ld.global.nc.u16 %0, [%1];\n"
      "}"
      : "=h"(x)
      : "l"(from), "r"(static_cast<int>(exists)));
  return x;
}
__device__ __forceinline__ unsigned load_or_zero(const unsigned* from, bool exists) {
  unsigned x;
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@p ld.global.nc.u32 %0, [%1];\n"
      "}"
      : "=r"(x)
      : "l"(from), "r"(static_cast<int>(exists)));
  return x;
}
__device__ __forceinline__ unsigned long long load_or_zero(const unsigned long long* from, bool exists) {
  unsigned long long x;
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b64 %0, 0;\n"
      "@p ld.global.nc.u64 %0, [%1];\n"
      "}"
      : "=l"(x)
      : "l"(from), "r"(static_cast<int>(exists)));
  return x;
}

// Fetches the line of this address into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* gmem) { asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem)); }
