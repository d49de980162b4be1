// The tile scheduler of decode on Hopper: few queries of each sequence, whose keys are split among thread blocks.
#pragma once
#include "../forward/work_counter.cuh"

// Schedules work tiles in order, in one warp. The splits of a sequence follow each other, and within a split the query
// blocks of all kv heads. So heads that lie side by side in memory are read at the same time.
//
// Nothing is loaded before the first work tile is computed. So lengths are read once for 32 sequences, one in each
// lane, and the lane keeps the results.
struct DecodeTileScheduler : WorkCounter {
  __device__ void begin(const DecodeParams& params) {
    const FastDivmod ctas(gridDim.x);
    read(params, 0, 0);
    most_tiles = params.split_tiles;
    if (most_tiles == 0) choose_splits(params, ctas);
    cut(params, 0);
    bool goes_on = false;
    while (go_on(params)) goes_on = true;
    num_work = const_min(last_of_warp(pieces_end), params.max_slots);
    if (goes_on) read(params, 0, 0), cut(params, 0);
  }

  __device__ void advance(const DecodeParams& params) { take_next(params, num_work); }

  // Writes the current work tile as number i of the thread block; returns false if there is none.
  template <class Addresses>
  __device__ __forceinline__ bool write_work(const DecodeParams& params, const Addresses& smem, unsigned i) {
    const DecodeWork work = find(params);
    if (threadIdx.x % 32 == 0) smem.write(i, work);
    return work.exists();
  }

  // Returns the work tile at `index`.
  __device__ DecodeWork find(const DecodeParams& params) {
    DecodeWork work;
    work.row_begin = kNoWork;
    if (index >= unsigned(num_work)) return work;
    for (;;) {
      const unsigned past = __ballot_sync(0xffffffffu, pieces_end > int(index));
      if (past != 0) {
        find(params, work, __ffs(past) - 1);
        break;
      }
      if (!go_on(params)) break;  // reached if another kernel writes to the lengths meanwhile
    }
    return work;
  }

 private:
  // A part of the query axis: the rows of one sequence, or rows of no sequence, with the splits of its keys.
  struct Part {
    VarlenQueryWork of;  // the data of the sequence
    int blocks;          // query blocks of all kv heads
    TileRange tiles;     // key tiles that some query sees, at least one
    int first_tile, splits;

    __device__ int rows_end() const { return of.q_begin + of.num_rows; }

    // Its number of key tiles as a minimum and a maximum, which are neutral in a part without query blocks.
    __device__ Range counts() const { return blocks > 0 ? Range{tiles.count(), tiles.count()} : Range{1 << 30, 0}; }
  };

  int most_tiles = 0;  // key tiles of a split at most
  int num_work = 0;
  int group;       // Each lane holds one of 32 consecutive parts of the query axis: the group's index …
  Part part;       // … the part …
  int pieces_end;  // … and the end of its work tiles, counted over all parts.

  __device__ static int last_of_warp(int x) { return __shfl_sync(0xffffffffu, x, 31); }

  __device__ void choose_splits(const DecodeParams& params, const FastDivmod& ctas) {
    const int num_groups = kFewSequences ? 1 : (num_parts(params) + 31) / 32;
    int blocks = part.blocks, tiles = part.blocks * part.tiles.count();
    Range counts = part.counts();
    for (int next = 1; next < num_groups; ++next) {
      read(params, next, last_of_warp(part.rows_end()));
      blocks += part.blocks, tiles += part.blocks * part.tiles.count();
      counts = {const_min(counts.begin, part.counts().begin), const_max(counts.end, part.counts().end)};
    }
    tiles = __reduce_add_sync(0xffffffffu, tiles);
    // Computed from parameters alone, which are there before the lengths.
    blocks = kFewSequences ? params.problem.batch * blocks_of(params, params.problem.rows_q)
                           : __reduce_add_sync(0xffffffffu, blocks);
    choose_splits(ctas, blocks, tiles, counts, params.partial_rows, num_groups > 1);
    if (num_groups > 1) read(params, 0, 0);
  }

  // Returns the key tiles of a split for which merging takes about as long as reading its keys. The last split to end
  // merges all rows, so more splits are shorter but take longer to merge (DESIGN.md).
  __device__ static int tiles_worth_merging(int blocks, int tiles, int rows) {
    constexpr float kCost = kWarpsSplitKeys ? 2.0f : 1.4f;
    return __float2int_rn(kCost * sqrtf(__fdividef(tiles, blocks) * rows / kBlockK));
  }

  // Makes splits so long that each thread block gets at most one. With more query blocks than thread blocks they are
  // shorter, so that the last ones end together. Two thirds of the thread blocks keep memory busy. A thread block has
  // at most 8 splits, plus one for each query block (SPLITS_OF_A_BLOCK in planning).
  __device__ void choose_splits(const FastDivmod& ctas, int blocks, int tiles, const Range& counts, int rows,
                                bool has_more) {
    constexpr int kLeast = 2, kLeastOfSome = 8, kLeastOfMany = 32;
    const int num_ctas = ctas.by, each = ctas.ceil_quotient(tiles);
    if (blocks > num_ctas) {
      const unsigned half = (each + 1u) / 2, eighth = (each + 7u) / 8;
      most_tiles = blocks < 3 * num_ctas ? const_max(int(half), kLeastOfSome) : const_max(int(eighth), kLeastOfMany);
      // Sequences of one length get splits of one length. With other lengths, this could make more splits.
      const int least = __reduce_min_sync(0xffffffffu, counts.begin), most = __reduce_max_sync(0xffffffffu, counts.end);
      if (least == most) most_tiles = ceil_quotient(most, ceil_quotient(most, most_tiles));
      return;
    }
    most_tiles = const_max(const_max(each, kLeast), tiles_worth_merging(blocks, tiles, rows));
    const int pieces = part.blocks * ceil_quotient(part.tiles.count(), most_tiles);
    // Each query block may have one split more than its share. The lengths of other groups are not read again.
    if (has_more || __reduce_add_sync(0xffffffffu, pieces) > num_ctas) {
      most_tiles = const_max(most_tiles, ceil_quotient(tiles, const_max(num_ctas - blocks, 1)));
    }
  }

  // Returns the query blocks of all kv heads for a sequence's num_queries rows.
  __device__ static int blocks_of(const DecodeParams& params, int num_queries) {
    return (num_queries * params.problem.heads_per_kv + kBlockQ - 1) / kBlockQ * params.heads_kv;
  }

  // Packed queries have two more parts: the rows before the first sequence and after the last one.
  __device__ static bool is_packed(const DecodeParams& params) {
    return !kFewSequences && params.problem.cu_seqlens_q != nullptr;
  }
  __device__ static int num_parts(const DecodeParams& params) {
    return params.problem.batch + (is_packed(params) ? 2 : 0);
  }

  // Reads the parts of a group; earlier parts end at row so_far. Each bound is the largest so far, so that parts do not
  // overlap whatever cu_seqlens hold.
  __device__ void read(const DecodeParams& params, int next_group, int so_far) {
    group = next_group;
    ProblemParams problem = params.problem;
    if (kFewSequences) problem.cu_seqlens_q = problem.cu_seqlens_k = nullptr;
    const Axis axis = axis_of_queries(problem);
    const int lane = threadIdx.x % 32, part_idx = 32 * group + lane;
    const bool exists = part_idx < num_parts(params);
    Range rows = {0, axis.rows};
    if (is_packed(params)) {
      int end = exists ? axis.bound(part_idx + 1) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, end, step);
        end = lane >= step ? const_max(end, other) : end;
      }
      end = const_max(end, so_far);
      const int before = __shfl_up_sync(0xffffffffu, end, 1);
      rows = {lane == 0 ? so_far : before, end};
    }
    const int of_batch = part_idx - is_packed(params);
    part.of.set(VarlenSequence(problem, exists ? of_batch : -1), of_batch, rows);
    part.blocks = exists ? blocks_of(params, rows.end - rows.begin) : 0;
    part.tiles = TileRange::touched({part.of.visible_begin, part.of.visible_end}, kBlockK);
    part.tiles.end = const_max(part.tiles.end, part.tiles.begin + 1);
  }

  // Cuts the group's parts into work tiles, which follow `before` others.
  __device__ void cut(const DecodeParams& params, int before) {
    const int lane = threadIdx.x % 32;
    part.first_tile = part.tiles.begin;
    if (params.split_tiles > 0) part.first_tile -= static_cast<unsigned>(part.tiles.begin) % most_tiles;
    part.splits = ceil_quotient(part.tiles.end - part.first_tile, most_tiles);
    pieces_end = part.blocks * part.splits;
    if (kFewSequences && params.problem.batch == 1) {
      pieces_end = __shfl_sync(0xffffffffu, pieces_end, 0);
      return;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, pieces_end, step);
      pieces_end += lane >= step ? other : 0;
    }
    pieces_end += before;
  }

  // Advances to the next group; returns false if there is none.
  __device__ bool go_on(const DecodeParams& params) {
    if (kFewSequences || 32 * (group + 1) >= num_parts(params)) return false;
    const int before = last_of_warp(pieces_end);
    read(params, group + 1, last_of_warp(part.rows_end()));
    cut(params, before);
    return true;
  }

  // Sets `work` to work tile `index`, which is in the part that lane `found` holds.
  __device__ void find(const DecodeParams& params, DecodeWork& work, int found) const {
    Part of;
    int words[sizeof(Part) / 4];
    memcpy(words, &part, sizeof(Part));
#pragma unroll
    for (int i = 0; i < int(sizeof(Part) / 4); ++i) words[i] = __shfl_sync(0xffffffffu, words[i], found);
    memcpy(&of, words, sizeof(Part));
    const int end = __shfl_sync(0xffffffffu, pieces_end, found);
    // Possible if another kernel writes to the lengths meanwhile.
    if (end > params.max_slots) return;
    if (kFewSequences) of.blocks = blocks_of(params, params.problem.rows_q);
    const int heads = params.heads_kv, first = end - of.blocks * of.splits, within = int(index) - first;
    const int split = fast_div(within, of.blocks), block_and_head = within - split * of.blocks;
    const int block = fast_div(block_and_head, heads);
    static_cast<VarlenQueryWork&>(work) = of.of;
    work.head = work.kv_head = block_and_head - block * heads;
    work.row_begin = block * kBlockQ;
    work.split = split, work.num_splits = of.splits;
    work.first_slot = first + block_and_head * of.splits;
    // A sequence has at most one query block more than its rows fill, so no two indices are equal.
    work.block = is_packed(params) ? (of.of.q_begin * params.problem.heads_per_kv / kBlockQ + of.of.number + 1) * heads
                                   : of.of.number * of.blocks;
    work.block += block_and_head;
    const int begin = of.first_tile + split * most_tiles;
    work.keys = TileRange::touched(visible_to(params.problem, work), kBlockK);
    work.keys.begin = const_max(work.keys.begin, begin);
    work.keys.end = const_min(work.keys.end, begin + most_tiles);
    if (work.keys.count() < 1) work.keys = {begin, begin + 1};
  }

  // Returns the keys that some query of the block sees.
  __device__ static Range visible_to(const ProblemParams& problem, const DecodeWork& work) {
    const Range queries = work.queries(problem, 0, kBlockQ);
    return work.sequence(problem).mask().key_range(queries.begin, const_min(queries.end, work.seqlen_q));
  }
};
