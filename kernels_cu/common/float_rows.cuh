// Rows of the float32 arrays that calls with `accumulate` add to. Fragments go there from registers, as each element
// has one writer per call: the sums of a sequence of calls are the same in each run.
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

// Adds row h of a lane's fragments, times `scale`, to a row of `columns` columns. kPairs: they are even, and the row is
// aligned.
template <bool kPairs, int kGroup = 1, int kCount>
__device__ __forceinline__ void add_row(float* row, const float (&x)[kCount], int h, float scale, int columns,
                                        bool aligned = true) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int column = lane_column<kGroup>(j);
    const float first = x[4 * j + 2 * h] * scale, second = x[4 * j + 2 * h + 1] * scale;
    if (kPairs ? column < columns : aligned && column + 1 < columns) {
      red_add_v2_f32(row + column, first, second);
    } else if constexpr (!kPairs) {
      if (column < columns) red_add_f32(row + column, first);
      if (column + 1 < columns) red_add_f32(row + column + 1, second);
    }
  }
}

// Adds a lane's two rows, `row` and `row` + 8, to rows of an operand from column `first` of `columns` on. Rows outside
// `visible` are in no visible pair, and stay. rows_from(row) is a position as in `float_row`. For operands that TMA
// could store: their rows are aligned.
template <int kCount, class RowsFrom>
__device__ __forceinline__ void add_rows(const Operand& sums, const float (&x)[kCount], float scale, int row,
                                         Range visible, RowsFrom rows_from, int head, int columns, int first = 0) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = row + 8 * h;
    if (at < visible.begin || at >= visible.end) continue;
    add_row<true>(float_row(sums, rows_from(at), head) + first, x, h, scale, columns - first);
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

  // Blends row h of a lane's fragments, times `scale`, into a row of out.
  template <int kCount>
  __device__ __forceinline__ void out(float* row, const float (&o)[kCount], int h, float scale, int columns,
                                      bool aligned) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = lane_column<1>(j);
      float* const to = row + column;
      const bool has_second = column + 1 < columns;
      if (column >= columns) continue;
      float2 state = {0.0f, 0.0f};
      if (!is_first) {
        if (aligned && has_second) state = *reinterpret_cast<const float2*>(to);
        else state = {to[0], has_second ? to[1] : 0.0f};
      }
      state.x += (o[4 * j + 2 * h] * scale - state.x) * weight;
      state.y += (o[4 * j + 2 * h + 1] * scale - state.y) * weight;
      if (aligned && has_second) {
        *reinterpret_cast<float2*>(to) = state;
      } else {
        to[0] = state.x;
        if (has_second) to[1] = state.y;
      }
    }
  }
};
