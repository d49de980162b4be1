// The first product of a warp's rows with a tile in shared memory, s = q kᵀ, and the left operands of both products.
// float32 operands are split into two TF32 numbers and multiplied three times (small·big + big·small + big·big).
#pragma once
#include "../common/fragment.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma_sync.cuh"

constexpr bool kIsTf32 = kDType == DType::kFloat32;
constexpr int kStepElements = 32 / kElementBytes;  // one mma step along the summed dimension: two 16-byte chunks
using QSwizzle = Swizzle<kHeadDim / kChunkElements>;

// A 16 x kStepElements left operand; `small` is only used for float32.
struct FragmentA {
  unsigned big[4];
  unsigned small[4];

  __device__ __forceinline__ void split() {
    if constexpr (kIsTf32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Tf32Pair pair = split_tf32(__uint_as_float(big[i]));
        big[i] = pair.big, small[i] = pair.small;
      }
    }
  }

  // Step kk of a weight fragment. For float32 the summed index is permuted, column t + 4 e standing for key 2 t + e:
  // the accumulator's pairs are then the operand as they are, and gemm_pv reads v in the same order.
  template <int kCount>
  __device__ __forceinline__ void from_weights(const float (&p)[kCount], int kk) {
    if constexpr (kIsTf32) {
      big[0] = __float_as_uint(p[4 * kk]), big[1] = __float_as_uint(p[4 * kk + 2]);
      big[2] = __float_as_uint(p[4 * kk + 1]), big[3] = __float_as_uint(p[4 * kk + 3]);
      split();
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) big[i] = pack2(p[8 * kk + 2 * i], p[8 * kk + 2 * i + 1]);
    }
  }
};

__device__ __forceinline__ void mma(float* d, const FragmentA& a, unsigned b0, unsigned b1) {
  if constexpr (kDType == DType::kFloat16) {
    mma_sync_m16n8k16_f16(d, a.big, b0, b1);
  } else {
    mma_sync_m16n8k16_bf16(d, a.big, b0, b1);
  }
}

// The three products of float32, in two calls: small terms of all steps go first, so that the accumulator stays small
// while they are added. why: the tensor cores truncate when they accumulate, and each addition to a large sum costs its
// last bit.
__device__ __forceinline__ void mma_small(float* d, const FragmentA& a, const Tf32Pair& b0, const Tf32Pair& b1) {
  mma_sync_m16n8k8_tf32(d, a.small, b0.big, b1.big);
  mma_sync_m16n8k8_tf32(d, a.big, b0.small, b1.small);
}

__device__ __forceinline__ void mma_big(float* d, const FragmentA& a, unsigned b0, unsigned b1) {
  mma_sync_m16n8k8_tf32(d, a.big, b0, b1);
}

// Steps of q as left operands, from this lane's address of the warp's first row; kTiles fragments of 16 rows.
template <int kTiles>
__device__ __forceinline__ void load_q(FragmentA (&a)[kTiles], unsigned q_lane, int kk) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    ldmatrix_x4(a[m].big, QSwizzle::advance(q_lane, 16 * m, 2 * kk));
    a[m].split();
  }
}

// This lane's address for load_q (16 rows x 2 chunks as four 8x8 matrices: rows first) …
__device__ __forceinline__ unsigned q_lane_address(unsigned smem, int row) {
  const int lane = threadIdx.x % 32;
  return smem + QSwizzle::offset(row + lane % 16, lane / 16);
}

// … and for 16 keys of k (chunks first).
__device__ __forceinline__ unsigned k_lane_address(unsigned smem) {
  const int lane = fresh_thread() % 32;
  return smem + QSwizzle::offset(lane % 8 + 8 * (lane / 16), lane / 8 % 2);
}

// s += step kk of q kᵀ over the kBlockK keys of the tile; for float32 either the small terms of the step or the big
// one.
template <bool kSmall, int kTiles>
__device__ __forceinline__ void gemm_qk_step(float (&s)[kTiles][kBlockK / 2], const FragmentA (&a)[kTiles],
                                             unsigned k_lane, int kk) {
#pragma unroll
  for (int j = 0; j < kBlockK / 16; ++j) {
    unsigned b[4];
    ldmatrix_x4(b, QSwizzle::advance(k_lane, 16 * j, 2 * kk));
    Tf32Pair pair[4];
    if constexpr (kIsTf32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = split_tf32(__uint_as_float(b[i]));
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (!kIsTf32) {
        mma(&s[m][8 * j], a[m], b[0], b[1]);
        mma(&s[m][8 * j + 4], a[m], b[2], b[3]);
      } else if constexpr (kSmall) {
        mma_small(&s[m][8 * j], a[m], pair[0], pair[1]);
        mma_small(&s[m][8 * j + 4], a[m], pair[2], pair[3]);
      } else {
        mma_big(&s[m][8 * j], a[m], pair[0].big, pair[1].big);
        mma_big(&s[m][8 * j + 4], a[m], pair[2].big, pair[3].big);
      }
    }
  }
}
