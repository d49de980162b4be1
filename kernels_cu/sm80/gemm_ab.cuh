// Products with a tile in shared memory whose rows run along the summed dimension, such as o += p v. The columns of the
// result are blocks of 16, kColumnStep columns of the tile apart, from column `column` on. The left operand comes from
// `load(a, kk)`: for float32 with its summed index permuted as in FragmentA::from_weights.
#pragma once
#include "gemm.cuh"

// 16-bit operands: the tile is read transposed, 16 rows x 16 columns at a time.
template <class S, int kSum, int kColumnStep, int kTiles, int kCount, typename Load>
__device__ __forceinline__ void gemm_ab_16bit(float (&c)[kTiles][kCount], const Load& load, unsigned b_smem,
                                              int column) {
  const int lane = fresh_thread() % 32;
  const unsigned b_lane = b_smem + S::offset(lane % 16, column / 8 + lane / 16);
#pragma unroll
  for (int kk = 0; kk < kSum / 16; ++kk) {
    FragmentA a[kTiles];
    load(a, kk);
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      unsigned b[4];
      ldmatrix_x4_trans(b, S::advance(b_lane, 16 * kk, kColumnStep / 8 * j));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        mma(&c[m][8 * j], a[m], b[0], b[1]);
        mma(&c[m][8 * j + 4], a[m], b[2], b[3]);
      }
    }
  }
}

// float32, kUnroll steps in one piece and kFragments fragments of 8 columns at a time. The tile's sum is formed apart
// and added once. why: the tensor cores truncate when they accumulate; over thousands of terms that would cost several
// bits of c.
template <class S, int kSum, int kColumnStep, int kUnroll, int kTiles, int kCount, typename Load>
__device__ __forceinline__ void gemm_ab_tf32(float (&c)[kTiles][kCount], const Load& load, unsigned b_smem,
                                             int column) {
  constexpr int kFragments = kCount >= 128 ? 2 : kCount % 16 == 0 ? 4 : kCount % 24 == 0 ? 6 : 2;
  const int lane = fresh_thread() % 32, g = lane / 4, t = lane % 4;
  // Rows 2 t and 2 t + 1 (hence their own swizzle phases), column g of an 8-column fragment.
  const unsigned even_lane = b_smem + S::offset(2 * t, column / 4 + g / 4) + g % 4 * 4;
  const unsigned odd_lane = b_smem + S::offset(2 * t + 1, column / 4 + g / 4) + g % 4 * 4;
#pragma unroll
  for (int j = 0; j < kCount / 4; j += kFragments) {
    float sum[kTiles][kFragments][4] = {};
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {  // small terms, then big ones
      __syncwarp();  // why: or ptxas keeps what it has read for the second pass, in registers that do not exist
#pragma unroll kUnroll
      for (int kk = 0; kk < kSum / 8; ++kk) {
        FragmentA a[kTiles];
        load(a, kk);
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          const int chunk = kColumnStep / 4 * ((j + i) / 2) + 2 * (i % 2);
          const Tf32Pair b0 = split_tf32(__uint_as_float(ld_shared_u32(S::advance(even_lane, 8 * kk, chunk))));
          const Tf32Pair b1 = split_tf32(__uint_as_float(ld_shared_u32(S::advance(odd_lane, 8 * kk, chunk))));
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
      for (int i = 0; i < 4 * kFragments; ++i) c[m][4 * j + i] += sum[m][i / 4][i % 4];
    }
  }
}

template <class S, int kSum, int kColumnStep, int kUnroll = kQkUnroll, int kTiles, int kCount, typename Load>
__device__ __forceinline__ void gemm_ab(float (&c)[kTiles][kCount], const Load& load, unsigned b_smem, int column) {
  if constexpr (kIsTf32) {
    gemm_ab_tf32<S, kSum, kColumnStep, kUnroll>(c, load, b_smem, column);
  } else {
    gemm_ab_16bit<S, kSum, kColumnStep>(c, load, b_smem, column);
  }
}

// c += p b with p in registers, c's columns being those of the tile.
template <class S, int kTiles, int kCount, int kWeights>
__device__ __forceinline__ void gemm_weights(float (&c)[kTiles][kCount], const float (&p)[kTiles][kWeights],
                                             unsigned b_smem) {
  const auto load = [&](FragmentA(&a)[kTiles], int kk) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) a[m].from_weights(p[m], kk);
  };
  gemm_ab<S, 2 * kWeights, 16, kWeights>(c, load, b_smem, 0);  // all steps in one piece, or p would be indexed
}
