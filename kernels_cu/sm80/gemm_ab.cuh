// Products a b with a tile b in shared memory, such as o += p v: the sum is over the rows of b. The columns of the
// result are blocks of 16 columns of b, kColumnStep columns apart, from column `column` on. `load(a, kk)` loads step kk
// of the left operand; for float32 its summed index is permuted as in FragmentA::from_weights.
#pragma once
#include "gemm.cuh"

// 16-bit operands: the tile is read transposed, 16 rows x 16 columns at a time.
template <class S, int kSum, int kColumnStep, int kFragments, int kCount, typename Load>
__device__ __forceinline__ void gemm_ab_16bit(float (&c)[kFragments][kCount], const Load& load, unsigned b_smem,
                                              int column) {
  const int lane = fresh_thread() % 32;
  const unsigned b_lane = b_smem + S::offset(lane % 16, column / 8 + lane / 16);
#pragma unroll
  for (int kk = 0; kk < kSum / 16; ++kk) {
    FragmentA a[kFragments];
    load(a, kk);
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      unsigned b[4];
      ldmatrix_x4_trans(b, S::advance(b_lane, 16 * kk, kColumnStep / 8 * j));
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        mma(&c[m][8 * j], a[m], b[0], b[1]);
        mma(&c[m][8 * j + 4], a[m], b[2], b[3]);
      }
    }
  }
}

// float32 operands: kUnroll steps are unrolled, and kColumnFragments fragments of 8 columns are computed at a time.
// Each tile is summed separately and added to c once, because tensor cores truncate and c has thousands of terms (L43).
template <class S, int kSum, int kColumnStep, int kUnroll, int kFragments, int kCount, typename Load>
__device__ __forceinline__ void gemm_ab_tf32(float (&c)[kFragments][kCount], const Load& load, unsigned b_smem,
                                             int column) {
  constexpr int kColumnFragments = kCount >= 128 ? 2 : kCount % 16 == 0 ? 4 : kCount % 24 == 0 ? 6 : 2;
  const int lane = fresh_thread() % 32, g = lane / 4, t = lane % 4;
  // Rows 2 t and 2 t + 1, each with its own swizzle phase, and column g of a fragment of 8 columns.
  const unsigned even_lane = b_smem + S::offset(2 * t, column / 4 + g / 4) + g % 4 * 4;
  const unsigned odd_lane = b_smem + S::offset(2 * t + 1, column / 4 + g / 4) + g % 4 * 4;
#pragma unroll
  for (int j = 0; j < kCount / 4; j += kColumnFragments) {
    float sum[kFragments][kColumnFragments][4] = {};
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {  // small terms, then big ones
      __syncwarp();                         // keeps ptxas from gathering all loads first (L8)
#pragma unroll kUnroll
      for (int kk = 0; kk < kSum / 8; ++kk) {
        FragmentA a[kFragments];
        load(a, kk);
#pragma unroll
        for (int i = 0; i < kColumnFragments; ++i) {
          const int chunk = kColumnStep / 4 * ((j + i) / 2) + 2 * (i % 2);
          const Tf32Pair b0 = split_tf32(__uint_as_float(ld_shared_u32(S::advance(even_lane, 8 * kk, chunk))));
          const Tf32Pair b1 = split_tf32(__uint_as_float(ld_shared_u32(S::advance(odd_lane, 8 * kk, chunk))));
#pragma unroll
          for (int m = 0; m < kFragments; ++m) {
            if (pass == 0) mma_small(sum[m][i], a[m], b0, b1);
            else mma_sync_m16n8k8_tf32(sum[m][i], a[m].big, b0.big, b1.big);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int i = 0; i < 4 * kColumnFragments; ++i) c[m][4 * j + i] += sum[m][i / 4][i % 4];
    }
  }
}

template <class S, int kSum, int kColumnStep, int kUnroll = kQkUnroll, int kFragments, int kCount, typename Load>
__device__ __forceinline__ void gemm_ab(float (&c)[kFragments][kCount], const Load& load, unsigned b_smem, int column) {
  if constexpr (kIsTf32) gemm_ab_tf32<S, kSum, kColumnStep, kUnroll>(c, load, b_smem, column);
  else gemm_ab_16bit<S, kSum, kColumnStep>(c, load, b_smem, column);
}

// c += p b with p in registers. c has the columns of the tile.
template <class S, int kFragments, int kCount, int kWeights>
__device__ __forceinline__ void gemm_weights(float (&c)[kFragments][kCount], const float (&p)[kFragments][kWeights],
                                             unsigned b_smem) {
  const auto load = [&](FragmentA(&a)[kFragments], int kk) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) a[m].from_weights(p[m], kk);
  };
  // All steps are unrolled: an index would move p to local memory (L7).
  gemm_ab<S, 2 * kWeights, 16, kWeights>(c, load, b_smem, 0);
}
