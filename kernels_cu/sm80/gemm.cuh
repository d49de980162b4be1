// Products a bᵀ with a tile b in shared memory, such as s = q kᵀ: each row of b gives a column of the result. Also the
// left operands of all products. A float32 operand is split into two TF32 numbers, and a product is three: small·big +
// big·small + big·big.
#pragma once
#include "../common/fragment.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma_sync.cuh"
#include "config.cuh"

constexpr bool kIsTf32 = kDType == DType::kFloat32;
constexpr int kStepElements = 32 / kElementBytes;      // elements of the summed dimension per mma: two 16-byte chunks
using QSwizzle = Swizzle<kHeadDim / kChunkElements>;   // tiles of q and k
using VSwizzle = Swizzle<kHeadDimV / kChunkElements>;  // tiles of v and dout

// A float32 number as big + small, each rounded to TF32. The remainder is under 2^-22 of x; NaN stays NaN in both.
// Source: Ootomo and Yokota, arXiv 2203.03341.
struct Tf32Pair {
  unsigned big, small;
};

__device__ __forceinline__ unsigned round_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ Tf32Pair split_tf32(float x) {
  const unsigned big = round_tf32(x);
  return {big, round_tf32(x - __uint_as_float(big))};
}

// A left operand of 16 x kStepElements. Only float32 uses `small`.
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

  // Converts step kk of a fragment of weights. For float32 the summed index is permuted: column t + 4 e stands for key
  // 2 t + e. The accumulator's pairs are then the operand without an exchange, and gemm_ab reads v in this order.
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
  mma_sync_m16n8k16<kDType == DType::kFloat16>(d, a.big, b0, b1);
}

// Most float32 steps that tensor cores accumulate: they truncate, and long sums lose their last bits (L43).
constexpr int kMostSteps = 16;

// Adds the two small products of float32. All steps' small products come before the big ones, which keeps errors inside
// the tolerance (L43).
__device__ __forceinline__ void mma_small(float* d, const FragmentA& a, const Tf32Pair& b0, const Tf32Pair& b1) {
  mma_sync_m16n8k8_tf32(d, a.small, b0.big, b1.big);
  mma_sync_m16n8k8_tf32(d, a.big, b0.small, b1.small);
}

// Returns this lane's address of 16 rows x 2 chunks of a right operand. The second 8x8 matrix is the second chunk.
template <class S>
__device__ __forceinline__ unsigned b_lane_address(unsigned smem) {
  const int lane = fresh_thread() % 32;
  return smem + S::offset(lane % 8 + 8 * (lane / 16), lane / 8 % 2);
}

// Left operands in shared memory: fragments of 16 rows from `row` on. Here the second 8x8 matrix has the lower rows.
template <class S>
struct Rows {
  unsigned a_lane;

  __device__ __forceinline__ Rows(unsigned smem, int row) {
    const int lane = fresh_thread() % 32;
    a_lane = smem + S::offset(row + lane % 16, lane / 16);
  }

  template <int kFragments>
  __device__ __forceinline__ void operator()(FragmentA (&a)[kFragments], int kk) const {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      ldmatrix_x4(a[m].big, S::advance(a_lane, 16 * m, 2 * kk));
      a[m].split();
    }
  }
};

// c += step kk of a bᵀ; for float32, either its small terms or its big one.
template <bool kSmall, class S, int kFragments, int kCount>
__device__ __forceinline__ void gemm_abt_step(float (&c)[kFragments][kCount], const FragmentA (&a)[kFragments],
                                              unsigned b_lane, int kk) {
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    unsigned b[4];
    ldmatrix_x4(b, S::advance(b_lane, 16 * j, 2 * kk));
    [[maybe_unused]] Tf32Pair pair[4];
    if constexpr (kIsTf32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = split_tf32(__uint_as_float(b[i]));
    }
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        float* const d = &c[m][8 * j + 2 * i];
        if constexpr (!kIsTf32) mma(d, a[m], b[i], b[i + 1]);
        else if constexpr (kSmall) mma_small(d, a[m], pair[i], pair[i + 1]);
        else mma_sync_m16n8k8_tf32(d, a[m].big, pair[i].big, pair[i + 1].big);
      }
    }
  }
}

// c += steps [begin, end) of a bᵀ. `load(a, kk)` loads step kk of a; b is in shared memory.
template <bool kSmall, class S, int kFragments, int kCount, typename Load>
__device__ __forceinline__ void gemm_abt_steps(float (&c)[kFragments][kCount], const Load& load, unsigned b_lane,
                                               int begin, int end) {
  FragmentA a[kFragments];
#pragma unroll kQkUnroll
  for (int kk = begin; kk < end; ++kk) {
    load(a, kk);
    gemm_abt_step<kSmall, S>(c, a, b_lane, kk);
  }
}

// c += a bᵀ over kSteps steps.
template <class S, int kSteps, int kFragments, int kCount, typename Load>
__device__ __forceinline__ void gemm_abt(float (&c)[kFragments][kCount], const Load& load, unsigned b_lane) {
  if constexpr (kIsTf32) {
    gemm_abt_steps<true, S>(c, load, b_lane, 0, kSteps);
    __syncwarp();  // keeps ptxas from holding the first pass's loads for the second (L8)
  }
  if constexpr (kIsTf32 && kSteps > kMostSteps) {
#pragma unroll 1
    for (int begin = 0; begin < kSteps; begin += kMostSteps) {
      float sum[kFragments][kCount] = {};
      gemm_abt_steps<false, S>(sum, load, b_lane, begin, min(begin + kMostSteps, kSteps));
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) c[m][i] += sum[m][i];
      }
    }
  } else {
    gemm_abt_steps<false, S>(c, load, b_lane, 0, kSteps);
  }
}
