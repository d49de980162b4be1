// One sequence: its lengths, its visible keys and queries, and the memory location of its rows. Kernels read these only
// through a Sequence or VarlenSequence.
#pragma once
#include "mask.cuh"
#include "params.cuh"

// The first row of a box in a tensor map of (head_dim, seqlen, heads, batch).
struct MapRows {
  int row, batch;

  __device__ constexpr MapRows from(int n) const { return {row + n, batch}; }
};

// Consecutive rows of an operand: index `batch` of the first axis, from row `begin` of the second axis on.
struct Place {
  int batch, begin;

  static constexpr bool kMayBePaged = false;

  // Returns the address of an element of an operand; `bytes` is the element size.
  __device__ __forceinline__ char* address(const Operand& x, int bytes, int head, int row = 0, int column = 0) const {
    const long long element = batch * x.stride_batch + head * x.stride_head + (begin + row) * x.stride_seqlen + column;
    return static_cast<char*>(x.pointer) + element * bytes;
  }
};

// A sequence of a dense batch: all sequences are alike, and all values are read from the parameters.
struct Sequence {
  using KeyPlace = Place;
  using HeldMask = const Mask;

  const ProblemParams& problem;
  int batch;

  __device__ constexpr int seqlen_q() const { return problem.seqlen_q; }
  __device__ constexpr int seqlen_k() const { return problem.seqlen_k; }

  __device__ constexpr Mask mask() const {
    return Mask(problem.seqlen_q, problem.seqlen_k, problem.mask_lo, problem.mask_hi);
  }

  // Returns the end of the rows of out and lse that are written, which are all.
  __device__ constexpr int written_end() const { return problem.seqlen_q; }

  // Keys that some query sees, and queries that see some key. Kernels read all others as zeros.
  __device__ constexpr Range visible_keys() const { return {problem.key_begin, problem.key_end}; }
  __device__ constexpr Range visible_queries() const { return {problem.row_begin, problem.row_end}; }

  // Rows per head of arrays that are laid out alike for all batch elements: the rows of the longest sequence.
  __device__ static constexpr int most_queries(const ProblemParams& p) { return p.seqlen_q; }
  __device__ static constexpr int most_keys(const ProblemParams& p) { return p.seqlen_k; }

  // Strips of 16 rows in such arrays.
  __device__ constexpr int query_strip(int row) const { return row / 16; }
  __device__ constexpr int key_strip(int row) const { return row / 16; }

  // Locations of the rows of q-like and k-like operands.
  __device__ constexpr Place queries() const { return {batch, 0}; }
  __device__ constexpr Place keys() const { return {batch, 0}; }

  // Returns a query's row in per-query arrays, whose heads are counted by query_head.
  __device__ constexpr int padded_query(int row) const { return row; }

  // Heads counted over the whole batch, and the number of all query heads.
  __device__ static constexpr long long num_query_heads(const ProblemParams& p) {
    return static_cast<long long>(p.batch) * p.heads_q;
  }
  __device__ constexpr long long query_head(int head) const {
    return static_cast<long long>(batch) * problem.heads_q + head;
  }
  __device__ constexpr long long kv_head(int head) const {
    return static_cast<long long>(batch) * (problem.heads_q / problem.heads_per_kv) + head;
  }

  // Offsets of query 0 of a query head: in lse, and in arrays with `rows` rows per head.
  __device__ constexpr long long lse_offset(int head) const { return rows_offset(head, problem.seqlen_q); }
  __device__ constexpr long long rows_offset(int head, int rows) const { return query_head(head) * rows; }

  // Rows in tensor maps of all rows, and in tensor maps that begin at the first visible row.
  __device__ constexpr MapRows keys_from(int key) const { return {key, batch}; }
  __device__ constexpr MapRows queries_from(int query) const { return {query, batch}; }
  __device__ constexpr MapRows out_from(int query) const { return queries_from(query); }
  __device__ constexpr MapRows visible_keys_from(int key) const { return {key - problem.key_begin, batch}; }
  __device__ constexpr MapRows visible_queries_from(int query) const { return {query - problem.row_begin, batch}; }
};
