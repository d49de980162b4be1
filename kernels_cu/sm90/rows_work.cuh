// The work of a block of threads in backward on Hopper by rows: a block of rows of a head, and the tiles of columns
// that it sees. Rows are queries and columns keys, or the other way round.
#pragma once
#include "../common/tile_range.cuh"
#include "../common/work.cuh"
#include "../ptx/mbarrier.cuh"
#include "config.cuh"
#include "seen_sequence.cuh"

static_assert(sizeof(TiledRowsParams) == kParamsBytes, "the host packs other parameters");

constexpr bool kRowsAreQueries = kGradient == Gradient::kDq, kWithDp = kGradient != Gradient::kDv;
constexpr int kRows = kGroupRows * kNumConsumers, kColumns = kRowsAreQueries ? kBlockK : kBlockQ;
static_assert(kRows == (kRowsAreQueries ? kBlockQ : kBlockK), "the consumers share the rows of a block");

constexpr bool kIsDv = kGradient == Gradient::kDv;
constexpr int kOutDim = kIsDv ? kHeadDimV : kHeadDim;

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
  struct Dealt {  // nothing
    __device__ static constexpr void init() {}
  };

  const ProblemParams& problem;
  int batch, head;  // a query head if rows are queries, else a kv head
  int row_begin;
  TileRange columns;
  int num_heads;  // whose columns the block goes over: where rows are keys, all query heads of the kv head

  // The longest blocks of rows under a causal mask come first: the last queries, or the first keys.
  __device__ __forceinline__ DenseRowBlock(const TiledRowsParams& p, const Dealt&) : problem(p.problem) {
    const unsigned blocks = kRowsAreQueries ? p.num_q_blocks : p.num_k_blocks;
    const unsigned heads = kRowsAreQueries ? problem.heads_q : problem.heads_q / problem.heads_per_kv;
    const Work work(longest_first(blockIdx.x, blocks, problem.batch * heads, p.heads_together), heads);
    batch = work.batch, head = work.head;
    row_begin = (kRowsAreQueries ? blocks - 1 - work.block : work.block) * kRows;
    num_heads = kRowsAreQueries ? 1 : problem.heads_per_kv;
    columns = seen_columns(mask_of_rows(sequence().mask()), row_begin);
  }

  __device__ __forceinline__ Sequence sequence() const { return {problem, batch}; }

  // A block of threads has one block of rows. The others below say what is to be done where it has several.
  __device__ static constexpr bool first() { return true; }
  __device__ static constexpr bool next() { return false; }
  __device__ static constexpr void deal() {}
  __device__ static constexpr void want_next(bool) {}
  __device__ static constexpr void await_rows_left() {}
  __device__ static constexpr void leave_rows(bool) {}
  __device__ static constexpr void leave_columns(unsigned, bool) {}
};

// The same of sequences of several lengths: slots, of which delta.cu has told what they hold (portable/key_blocks.cuh). As
// many blocks of threads as there are multiprocessors take them one by one. why: some are empty, and a block of threads takes
// 1 to 2 µs to begin.
struct RaggedRowBlock {
  static_assert(kRows == kPaddedSlot, "delta.cu tells of blocks of other rows");

  struct alignas(16) Slot {
    SeenBlock of;
    int head;  // kNoWork once there is no more
  };

  // Work goes from one warp to all others that work, through a ring of slots.
  struct Dealt {
    static constexpr int kSlots = 2;

    Slot slots[kSlots];
    unsigned long long full[kSlots], empty[kSlots];
    unsigned long long rows_left, wanted;  // a and c may be loaded again; all loads of a block of rows have begun

    // One thread calls.
    __device__ void init() const {
      constexpr int kConsumers = 4 * kNumConsumers;
      for (int i = 0; i < kSlots; ++i) {
        mbarrier_init(smem_address(&full[i]), 1), mbarrier_init(smem_address(&empty[i]), 1 + kConsumers);
      }
      mbarrier_init(smem_address(&rows_left), kConsumers), mbarrier_init(smem_address(&wanted), 1);
    }
  };

  const TiledRowsParams& params;
  const ProblemParams& problem;
  unsigned dealt;          // the address of Dealt in shared memory
  unsigned number = kNone;  // counts this block's work
  int head, row_begin;
  TileRange columns;
  int num_heads;

  __device__ __forceinline__ RaggedRowBlock(const TiledRowsParams& p, const Dealt& in_memory)
      : params(p),
        problem(p.problem),
        dealt(smem_address(&in_memory)),
        num_heads(kRowsAreQueries ? 1 : problem.heads_per_kv) {}

  __device__ __forceinline__ SeenSequence sequence() const { return {slot(number)}; }

  // Deals out all work of a block of threads, each piece once all loads of the piece before have begun. One warp calls. why so
  // late: L19.
  __device__ __forceinline__ void deal() const {
    if (threadIdx.x % 32 != 0) return;
    const unsigned heads = kRowsAreQueries ? problem.heads_q : problem.heads_q / problem.heads_per_kv;
    const unsigned slots = kRowsAreQueries ? params.num_q_blocks : params.num_k_blocks, num_work = slots * heads;
    const SeenBlock* const told = static_cast<const SeenBlock*>(kRowsAreQueries ? params.q_blocks : params.k_blocks);
    unsigned next = 0;
#pragma unroll 1
    for (unsigned n = blockIdx.x; n < num_work; n = gridDim.x + take_number(params.counter, num_work)) {
      const HeadBlock at = longest_first(n, slots, heads, params.heads_together);
      if (told[at.block].block == SeenBlock::kNone) continue;
      await_empty(next);
      st_shared_u32(slot(next) + sizeof(SeenBlock), at.head);
      mbarrier_arrive_expect_tx(full(next), sizeof(SeenBlock));
      bulk_load(slot(next), told + at.block, sizeof(SeenBlock), full(next));
      mbarrier_wait(wanted(), next & 1);
      ++next;
    }
    await_empty(next);
    st_shared_u32(slot(next) + sizeof(SeenBlock), unsigned(kNoWork));
    mbarrier_arrive(full(next));
  }

  // Goes on to the first or the next block of rows; false if there is none.
  __device__ __forceinline__ bool first() { return next(); }
  __device__ __forceinline__ bool next() {
    if (number != kNone) mbarrier_arrive_warp(empty(number), threadIdx.x % 32 == 0);
    ++number;
    mbarrier_wait(full(number), number / Dealt::kSlots & 1);
    head = ld_shared_u32(slot(number) + sizeof(SeenBlock));
    if (head == kNoWork) return false;
    row_begin = ld_shared_u32(slot(number) + kBlockOffset) * kRows;
    columns = seen_columns(mask_of_rows(sequence().mask()), row_begin);
    return true;
  }

  // Tells the warp that deals out work that all loads of the block of rows have begun.
  __device__ __forceinline__ void want_next(bool leads) const { mbarrier_arrive_warp(wanted(), leads); }

  // Waits until all consumers have left the place of the rows; they leave it one by one.
  __device__ __forceinline__ void await_rows_left() const { mbarrier_wait(rows_left(), (number & 1) ^ 1); }
  __device__ __forceinline__ void leave_rows(bool leads) const { mbarrier_arrive_warp(rows_left(), leads); }

  // Gives the last tile of columns back, through this barrier, so that others can be loaded.
  __device__ __forceinline__ void leave_columns(unsigned empty, bool leads) const { mbarrier_arrive_warp(empty, leads); }

 private:
  static constexpr unsigned kNone = ~0u, kBlockOffset = 52;
  static constexpr int kNoWork = -1;

  __device__ __forceinline__ unsigned slot(unsigned n) const { return dealt + n % Dealt::kSlots * sizeof(Slot); }
  __device__ __forceinline__ unsigned full(unsigned n) const {
    return dealt + sizeof(Dealt::slots) + n % Dealt::kSlots * 8;
  }
  __device__ __forceinline__ unsigned empty(unsigned n) const { return full(n) + sizeof(Dealt::full); }
  __device__ __forceinline__ unsigned rows_left() const { return empty(0) + sizeof(Dealt::empty); }
  __device__ __forceinline__ unsigned wanted() const { return rows_left() + 8; }
  __device__ __forceinline__ void await_empty(unsigned n) const { mbarrier_wait(empty(n), (n / Dealt::kSlots & 1) ^ 1); }
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

  // Lets a role run over each block of rows. Steps are counted over all of them.
  template <class Role>
  __device__ __forceinline__ void each(Role&& role) {
    unsigned step = 0;
#pragma unroll 1
    for (bool any = first(); any; any = next()) step = role.run(step);
  }

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
