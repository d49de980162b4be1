// red: addition to global memory, with no result.
#pragma once

__device__ __forceinline__ void red_add_f32(float* gmem, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(gmem), "f"(x) : "memory");
}

// Four neighbouring floats, 16-byte aligned; sm_90 and newer.
__device__ __forceinline__ void red_add_v4_f32(float* gmem, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(gmem), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}
