// Tiles between global memory and swizzled shared memory: loads by cp.async, stores of 16 bytes.
#pragma once
#include "../common/fragment.cuh"
#include "../common/varlen.cuh"
#include "../common/swizzle.cuh"
#include "../common/vector.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"

// The address of row 0 of a head.
template <class At>
struct FirstRow {
  const char* gmem;

  __device__ __forceinline__ FirstRow(const Operand& x, const At& place, int head, int column)
      : gmem(place.address(x, kElementBytes, head, 0, column)) {}
  __device__ __forceinline__ const char* address(const Operand&) const { return gmem; }
};

// The address of row 0 for keys whose place is in shared memory. Computed at each use, to hold no registers.
template <>
struct FirstRow<KeyPlaceInMemory> {
  const KeyPlaceInMemory place;
  int head, column;

  __device__ __forceinline__ FirstRow(const Operand&, const KeyPlaceInMemory& keys, int head_idx, int first_column)
      : place(keys), head(head_idx), column(first_column) {}
  __device__ __forceinline__ const char* address(const Operand& x) const {
    return place.address(x, kElementBytes, head, 0, column);
  }
};

// Loads (kRows, kCols) tiles of a head of an operand, from column `column` on; the head has `columns` columns. Rows
// outside the range `valid` and columns past the last become zeros, whatever memory holds there. `At` is the location
// of the rows: a Place, or a place with pages.
template <int kRows, int kCols, class At = Place>
struct TileLoader {
  static constexpr int kChunks = kCols / kChunkElements, kBytes = kRows * kChunks * 16;
  // Adjacent threads take adjacent chunks of a row, up to 128 bytes. The rows of a thread are kRowStep apart.
  static constexpr int kLanes = Swizzle<kChunks>::kSpan;
  static constexpr int kRowStep = kNumThreads / kLanes;
  static constexpr bool kWhole = kRows % kRowStep == 0;
  static_assert(kRowStep % 8 == 0, "a thread's rows must share their swizzle phase");

  const Operand& operand;
  const FirstRow<At> first;  // row 0 of the head, first column of the tile
  int num_columns;           // existing columns from there on

  __device__ __forceinline__ TileLoader(const Operand& x, const At& place, int head, int columns, int column = 0)
      : operand(x), first(x, place, head, column), num_columns(columns - column) {}

  // The begin of this thread's chunks of the rows from `row` on: in global memory, and in shared memory.
  __device__ __forceinline__ const char* source_of(int row) const {
    const int thread = fresh_thread(), first_row = thread / kLanes, lane = thread % kLanes;
    return first.address(operand) + (row + first_row) * (operand.stride_seqlen * kElementBytes) + lane * 16;
  }
  __device__ __forceinline__ static unsigned target_of(unsigned smem) {
    return smem + Swizzle<kChunks>::offset(fresh_thread() / kLanes, fresh_thread() % kLanes);
  }

  // True if the tile of the rows from `row` on is copied whole, without zeros.
  __device__ __forceinline__ bool is_whole(int row, Range valid) const {
    return operand.aligned && num_columns >= kCols && row >= valid.begin && row + kRows <= valid.end;
  }

  // Starts the copy of a whole tile. first_row: this thread's first row.
  __device__ __forceinline__ static void copy_whole(unsigned target, const char* source, long long row_bytes,
                                                    int first_row) {
#pragma unroll
    for (int r = 0; r < kRows; r += kRowStep, source += kRowStep * row_bytes) {
      if (kWhole || first_row + r < kRows) {
#pragma unroll
        for (int c = 0; c < kChunks; c += kLanes) cp_async_16(target + r * kChunks * 16 + c * 16, source + c * 16);
      }
    }
  }

  // Starts to load the rows row … row + kRows - 1.
  __device__ __forceinline__ void load(unsigned smem, int row, Range valid) const {
    const int thread = fresh_thread(), first_row = thread / kLanes, lane = thread % kLanes;
    const long long row_bytes = operand.stride_seqlen * kElementBytes;
    const char* source = first.address(operand) + (row + first_row) * row_bytes + lane * 16;
    const unsigned target = smem + Swizzle<kChunks>::offset(first_row, lane);
    if constexpr (At::kMayBePaged) {
      if (first.place.at.is_paged())
        return load_paged(target, row + first_row, row + kRows, lane * kChunkElements, valid);
    }
    // Repeats copy_whole: a call would reorder the instructions of measured kernels.
    if (operand.aligned && num_columns >= kCols && row >= valid.begin && row + kRows <= valid.end) {
#pragma unroll
      for (int r = 0; r < kRows; r += kRowStep, source += kRowStep * row_bytes) {
        if (kWhole || first_row + r < kRows) {
#pragma unroll
          for (int c = 0; c < kChunks; c += kLanes) cp_async_16(target + r * kChunks * 16 + c * 16, source + c * 16);
        }
      }
    } else {
      load_edge(target, source, row + first_row, row + kRows, lane * kChunkElements, valid);
    }
  }

 private:
  // Loads this thread's rows i, i + kRowStep … before row_end, from column `first_column` on.
  __device__ __forceinline__ void load_edge(unsigned target, const char* source, int i, int row_end, int first_column,
                                            Range valid) const {
    const long long row_bytes = operand.stride_seqlen * kElementBytes;
#pragma unroll 1
    for (; i < row_end; i += kRowStep, source += kRowStep * row_bytes, target += kRowStep * kChunks * 16) {
      const bool is_valid = i >= valid.begin && i < valid.end;
#pragma unroll 1
      for (int c = 0; c < kChunks; c += kLanes) {
        const int count = is_valid ? min(max(num_columns - first_column - c * kChunkElements, 0), kChunkElements) : 0;
        load_chunk_to(target + c * 16, source + c * 16, count);
      }
    }
  }

  // Loads such rows by looking up the page of each.
  __device__ __forceinline__ void load_paged(unsigned target, int i, int row_end, int first_column, Range valid) const {
    const int columns = num_columns - first_column;
#pragma unroll 1
    for (; i < row_end; i += kRowStep, target += kRowStep * kChunks * 16) {
      const bool is_valid = i >= valid.begin && i < valid.end;
      const char* const source =
          is_valid ? first.place.at.pages.row_of(first.address(operand), operand, kElementBytes, i) : nullptr;
#pragma unroll
      for (int c = 0; c < kChunks; c += kLanes) {
        const int count = source != nullptr ? min(max(columns - c * kChunkElements, 0), kChunkElements) : 0;
        load_chunk_to(target + c * 16, source + first_column * kElementBytes + c * 16, count);
      }
    }
  }

  // Loads `count` elements and zeros after them. No address outside the operand is read, even by a copy of no bytes.
  __device__ __forceinline__ void load_chunk_to(unsigned target, const char* source, int count) const {
    const char* from = count > 0 ? source : static_cast<const char*>(operand.pointer);
    if (operand.aligned) {
      cp_async_16_zfill(target, from, count * kElementBytes);
    } else {
      const Chunk<kDType> chunk = load_chunk<kDType>(from, 0, count, false);
      st_shared_v4(target, chunk.words);
    }
  }
};

// Stores a (kRows, kCols) tile from swizzled shared memory to rows of a head of an operand. There are at most kRows
// rows, with `num_columns` columns. Rows outside the range `valid` become zeros, whatever the tile holds.
template <int kRows, int kCols>
__device__ __forceinline__ void store_tile(const Operand& x, const Place& place, int head, unsigned smem, Range rows,
                                           Range valid, int num_columns) {
  constexpr int kChunks = kCols / kChunkElements;
  char* const gmem = place.address(x, kElementBytes, head);
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kChunks; i += kNumThreads) {
    const int r = i / kChunks, row = rows.begin + r, chunk = i % kChunks, count = num_columns - chunk * kChunkElements;
    if (row >= rows.end || count <= 0) continue;
    Chunk<kDType> value = {};
    if (row >= valid.begin && row < valid.end) ld_shared_v4(value.words, smem + Swizzle<kChunks>::offset(r, chunk));
    store_chunk(gmem + row * x.stride_seqlen * kElementBytes, chunk * kChunkElements, count, x.aligned, value);
  }
}
