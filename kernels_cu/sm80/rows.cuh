// Stores of fragment rows from registers to global memory, by 16-byte accesses.
#pragma once
#include "../common/fragment.cuh"
#include "../common/vector.cuh"

// Gathers row h of columns 32 g … 32 g + 31 as 16-bit numbers, 16 bytes per lane. The lanes of a quad exchange pairs by
// two butterflies, which transpose 4x4 pairs; lane t then holds the columns 32 g + 8 t … + 7.
template <int kCount>
__device__ __forceinline__ void gather_row_16bit(unsigned (&r)[4], const float (&o)[kCount], int g, int h) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = pack2(o[16 * g + 4 * i + 2 * h], o[16 * g + 4 * i + 2 * h + 1]);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int step = n < 2 ? 1 : 2, i = n < 2 ? 2 * n : n - 2;  // r[i] and r[i + step]
    const unsigned got = __shfl_xor_sync(0xffffffffu, t & step ? r[i] : r[i + step], step);
    if (t & step) r[i] = got;
    else r[i + step] = got;
  }
}

// Gathers row h of columns 16 g … 16 g + 15 as floats, 16 bytes per lane. Lane t then holds the columns 16 g + 8 (t %
// 2) + 4 (t / 2) … + 3.
template <int kCount>
__device__ __forceinline__ void gather_row_float(unsigned (&r)[4], const float (&o)[kCount], int g, int h) {
  const bool odd = threadIdx.x & 1;
  const float* first = &o[8 * g + 2 * h];
  const float* second = &o[8 * g + 4 + 2 * h];
  const float x = __shfl_xor_sync(0xffffffffu, odd ? first[0] : second[0], 1);
  const float y = __shfl_xor_sync(0xffffffffu, odd ? first[1] : second[1], 1);
  r[0] = __float_as_uint(odd ? x : first[0]), r[1] = __float_as_uint(odd ? y : first[1]);
  r[2] = __float_as_uint(odd ? second[0] : x), r[3] = __float_as_uint(odd ? second[1] : y);
}

// Stores row `half` of a fragment. `gmem` is the address of its first column in out (or dq), which has `columns`
// columns.
template <int kCount>
__device__ __forceinline__ void store_row(char* gmem, const float (&o)[kCount], int half, int columns, bool exists,
                                          bool aligned) {
  constexpr bool kWide = kOutDType == DType::kFloat32;
  constexpr int kQuadColumns = kWide ? 16 : 32;  // columns of a quad's 16-byte accesses
  const int t = threadIdx.x % 4;
  const int lane_column = kWide ? 8 * (t % 2) + 4 * (t / 2) : 8 * t;
#pragma unroll
  for (int g = 0; g < kCount * 2 / kQuadColumns; ++g) {
    Chunk<kOutDType> chunk;
    if constexpr (kWide) gather_row_float(chunk.words, o, g, half);
    else gather_row_16bit(chunk.words, o, g, half);
    const int column = g * kQuadColumns + lane_column;
    if (exists) store_chunk(gmem, column, columns - column, aligned, chunk);
  }
}
