// What the backward kernels on Hopper share: what they do with a warpgroup's tile in registers.
#pragma once
#include "../common/fragment.cuh"
#include "../common/mask.cuh"
#include "../common/params.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/warpgroup.cuh"
#include "products.cuh"

static_assert(sizeof(TiledBackwardParams) == kParamsBytes, "the host packs other parameters");

constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// What a cap multiplies the gradient of scores by; `capped`: tanh. why not negative: that of a hidden pair is infinite.
__device__ __forceinline__ float softcap_slope(float capped) { return fmaxf(fmaf(-capped, capped, 1.0f), 0.0f); }

// Rows that see nothing, or are not seen: zeros, whatever stands there. `row` is the thread's upper one.
template <int kCount>
__device__ __forceinline__ void clear_outside(float (&x)[kCount], int row, int begin, int end) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h < begin || row + 8 * h >= end) clear_row(x, h);
  }
}

// The warp's 16 rows to shared memory, as 16-bit numbers, in panels of `panel_bytes`.
template <int kColumns>
__device__ __forceinline__ void store_rows(const float (&x)[kColumns / 2], float scale, unsigned target,
                                           unsigned panel_bytes) {
  const int lane = fresh_thread() % 32;
  target += Swizzle<8>::offset(lane % 16, lane / 16);
#pragma unroll
  for (int column = 0; column < kColumns; column += 16) {
    const float* const y = x + column / 2;
    stmatrix_x4(Swizzle<8>::advance(target + column / 64 * panel_bytes, 0, column % 64 / 8),
                pack2(y[0] * scale, y[1] * scale), pack2(y[2] * scale, y[3] * scale), pack2(y[4] * scale, y[5] * scale),
                pack2(y[6] * scale, y[7] * scale));
  }
}
