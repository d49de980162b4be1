// red: additions to global memory without a result. Also counters in global memory, by which thread blocks signal
// progress to each other.
#pragma once

__device__ __forceinline__ void red_add_f32(float* gmem, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(gmem), "f"(x) : "memory");
}

// Adds to two contiguous floats, aligned to 8 bytes. As one instruction from sm_90 on.
__device__ __forceinline__ void red_add_v2_f32(float* gmem, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1,%2};" ::"l"(gmem), "f"(x), "f"(y) : "memory");
#else
  red_add_f32(gmem, x), red_add_f32(gmem + 1, y);
#endif
}

// Adds to four contiguous floats, aligned to 16 bytes. Requires sm_90.
__device__ __forceinline__ void red_add_v4_f32(float* gmem, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(gmem), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

__device__ __forceinline__ void red_release_add(unsigned* gmem, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(gmem), "r"(x) : "memory");
}

__device__ __forceinline__ unsigned atom_acquire_add(unsigned* gmem, unsigned x) {
  unsigned old;
  asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(gmem), "r"(x) : "memory");
  return old;
}

__device__ __forceinline__ unsigned ld_acquire(const unsigned* gmem) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(gmem) : "memory");
  return x;
}
