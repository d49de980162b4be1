// The epilogue of the decode kernels on Hopper: stores rows of out and lse, whole or merged from splits.
#pragma once
#include "../../ptx/atomic.cuh"
#include "../forward/consumer.cuh"

constexpr int kMerge = 1;  // named barrier of the consumer warps

struct DecodeOutput {
  const KernelParams& params;

  // The query and the head of a row of the block.
  struct Row {
    int query, head;
  };
  __device__ __forceinline__ Row row(const QueryWork& work, int number) const {
    const int group = params.problem.heads_per_kv, query = fast_div(work.row_begin + number, group);
    return {query, work.head * group + work.row_begin + number - query * group};
  }

  // Returns the address of a row in out, or null if out keeps its contents there.
  __device__ __forceinline__ char* out_row(const QueryWork& work, const Row& row) const {
    if (row.query >= work.seqlen_q && !params.problem.zero_unused_rows) return nullptr;
    return Place{work.q_batch, work.q_begin}.address(params.out, kOutBytes, row.head, row.query);
  }

  __device__ __forceinline__ void store_lse(const QueryWork& work, const Row& row, float lse) const {
    if (params.lse != nullptr) params.lse[work.sequence(params.problem).lse_offset(row.head) + row.query] = lse;
  }

  // Adds the sink of a row's head, once all splits of the row are merged. Unused rows see no sink.
  __device__ __forceinline__ void count_sink(const QueryWork& work, const Row& row, float& o_scale, float& lse) const {
    if constexpr (kSinks) {
      if (row.query < work.seqlen_q) Sink(params, row.head).add(o_scale, lse);
    }
  }

  // Stores four columns of a row of out.
  __device__ __forceinline__ static void store_four(char* out, int column, const float4& x) {
    if constexpr (kOutBytes == 2) *reinterpret_cast<uint2*>(out + 2 * column) = {pack2(x.x, x.y), pack2(x.z, x.w)};
    else *reinterpret_cast<float4*>(out + 4 * column) = x;
  }

  // Stores four columns of a merged row.
  __device__ __forceinline__ void store(const QueryWork& work, int number, int column, const MergedRow& merged) const {
    const Row row = this->row(work, number);
    char* const out = out_row(work, row);
    if constexpr (kSinks) {
      float scale = merged.scale(), lse = Softmax::lse(merged.sum, merged.shift);
      count_sink(work, row, scale, lse);
      if (out != nullptr && column < params.problem.head_dim_v) store_four(out, column, merged.out(scale));
      if (column == 0) store_lse(work, row, lse);
      return;
    }
    if (out != nullptr && column < params.problem.head_dim_v) store_four(out, column, merged.out());
    if (column == 0) store_lse(work, row, Softmax::lse(merged.sum, merged.shift));
  }

  // The number of existing rows of a block, and of those that all splits share. Rows past partial_rows are unused, and
  // belong to the first split.
  __device__ __forceinline__ int num_rows(const QueryWork& work) const {
    return min(work.num_rows * params.problem.heads_per_kv - work.row_begin, kBlockQ);
  }
  __device__ __forceinline__ int shared_rows(const QueryWork& work) const {
    return work.num_splits == 1 ? 0 : min(num_rows(work), params.partial_rows);
  }

  // Returns the index of a row of a split in partial_out and partial_sums.
  __device__ __forceinline__ long long partial_row(const QueryWork& work, int split, int row) const {
    return static_cast<long long>(work.first_slot + split) * params.partial_rows + row;
  }

  // True if this split ends last in its query block, so that the rows of all splits can be merged. All consumer warps
  // call, after they have stored their rows.
  __device__ __forceinline__ bool is_last_split(const QueryWork& work) const {
    bar_sync(kMerge, 128);
    bool is_last = false;
    if (threadIdx.x % 128 == 0) {  // one thread for all, as they stored before the barrier
      is_last = atomic_add_acq_rel(params.arrivals + work.block, 1) == work.num_splits - 1;
      if (is_last) params.arrivals[work.block] = 0;  // zero for the next launch
    }
    return bar_sync_any(kMerge, 128, is_last);
  }
};
