// Work tiles of forward, lse and decode on Hopper, as the warps of a thread block read them from shared memory.
#pragma once
#include "../../common/division.cuh"
#include "../../common/mask_tiles.cuh"
#include "../../common/select.cuh"
#include "../../common/varlen.cuh"
#include "../../common/tile_range.cuh"
#include "../config.cuh"

constexpr int kNoWork = -1;
constexpr int kVoid = -2;  // end marker that also voids the work tile before it: its rows are not stored

// The sequence length for mods: all keys, masked or not.
template <bool kEnabled>
struct UsedKeys {
  __device__ void set_used(const VarlenSequence&) {}
  __device__ __forceinline__ int seqlen_k(const ProblemParams&) const { return 0; }  // unused in this variant
};
template <>
struct UsedKeys<true> {
  // Only element 0 is used. Decode fills up to 16 bytes, so that DecodeWork::is compares no padding.
  int used_keys[kDecode ? 4 : 1];

  __device__ void set_used(const VarlenSequence& sequence) {
    used_keys[0] = sequence.seqlen_k();
#pragma unroll
    for (int i = 1; i < int(sizeof(used_keys) / 4); ++i) used_keys[i] = 0;
  }
  __device__ __forceinline__ int seqlen_k(const ProblemParams&) const { return used_keys[0]; }
};

// If block-sparse, a query block's key tiles are numbered over the visible ones; the first tile is number 0. The
// loading warp finds them in `tiles`, and writes their indices to the ring.
template <bool kEnabled>
struct AllKeys {};
template <>
struct AllKeys<true> {
  TileRange tiles;
};

// Returns the visible key tiles of a query block.
template <class Params, class AnyWork>
__device__ __forceinline__ VisibleTiles<DescendingTiles, kBlockQ, kBlockK> visible_keys(const Params& params,
                                                                                        const AnyWork& work) {
  const Range rows{work.row_begin, const_min(work.row_begin + kBlockQ, work.sequence(params.problem).seqlen_q())};
  return {DescendingTiles(work.tiles), params, work.sequence_idx(), work.head, rows, work.seqlen_k(params.problem)};
}

// Renumbers the key tiles over the visible ones. All lanes of a warp call. Query blocks without queries have no mask
// tiles.
template <class Params, class AnyWork>
__device__ __forceinline__ void number_visible(const Params& params, AnyWork& work) {
  if constexpr (kBlockSparse) {
    work.tiles = work.keys;
    if (kVarlen && work.row_begin >= work.sequence(params.problem).seqlen_q()) work.tiles = {0, 0};
    work.keys = {0, const_max(visible_keys(params, work).count_visible(), 1)};
  }
}

// A query block of a head. It has at least one key tile, even if no key is visible.
struct alignas(16) DenseQueryWork : AllKeys<kBlockSparse> {
  int row_begin;  // kNoWork at the end
  TileRange keys;
  int head, kv_head, batch;

  __device__ __forceinline__ static DenseQueryWork none() {
    DenseQueryWork work = {};
    work.row_begin = kNoWork;
    return work;
  }

  // As in VarlenQueryWork.
  __device__ __forceinline__ Range queries(const ProblemParams&, int begin, int end) const {
    return {row_begin + begin, row_begin + end};
  }
  __device__ __forceinline__ LaneQueries lane_queries(const ProblemParams&, int row) const { return {row_begin + row}; }

  __device__ __forceinline__ bool exists() const { return row_begin != kNoWork; }
  __device__ __forceinline__ Sequence sequence(const ProblemParams& problem) const { return {problem, batch}; }
  __device__ __forceinline__ int sequence_idx() const { return batch; }
  __device__ __forceinline__ int seqlen_k(const ProblemParams& problem) const { return problem.seqlen_k; }
};

// A query block of a head of a variable-length sequence, with the data of that sequence.
struct alignas(16) VarlenQueryWork : AllKeys<kBlockSparse>, UsedKeys<kHasMods> {
  int row_begin;
  TileRange keys;
  int head, kv_head;
  int number;  // index of the sequence
  int q_batch, q_begin, seqlen_q;
  int num_rows;  // rows of the sequence, used or not
  int k_batch, k_begin;
  int visible_begin, visible_end;  // keys that some query sees; all others are read as zeros
  int lo, hi;

  // The sequence, with the interface that kernels use.
  struct Sequence {
    const ProblemParams& problem;
    const VarlenQueryWork& work;

    __device__ int seqlen_q() const { return work.seqlen_q; }
    __device__ Mask mask() const { return Mask(work.seqlen_q, work.visible_end, work.lo, work.hi); }

    // The end of the rows written to lse (and to out with zero_unused_rows). Rows from seqlen_q on are unused.
    __device__ int written_end() const { return work.num_rows; }
    __device__ long long lse_offset(int head) const {
      return (static_cast<long long>(work.q_batch) * problem.heads_q + head) * problem.rows_q + work.q_begin;
    }

    __device__ VarlenMapRows queries_from(int query) const {
      return {problem.rows_q, work.q_begin + query, work.q_begin + work.seqlen_q, work.q_batch};
    }
    __device__ VarlenMapRows out_from(int query) const {
      const int end = problem.zero_unused_rows ? work.num_rows : work.seqlen_q;
      return {problem.rows_q, work.q_begin + query, work.q_begin + end, work.q_batch};
    }
    __device__ VarlenMapRows visible_keys_from(int key) const {
      return {problem.rows_k, work.k_begin + key, work.k_begin + work.visible_end, work.k_batch};
    }
  };

  // The queries of rows begin … end - 1 of the block, and of a lane's two rows `row` and `row` + 8.
  __device__ __forceinline__ Range queries(const ProblemParams&, int begin, int end) const {
    return {row_begin + begin, row_begin + end};
  }
  __device__ __forceinline__ LaneQueries lane_queries(const ProblemParams&, int row) const { return {row_begin + row}; }

  __device__ __forceinline__ bool exists() const { return row_begin != kNoWork; }
  __device__ __forceinline__ Sequence sequence(const ProblemParams& problem) const { return {problem, *this}; }
  // Never negative: mods may index arrays with it, even for rows of no sequence.
  __device__ __forceinline__ int sequence_idx() const { return const_max(number, 0); }

  // Sets the data of a sequence whose rows are `row_slots`.
  __device__ __forceinline__ void set(const VarlenSequence& sequence, int sequence_number, Range row_slots) {
    const Range visible = sequence.visible_keys();
    number = sequence_number;
    q_batch = sequence.q_place.batch, q_begin = row_slots.begin, num_rows = row_slots.end - row_slots.begin;
    seqlen_q = sequence.seqlen_q();
    k_batch = sequence.k_place.batch, k_begin = sequence.k_place.begin;
    visible_begin = visible.begin, visible_end = visible.end;
    lo = sequence.mask().lo, hi = sequence.mask().hi;
    set_used(sequence);
  }
};

// One split of the keys of a query block. Its rows hold all heads of a group: row r is query r / heads_per_kv of
// head r % heads_per_kv of the group. `head` is the kv head.
struct alignas(16) DecodeWork : VarlenQueryWork {
  int split, num_splits;  // of the query block
  int first_slot;         // index of the query block's first split in partial_out and partial_sums
  int block;              // index of the query block's counter in `arrivals`

  __device__ __forceinline__ bool exists() const { return row_begin >= 0; }

  // True if both are the same work tile.
  __device__ __forceinline__ bool is(const DecodeWork& other) const {
    int words[2][sizeof(DecodeWork) / 4];
    memcpy(words[0], this, sizeof(DecodeWork)), memcpy(words[1], &other, sizeof(DecodeWork));
    bool same = true;
#pragma unroll
    for (int i = 0; i < int(sizeof(DecodeWork) / 4); ++i) same &= words[0][i] == words[1][i];
    return same;
  }

  __device__ __forceinline__ Range queries(const ProblemParams& problem, int begin, int end) const {
    const int group = problem.heads_per_kv;
    return {fast_div(row_begin + begin, group), ceil_quotient(row_begin + end, group)};
  }
  __device__ __forceinline__ AnyLaneQueries lane_queries(const ProblemParams& problem, int row) const {
    return {fast_div(row_begin + row, problem.heads_per_kv), fast_div(row_begin + row + 8, problem.heads_per_kv)};
  }
};

using QueryWork = Select<kDecode, DecodeWork, Select<kVarlen, VarlenQueryWork, DenseQueryWork>>;
