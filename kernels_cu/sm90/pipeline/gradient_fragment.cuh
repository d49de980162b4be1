// Helpers of the backward kernels on Hopper for a warpgroup's gradients in registers.
#pragma once
#include "../../common/float_rows.cuh"
#include "../../common/score.cuh"
#include "../../common/sequence.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/warpgroup.cuh"
#include "panels.cuh"
#include "products.cuh"

// Zeros the rows outside `visible`, which are in no visible pair. `row` is the thread's upper row.
template <int kCount>
__device__ __forceinline__ void zero_outside(float (&x)[kCount], int row, Range visible) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (row + 8 * h < visible.begin || row + 8 * h >= visible.end) zero_row(x, h);
}

// Stores the warp's 16 rows to shared memory, as 16-bit numbers or as floats, in panels of `panel_bytes`.
template <int kColumns, bool kAsFloats = false>
__device__ __forceinline__ void stage_rows(const float (&x)[kColumns / 2], float scale, unsigned target,
                                           unsigned panel_bytes) {
  if constexpr (kAsFloats) {
    const int lane = fresh_thread() % 32;
    const unsigned first = target + Swizzle<8>::offset(lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
      st_shared_v2(Swizzle<8>::advance(first + i / 16 * panel_bytes, 0, i / 4 % 4 * 2) + i / 2 % 2 * 1024,
                   __float_as_uint(x[i] * scale), __float_as_uint(x[i + 1] * scale));
    }
    return;
  }
  target = row_address(target);
#pragma unroll
  for (int column = 0; column < kColumns; column += 16) {
    const float* const y = x + column / 2;
    stmatrix_x4(Swizzle<8>::advance(target + column / 64 * panel_bytes, 0, column % 64 / 8),
                pack2(y[0] * scale, y[1] * scale), pack2(y[2] * scale, y[3] * scale), pack2(y[4] * scale, y[5] * scale),
                pack2(y[6] * scale, y[7] * scale));
  }
}

// Adds the warp's 16 rows of a gradient to float32 rows in global memory, from `rows` on. They pass through kPanels
// panels of shared memory, in as many passes as these take: 32 columns each.
template <int kColumns, int kPanels, class Rows>
__device__ __forceinline__ void add_rows(const TensorMap& map, const float (&x)[kColumns / 2], float scale,
                                         unsigned staged, unsigned panel_bytes, const Rows& rows, int head,
                                         bool is_leader) {
  constexpr int kPass = kColumns % (32 * kPanels) == 0 ? 32 * kPanels : kColumns < 32 * kPanels ? kColumns : 32;
#pragma unroll
  for (int first = 0; first < kColumns; first += kPass) {
    stage_rows<kPass, true>(reinterpret_cast<const float (&)[kPass / 2]>(x[first / 2]), scale, staged, panel_bytes);
    fence_proxy_async();
    __syncwarp();
    if (is_leader) {
      add_panels<kPass>(map, staged, panel_bytes, first, rows, head);
      bulk_commit();
      bulk_wait_read<0>();
    }
    __syncwarp();
  }
}

// Issues the stores of the warp's 16 rows of a gradient to global memory, from `rows` on. They pass through `staged` in
// shared memory.
template <int kColumns, class Rows>
__device__ __forceinline__ void store_rows(const TensorMap& map, const float (&x)[kColumns / 2], float scale,
                                           unsigned staged, unsigned panel_bytes, const Rows& rows, int head,
                                           bool is_leader) {
  stage_rows<kColumns>(x, scale, staged, panel_bytes);
  fence_proxy_async();
  __syncwarp();
  if (is_leader) {
    store_panels<(kColumns + kPanelColumns - 1) / kPanelColumns>(map, staged, panel_bytes, 0, rows, head);
    bulk_commit();
  }
}
