// Loads and stores of shared memory, by address. ldmatrix loads four 8x8 matrices of 16-bit elements: lane 8 i + r
// gives the address of row r (16 bytes) of matrix i.
#pragma once

__device__ __forceinline__ unsigned smem_address(const void* smem) {
  return static_cast<unsigned>(__cvta_generic_to_shared(smem));
}

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned smem_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned smem_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address));
}

__device__ __forceinline__ unsigned ld_shared_u32(unsigned smem_address) {
  unsigned value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem_address));
  return value;
}

__device__ __forceinline__ void st_shared_v4(unsigned smem_address, const unsigned (&x)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(smem_address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ __forceinline__ void ld_shared_v2(unsigned& x, unsigned& y, unsigned smem_address) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(smem_address));
}

__device__ __forceinline__ float4 ld_shared_v4_f32(unsigned smem_address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(smem_address));
  return value;
}

__device__ __forceinline__ void ld_shared_v4(unsigned (&x)[4], unsigned smem_address) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(smem_address));
}

__device__ __forceinline__ void st_shared_u32(unsigned smem_address, unsigned value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem_address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_v2(unsigned smem_address, unsigned x, unsigned y) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(smem_address), "r"(x), "r"(y) : "memory");
}

// Stores four 8x8 matrices of 16-bit elements; lanes give row addresses as for ldmatrix.
__device__ __forceinline__ void stmatrix_x4(unsigned smem_address, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem_address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void stmatrix_x2_trans(unsigned smem_address, const unsigned* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(smem_address), "r"(r[0]), "r"(r[1])
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(unsigned smem_address, const unsigned* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(smem_address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
