// The tile scheduler of forward and lse on Hopper for variable-length sequences.
#pragma once
#include "work_counter.cuh"

// Schedules work like DenseTileScheduler, in one warp. Query blocks with the same rows follow each other in heads_in_l2
// heads. A sequence's last query block comes first, as it is the longest under a causal mask.
//
// With in_pairs, two heads of the same rows are scheduled together, which takes as long as one work tile. The last
// kSingles work tiles of each thread block are scheduled one by one, so that all thread blocks end together. If
// block-sparse there are no pairs, because each head may see other tiles.
//
// At the end, long and short sequences that follow each other would keep thread blocks from ending together. So the
// query blocks of the last tail_parts parts of the axis are scheduled by their index, the highest first.
struct VarlenTileScheduler : WorkCounter {
  int blocks = 0;  // query blocks of a head
  // The state of the search: the next part of the axis, and the query blocks of all parts before it.
  int first_part = 0, blocks_before = 0;

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

  // Writes the current work tile as number i of the thread block; returns false if there is none. It is written in two
  // pieces, which takes fewer registers.
  template <class Addresses>
  __device__ __forceinline__ bool write_work(const VarlenParams& params, const Addresses& smem, unsigned i) {
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
  // The number of 16-byte pieces, at the start of a work tile, that are computed last.
  static constexpr int kFoundLast = kBlockSparse ? 2 : 1;
  // Other head dims have short work tiles, where a tail costs up to 2 %.
  static constexpr bool kHasTail = kHeadDim > 128;

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

  // Finds the part of the axis that contains this block of a head, and the block's index in the part.
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

  // Finds block `within` of the last parts, in descending order of block index. Each lane holds the rows and the number
  // of blocks of one part.
  __device__ static Found find_in_tail(Range rows, int part, int num_blocks, int within) {
    constexpr unsigned kAll = 0xffffffffu;
    // More than `within` blocks have index `low` or higher, and at most `within` have index `end` or higher.
    int low = 0, end = __reduce_max_sync(kAll, num_blocks);
#pragma unroll 1
    while (end - low > 1) {
      const int middle = (low + end) / 2;
      const bool is_below = __reduce_add_sync(kAll, const_max(num_blocks - middle, 0)) <= within;
      (is_below ? end : low) = middle;
    }
    within -= __reduce_add_sync(kAll, const_max(num_blocks - end, 0));
    const unsigned having = __ballot_sync(kAll, num_blocks > low), before = (1u << threadIdx.x % 32) - 1;
    const int from = __ffs(__ballot_sync(kAll, num_blocks > low && __popc(having & before) == within)) - 1;
    auto found = [&](int x) { return __shfl_sync(kAll, x, from); };
    return {found(part), low, {found(rows.begin), found(rows.end)}};
  }

  __device__ Found find_in_order(const Axis& axis, int block) {
    const int lane = threadIdx.x % 32, parts = axis.batch + 2;
    if (block < blocks_before) first_part = blocks_before = 0;
#pragma unroll 1
    for (; first_part < parts; first_part += 32) {
      const Range rows = {axis.bound(first_part + lane), axis.bound(first_part + lane + 1)};
      int end = first_part + lane < parts ? blocks_of(rows.end - rows.begin) : 0;
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
        return {first_part + first, found(end) - 1 - block, {found(rows.begin), found(rows.end)}};
      }
      blocks_before = __shfl_sync(0xffffffffu, end, 31);
    }
    return {0, 0, {0, 0}};  // reached if another kernel writes to cu_seqlens meanwhile
  }
};
