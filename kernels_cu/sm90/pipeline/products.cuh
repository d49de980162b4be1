// wgmma products of tiles in shared-memory panels, and their register operands. These functions only issue products;
// the caller waits for them.
#pragma once
#include "../../common/fragment.cuh"
#include "../../common/swizzle.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/wgmma.cuh"
#include "panels.cuh"

// Returns this lane's ldmatrix or stmatrix address of a warp's 16 rows, which begin at `smem` in a panel.
__device__ __forceinline__ unsigned row_address(unsigned smem) {
  const int lane = fresh_thread() % 32;
  return smem + Swizzle<8>::offset(lane % 16, lane / 16);
}

// Loads the first kSteps 16-column steps of these rows as register operands of wgmma.
template <int kSteps, int kCount>
__device__ __forceinline__ void load_rows(unsigned (&a)[kCount][4], unsigned row_address, unsigned panel_bytes) {
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
    ldmatrix_x4(a[kk], Swizzle<8>::advance(row_address + kk / 4 * panel_bytes, 0, kk % 4 * 2));
  }
}

// Issues x = a bᵀ, or x += a bᵀ, over kDim columns of the tiles behind two descriptors. The first kInRegisters steps of
// a are in registers.
template <int kDim, int kInRegisters, int kCount>
__device__ __forceinline__ void issue_abt(float (&x)[kCount], const unsigned (*a_registers)[4],
                                          unsigned long long a_begin, unsigned a_panel_bytes,
                                          unsigned long long b_begin, unsigned b_panel_bytes, bool accumulate = false) {
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kDim / 16; ++kk) {
    const unsigned long long b = b_begin + wgmma_columns(kk, b_panel_bytes);
    if (kk < kInRegisters) {
      Wgmma<2 * kCount>::template rs<kIsFloat16, false>(x, a_registers[kk], b, kk > 0 || accumulate);
    } else {
      const unsigned long long a = a_begin + wgmma_columns(kk, a_panel_bytes);
      Wgmma<2 * kCount>::template ss<kIsFloat16, false>(x, a, b, kk > 0 || accumulate);
    }
  }
  wgmma_commit();
}

// Issues x += a b, or x = a b unless `accumulate`. a is in registers; the sum runs over the kRows rows of b.
template <int kRows, int kColumns>
__device__ __forceinline__ void issue_ab(float (&x)[kColumns / 2], const unsigned (&a)[kRows / 4], unsigned b_smem,
                                         unsigned b_panel_bytes, bool accumulate = true) {
  const unsigned long long b = wgmma_descriptor(b_smem, b_panel_bytes);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kRows / 16; ++kk) {
    Wgmma<kColumns>::template rs<kIsFloat16, true>(x, a + 4 * kk, b + wgmma_rows(kk), kk > 0 || accumulate);
  }
  wgmma_commit();
}
