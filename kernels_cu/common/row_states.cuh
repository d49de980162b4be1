// At most 16 rows of a block of threads of which each of its four warps has seen other keys, and each of several blocks
// (the splits) others again. What one of them knows of a row is a state: the row of out over its keys, and its lse.
//   out = sum w o / sum w       over the states of a row, w = exp(lse - the largest of them)
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "fragment.cuh"

constexpr int kStateRows = 16, kStateWarps = 4, kStateThreads = 32 * kStateWarps;
constexpr int kStateColumns = kHeadDimV + 8;  // floats from row to row of a warp. why more than a row: bank conflicts
constexpr int kStateBytes = kStateWarps * kStateRows * 4 * (kStateColumns + 1);  // in shared memory, with lse

// Four columns of a row, from the states that were added.
struct MergedRow {
  float most = -infinity(), sum = 0.0f;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};

  // Adds four states that lie in shared memory so many bytes apart.
  __device__ __forceinline__ void add(unsigned rows, unsigned step, unsigned lses, unsigned lse_step) {
    float lse[4], next = most;
    float4 x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      lse[n] = __uint_as_float(ld_shared_u32(lses + n * lse_step)), x[n] = ld_shared_v4_f32(rows + n * step);
      next = fmaxf(next, lse[n]);
    }
    const float scale = next == most ? 1.0f : exp2_approx((most - next) * kLog2E);
    total = {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
    sum *= scale, most = next;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (lse[n] == -infinity()) continue;  // why not a weight of 0: x may be NaN
      const float weight = exp2_approx((lse[n] - most) * kLog2E);
      total.x += weight * x[n].x, total.y += weight * x[n].y, total.z += weight * x[n].z;
      total.w += weight * x[n].w, sum += weight;
    }
  }

  __device__ __forceinline__ float4 out() const {
    const float scale = sum == 0.0f ? 0.0f : rcp_approx(sum);
    return {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
  }
  __device__ __forceinline__ float lse() const { return sum == 0.0f ? -infinity() : most + log2_approx(sum) * kLn2; }
};

// `Rows` says of the rows of a block: num_rows; num_splits, and which of them is `split`; that rows below shared_rows are
// those of all splits, and the others of the first; where the states of splits lie (partial_out, partial_lse, partial_row);
// is_last_split(), whether all splits have stored theirs; store(row, column, four columns, lse); and sync(), by which its
// threads meet.
template <class Rows>
struct RowStates {
  const Rows& rows;
  const unsigned smem;

  // Puts row h of a lane's fragment, times `scale`, and its lse where all warps read them.
  template <int kCount>
  __device__ __forceinline__ void put(int warp, int h, const float (&o)[kCount], float scale, float lse) const {
    const int lane = fresh_thread() % 32, row = kStateRows * warp + lane / 4 + 8 * h;
    if (lane % 4 == 0) st_shared_u32(lses() + 4 * row, __float_as_uint(lse));
    const unsigned to = smem + 4 * (row * kStateColumns + lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      st_shared_v2(to + 32 * j, __float_as_uint(o[4 * j + 2 * h] * scale), __float_as_uint(o[4 * j + 2 * h + 1] * scale));
    }
  }

  // Stores all rows, once the warps have put theirs and met. States are merged twice, by the same code: those of the
  // warps, which gives the state of a split, and by the block whose split ends last those of the splits, in their order.
  __device__ __forceinline__ void store() const {
    int num_rows = rows.num_rows;
    // why one loop: L50.
#pragma unroll 1
    for (bool of_splits = false;; of_splits = true) {
#pragma unroll 1
      for (int first = 0; first < num_rows; first += kPassRows) {
        const int row = first + thread_row(), column = thread_column();
        // Of a warp's rows, or of what was fetched: the bytes of a row, how many rows follow each other, and which of
        // them this thread's is.
        const int row_bytes = 4 * (of_splits ? kHeadDimV : kStateColumns), together = of_splits ? kPassRows : kStateRows;
        const int number = of_splits ? thread_row() : row, num_states = of_splits ? rows.num_splits : kStateWarps;
        const bool exists = thread_row() < kPassRows && row < num_rows;
        MergedRow merged;
#pragma unroll 1
        for (int n = 0; n < num_states; n += 4) {
          if (of_splits && n % kFetched == 0) fetch(first, num_rows, n);
          const int begin = n % kFetched * together + number;
          const unsigned from = smem + begin * row_bytes + 4 * column;
          if (exists) merged.add(from, together * row_bytes, lses() + 4 * begin, 4 * together);
        }
        if (!exists) continue;
        if (!of_splits && row < rows.shared_rows) {
          const long long place = rows.partial_row(rows.split, row);
          if (column == 0) rows.partial_lse()[place] = merged.lse();
          *reinterpret_cast<float4*>(rows.partial_out() + place * kHeadDimV + column) = merged.out();
        } else if (of_splits || rows.split == 0) {
          rows.store(row, column, merged.out(), merged.lse());
        }
      }
      if (of_splits || rows.num_splits == 1 || !rows.is_last_split()) break;
      num_rows = rows.shared_rows;
    }
  }

 private:
  static constexpr int kChunks = kHeadDimV / 4;               // of four columns, in a row
  static constexpr int kPassRows = kStateThreads / kChunks;   // rows that the threads have together
  static constexpr int kFetched = 64 / kPassRows / 4 * 4;     // splits of so many rows for which there is room
  static_assert(kFetched * kPassRows <= kStateWarps * kStateRows && kFetched % kStateWarps == 0, "");

  // The thread's row, of those of a pass, and its first column.
  __device__ __forceinline__ static int thread_row() { return fresh_thread() % kStateThreads / kChunks; }
  __device__ __forceinline__ static int thread_column() { return fresh_thread() % kStateThreads % kChunks * 4; }

  // Behind the rows, lse of each of them.
  __device__ __forceinline__ unsigned lses() const { return smem + 4 * kStateWarps * kStateRows * kStateColumns; }

  // Gets the rows from `first` on of kFetched splits; those that do not exist see nothing. Each thread copies the columns
  // that it merges. why by cp.async: all copies are on their way together, and one instruction makes them.
  __device__ __forceinline__ void fetch(int first, int end, int begin) const {
    const long long place = rows.partial_row(begin, first), of_split = rows.partial_row(begin + 1, first) - place;
    const int row = thread_row(), count = min(rows.num_splits - begin, kFetched);
    rows.sync();  // why: lse of the splits before these were read
    if (row < kPassRows && first + row < end) {
      const float* from = rows.partial_out() + (place + row) * kHeadDimV + thread_column();
      unsigned to = smem + 4 * (thread_column() + kHeadDimV * row);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        cp_async_16(to, from);
        to += 4 * kPassRows * kHeadDimV, from += of_split * kHeadDimV;
      }
    }
    const int number = fresh_thread() % kStateThreads, split = number / kPassRows, of_row = number % kPassRows;
    if (split < kFetched) {
      const bool exists = split < count && first + of_row < end;
      const float lse = exists ? __ldcg(rows.partial_lse() + place + split * of_split + of_row) : -infinity();
      st_shared_u32(lses() + 4 * number, __float_as_uint(lse));
    }
    cp_async_commit();
    cp_async_wait<0>();
    rows.sync();
  }
};
