// Which keys a query sees: the predicate and the ranges of the mask, with the names that the Python package gives them.
#pragma once
#include "numeric.cuh"
#include "range.cuh"

// The queries of the two rows of a fragment that a lane has, where rows are queries that follow each other …
struct LaneQueries {
  int upper;

  __device__ constexpr int operator[](int half) const { return upper + 8 * half; }
};

// … and where they are any.
struct AnyLaneQueries {
  int upper, lower;

  __device__ constexpr int operator[](int half) const { return half == 0 ? upper : lower; }
};

struct Mask {
  int seqlen_q, seqlen_k;
  int lo, hi;  // query i sees the keys i + lo … i + hi that exist

  __device__ constexpr Mask(int num_queries, int num_keys, int first, int last)
      : seqlen_q(num_queries), seqlen_k(num_keys), lo(first), hi(last) {}

  __device__ constexpr bool visible(int i, int j) const {
    return i >= 0 && i < seqlen_q && j >= const_max(0, i + lo) && j < const_min(seqlen_k, i + hi + 1);
  }

  // The mask with queries and keys exchanged: i sees j here if and only if j sees i there.
  __device__ constexpr Mask transposed() const { return Mask(seqlen_k, seqlen_q, -hi, -lo); }

  // The key after the last one that a query sees.
  __device__ constexpr int end(int row) const { return const_min(seqlen_k, row + hi + 1); }

  // Keys that at least one of the queries sees. Here and below a range whose end is not after its begin is empty.
  __device__ constexpr Range key_range(int row_begin, int row_end) const {
    return {const_max(0, row_begin + lo), const_min(seqlen_k, row_end + hi)};
  }

  // Keys that all of the queries see.
  __device__ constexpr Range full_range(int row_begin, int row_end) const {
    return {const_max(0, row_end - 1 + lo), const_min(seqlen_k, row_begin + hi + 1)};
  }

  // Queries that see at least one of the keys.
  __device__ constexpr Range row_range(int key_begin, int key_end) const {
    return transposed().key_range(key_begin, key_end);
  }

  // Whether each of the queries sees each of the keys, so that a tile of them needs no mask. kEndRows: the queries may
  // go past the last one, and those past it see nothing.
  template <bool kEndRows = false>
  __device__ constexpr bool all_visible(Range rows, Range keys) const {
    const Range full = full_range(rows.begin, rows.end);
    return keys.begin >= full.begin && keys.end <= full.end && (!kEndRows || rows.end <= seqlen_q);
  }

  // Scores of a fragment of 16 queries that are not visible become `hidden`. `row` is the thread's upper row, `key` the
  // first key, column_pair = lane % 4. kEndRows: queries past the last one see nothing. why not through keep: L9.
  template <bool kEndRows = false, int kCount>
  __device__ __forceinline__ void apply(float (&s)[kCount], int row, int key, int column_pair,
                                        float hidden = -infinity()) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half, first = i + lo - key - 2 * column_pair;
      const int end = !kEndRows || i < seqlen_q ? min(i + hi, seqlen_k - 1) : -1;
      const int last = end - key - 2 * column_pair;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * j + e;
          float& score = s[4 * j + 2 * half + e];
          score = column >= first && column <= last ? score : hidden;
        }
      }
    }
  }

  // Scores of keys after the last that the query sees become -inf.
  template <int kCount, class Queries>
  __device__ __forceinline__ void apply_end(float (&s)[kCount], Queries rows, int key, int column_pair) const {
    keep(s, key, column_pair, [&](int half) { return Range{kNoBound, min(rows[half] + hi + 1, seqlen_k)}; });
  }

  // Scores of keys before the first that the query sees become -inf.
  template <int kCount, class Queries>
  __device__ __forceinline__ void apply_begin(float (&s)[kCount], Queries rows, int key, int column_pair) const {
    keep(s, key, column_pair, [&](int half) { return Range{rows[half] + lo, kNoBound}; });
  }

 private:
  static constexpr int kNoBound = 0x7fffffff;  // a range is not bounded on this side

  template <int kCount, class Visible>
  __device__ __forceinline__ static void keep(float (&s)[kCount], int key, int column_pair, Visible visible) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range keys = visible(half);
      const int begin = keys.begin - key - 2 * column_pair, end = keys.end - key - 2 * column_pair;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * j + e;
          float& score = s[4 * j + 2 * half + e];
          const bool kept = (keys.begin == kNoBound || column >= begin) && (keys.end == kNoBound || column < end);
          score = kept ? score : -infinity();
        }
      }
    }
  }
};
