// Weights (p or ds) of kBlockK keys x kBlockQ queries in shared memory, for exchange between warps.
#pragma once
#include "gemm.cuh"

using WeightSwizzle = Swizzle<kBlockQ / kChunkElements>;
constexpr int kWeightBytes = kBlockK * kBlockQ * kElementBytes;

// Stores a warp's accumulator into a swizzled tile, from `row` on. Its columns are blocks of 16 as in gemm_ab.cuh.
template <class S, int kColumnStep, int kFragments, int kCount>
__device__ __forceinline__ void store_fragments(unsigned smem, const float (&x)[kFragments][kCount], int row,
                                                int column) {
  const int lane = fresh_thread() % 32;
  row += lane / 4;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int c = column + kColumnStep * (j / 2) + 8 * (j % 2) + lane % 4 * 2;
    const unsigned target = smem + S::offset(row, c / kChunkElements) + c % kChunkElements * kElementBytes;
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = x[m][4 * j + 2 * h], high = x[m][4 * j + 2 * h + 1];
        const unsigned address = target + (16 * m + 8 * h) * S::kRowBytes;
        if constexpr (kIsTf32) st_shared_v2(address, __float_as_uint(low), __float_as_uint(high));
        else st_shared_u32(address, pack2(low, high));
      }
    }
  }
}

// Left operands with keys as rows, from row `key` on; the summed dimension is the queries.
struct KeyRows {
  unsigned lane_address;

  __device__ __forceinline__ KeyRows(unsigned smem, int key) {
    const int lane = fresh_thread() % 32;
    if constexpr (kIsTf32) lane_address = smem + WeightSwizzle::offset(key + lane / 4, lane % 4 / 2) + lane % 2 * 8;
    else lane_address = smem + WeightSwizzle::offset(key + lane % 16, lane / 16);
  }

  template <int kFragments>
  __device__ __forceinline__ void operator()(FragmentA (&a)[kFragments], int kk) const {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      if constexpr (kIsTf32) {  // queries 2 t and 2 t + 1, in the permuted order of gemm_ab
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ld_shared_v2(a[m].big[h], a[m].big[h + 2], WeightSwizzle::advance(lane_address, 16 * m + 8 * h, 2 * kk));
        }
        a[m].split();
      } else {
        ldmatrix_x4(a[m].big, WeightSwizzle::advance(lane_address, 16 * m, 2 * kk));
      }
    }
  }
};

// Left operands with queries as rows, from row `query` on; the summed dimension is the keys. `query` is a multiple of
// the number of rows that are loaded.
struct QueryRows {
  unsigned even_lane, odd_lane;

  __device__ __forceinline__ QueryRows(unsigned smem, int query) {
    const int lane = fresh_thread() % 32, g = lane / 4, t = lane % 4;
    if constexpr (kIsTf32) {  // keys 2 t and 2 t + 1
      const int chunk = query / 4 + g / 4;
      even_lane = smem + WeightSwizzle::offset(2 * t, chunk) + g % 4 * 4;
      odd_lane = smem + WeightSwizzle::offset(2 * t + 1, chunk) + g % 4 * 4;
    } else {
      even_lane = smem + WeightSwizzle::offset(lane % 8 + 8 * (lane / 16), query / 8 + lane / 8 % 2);
    }
  }

  template <int kFragments>
  __device__ __forceinline__ void operator()(FragmentA (&a)[kFragments], int kk) const {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      if constexpr (kIsTf32) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          a[m].big[h] = ld_shared_u32(WeightSwizzle::advance(even_lane, 8 * kk, 4 * m + 2 * h));
          a[m].big[h + 2] = ld_shared_u32(WeightSwizzle::advance(odd_lane, 8 * kk, 4 * m + 2 * h));
        }
        a[m].split();
      } else {
        ldmatrix_x4_trans(a[m].big, WeightSwizzle::advance(even_lane, 16 * kk, 2 * m));
      }
    }
  }
};
