// Warpgroups (four warps): register reallocation, and named barriers.
#pragma once

// Changes the registers per thread. All warps of the warpgroup call it, once. The kernel needs __launch_bounds__;
// otherwise the compiler ignores these instructions.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barrier `id` (1 to 15): completes once `threads` threads have synchronised or arrived.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Synchronises; returns true if `says` is true in any of the threads.
__device__ __forceinline__ bool bar_sync_any(int id, int threads, bool says) {
  unsigned any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(unsigned(says))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
