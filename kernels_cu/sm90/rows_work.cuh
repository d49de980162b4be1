// The work of a block of threads in backward on Hopper by rows: a block of rows of a head, and the tiles of columns
// that it sees. Rows are queries and columns keys, or the other way round.
#pragma once
#include "../common/sequence.cuh"
#include "../common/tile_range.cuh"
#include "../common/work.cuh"
#include "config.cuh"

static_assert(sizeof(TiledRowsParams) == kParamsBytes, "the host packs other parameters");

constexpr bool kRowsAreQueries = kGradient == Gradient::kDq, kWithDp = kGradient != Gradient::kDv;
constexpr int kRows = kGroupRows * kNumConsumers, kColumns = kRowsAreQueries ? kBlockK : kBlockQ;
static_assert(kRows == (kRowsAreQueries ? kBlockQ : kBlockK), "the consumers share the rows of a block");

struct RowWork {
  const ProblemParams& problem;
  int batch, head;  // a query head if rows are queries, else a kv head
  int row_begin;
  TileRange columns;
  int num_heads;  // whose columns the block goes over: where rows are keys, all query heads of the kv head

  // The longest blocks of rows under a causal mask come first: the last queries, or the first keys.
  __device__ __forceinline__ explicit RowWork(const TiledRowsParams& p) : problem(p.problem) {
    const unsigned blocks = kRowsAreQueries ? p.num_q_blocks : p.num_k_blocks;
    const unsigned heads = kRowsAreQueries ? problem.heads_q : problem.heads_q / problem.heads_per_kv;
    const Work work(longest_first(blockIdx.x, blocks, problem.batch * heads, p.heads_together), heads);
    batch = work.batch, head = work.head;
    row_begin = (kRowsAreQueries ? blocks - 1 - work.block : work.block) * kRows;
    num_heads = kRowsAreQueries ? 1 : problem.heads_per_kv;
    const Mask mask = rows_mask();
    columns = TileRange::covering(mask.key_range(row_begin, smaller(row_begin + kRows, mask.seqlen_q)), kColumns);
  }

  __device__ __forceinline__ Sequence sequence() const { return {problem, batch}; }

  // Which columns a row sees. In the names of the mask, rows are its queries.
  __device__ __forceinline__ Mask rows_mask() const {
    return kRowsAreQueries ? sequence().mask() : sequence().mask().transposed();
  }

  // Rows that see, or are seen by, somebody.
  __device__ __forceinline__ Range seen_rows() const {
    return kRowsAreQueries ? sequence().seen_queries() : sequence().seen_keys();
  }

  // Rows and columns in the tensor maps of the operands, and rows in that of the gradient.
  __device__ __forceinline__ auto seen_rows_from(int row) const {
    return kRowsAreQueries ? sequence().seen_queries_from(row) : sequence().seen_keys_from(row);
  }
  __device__ __forceinline__ auto seen_columns_from(int column) const {
    return kRowsAreQueries ? sequence().seen_keys_from(column) : sequence().seen_queries_from(column);
  }
  __device__ __forceinline__ auto rows_from(int row) const {
    return kRowsAreQueries ? sequence().queries_from(row) : sequence().keys_from(row);
  }
};
