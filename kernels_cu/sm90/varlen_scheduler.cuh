// The work of forward and lse on Hopper for variable-length sequences: query blocks of any of them.
#pragma once
#include "../common/mask_tiles.cuh"
#include "work_counter.cuh"

// What of a sequence the mods alone need: how many keys it has, seen or not.
template <bool kEnabled>
struct UsedKeys {
  __device__ void set_used(const VarlenSequence&) {}
  __device__ __forceinline__ int seqlen_k(const ProblemParams&) const { return 0; }  // not used
};
template <>
struct UsedKeys<true> {
  int used_keys[kDecode ? 4 : 1];  // the first. why more: pieces of decoding are compared as a whole

  __device__ void set_used(const VarlenSequence& sequence) {
    used_keys[0] = sequence.seqlen_k();
#pragma unroll
    for (int i = 1; i < int(sizeof(used_keys) / 4); ++i) used_keys[i] = 0;
  }
  __device__ __forceinline__ int seqlen_k(const ProblemParams&) const { return used_keys[0]; }
};

// If block-sparse, the key tiles of a query block are numbered over those that are seen, from the last one on to the
// first, which is number 0. The warp that loads them finds them among all of the block, and writes their places in the
// ring.
template <bool kEnabled>
struct AllKeys {};
template <>
struct AllKeys<true> {
  TileRange tiles;
};

// The key tiles of a query block that are seen.
template <class Params, class AnyWork>
__device__ __forceinline__ VisibleTiles<DescendingTiles, kBlockQ, kBlockK> visible_keys(const Params& params,
                                                                                        const AnyWork& work) {
  const Range rows{work.row_begin, const_min(work.row_begin + kBlockQ, work.sequence(params.problem).seqlen_q())};
  return {DescendingTiles(work.tiles), params, work.sequence_idx(), work.head, rows, work.seqlen_k(params.problem)};
}

// Numbers the key tiles over those that are seen. All lanes of a warp call. why none without queries: they have no
// mask tiles.
template <class Params, class AnyWork>
__device__ __forceinline__ void number_visible(const Params& params, AnyWork& work) {
  if constexpr (kBlockSparse) {
    work.tiles = work.keys;
    if (kVarlen && work.row_begin >= work.sequence(params.problem).seqlen_q()) work.tiles = {0, 0};
    work.keys = {0, const_max(visible_keys(params, work).count_visible(), 1)};
  }
}

// A query block of a head, as `QueryWork` of sequences that are all alike, and what is known of its sequence.
struct alignas(16) VarlenQueryWork : AllKeys<kBlockSparse>, UsedKeys<kHasMods> {
  int row_begin;
  TileRange keys;
  int head, kv_head;
  int number;  // of the sequence
  int q_batch, q_begin, seqlen_q;
  int num_rows;  // rows of the sequence, used or not
  int k_batch, k_begin;
  int visible_begin, visible_end;  // the keys that some query sees; all others are read as zeros
  int lo, hi;

  // What of a sequence its kernels ask.
  struct Sequence {
    const ProblemParams& problem;
    const VarlenQueryWork& work;

    __device__ int seqlen_q() const { return work.seqlen_q; }
    __device__ Mask mask() const { return Mask(work.seqlen_q, work.visible_end, work.lo, work.hi); }

    // Rows of lse, and perhaps of out, that are written. Those from seqlen_q on are not used.
    __device__ int written_end() const { return work.num_rows; }
    __device__ long long lse_offset(int head) const {
      return (static_cast<long long>(work.q_batch) * problem.heads_q + head) * problem.rows_q + work.q_begin;
    }

    __device__ VarlenMapRows queries_from(int query) const {
      return {problem.rows_q, work.q_begin + query, work.q_begin + work.seqlen_q, work.q_batch};
    }
    __device__ VarlenMapRows out_from(int query) const {
      const int end = problem.zeros_unused ? work.num_rows : work.seqlen_q;
      return {problem.rows_q, work.q_begin + query, work.q_begin + end, work.q_batch};
    }
    __device__ VarlenMapRows visible_keys_from(int key) const {
      return {problem.rows_k, work.k_begin + key, work.k_begin + work.visible_end, work.k_batch};
    }
  };

  // The queries of these rows of the block, and of a lane's row and the row 8 below it.
  __device__ __forceinline__ Range queries(const ProblemParams&, int begin, int end) const {
    return {row_begin + begin, row_begin + end};
  }
  __device__ __forceinline__ LaneQueries lane_queries(const ProblemParams&, int row) const { return {row_begin + row}; }

  __device__ __forceinline__ bool exists() const { return row_begin != kNoWork; }
  __device__ __forceinline__ Sequence sequence(const ProblemParams& problem) const { return {problem, *this}; }
  // why not below 0: rows of no sequence ask the mods, too, and these may load by it.
  __device__ __forceinline__ int sequence_idx() const { return const_max(number, 0); }

  // What is known of the sequence whose rows are `row_slots`.
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

// Schedules work as DenseTileScheduler does. One warp asks. Blocks of heads_in_l2 heads that have the same rows follow
// each other; the last block of a sequence, the longest under a causal mask, comes before its others.
//
// With in_pairs two heads of the same rows are scheduled together, since such a pair is found as quickly as one work
// tile. The last kSingles work tiles of each thread block are scheduled one at a time, so that all blocks end together.
// If block-sparse, no heads are, because each may see other tiles.
//
// Nor do they end together if the last work tiles are those of one sequence after the other, some long and some short.
// So the blocks of the last tail_parts parts of the axis are scheduled by their numbers, the greatest first.
struct VarlenTileScheduler : WorkCounter {
  int blocks = 0;                    // query blocks of a head
  int group = 0, blocks_before = 0;  // where the search goes on: parts of the axis, and the blocks of those before them

  __device__ void begin(const VarlenForwardParams& params) {
    const Axis axis = axis_of_queries(params.problem);
    if (axis.cu_seqlens == nullptr) {
      blocks = axis.batch * blocks_of(axis.rows);
    } else {
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < axis.batch + 2; i += 32)
        blocks += blocks_of(axis.bound(i + 1) - axis.bound(i));
      blocks = __reduce_add_sync(0xffffffffu, blocks);
    }
  }

  __device__ void advance(const VarlenForwardParams& params) { take_next(params, num_numbers(params)); }

  __device__ bool is_pair() const { return paired; }

  // Writes the work tile as work i of the thread block; false if there is none. why in parts: registers.
  template <class Addresses>
  __device__ __forceinline__ bool write_work(const WithMods<VarlenForwardParams>& params, const Addresses& smem,
                                             unsigned i) {
    const ProblemParams& problem = params.problem;
    VarlenQueryWork work;
    const bool exists = index < num_numbers(params), is_leader = threadIdx.x % 32 == 0;
    work.row_begin = kNoWork, paired = false;
    if (exists) {
      const unsigned pairs = num_pairs(params);
      paired = index < pairs;
      const HeadBlock at = lpt_order(index + const_min(index, pairs), blocks, problem.heads_q, params.heads_in_l2);
      const Axis axis = axis_of_queries(problem);
      Range rows = {0, axis.rows};
      int block;
      if (axis.cu_seqlens == nullptr) {
        const int each = blocks_of(axis.rows), sequence = at.block / each;
        work.number = sequence, block = (sequence + 1) * each - 1 - at.block;
      } else {
        const Found found = find(params, axis, at.block);
        work.number = found.part - 1, block = found.block, rows = found.rows;
      }
      work.set(VarlenSequence(problem, work.number, rows), work.number, rows);
      work.head = head = at.head, work.kv_head = fast_div(at.head, problem.heads_per_kv);
      if (is_leader) smem.template write<kFoundLast>(i, work);
      work.row_begin = block * kBlockQ;
      const int row_end = const_min(work.row_begin + kBlockQ, work.seqlen_q);
      work.keys = TileRange::touched(work.sequence(problem).mask().key_range(work.row_begin, row_end), kBlockK);
      work.keys.end = const_max(work.keys.end, work.keys.begin + 1);
      number_visible(params, work);
    }
    if (is_leader) smem.template write<0, kFoundLast>(i, work);
    return exists;
  }

  // Writes the second work tile of a pair.
  template <class Addresses>
  __device__ __forceinline__ void write_second(const VarlenForwardParams& params, const Addresses& smem, unsigned i) {
    smem.copy_work(i - 1, i);
    ++head;
    if (threadIdx.x % 32 == 0) smem.write_heads(i, head, fast_div(head, params.problem.heads_per_kv));
  }

 private:
  static constexpr unsigned kSingles = 4;
  static constexpr int kFoundLast =
      kBlockSparse ? 2 : 1;  // so many times 16 bytes of a description are found after the others
  static constexpr bool kHasTail = kHeadDim > 128;  // why not others: their pieces are short, and it costs up to 2 %

  bool paired = false;
  int head;  // of the latest work tile

  struct Found {
    int part, block;
    Range rows;
  };

  __device__ static int blocks_of(int rows) { return rows > 0 ? (unsigned(rows) + kBlockQ - 1) / kBlockQ : 0; }

  __device__ unsigned num_work(const VarlenForwardParams& params) const { return blocks * params.problem.heads_q; }
  __device__ unsigned num_pairs(const VarlenForwardParams& params) const {
    const unsigned work = num_work(params), singles = kSingles * gridDim.x;
    return work < singles || !params.in_pairs ? 0 : (work - singles) / 2;
  }
  __device__ unsigned num_numbers(const VarlenForwardParams& params) const {
    return num_work(params) - num_pairs(params);
  }

  // Finds the part of the axis that has this block of a head, and which of the part's blocks it is.
  __device__ Found find(const VarlenForwardParams& params, const Axis& axis, int block) {
    if constexpr (kHasTail) {
      if (params.tail_parts > 0) {
        const int lane = threadIdx.x % 32, part = axis.batch + 2 - params.tail_parts + lane;
        const bool exists = lane < params.tail_parts;
        const Range rows = {exists ? axis.bound(part) : 0, exists ? axis.bound(part + 1) : 0};
        const int num_blocks = blocks_of(rows.end - rows.begin),
                  within = block - blocks + __reduce_add_sync(0xffffffffu, num_blocks);
        if (within >= 0) return find_in_tail(rows, part, num_blocks, within);
      }
    }
    return find_in_order(axis, block);
  }

  // Finds block `within` of the last parts, of which each lane has one, with its rows and its number of blocks. Blocks
  // of a greater number come first.
  __device__ static Found find_in_tail(Range rows, int part, int num_blocks, int within) {
    constexpr unsigned kAll = 0xffffffffu;
    // More than `within` blocks have `number` or a greater one, but no more than `within` have `end` or a greater one.
    int number = 0, end = __reduce_max_sync(kAll, num_blocks);
#pragma unroll 1
    while (end - number > 1) {
      const int middle = (number + end) / 2;
      const bool is_below = __reduce_add_sync(kAll, const_max(num_blocks - middle, 0)) <= within;
      (is_below ? end : number) = middle;
    }
    within -= __reduce_add_sync(kAll, const_max(num_blocks - end, 0));
    const unsigned having = __ballot_sync(kAll, num_blocks > number), before = (1u << threadIdx.x % 32) - 1;
    const int from = __ffs(__ballot_sync(kAll, num_blocks > number && __popc(having & before) == within)) - 1;
    auto found = [&](int x) { return __shfl_sync(kAll, x, from); };
    return {found(part), number, {found(rows.begin), found(rows.end)}};
  }

  __device__ Found find_in_order(const Axis& axis, int block) {
    const int lane = threadIdx.x % 32, parts = axis.batch + 2;
    if (block < blocks_before) group = blocks_before = 0;
#pragma unroll 1
    for (; group < parts; group += 32) {
      const Range rows = {axis.bound(group + lane), axis.bound(group + lane + 1)};
      int end = group + lane < parts ? blocks_of(rows.end - rows.begin) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, end, step);
        end += lane >= step ? other : 0;
      }
      end += blocks_before;
      const unsigned past = __ballot_sync(0xffffffffu, end > block);
      if (past != 0) {
        const int first = __ffs(past) - 1;
        auto found = [&](int x) { return __shfl_sync(0xffffffffu, x, first); };
        return {group + first, found(end) - 1 - block, {found(rows.begin), found(rows.end)}};
      }
      blocks_before = __shfl_sync(0xffffffffu, end, 31);
    }
    return {0, 0, {0, 0}};  // why: another kernel may write to cu_seqlens while they are read
  }
};
