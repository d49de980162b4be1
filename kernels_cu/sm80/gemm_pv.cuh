// The second product of a warp's rows with a tile in shared memory: o += p v.
#pragma once
#include "gemm.cuh"

using VSwizzle = Swizzle<kHeadDimV / kChunkElements>;

// o += p v for 16-bit operands: v is read transposed, 16 keys x 16 columns at a time.
template <int kTiles>
__device__ __forceinline__ void gemm_pv_16bit(float (&o)[kTiles][kHeadDimV / 2], const float (&p)[kTiles][kBlockK / 2],
                                              unsigned v_smem) {
  const int lane = fresh_thread() % 32;
  const unsigned v_lane = v_smem + VSwizzle::offset(lane % 16, lane / 16);
#pragma unroll
  for (int kk = 0; kk < kBlockK / 16; ++kk) {
    FragmentA a[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) a[m].from_weights(p[m], kk);
#pragma unroll
    for (int j = 0; j < kHeadDimV / 16; ++j) {
      unsigned b[4];
      ldmatrix_x4_trans(b, VSwizzle::advance(v_lane, 16 * kk, 2 * j));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        mma(&o[m][8 * j], a[m], b[0], b[1]);
        mma(&o[m][8 * j + 4], a[m], b[2], b[3]);
      }
    }
  }
}

// o += p v for float32, kGroup fragments of 8 columns at a time. The tile's sum is formed apart and added once.
// why: the tensor cores truncate when they accumulate; over thousands of keys that would cost several bits of o.
template <int kTiles>
__device__ __forceinline__ void gemm_pv_tf32(float (&o)[kTiles][kHeadDimV / 2], const float (&p)[kTiles][kBlockK / 2],
                                             unsigned v_smem) {
  constexpr int kGroup = 4;
  const int lane = fresh_thread() % 32, g = lane / 4, t = lane % 4;
  // Keys 2 t and 2 t + 1 (one row apart, hence their own swizzle phases), column g of an 8-column fragment.
  const unsigned even_lane = v_smem + VSwizzle::offset(2 * t, g / 4) + g % 4 * 4;
  const unsigned odd_lane = v_smem + VSwizzle::offset(2 * t + 1, g / 4) + g % 4 * 4;
#pragma unroll
  for (int j = 0; j < kHeadDimV / 8; j += kGroup) {
    float sum[kTiles][kGroup][4] = {};
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {  // small terms, then big ones
      __syncwarp();  // why: or ptxas keeps what it has read for the second pass, in registers that do not exist
#pragma unroll
      for (int kk = 0; kk < kBlockK / 8; ++kk) {
        FragmentA a[kTiles];
#pragma unroll
        for (int m = 0; m < kTiles; ++m) a[m].from_weights(p[m], kk);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const Tf32Pair b0 =
              split_tf32(__uint_as_float(ld_shared_u32(VSwizzle::advance(even_lane, 8 * kk, 2 * (j + i)))));
          const Tf32Pair b1 =
              split_tf32(__uint_as_float(ld_shared_u32(VSwizzle::advance(odd_lane, 8 * kk, 2 * (j + i)))));
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            if (pass == 0) {
              mma_small(sum[m][i], a[m], b0, b1);
            } else {
              mma_big(sum[m][i], a[m], b0.big, b1.big);
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * kGroup; ++i) o[m][4 * j + i] += sum[m][i / 4][i % 4];
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void gemm_pv(float (&o)[kTiles][kHeadDimV / 2], const float (&p)[kTiles][kBlockK / 2],
                                        unsigned v_smem) {
  if constexpr (kIsTf32) {
    gemm_pv_tf32(o, p, v_smem);
  } else {
    gemm_pv_16bit(o, p, v_smem);
  }
}
