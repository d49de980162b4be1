// Tile movement: global to swizzled shared memory by cp.async, fragments to global memory by 128-bit stores.
#pragma once
#include "../common/fragment.cuh"
#include "../common/params.cuh"
#include "../common/swizzle.cuh"
#include "../common/vector.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"

// One (kRows, kCols) tile of an operand: rows row … row + kRows - 1, starting at column `column` of the head.
// Rows outside [valid_begin, valid_end) and columns from `num_columns` on are zeros, whatever memory holds there.
template <int kRows, int kCols>
struct TileLoader {
  static constexpr int kChunks = kCols / kChunkElements;
  // Neighbouring threads take neighbouring chunks of a row, up to 128 bytes; a thread's rows are kRowStep apart.
  static constexpr int kLanes = Swizzle<kChunks>::kSpan;
  static constexpr int kRowStep = kNumThreads / kLanes;
  static constexpr bool kWhole = kRows % kRowStep == 0;
  static_assert(kRowStep % 8 == 0, "a thread's rows must share their swizzle phase");

  const Operand& operand;
  const char* gmem;  // row 0 of the head, first column of the tile
  int num_columns;
  bool aligned;  // 16-byte accesses

  __device__ __forceinline__ TileLoader(const Operand& x, long long batch, int head, int column, int columns,
                                        bool is_aligned)
      : operand(x), num_columns(columns - column), aligned(is_aligned) {
    gmem =
        static_cast<const char*>(x.pointer) + (batch * x.stride_batch + head * x.stride_head + column) * kElementBytes;
  }

  __device__ __forceinline__ void load(unsigned smem, int row, int valid_begin, int valid_end) const {
    const int thread = fresh_thread(), first_row = thread / kLanes, lane = thread % kLanes;
    const long long row_bytes = operand.stride_seqlen * kElementBytes;
    const char* source = gmem + (row + first_row) * row_bytes + lane * 16;
    const unsigned target = smem + Swizzle<kChunks>::offset(first_row, lane);
    if (aligned && num_columns >= kCols && row >= valid_begin && row + kRows <= valid_end) {
#pragma unroll
      for (int r = 0; r < kRows; r += kRowStep, source += kRowStep * row_bytes) {
        if (kWhole || first_row + r < kRows) {
#pragma unroll
          for (int c = 0; c < kChunks; c += kLanes) {
            cp_async_16(target + r * kChunks * 16 + c * 16, source + c * 16);
          }
        }
      }
    } else {
      load_edge(target, source, row + first_row, row + kRows, lane * kChunkElements, valid_begin, valid_end);
    }
  }

 private:
  // This thread's rows i, i + kRowStep … before row_end, from column `first_column`.
  __device__ __forceinline__ void load_edge(unsigned target, const char* source, int i, int row_end, int first_column,
                                            int valid_begin, int valid_end) const {
    const long long row_bytes = operand.stride_seqlen * kElementBytes;
#pragma unroll 1
    for (; i < row_end; i += kRowStep, source += kRowStep * row_bytes, target += kRowStep * kChunks * 16) {
      const bool valid = i >= valid_begin && i < valid_end;
#pragma unroll 1
      for (int c = 0; c < kChunks; c += kLanes) {
        const int count = valid ? min(max(num_columns - first_column - c * kChunkElements, 0), kChunkElements) : 0;
        // why: an address outside the operand is never read, even for a copy of no bytes.
        const char* from = count > 0 ? source + c * 16 : static_cast<const char*>(operand.pointer);
        if (aligned) {
          cp_async_16_zfill(target + c * 16, from, count * kElementBytes);
        } else {
          const Chunk<kDType> chunk = load_chunk<kDType>(from, 0, count, false);
          st_shared_v4(target + c * 16, chunk.words);
        }
      }
    }
  }
};

// A (kRows, kCols) tile in the input dtype from swizzled shared memory to rows row … row_end - 1 of an operand. Rows
// outside [valid_begin, valid_end) become zeros, whatever the tile holds.
template <int kRows, int kCols>
__device__ __forceinline__ void store_tile(const Operand& x, long long batch, int head, unsigned smem, int row,
                                           int row_end, int valid_begin, int valid_end, int num_columns, bool aligned) {
  constexpr int kChunks = kCols / kChunkElements;
  char* const gmem = static_cast<char*>(x.pointer) + (batch * x.stride_batch + head * x.stride_head) * kElementBytes;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kChunks; i += kNumThreads) {
    const int r = i / kChunks, chunk = i % kChunks, count = num_columns - chunk * kChunkElements;
    if (row + r >= row_end || count <= 0) continue;
    Chunk<kDType> value = {};
    if (row + r >= valid_begin && row + r < valid_end) {
      ld_shared_v4(value.words, smem + Swizzle<kChunks>::offset(r, chunk));
    }
    store_chunk(gmem + (row + r) * x.stride_seqlen * kElementBytes, chunk * kChunkElements, count, aligned, value);
  }
}

// Row `half` of a fragment to gmem: the head's row in out from this block's first column; `columns` of them exist.
template <int kCount>
__device__ __forceinline__ void store_row(char* gmem, const float (&o)[kCount], int half, int columns, bool visible,
                                          bool aligned) {
  constexpr bool kWide = kOutDType == DType::kFloat32;
  constexpr int kGroup = kWide ? 16 : 32;  // columns that a quad writes with one 16-byte access a lane
  const int t = threadIdx.x % 4;
  const int lane_column = kWide ? 8 * (t % 2) + 4 * (t / 2) : 8 * t;
#pragma unroll
  for (int g = 0; g < kCount * 2 / kGroup; ++g) {
    uint4 value;
    if constexpr (kWide) {
      value = gather_row_float(o, g, half);
    } else {
      value = gather_row_16bit(o, g, half);
    }
    Chunk<kOutDType> chunk;
    chunk.words[0] = value.x, chunk.words[1] = value.y, chunk.words[2] = value.z, chunk.words[3] = value.w;
    const int column = g * kGroup + lane_column;
    if (visible) store_chunk(gmem, column, columns - column, aligned, chunk);
  }
}
