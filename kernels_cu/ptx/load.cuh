// Loads from global memory that no kernel writes to, or zeros.
#pragma once

// why not volatile: the compiler then makes one load of two equal ones. why no condition in C++: that would be two
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
