// Merges partial softmax states of at most 16 rows of a thread block. Its four warps hold different keys, and so do
// several thread blocks (the splits).
//
//   state of a row: shift, sum = Σ p, o = Σ p v     over its keys, p = exp2(score - shift)
//   out = Σ w o / Σ w sum                           over the states of a row, w = exp2(shift - the largest shift)
//
// A state has no lse and no normalised row: lse has lost the last bits of large scores, which weights need.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "fragment.cuh"

constexpr int kStateRows = 16, kStateWarps = 4, kStateThreads = 32 * kStateWarps;
constexpr int kStateColumns = kHeadDimV + 8;  // floats from row to row; padded by 8 against bank conflicts
constexpr int kStateBytes = kStateWarps * kStateRows * 4 * (kStateColumns + 2);  // o, sum and shift in shared memory
constexpr int kStateChunks = kHeadDimV > 0 ? kHeadDimV / 4 : 1;  // per row, of four columns; 1 without v (lse.cu)

// Four columns of a row, merged from states.
struct MergedRow {
  float shift = -infinity(), sum = 0.0f;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};

  // Adds states: `of` holds their sums and shifts, `x` four columns of o.
  template <int kCount>
  __device__ __forceinline__ void add(float2 (&of)[kCount], float4 (&x)[kCount]) {
    float next = shift;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      // x may be NaN
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

  // Adds four states from shared memory; `step` and `sum_step` are distances in bytes.
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

  // Returns the factor from the total to the row of out; 0 without visible keys.
  __device__ __forceinline__ float scale() const { return sum == 0.0f ? 0.0f : rcp_approx(sum); }
  __device__ __forceinline__ float4 out() const { return out(scale()); }
  __device__ __forceinline__ float4 out(float scale) const {
    return {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
  }
};

// Merges the rows of a thread block. `Rows` provides:
//   num_rows, num_splits, split      the rows, the number of splits, and this block's index among them
//   shared_rows                      rows below it have states from all splits, the others from the first split only
//   partial_out, partial_sums        the states of splits in global memory; partial_row(split, row) is the index
//   is_last_split()                  true in the thread block whose split ends last
//   store(row, column, merged)       writes the merged row
//   sync()                           a barrier of the threads
template <class Rows>
struct RowStates {
  const Rows& rows;
  const unsigned smem;

  // Writes row h of a lane's fragment, its sum (0 without visible keys) and its shift to shared memory.
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

  // Stores all rows; a barrier must separate it from put(). One loop merges twice: first the warps' states, into the
  // state of a split; then, in the thread block whose split ends last, the splits' states, in their order.
  __device__ __forceinline__ void store() const {
    int num_rows = rows.num_rows;
    // One loop for both merges: code is read from memory once a launch (cold code, L50).
#pragma unroll 1
    for (bool of_splits = false;; of_splits = true) {
#pragma unroll 1
      for (int first = 0; first < num_rows; first += kPassRows) {
        const int row = first + thread_row(), column = thread_column();
        // Either rows of warps or fetched rows of splits: bytes of a row, rows per state, and this thread's row.
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
  static constexpr int kPassRows = kStateThreads / kStateChunks;  // rows that the threads merge at a time
  static constexpr int kFetched = 64 / kPassRows / 4 * 4;  // splits of kPassRows rows that fit into shared memory
  static_assert(kFetched * kPassRows <= kStateWarps * kStateRows && kFetched % kStateWarps == 0, "");

  // This thread's row within a pass, and its first column.
  __device__ __forceinline__ static int thread_row() { return fresh_thread() % kStateThreads / kStateChunks; }
  __device__ __forceinline__ static int thread_column() { return fresh_thread() % kStateThreads % kStateChunks * 4; }

  // The sums and shifts lie behind the rows.
  __device__ __forceinline__ unsigned sums() const { return smem + 4 * kStateWarps * kStateRows * kStateColumns; }

  // Loads rows from `first` on of kFetched splits; missing ones become empty states. Each thread copies the columns
  // that it merges. cp.async keeps all copies in flight, with one instruction each.
  __device__ __forceinline__ void fetch(int first, int end, int begin) const {
    const long long place = rows.partial_row(begin, first), of_split = rows.partial_row(begin + 1, first) - place;
    const int row = thread_row(), count = min(rows.num_splits - begin, kFetched);
    const int thread = fresh_thread() % kStateThreads, split = thread / kPassRows, of_row = thread % kPassRows;
    float2 of = {0.0f, 0.0f};
    if (split < count && first + of_row < end) of = __ldcg(rows.partial_sums() + place + split * of_split + of_row);
    rows.sync();  // the sums of the splits before these have been read
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
