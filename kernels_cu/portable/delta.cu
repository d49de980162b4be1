// delta: computes the per-query inputs of backward's main kernel.
//
//   delta = rowsum(dout ∘ out) - dlse        lse * log2(e), or lse for float32; inf where a query sees nothing
//
// It also prepares sums over thread blocks. It zeroes the accumulator of dq or, for kernels with semaphores, these and
// the rows of dq that such kernels skip. For kernels that walk block lists of variable-length sequences it writes the
// lists, and zeroes the rows of dk and dv that they skip (key_blocks.cuh).
//
// Roles    8 threads own a query; a thread block owns 32 queries, of one head after the other. With block lists, the
//          first thread block writes the key list, if there is one, and each of the next ones owns a slot.
#include "../common/accumulators.cuh"
#include "../common/tile_scheduler.cuh"
#include "../ptx/grid.cuh"
#include "key_blocks.cuh"

using Params = Select<kTakesDelta || kReturnsDelta, DeltaArrayParams, DeltaParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");

template <class AnyParams>
__device__ __forceinline__ float* delta_array(const AnyParams& p) {
  return p.delta;
}

constexpr int kLanes = 8;
constexpr int kRows = kNumThreads / kLanes;

// 16 bytes of dout, and the same columns of out. kWhole: all elements exist and are aligned.
template <bool kWhole>
struct ChunkPair {
  static constexpr int kStep = Chunk<kOutDType>::kElements;
  Chunk<kDType> x = {};
  Chunk<kOutDType> y[kChunkElements / kStep] = {};

  __device__ __forceinline__ void load(const char* dout, const char* out, int column, const DeltaParams& p) {
    const int count = kWhole ? kChunkElements : p.problem.head_dim_v - column;
    x = load_chunk<kDType>(dout, column, count, kWhole || p.dout.aligned);
#pragma unroll
    for (int i = 0; i < kChunkElements; i += kStep) {
      y[i / kStep] = load_chunk<kOutDType>(out, column + i, count - i, kWhole || p.out.aligned);
    }
  }

  __device__ __forceinline__ float dot() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) sum = fmaf(x.get(i), y[i / kStep].get(i % kStep), sum);
    return sum;
  }
};

// Returns this thread's part of a row's dot product. Two chunks, or two iterations, keep their loads in flight
// together. Varlen takes chunks, dense takes iterations: a varlen thread block has fewer registers to spare.
template <bool kWhole>
__device__ __forceinline__ float dot_row(const char* dout, const char* out, int lane, const DeltaParams& p) {
  constexpr int kTogether = kWhole && kVarlen ? 2 : 1, kStep = kLanes * kChunkElements;
  float sum = 0.0f;
#pragma unroll(kWhole && !kVarlen ? 2 : 1)
  for (int column = lane * kChunkElements; column < p.problem.head_dim_v; column += kTogether * kStep) {
    ChunkPair<kWhole> pairs[kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (n == 0 || column + n * kStep < p.problem.head_dim_v) pairs[n].load(dout, out, column + n * kStep, p);
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) sum += pairs[n].dot();
  }
  return sum;
}

// A block of kRows queries of the query heads head … head_end - 1.
struct DenseRows {
  int batch, head, head_end, row_begin;
  Sequence sequence;
  Place place = sequence.queries();

  __device__ DenseRows(const DeltaParams& p, const Work& work)
      : batch(work.batch),
        head(work.head),
        head_end(work.head + 1),
        row_begin(work.block * kRows),
        sequence{p.problem, work.batch} {}
  __device__ explicit DenseRows(const DeltaParams& p)
      : DenseRows(p, Work(head_by_head(blockIdx.x, p.stats_rows / kRows), p.problem.heads_q)) {}

  __device__ static constexpr bool exists() { return true; }
  __device__ bool is_first_of_head() const { return row_begin == 0; }
  __device__ bool is_last(int head, const DeltaParams& p) const {
    return batch == p.problem.batch - 1 && head == p.problem.heads_q - 1;
  }

  // Rows of dq, and the query whose stats are stored first.
  __device__ int num_rows() const { return sequence.seqlen_q(); }
  __device__ static constexpr int first_query(const DeltaParams&) { return 0; }
};

// Rows of a variable-length sequence, or rows outside of all sequences.
struct VarlenRows {
  int head, head_end;
  unsigned row_of_head;
  RowSlots row_slots;
  int row_begin;
  VarlenSequence sequence;
  Place place;

  __device__ explicit VarlenRows(const DeltaParams& p)
      : VarlenRows(p, lpt_order(index(p), p.stats_rows / kRows, num_parts(p), num_parts(p))) {}
  __device__ VarlenRows(const DeltaParams& p, const HeadBlock& at)
      : head(at.head * p.heads_each),
        head_end(min(head + p.heads_each, p.problem.heads_q)),
        row_of_head(at.block * kRows),
        row_slots(RowSlots::of_slot(axis_of_queries(p.problem), row_of_head / kPaddedSlot, kPaddedSlot)),
        row_begin(row_of_head - row_slots.first_slot * kPaddedSlot),
        sequence(p.problem, row_slots.sequence),
        place{sequence.q_place.batch, row_slots.begin} {}

  // Returns the number of thread blocks for the same rows. They are consecutive, because rows of all heads are adjacent
  // in memory.
  __device__ static unsigned num_parts(const DeltaParams& p) {
    return (unsigned(p.problem.heads_q) + p.heads_each - 1) / p.heads_each;
  }

  __device__ bool exists() const { return sequence.seqlen_q() > 0; }
  __device__ bool is_first_of_head() const { return row_of_head == 0; }
  __device__ bool is_last(int head, const DeltaParams& p) const { return head == p.problem.heads_q - 1; }

  __device__ int num_rows() const { return row_slots.num_rows(); }

  // Kernels that read stats as rows (stats_step 1) number queries from the first one that sees a key
  // (sm90/pipeline/visible_sequence.cuh).
  __device__ int first_query(const DeltaParams& p) const {
    return p.stats_step == 1 ? sequence.visible_queries().begin : 0;
  }

  // Thread blocks of the key list and of slots come before thread blocks of queries.
  __device__ static int blocks_for_slots(const DeltaParams& p) { return p.num_slots == 0 ? 0 : 1 + p.num_slots; }
  __device__ static unsigned index(const DeltaParams& p) { return blockIdx.x - blocks_for_slots(p); }
};

using Rows = Select<kVarlen, VarlenRows, DenseRows>;

// Minimum of thread blocks per SM: many blocks hide the latency of rows from memory. Fewer with kListsSeqlens, where
// threads hold more of a sequence while they write the list.
constexpr int kMinBlocks = !kVarlen ? 0 : kListsSeqlens ? 4 : 5;

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks) CUFLASH_KERNEL(const __grid_constant__ Params p) {
  launch_next_kernel();
  if constexpr (kVarlen) {
    if (blockIdx.x < VarlenRows::blocks_for_slots(p)) {
      if (blockIdx.x > 0) {
        write_slots(p, blockIdx.x - 1);
        zero_hidden_keys<kLanes>(p, blockIdx.x - 1);
      } else if (p.key_list != nullptr) {
        list_key_blocks(p);
      }
      return;
    }
  }
  const Rows work(p);
  const AnySequence& sequence = work.sequence;
  const int row_begin = work.row_begin;
  const int row = row_begin + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Range visible = sequence.visible_queries();
  const int query = row + work.first_query(p);
  const bool sees = query >= visible.begin && query < visible.end;
  const bool whole = p.dout.aligned && p.out.aligned && p.problem.head_dim_v % kChunkElements == 0;
  const bool passed_over = (row < visible.begin || row >= visible.end) && row < work.num_rows();
  const bool zeros_dq = !kAccumulates && passed_over && (p.semaphores != nullptr || p.q_blocks != nullptr);

#pragma unroll 1
  for (int head = work.head; head < work.head_end; ++head) {
    if (zeros_dq) zero_row<kLanes>(p.dq, work.place, head, row, p.problem.head_dim);
    if (p.semaphores != nullptr && work.is_first_of_head()) {
      unsigned* const semaphores = p.semaphores + sequence.query_head(head) * p.num_q_blocks;
      const int count = p.num_q_blocks + (work.is_last(head, p) ? p.more_semaphores : 0);
      for (int i = threadIdx.x; i < count; i += kNumThreads) semaphores[i] = 0;
    }
    if (p.semaphores == nullptr && p.dq_acc != nullptr) {
      const int strip = row_begin / 16, strips = min(kRows / 16, (sequence.seqlen_q() + 15) / 16 - strip);
      float* const first = fragment_strip(p.dq_acc, sequence.query_head(head), AnySequence::most_queries(p.problem),
                                          sequence.query_strip(16 * strip), p.padded_dim);
      float4* const dq = reinterpret_cast<float4*>(first);
      for (int i = threadIdx.x; i < strips * p.padded_dim * 4; i += kNumThreads) dq[i] = make_float4(0, 0, 0, 0);
    }
  }

  // Location of the current head's row. Advanced from head to head, and computed after the loops above, to save
  // registers.
  const char* dout = sequence.queries().address(p.dout, kElementBytes, work.head, query);
  const char* out = sequence.queries().address(p.out, kOutBytes, work.head, query);
  long long at = sequence.lse_offset(work.head) + query;
  float* stats =
      p.stats + 2 * (sequence.query_head(work.head) * p.stats_rows) + p.stats_step * sequence.padded_query(row);
#pragma unroll 1
  for (int head = work.head; head < work.head_end; ++head) {
    float delta = 0.0f, lse = -infinity(), dlse = 0.0f;
    if (sees) {
      lse = p.lse[at];  // loaded first, to overlap with the loads below
      if constexpr (kTakesDelta) {
        if (lane == 0) delta = delta_array(p)[at];
      } else {
        if (p.dlse != nullptr) dlse = p.dlse[at];
        delta = whole ? dot_row<true>(dout, out, lane, p) : dot_row<false>(dout, out, lane, p);
      }
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
    if (lane == 0 && work.exists()) {
      // inf makes the weight of a query without keys, or past the last query, zero: exp2(s - inf) = 0.
      const bool nothing = lse == -infinity();
      stats[0] = nothing ? infinity() : kDType == DType::kFloat32 ? lse : lse * kLog2E;
      stats[p.stats_delta] = nothing ? 0.0f : delta - dlse;
    }
    if constexpr (kReturnsDelta) {
      if (lane == 0 && sees) delta_array(p)[at] = lse == -infinity() ? 0.0f : delta - dlse;
      if (lane == 0 && passed_over)
        delta_array(p)[at - query + work.place.begin - sequence.queries().begin + row] = 0.0f;
    }
    dout += p.dout.stride_head * kElementBytes, out += p.out.stride_head * kOutBytes;
    at += sequence.lse_offset(1) - sequence.lse_offset(0), stats += 2ll * p.stats_rows;
  }
}
