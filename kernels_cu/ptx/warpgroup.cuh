// What a warpgroup, four warps, has of its own: its share of the registers, and named barriers.
#pragma once

// Change the registers of each thread. All warps of the warpgroup call, once. The kernel needs __launch_bounds__: the
// compiler else ignores these instructions.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier `id` (1 to 15) opens once `threads` threads have come to it, be it to wait or only to arrive.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; tells whether any of the threads says so.
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
