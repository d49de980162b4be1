// mma.sync: D += A B on one warp. The PTX ISA describes the fragments under "Matrix fragments for mma.m16n8k16" and
// "… .m16n8k8".
#pragma once

// d holds 4 floats of a 16x8 result; a is 16x16, row-major; b is 16x8, column-major, both float16 or both bfloat16.
template <bool kIsFloat16>
__device__ __forceinline__ void mma_sync_m16n8k16(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (kIsFloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// a is 16x8 and b is 8x8. Both are TF32: the unit reads the upper 19 bits of each word.
__device__ __forceinline__ void mma_sync_m16n8k8_tf32(float* d, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
