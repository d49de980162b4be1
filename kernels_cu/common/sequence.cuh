// One batch element: its lengths, which of its keys and queries take part, and where its rows lie in memory. Kernels
// ask nobody else for these. Today all batch elements are alike, and every answer is read from the parameters.
#pragma once
#include "mask.cuh"
#include "params.cuh"

struct Sequence {
  const ProblemParams& problem;
  int batch;

  __device__ constexpr Sequence(const ProblemParams& p, int batch_idx) : problem(p), batch(batch_idx) {}

  __device__ constexpr int seqlen_q() const { return problem.seqlen_q; }
  __device__ constexpr int seqlen_k() const { return problem.seqlen_k; }

  __device__ constexpr Mask mask() const {
    return Mask(problem.seqlen_q, problem.seqlen_k, problem.mask_lo, problem.mask_hi);
  }

  // The keys that some query sees, and the queries that see some key. Kernels read all others as zeros.
  __device__ constexpr Range seen_keys() const { return {problem.key_begin, problem.key_end}; }
  __device__ constexpr Range seen_queries() const { return {problem.row_begin, problem.row_end}; }

  // Elements of an operand before row 0 of a head.
  __device__ constexpr long long offset(const Operand& x, int head) const {
    return batch * x.stride_batch + head * x.stride_head;
  }

  // Heads counted over the whole batch.
  __device__ constexpr long long query_head(int head) const {
    return static_cast<long long>(batch) * problem.heads_q + head;
  }
  __device__ constexpr long long kv_head(int head) const {
    return static_cast<long long>(batch) * (problem.heads_q / problem.heads_per_kv) + head;
  }

  // Numbers before query 0 of a query head, in lse, and in arrays whose heads have `rows` rows.
  __device__ constexpr long long lse_offset(int head) const { return rows_offset(head, problem.seqlen_q); }
  __device__ constexpr long long rows_offset(int head, int rows) const { return query_head(head) * rows; }

  // Coordinates in tensor maps that hold all rows, and in those that begin at the first row that is seen.
  __device__ constexpr int key_coordinate(int key) const { return key; }
  __device__ constexpr int query_coordinate(int query) const { return query; }
  __device__ constexpr int seen_key_coordinate(int key) const { return key - problem.key_begin; }
  __device__ constexpr int seen_query_coordinate(int query) const { return query - problem.row_begin; }
  __device__ constexpr int batch_coordinate() const { return batch; }
};
