// Rows of the float32 arrays that calls with `accumulate` add to, from registers. In deterministic calls the writers of
// an element take turns in a fixed order, so that the sums of a sequence of calls are the same in each run.
#pragma once
#include "../ptx/red.cuh"
#include "fragment.cuh"
#include "params.cuh"
#include "range.cuh"

// Returns the address of a row, at a position with members `row` and `batch`: MapRows or VarlenMapRows.
template <class Rows>
__device__ __forceinline__ float* float_row(const Operand& x, const Rows& at, int head) {
  return static_cast<float*>(x.pointer) + at.batch * x.stride_batch + at.row * x.stride_seqlen + head * x.stride_head;
}

// Returns this lane's first column of fragment j, 8 columns wide. A warp has every kGroup-th block of 16 columns.
template <int kGroup>
__device__ __forceinline__ int lane_column(int j) {
  return (j / 2 * kGroup * 2 + j % 2) * 8 + fresh_thread() % 4 * 2;
}

// Adds row h of a lane's fragments, times `scale`, to a row of `columns` columns.
template <int kGroup = 1, int kCount>
__device__ __forceinline__ void add_row(float* row, const float (&x)[kCount], int h, float scale, int columns,
                                        bool aligned) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int column = lane_column<kGroup>(j);
    const float first = x[4 * j + 2 * h] * scale, second = x[4 * j + 2 * h + 1] * scale;
    if (aligned && column + 1 < columns) {
      red_add_v2_f32(row + column, first, second);
    } else {
      if (column < columns) red_add_f32(row + column, first);
      if (column + 1 < columns) red_add_f32(row + column + 1, second);
    }
  }
}

// The state (out, lse) of a row over other keys, blended with the row over these keys as merge.cu blends states.
struct Blend {
  float weight, lse;  // the share of these keys; lse over all keys
  bool is_first;      // the state has no keys yet, and its out may be anything

  __device__ __forceinline__ Blend(float state, float row) : is_first(state == -infinity()) {
    const float difference = row - state;
    weight = 1.0f / (1.0f + expf(-difference));
    lse = fmaxf(row, state) + log1pf(expf(-fabsf(difference)));
  }

  // Blends row h of a lane's fragments, times `scale`, into a row of out. kPairs: rows are aligned, of an even length.
  template <bool kPairs, int kCount>
  __device__ __forceinline__ void out(float* row, const float (&o)[kCount], int h, float scale, int columns,
                                      bool aligned = true) const {
    constexpr int kLoaded = 8;  // pairs in flight: one after the other took 30 us a tile of 128 x 128
    const bool pairs = kPairs || (aligned && columns % 2 == 0);
#pragma unroll
    for (int first = 0; first < kCount / 4; first += kLoaded) {
      float2 state[kLoaded];
#pragma unroll
      for (int n = 0; n < kLoaded; ++n) {
        const int column = lane_column<1>(first + n);
        state[n] = {0.0f, 0.0f};
        if (first + n >= kCount / 4 || column >= columns || is_first) continue;
        if (pairs) state[n] = __ldcg(reinterpret_cast<const float2*>(row + column));
        else state[n] = {row[column], column + 1 < columns ? row[column + 1] : 0.0f};
      }
#pragma unroll
      for (int n = 0; n < kLoaded; ++n) {
        const int j = const_min(first + n, kCount / 4 - 1), column = lane_column<1>(j);
        if (first + n >= kCount / 4 || column >= columns) continue;
        state[n].x += (o[4 * j + 2 * h] * scale - state[n].x) * weight;
        state[n].y += (o[4 * j + 2 * h + 1] * scale - state[n].y) * weight;
        if (pairs) {
          *reinterpret_cast<float2*>(row + column) = state[n];
        } else {
          row[column] = state[n].x;
          if (column + 1 < columns) row[column + 1] = state[n].y;
        }
      }
    }
  }
};
