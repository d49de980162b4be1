// One sequence: its lengths, which of its keys and queries take part, and where its rows lie in memory. Kernels ask no
// other code for these, and ask for the sequence that they work on.
#pragma once
#include "mask.cuh"
#include "params.cuh"

// Where rows begin in a tensor map of (head_dim, seqlen, heads, batch).
struct MapRows {
  int row, batch;

  __device__ constexpr MapRows from(int n) const { return {row + n, batch}; }
};

// Rows that follow each other: those of row `batch` of an operand's first axis, from row `begin` of the second on.
struct Place {
  int batch, begin;

  static constexpr bool kMayBePaged = false;

  // Where an element of an operand lies whose elements have `bytes` bytes.
  __device__ __forceinline__ char* address(const Operand& x, int bytes, int head, int row = 0, int column = 0) const {
    const long long element = batch * x.stride_batch + head * x.stride_head + (begin + row) * x.stride_seqlen + column;
    return static_cast<char*>(x.pointer) + element * bytes;
  }
};

// Sequences that are all alike: each is one element of the batch, and every answer is read from the parameters.
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

  // Rows of out and lse that are written: all.
  __device__ constexpr int written_end() const { return problem.seqlen_q; }

  // The keys that some query sees, and the queries that see some key. Kernels read all others as zeros.
  __device__ constexpr Range visible_keys() const { return {problem.key_begin, problem.key_end}; }
  __device__ constexpr Range visible_queries() const { return {problem.row_begin, problem.row_end}; }

  // What is counted or laid out alike for all batch elements has as many rows as the longest of them.
  __device__ static constexpr int most_queries(const ProblemParams& p) { return p.seqlen_q; }
  __device__ static constexpr int most_keys(const ProblemParams& p) { return p.seqlen_k; }

  // Strips of 16 rows, in arrays whose heads have so many rows.
  __device__ constexpr int query_strip(int row) const { return row / 16; }
  __device__ constexpr int key_strip(int row) const { return row / 16; }

  // Where the rows of operands like q, and of those like k, lie.
  __device__ constexpr Place queries() const { return {batch, 0}; }
  __device__ constexpr Place keys() const { return {batch, 0}; }

  // A query's row in arrays of numbers of each query, whose heads are those of query_head.
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

  // Numbers before query 0 of a query head, in lse, and in arrays whose heads have `rows` rows.
  __device__ constexpr long long lse_offset(int head) const { return rows_offset(head, problem.seqlen_q); }
  __device__ constexpr long long rows_offset(int head, int rows) const { return query_head(head) * rows; }

  // Rows in tensor maps that hold all of them, and in those that begin at the first row that is seen.
  __device__ constexpr MapRows keys_from(int key) const { return {key, batch}; }
  __device__ constexpr MapRows queries_from(int query) const { return {query, batch}; }
  __device__ constexpr MapRows out_from(int query) const { return queries_from(query); }
  __device__ constexpr MapRows visible_keys_from(int key) const { return {key - problem.key_begin, batch}; }
  __device__ constexpr MapRows visible_queries_from(int query) const { return {query - problem.row_begin, batch}; }
};
