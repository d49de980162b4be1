// At most 16 rows of a thread block of which each of its four warps has seen other keys, and each of several blocks
// (the splits) others again. What one of them knows of a row is a state: o = sum of exp2(score - shift) v over its
// keys, the sum of these weights, and the shift.
//   out = sum w o / sum w sum       over the states of a row, w = exp2(shift - the largest of them)
// why not lse and a normalised row: lse has rounded away what a weight of large scores needs.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "fragment.cuh"

constexpr int kStateRows = 16, kStateWarps = 4, kStateThreads = 32 * kStateWarps;
constexpr int kStateColumns = kHeadDimV + 8;  // floats from row to row of a warp. why more than a row: bank conflicts
constexpr int kStateBytes = kStateWarps * kStateRows * 4 * (kStateColumns + 2);  // in shared memory, with sum and shift
constexpr int kStateChunks = kHeadDimV > 0 ? kHeadDimV / 4 : 1;  // of four columns, in a row. why not 0: lse.cu

// Four columns of a row, from the states that were added.
struct MergedRow {
  float shift = -infinity(), sum = 0.0f;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};

  // Adds states: their sums and shifts, and four columns of o.
  template <int kCount>
  __device__ __forceinline__ void add(float2 (&of)[kCount], float4 (&x)[kCount]) {
    float next = shift;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      // why x, too: it may be NaN.
      if (of[n].x == 0.0f) of[n].y = -infinity(), x[n] = {0.0f, 0.0f, 0.0f, 0.0f};
      next = fmaxf(next, of[n].y);
    }
    const float base = next == -infinity() ? 0.0f : next, scale = exp2_approx(shift - base);
    total = {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
    sum *= scale, shift = next;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float weight = exp2_approx(of[n].y - base);
      total.x += weight * x[n].x, total.y += weight * x[n].y, total.z += weight * x[n].z;
      total.w += weight * x[n].w, sum += weight * of[n].x;
    }
  }

  // The same with four states that lie in shared memory so many bytes apart.
  __device__ __forceinline__ void add(unsigned rows, unsigned step, unsigned sums, unsigned sum_step) {
    float2 of[4];
    float4 x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      unsigned words[2];
      ld_shared_v2(words[0], words[1], sums + n * sum_step);
      of[n] = {__uint_as_float(words[0]), __uint_as_float(words[1])}, x[n] = ld_shared_v4_f32(rows + n * step);
    }
    add(of, x);
  }

  // What turns the total into the row of out; 0 where nothing is seen.
  __device__ __forceinline__ float scale() const { return sum == 0.0f ? 0.0f : rcp_approx(sum); }
  __device__ __forceinline__ float4 out() const { return out(scale()); }
  __device__ __forceinline__ float4 out(float scale) const {
    return {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
  }
};

// `Rows` says of the rows of a block: num_rows; num_splits, and which of them is `split`; that rows below shared_rows
// are those of all splits, and the others of the first; where the states of splits lie (partial_out, partial_sums,
// partial_row); is_last_split(), whether all splits have stored theirs; store(row, column, the merged row); and sync(),
// by which its threads meet.
template <class Rows>
struct RowStates {
  const Rows& rows;
  const unsigned smem;

  // Puts row h of a lane's fragment, its sum, which is 0 if it sees nothing, and its shift where all warps read them.
  template <int kCount>
  __device__ __forceinline__ void put(int warp, int h, const float (&o)[kCount], float sum, float shift) const {
    const int lane = fresh_thread() % 32, row = kStateRows * warp + lane / 4 + 8 * h;
    if (lane % 4 == 0) st_shared_v2(sums() + 8 * row, __float_as_uint(sum), __float_as_uint(shift));
    const unsigned to = smem + 4 * (row * kStateColumns + lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      st_shared_v2(to + 32 * j, __float_as_uint(o[4 * j + 2 * h]), __float_as_uint(o[4 * j + 2 * h + 1]));
    }
  }

  // Stores all rows, once the warps have put theirs and met. States are merged twice, by the same code: those of the
  // warps, which gives the state of a split, and by the block whose split ends last those of the splits, in their
  // order.
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
        const int row_bytes = 4 * (of_splits ? kHeadDimV : kStateColumns),
                  together = of_splits ? kPassRows : kStateRows;
        const int state_row = of_splits ? thread_row() : row, num_states = of_splits ? rows.num_splits : kStateWarps;
        const bool exists = thread_row() < kPassRows && row < num_rows;
        MergedRow merged;
#pragma unroll 1
        for (int n = 0; n < num_states; n += 4) {
          if (of_splits && n % kFetched == 0) fetch(first, num_rows, n);
          const int begin = n % kFetched * together + state_row;
          const unsigned from = smem + begin * row_bytes + 4 * column;
          if (exists) merged.add(from, together * row_bytes, sums() + 8 * begin, 8 * together);
        }
        if (!exists) continue;
        if (!of_splits && row < rows.shared_rows) {
          const long long place = rows.partial_row(rows.split, row);
          if (column == 0) rows.partial_sums()[place] = {merged.sum, merged.shift};
          *reinterpret_cast<float4*>(rows.partial_out() + place * kHeadDimV + column) = merged.total;
        } else if (of_splits || rows.split == 0) {
          rows.store(row, column, merged);
        }
      }
      if (of_splits || rows.num_splits == 1 || !rows.is_last_split()) break;
      num_rows = rows.shared_rows;
    }
  }

 private:
  static constexpr int kPassRows = kStateThreads / kStateChunks;  // rows that the threads have together
  static constexpr int kFetched = 64 / kPassRows / 4 * 4;         // splits of so many rows for which there is room
  static_assert(kFetched * kPassRows <= kStateWarps * kStateRows && kFetched % kStateWarps == 0, "");

  // The thread's row, of those of a pass, and its first column.
  __device__ __forceinline__ static int thread_row() { return fresh_thread() % kStateThreads / kStateChunks; }
  __device__ __forceinline__ static int thread_column() { return fresh_thread() % kStateThreads % kStateChunks * 4; }

  // Behind the rows, the sum and the shift of each of them.
  __device__ __forceinline__ unsigned sums() const { return smem + 4 * kStateWarps * kStateRows * kStateColumns; }

  // Gets the rows from `first` on of kFetched splits; those that do not exist see nothing. Each thread copies the
  // columns that it merges. why by cp.async: all copies are on their way together, and one instruction makes them.
  __device__ __forceinline__ void fetch(int first, int end, int begin) const {
    const long long place = rows.partial_row(begin, first), of_split = rows.partial_row(begin + 1, first) - place;
    const int row = thread_row(), count = min(rows.num_splits - begin, kFetched);
    const int thread = fresh_thread() % kStateThreads, split = thread / kPassRows, of_row = thread % kPassRows;
    float2 of = {0.0f, 0.0f};
    if (split < count && first + of_row < end) of = __ldcg(rows.partial_sums() + place + split * of_split + of_row);
    rows.sync();  // why: the sums of the splits before these were read
    if (row < kPassRows && first + row < end) {
      const float* from = rows.partial_out() + (place + row) * kHeadDimV + thread_column();
      unsigned to = smem + 4 * (thread_column() + kHeadDimV * row);
#pragma unroll 4
      for (int n = 0; n < count; ++n) {
        cp_async_16(to, from);
        to += 4 * kPassRows * kHeadDimV, from += of_split * kHeadDimV;
      }
    }
    if (split < kFetched) st_shared_v2(sums() + 8 * thread, __float_as_uint(of.x), __float_as_uint(of.y));
    cp_async_commit();
    cp_async_wait<0>();
    rows.sync();
  }
};
