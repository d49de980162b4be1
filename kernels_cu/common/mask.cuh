// The mask: its predicate and its ranges of visible keys and queries, named as in the Python package.
#pragma once
#include "numeric.cuh"
#include "range.cuh"

// A lane's two queries of a fragment whose rows are consecutive queries.
struct LaneQueries {
  int upper;

  __device__ constexpr int operator[](int half) const { return upper + 8 * half; }
};

// A lane's two queries of a fragment whose rows are arbitrary queries.
struct AnyLaneQueries {
  int upper, lower;

  __device__ constexpr int operator[](int half) const { return half == 0 ? upper : lower; }
};

struct Mask {
  int seqlen_q, seqlen_k;
  int lo, hi;  // query i sees the existing keys of i + lo … i + hi

  __device__ constexpr Mask(int num_queries, int num_keys, int first, int last)
      : seqlen_q(num_queries), seqlen_k(num_keys), lo(first), hi(last) {}

  __device__ constexpr bool visible(int i, int j) const {
    return i >= 0 && i < seqlen_q && j >= const_max(0, i + lo) && j < const_min(seqlen_k, i + hi + 1);
  }

  // Returns the mask with queries and keys exchanged: i sees j here if and only if j sees i in this mask.
  __device__ constexpr Mask transposed() const { return Mask(seqlen_k, seqlen_q, -hi, -lo); }

  // Returns the end of the keys that a query sees.
  __device__ constexpr int end(int row) const { return const_min(seqlen_k, row + hi + 1); }

  // Returns the keys that at least one of the queries sees. Here and below a range is empty if its end is not after its
  // begin.
  __device__ constexpr Range key_range(int row_begin, int row_end) const {
    return {const_max(0, row_begin + lo), const_min(seqlen_k, row_end + hi)};
  }

  // Returns the keys that all of the queries see.
  __device__ constexpr Range full_range(int row_begin, int row_end) const {
    return {const_max(0, row_end - 1 + lo), const_min(seqlen_k, row_begin + hi + 1)};
  }

  // Returns the queries that see at least one of the keys.
  __device__ constexpr Range row_range(int key_begin, int key_end) const {
    return transposed().key_range(key_begin, key_end);
  }

  // True if each query sees each key, so that the tile needs no mask. With kEndRows the queries may include rows after
  // the last one, which see nothing.
  template <bool kEndRows = false>
  __device__ constexpr bool all_visible(Range rows, Range keys) const {
    const Range full = full_range(rows.begin, rows.end);
    return keys.begin >= full.begin && keys.end <= full.end && (!kEndRows || rows.end <= seqlen_q);
  }

  // Sets the masked scores of a fragment of 16 queries to `hidden`. `row` is the thread's upper row, `key` the first
  // key, column_pair = lane % 4. kEndRows: queries after the last one see nothing. A loop of its own: through keep() d
  // 32 spilled 8 bytes (L9).
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

  // Sets scores of keys after the last visible one to -inf.
  template <int kCount, class Queries>
  __device__ __forceinline__ void apply_end(float (&s)[kCount], Queries rows, int key, int column_pair) const {
    keep(s, key, column_pair, [&](int half) { return Range{kNoBound, min(rows[half] + hi + 1, seqlen_k)}; });
  }

  // Sets scores of keys before the first visible one to -inf.
  template <int kCount, class Queries>
  __device__ __forceinline__ void apply_begin(float (&s)[kCount], Queries rows, int key, int column_pair) const {
    keep(s, key, column_pair, [&](int half) { return Range{rows[half] + lo, kNoBound}; });
  }

 private:
  static constexpr int kNoBound = 0x7fffffff;  // the range has no bound on this side

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
