// Which keys a query sees: cuflash/mask.py in CUDA, with the same names.
#pragma once
#include "numeric.cuh"
#include "params.cuh"

struct KeyRange {
  int begin, end;  // half-open
};

struct Mask {
  int seqlen_q, seqlen_k, lo, hi;

  __device__ Mask(int num_queries, int num_keys, int first, int last)
      : seqlen_q(num_queries), seqlen_k(num_keys), lo(first), hi(last) {}

  template <class Params>
  __device__ explicit Mask(const Params& p) : Mask(p.seqlen_q, p.seqlen_k, p.mask_lo, p.mask_hi) {}

  // Queries and keys with their parts exchanged: i sees j here iff j sees i there.
  __device__ Mask transposed() const { return {seqlen_k, seqlen_q, -hi, -lo}; }

  // Keys that at least one of the queries sees.
  __device__ KeyRange key_range(int row_begin, int row_end) const {
    return {max(0, row_begin + lo), min(seqlen_k, row_end + hi)};
  }

  // Keys that all of the queries see.
  __device__ KeyRange full_range(int row_begin, int row_end) const {
    return {max(0, row_end - 1 + lo), min(seqlen_k, row_begin + hi + 1)};
  }

  // Scores of a 16 x kBlockK fragment that the query does not see become -inf. `row` is the thread's upper row, `key`
  // the first key of the tile, column_pair = lane % 4. kEndRows: rows from seqlen_q on see nothing.
  template <bool kEndRows = false, int kCount>
  __device__ __forceinline__ void apply(float (&s)[kCount], int row, int key, int column_pair) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half;
      const int first = i + lo - key - 2 * column_pair;
      const int end = !kEndRows || i < seqlen_q ? min(i + hi, seqlen_k - 1) : -1;
      const int last = end - key - 2 * column_pair;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * j + e;
          float& score = s[4 * j + 2 * half + e];
          score = column >= first && column <= last ? score : -infinity();
        }
      }
    }
  }

  // The same of one side alone: keys after the last that the query sees, and those before the first.
  template <int kCount>
  __device__ __forceinline__ void hide_after(float (&s)[kCount], int row, int key, int column_pair) const {
    keep(s, key, column_pair, [&](int half) { return KeyRange{kAnyKey, min(row + 8 * half + hi + 1, seqlen_k)}; });
  }

  template <int kCount>
  __device__ __forceinline__ void hide_before(float (&s)[kCount], int row, int key, int column_pair) const {
    keep(s, key, column_pair, [&](int half) { return KeyRange{row + 8 * half + lo, kAnyKey}; });
  }

 private:
  static constexpr int kAnyKey = 0x7fffffff;  // a bound that does not exist

  template <int kCount, class Seen>
  __device__ __forceinline__ static void keep(float (&s)[kCount], int key, int column_pair, Seen seen) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = seen(half);
      const int begin = keys.begin - key - 2 * column_pair, end = keys.end - key - 2 * column_pair;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * j + e;
          float& score = s[4 * j + 2 * half + e];
          const bool visible = (keys.begin == kAnyKey || column >= begin) && (keys.end == kAnyKey || column < end);
          score = visible ? score : -infinity();
        }
      }
    }
  }
};
