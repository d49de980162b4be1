// Work tiles of backward_dq_dkv: a block of rows of a head, and the tiles of columns that it sees. Rows are queries and
// columns keys, or the other way round.
#pragma once
#include "../../common/select.cuh"
#include "../../common/tile_range.cuh"
#include "../../common/tile_scheduler.cuh"
#include "../config.cuh"
#include "../pipeline/work_ring.cuh"
#include "../pipeline/step_ring.cuh"

using Params = WithMods<TiledDqDkvParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");

constexpr bool kRowsAreQueries = kGradient == Gradient::kDq, kWithDp = kGradient != Gradient::kDv;
constexpr int kRows = kGroupRows * kNumConsumers, kColumns = kRowsAreQueries ? kBlockK : kBlockQ;
static_assert(kRows == (kRowsAreQueries ? kBlockQ : kBlockK), "the consumers share the rows of a block");

constexpr bool kIsDv = kGradient == Gradient::kDv;
constexpr int kOutDim = kIsDv ? kHeadDimV : kHeadDim;

__device__ __forceinline__ const TensorMap& map_of_gradient(const TiledDqDkvParams& p) {
  return kIsDv ? p.dv_map : kGradient == Gradient::kDk ? p.dk_map : p.dq_map;
}

// Blocks of rows (or slots for them) of a head; heads of the rows; heads of the columns for one block of rows. If rows
// are keys, the latter are all query heads of the kv head.
__device__ __forceinline__ unsigned blocks_of_rows(const TiledDqDkvParams& p) {
  return kRowsAreQueries ? p.num_q_blocks : p.num_k_blocks;
}
__device__ __forceinline__ unsigned heads_of_rows(const ProblemParams& p) {
  return kRowsAreQueries ? p.heads_q : p.heads_q / p.heads_per_kv;
}
__device__ __forceinline__ int heads_of_columns(const ProblemParams& p) { return kRowsAreQueries ? 1 : p.heads_per_kv; }

// Thread blocks that share the heads of a block of rows. Two at most, as the sum of two has the same bits in either
// order.
constexpr int kSharers = kSharesHeads ? 2 : 1;

// Returns the index of this thread block's block of rows.
__device__ __forceinline__ unsigned row_block_idx() {
  unsigned index = blockIdx.x / kSharers;
  if (kSharesHeads) asm volatile("" : "+r"(index));  // opaque, so that what follows from it is computed again, not held
  return index;
}

// Returns the mask with rows as its queries and columns as its keys.
__device__ __forceinline__ Mask mask_of_rows(const Mask& mask) { return kRowsAreQueries ? mask : mask.transposed(); }

// Returns the tiles of columns that some row of a block sees.
__device__ __forceinline__ TileRange visible_columns(const Mask& mask, int row_begin) {
  return TileRange::covering(mask.key_range(row_begin, const_min(row_begin + kRows, mask.seqlen_q)), kColumns);
}

struct DenseRowBlock {
  struct SchedulerStorage {  // empty
    __device__ static constexpr void init() {}
  };

  const Params& params;
  int batch, head;  // a query head if rows are queries, otherwise a kv head
  int row_begin;
  TileRange columns;

  __device__ __forceinline__ DenseRowBlock(const Params& p, const SchedulerStorage&) : params(p) { find(); }

  // The longest blocks of rows under a causal mask come first: the last queries, or the first keys.
  __device__ __forceinline__ void find() {
    const Params& p = params;
    const unsigned blocks = blocks_of_rows(p), heads = heads_of_rows(p.problem);
    const Work work(lpt_order(row_block_idx(), blocks, p.problem.batch * heads, p.heads_in_l2), heads);
    batch = work.batch, head = work.head;
    row_begin = (kRowsAreQueries ? blocks - 1 - work.block : work.block) * kRows;
    columns = visible_columns(mask_of_rows(sequence().mask()), row_begin);
  }

  __device__ __forceinline__ Sequence sequence() const { return {params.problem, batch}; }
  __device__ __forceinline__ WholeSequence whole_sequence() const {
    return {batch, params.problem.seqlen_q, params.problem.seqlen_k, 0, 0};
  }

  // A thread block has one block of rows. VarlenRowBlock, with several, gives these functions bodies.
  __device__ static constexpr bool first() { return true; }
  __device__ static constexpr bool next() { return false; }
  __device__ static constexpr void schedule() {}
  __device__ static constexpr void request_next(bool) {}
  __device__ static constexpr void wait_rows_left() {}
  __device__ static constexpr void leave_rows(bool) {}
  __device__ static constexpr void leave_columns(unsigned, bool) {}
};

// Blocks of rows of variable-length sequences: slots that delta.cu has listed (portable/key_blocks.cuh). As many thread
// blocks as there are SMs take them one by one. Some slots are empty, and a thread block takes 1 to 2 µs to start.
struct VarlenRowBlock : WorkRing<2, 1 + 4 * kNumConsumers> {
  static_assert(kRows == kPaddedSlot, "delta.cu tells of blocks of other rows");

  struct SchedulerStorage : Ring {
    // rows_left: a and c may be loaded again. requested: all loads of a block of rows are issued.
    unsigned long long rows_left, requested;

    // One thread calls.
    __device__ void init() const {
      Ring::init();
      mbarrier_init(smem_address(&rows_left), 4 * kNumConsumers), mbarrier_init(smem_address(&requested), 1);
    }
  };

  const Params& params;
  int head, row_begin;
  TileRange columns;

  __device__ __forceinline__ VarlenRowBlock(const Params& p, const SchedulerStorage& in_memory)
      : WorkRing(in_memory), params(p) {}

  // Schedules all work tiles of a thread block, each once all loads of the one before are issued: bursts of copies cost
  // (L19). One warp calls.
  __device__ __forceinline__ void schedule() const {
    if (threadIdx.x % 32 != 0) return;
    const unsigned heads = heads_of_rows(params.problem), slots = blocks_of_rows(params), num_work = slots * heads;
    const VisibleBlock* const listed =
        static_cast<const VisibleBlock*>(kRowsAreQueries ? params.q_blocks : params.k_blocks);
    unsigned next = 0;
#pragma unroll 1
    for (unsigned n = blockIdx.x; n < num_work; n = gridDim.x + take_number(params.counter, num_work)) {
      const HeadBlock at = lpt_order(n, slots, heads, params.heads_in_l2);
      if (listed[at.block].block == VisibleBlock::kNone) continue;
      wait_place(next);
      push(next, listed, at.block, {at.head});
      mbarrier_wait(requested(), next & 1);
      ++next;
    }
    wait_place(next);
    end(next);
  }

  __device__ static constexpr void find() {}

  // Advances to the first or the next block of rows; returns false at the end.
  __device__ __forceinline__ bool first() { return next(); }
  __device__ __forceinline__ bool next() {
    if (!go_on()) return false;
    head = scheduled_head(), row_begin = scheduled_block() * kRows;
    columns = visible_columns(mask_of_rows(sequence().mask()), row_begin);
    return true;
  }

  // Requests the next block of rows from the scheduler warp, once all loads of this one are issued.
  __device__ __forceinline__ void request_next(bool is_leader) const { mbarrier_arrive_warp(requested(), is_leader); }

  // Waits until all consumers have released the shared memory of the rows, one by one.
  __device__ __forceinline__ void wait_rows_left() const { mbarrier_wait(rows_left(), (number & 1) ^ 1); }
  __device__ __forceinline__ void leave_rows(bool is_leader) const { mbarrier_arrive_warp(rows_left(), is_leader); }

  // Releases the last tile of columns through this barrier, so that others can be loaded.
  __device__ __forceinline__ void leave_columns(unsigned empty, bool is_leader) const {
    mbarrier_arrive_warp(empty, is_leader);
  }

 private:
  __device__ __forceinline__ unsigned rows_left() const { return ring + sizeof(Ring); }
  __device__ __forceinline__ unsigned requested() const { return rows_left() + 8; }
};

using RowBlock = Select<kVarlen, VarlenRowBlock, DenseRowBlock>;

// Returns the tiles of columns that some row of a block sees.
template <class AnyBlock>
__device__ __forceinline__ auto visible_tiles(const AnyBlock& block, int query_head) {
  const AscendingTiles tiles = block.columns;
  const Mask mask = mask_of_rows(block.sequence().mask());
  const Range rows{block.row_begin, const_min(block.row_begin + kRows, mask.seqlen_q)};
  int batch = 0;
  if constexpr (kBlockSparse) batch = block.batch;
  return VisibleTiles<AscendingTiles, kRows, kColumns, !kRowsAreQueries>(tiles, block.params, batch, query_head, rows,
                                                                         mask.seqlen_k);
}

// A block of rows, dense or varlen, and the ring of its steps.
struct RowWork : RowBlock, StepRing<4 * kNumConsumers> {
  using Steps = StepRing<4 * kNumConsumers>;
  using Steps::push;

  struct SchedulerStorage : RowBlock::SchedulerStorage, Steps::Ring {
    // One thread calls.
    __device__ void init() const { RowBlock::SchedulerStorage::init(), Steps::Ring::init(); }
  };

  __device__ __forceinline__ RowWork(const Params& p, const SchedulerStorage& in_memory)
      : RowBlock(p, in_memory), Steps(in_memory) {}

  // Runs a role over each block of rows. Steps are counted over all of them.
  template <class Role>
  __device__ __forceinline__ void each(Role&& role) {
    unsigned step = 0;
#pragma unroll 1
    for (bool any = first(); any; any = next()) step = role.run(step);
  }

  // The heads of the columns for this thread block, counted from the first one of the rows.
  __device__ __forceinline__ Range heads() const {
    const int all = heads_of_columns(params.problem), part = blockIdx.x % kSharers;
    return {all * part / kSharers, all * (part + 1) / kSharers};
  }

  // The columns that a row sees.
  __device__ __forceinline__ Mask rows_mask() const { return mask_of_rows(sequence().mask()); }

  // Rows that are in some visible pair.
  __device__ __forceinline__ Range visible_rows() const {
    return kRowsAreQueries ? sequence().visible_queries() : sequence().visible_keys();
  }

  // Rows and columns in the operands' tensor maps, and rows in the gradient's.
  __device__ __forceinline__ auto visible_rows_from(int row) const {
    return kRowsAreQueries ? sequence().visible_queries_from(row) : sequence().visible_keys_from(row);
  }
  __device__ __forceinline__ auto visible_columns_from(int column) const {
    return kRowsAreQueries ? sequence().visible_keys_from(column) : sequence().visible_queries_from(column);
  }
  __device__ __forceinline__ auto rows_from(int row) const {
    return kRowsAreQueries ? sequence().queries_from(row) : sequence().keys_from(row);
  }
};
