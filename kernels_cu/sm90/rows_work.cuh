// The work of a block of threads in backward on Hopper by rows: a block of rows of a head, and the tiles of columns
// that it sees. Rows are queries and columns keys, or the other way round.
#pragma once
#include "../common/tile_range.cuh"
#include "../common/work.cuh"
#include "config.cuh"
#include "unseen_rows.cuh"

static_assert(sizeof(TiledRowsParams) == kParamsBytes, "the host packs other parameters");

constexpr bool kRowsAreQueries = kGradient == Gradient::kDq, kWithDp = kGradient != Gradient::kDv;
constexpr int kRows = kGroupRows * kNumConsumers, kColumns = kRowsAreQueries ? kBlockK : kBlockQ;
static_assert(kRows == (kRowsAreQueries ? kBlockQ : kBlockK), "the consumers share the rows of a block");

constexpr bool kIsDv = kGradient == Gradient::kDv;
constexpr int kOutDim = kIsDv ? kHeadDimV : kHeadDim, kOutPanels = kIsDv ? kPanelsV : kPanelsQk;

__device__ __forceinline__ const TensorMap& map_of_gradient(const TiledRowsParams& p) {
  return kIsDv ? p.dv_map : kGradient == Gradient::kDk ? p.dk_map : p.dq_map;
}

// In the names of the result, rows are queries.
__device__ __forceinline__ Mask mask_of_rows(const Mask& mask) { return kRowsAreQueries ? mask : mask.transposed(); }

// The columns that some row of a block sees.
__device__ __forceinline__ TileRange seen_columns(const Mask& mask, int row_begin) {
  return TileRange::covering(mask.key_range(row_begin, smaller(row_begin + kRows, mask.seqlen_q)), kColumns);
}

struct DenseRowBlock {
  struct Found {};  // what blocks of threads find out before they begin: nothing

  const ProblemParams& problem;
  int batch, head;  // a query head if rows are queries, else a kv head
  int row_begin;
  TileRange columns;
  int num_heads;  // whose columns the block goes over: where rows are keys, all query heads of the kv head

  // The longest blocks of rows under a causal mask come first: the last queries, or the first keys.
  __device__ __forceinline__ DenseRowBlock(const TiledRowsParams& p, const Found&) : problem(p.problem) {
    const unsigned blocks = kRowsAreQueries ? p.num_q_blocks : p.num_k_blocks;
    const unsigned heads = kRowsAreQueries ? problem.heads_q : problem.heads_q / problem.heads_per_kv;
    const Work work(longest_first(blockIdx.x, blocks, problem.batch * heads, p.heads_together), heads);
    batch = work.batch, head = work.head;
    row_begin = (kRowsAreQueries ? blocks - 1 - work.block : work.block) * kRows;
    num_heads = kRowsAreQueries ? 1 : problem.heads_per_kv;
    columns = seen_columns(mask_of_rows(sequence().mask()), row_begin);
  }

  __device__ __forceinline__ Sequence sequence() const { return {problem, batch}; }
};

// The same of sequences of several lengths.
struct RaggedRowBlock {
  // What one warp finds out before the others begin.
  struct alignas(16) Found {
    SeenRows rows;
    TileRange columns;
    int head, row_begin;  // row_begin: -1 where a block of threads has nothing to do

    Found() = default;
    __device__ Found(const TiledRowsParams& p, UnseenRows& unseen) {
      const ProblemParams& problem = p.problem;
      const unsigned slots = kRowsAreQueries ? p.num_q_blocks : p.num_k_blocks;
      const unsigned heads = kRowsAreQueries ? problem.heads_q : problem.heads_q / problem.heads_per_kv;
      const HeadBlock at = longest_first(blockIdx.x, slots, heads, p.heads_together);
      const Axis axis = kRowsAreQueries ? axis_of_queries(problem) : axis_of_keys(problem);
      const Territory territory = Territory::of_slot(axis, at.block, kRows);
      const RaggedSequence sequence(problem, territory.sequence);
      rows = SeenRows(problem, sequence);
      const Mask mask = mask_of_rows(rows.mask());
      head = at.head;
      row_begin = kRowsAreQueries ? territory.row_from_end(at.block, kRows) : territory.row(at.block, kRows);
      const int row_end = min(row_begin + kRows, territory.num_rows());
      const Place& place = kRowsAreQueries ? sequence.q_place : static_cast<const Place&>(sequence.k_place);
      unseen = {axis.rows, place.batch, territory.begin, {row_begin, row_end},
                kRowsAreQueries ? sequence.seen_queries() : sequence.seen_keys()};
      columns = seen_columns(mask, row_begin);
      if (row_begin >= mask.seqlen_q) row_begin = -1;
    }

    __device__ __forceinline__ bool exists() const { return row_begin >= 0; }

    __device__ void clear(const TiledRowsParams& p, const UnseenRows& unseen, unsigned zeros) const {
      unseen.clear<kOutPanels>(map_of_gradient(p), zeros, head);
    }
  };

  const ProblemParams& problem;
  unsigned found;  // the address of Found in shared memory
  int head, row_begin;
  TileRange columns;
  int num_heads;

  __device__ __forceinline__ RaggedRowBlock(const TiledRowsParams& p, const Found& in_memory)
      : problem(p.problem), found(smem_address(&in_memory)), num_heads(kRowsAreQueries ? 1 : problem.heads_per_kv) {
    unsigned x[4];
    ld_shared_v4(x, found + sizeof(SeenRows));
    columns = {static_cast<int>(x[0]), static_cast<int>(x[1])}, head = x[2], row_begin = x[3];
  }

  __device__ __forceinline__ SeenSequence sequence() const { return {found}; }
};

template <bool kOfSeveralLengths>
struct RowBlockOf {
  using Type = DenseRowBlock;
};
template <>
struct RowBlockOf<true> {
  using Type = RaggedRowBlock;
};
using RowBlock = RowBlockOf<kLengths>::Type;

// A block of rows, whichever they are.
struct RowWork : RowBlock {
  using RowBlock::RowBlock;

  // Which columns a row sees.
  __device__ __forceinline__ Mask rows_mask() const { return mask_of_rows(sequence().mask()); }

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
