// The work of decoding on Hopper: few queries of each sequence, whose keys are shared out among blocks of threads.
#pragma once
#include "ragged_work.cuh"

// A share (a split) of the keys of a query block. Its rows are those of all query heads of a kv head: row r is query
// r / heads_per_kv of head r % heads_per_kv of the group. Its `head` is the kv head.
struct alignas(16) DecodeWork : RaggedQueryWork {
  int split, num_splits;  // of the query block
  int first_slot;         // of the query block's splits, in memory
  int block;              // the query block, among those that all sequences and kv heads may have

  __device__ __forceinline__ Range queries(const ProblemParams& problem, int begin, int end) const {
    const int group = problem.heads_per_kv;
    return {(row_begin + begin) / group, (row_begin + end + group - 1) / group};
  }
  __device__ __forceinline__ LaneQueries lane_queries(const ProblemParams& problem, int row) const {
    return {(row_begin + row) / problem.heads_per_kv, (row_begin + row + 8) / problem.heads_per_kv};
  }
};

// Deals out work, in order. One warp asks. Each sequence has its splits one after the other, and of each split the query
// blocks of all kv heads. So heads that lie beside each other in memory are read at the same time.
struct DecodeQueue : WorkCounter {
  __device__ void begin(const DecodeParams& params) {
    const ProblemParams& problem = params.problem;
    split_tiles = params.split_tiles;
    if (split_tiles == 0) {
      int blocks = 0, tiles = 0;
      for_each_group(problem, [&] { blocks += part.blocks, tiles += part.blocks * part.tiles.count(); });
      most_tiles = tiles_of_split(sum_of_warp(blocks), sum_of_warp(tiles));
    }
    int pieces = 0;
    for_each_group(problem, [&] { pieces += part.pieces(*this); });
    num_work = smaller(sum_of_warp(pieces), params.max_slots);
    restart(problem);
  }

  __device__ void advance(const DecodeParams& params) { take_next(params, num_work); }

  __device__ DecodeWork work(const DecodeParams& params) {
    const ProblemParams& problem = params.problem;
    DecodeWork work;
    work.row_begin = kNoWork;
    if (index >= unsigned(num_work)) return work;
    for (;;) {
      const unsigned past = __ballot_sync(0xffffffffu, pieces_end > int(index));
      if (past != 0) {
        describe(params, work, __ffs(past) - 1);
        break;
      }
      // why: somebody may write to the lengths while they are read.
      if (!go_on(problem)) break;
    }
    return work;
  }

 private:
  // The rows that blocks of threads write for one sequence, or for no sequence.
  struct Part {
    Range rows;       // of the second axis of q
    int blocks;       // query blocks of all kv heads
    TileRange tiles;  // key tiles that some query sees; at least one

    // Key tiles of a split. The first split begins at a multiple of them; or all are about equally long.
    __device__ int tiles_of_split(const DecodeQueue& of) const {
      if (of.split_tiles > 0) return of.split_tiles;
      const int splits = (tiles.count() + of.most_tiles - 1) / of.most_tiles;
      return (tiles.count() + splits - 1) / splits;
    }
    __device__ int first_tile(const DecodeQueue& of) const {
      return of.split_tiles > 0 ? tiles.begin / of.split_tiles * of.split_tiles : tiles.begin;
    }
    __device__ int splits(const DecodeQueue& of) const {
      const int each = tiles_of_split(of);
      return (tiles.end - first_tile(of) + each - 1) / each;
    }
    __device__ int pieces(const DecodeQueue& of) const { return blocks == 0 ? 0 : blocks * splits(of); }
  };

  int split_tiles = 0;  // key tiles of a split, as the host wants it, or 0 …
  int most_tiles = 0;   // … and as many as it then has at most
  int num_work = 0;
  int group = -1;      // each lane holds a part of the axis of queries, of 32 that follow each other: its number …
  Part part;           // … the part …
  int pieces_end = 0;  // … and the pieces of it and of all parts before

  __device__ static int heads_kv(const ProblemParams& problem) { return problem.heads_q / problem.heads_per_kv; }
  __device__ static int blocks_of(const ProblemParams& problem, int rows) {
    return (rows * problem.heads_per_kv + kBlockQ - 1) / kBlockQ;
  }
  __device__ static int last_of_warp(int x) { return __shfl_sync(0xffffffffu, x, 31); }
  __device__ static int sum_of_warp(int x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }

  // As many key tiles as give each block of threads one split. Where there are more query blocks than blocks of threads,
  // shorter ones, so that the last ones end together: memory is busy with two thirds of the blocks of threads.
  __device__ static int tiles_of_split(int blocks, int tiles) {
    constexpr int kLeast = 2, kLeastOfSome = 8, kLeastOfMany = 32;
    const int num_ctas = gridDim.x, each = (tiles + num_ctas - 1) / num_ctas;
    if (blocks <= num_ctas) return larger(each, kLeast);
    return blocks < 3 * num_ctas ? larger((each + 1) / 2, kLeastOfSome) : larger(each / 8, kLeastOfMany);
  }

  // Parts of the axis of queries, and the sequence that a part is.
  __device__ static bool is_packed(const ProblemParams& problem) { return problem.cu_seqlens_q != nullptr; }
  __device__ static int num_parts(const ProblemParams& problem) { return problem.batch + (is_packed(problem) ? 2 : 0); }
  __device__ int sequence(const ProblemParams& problem) const {
    return 32 * group + threadIdx.x % 32 - is_packed(problem);
  }

  // Reads the parts of a group; those before end with row so_far. why the largest bound so far: parts then do not
  // overlap, whatever cu_seqlens say.
  __device__ void read(const ProblemParams& problem, int next_group, int so_far) {
    group = next_group;
    const Axis axis = axis_of_queries(problem);
    const int lane = threadIdx.x % 32;
    const bool exists = 32 * group + lane < num_parts(problem);
    part = {{0, axis.rows}, 0, {0, 1}};
    if (is_packed(problem)) {
      int end = exists ? axis.bound(32 * group + lane + 1) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, end, step);
        end = lane >= step ? larger(end, other) : end;
      }
      end = larger(end, so_far);
      const int before = __shfl_up_sync(0xffffffffu, end, 1);
      part.rows = {lane == 0 ? so_far : before, end};
    }
    if (exists) part.blocks = blocks_of(problem, part.rows.end - part.rows.begin) * heads_kv(problem);
    if (part.blocks > 0) {
      part.tiles = TileRange::touched(RaggedSequence(problem, sequence(problem)).seen_keys(), kBlockK);
      part.tiles.end = larger(part.tiles.end, part.tiles.begin + 1);
    }
  }

  template <class Visit>
  __device__ void for_each_group(const ProblemParams& problem, Visit visit) {
#pragma unroll 1
    for (int next = 0; 32 * next < num_parts(problem); ++next) {
      if (group != next) read(problem, next, next > 0 ? last_of_warp(part.rows.end) : 0);
      visit();
    }
  }

  // Counts the pieces of the group, of which so many stand before it.
  __device__ void count(int before) {
    const int lane = threadIdx.x % 32;
    pieces_end = part.pieces(*this);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, pieces_end, step);
      pieces_end += lane >= step ? other : 0;
    }
    pieces_end += before;
  }

  __device__ void restart(const ProblemParams& problem) {
    if (group != 0) read(problem, 0, 0);
    count(0);
  }

  // Goes on to the next group, if there is one.
  __device__ bool go_on(const ProblemParams& problem) {
    if (32 * (group + 1) >= num_parts(problem)) return false;
    read(problem, group + 1, last_of_warp(part.rows.end));
    count(last_of_warp(pieces_end));
    return true;
  }

  // Piece `index`, which is of the part that lane `found` holds.
  __device__ void describe(const DecodeParams& params, DecodeWork& work, int found) const {
    const ProblemParams& problem = params.problem;
    auto of_found = [&](int x) { return __shfl_sync(0xffffffffu, x, found); };
    const Part of = {{of_found(part.rows.begin), of_found(part.rows.end)}, of_found(part.blocks),
                     {of_found(part.tiles.begin), of_found(part.tiles.end)}};
    const int number = of_found(sequence(problem)), first = of_found(pieces_end - part.pieces(*this));
    const int heads = heads_kv(problem), within = int(index) - first, split = within / of.blocks;
    const int block_and_head = within - split * of.blocks, block = block_and_head / heads;
    work.set(RaggedSequence(problem, number), number, of.rows);
    work.head = work.kv_head = block_and_head - block * heads;
    // why a limit: somebody may write to the lengths while they are read.
    work.row_begin = first + of.pieces(*this) <= params.max_slots ? block * kBlockQ : kNoWork;
    work.split = split, work.num_splits = of.splits(*this);
    work.first_slot = first + block_and_head * work.num_splits;
    // why so: a sequence has at most one block more than its rows fill, so that no two have the same number.
    const int before = is_packed(problem) ? of.rows.begin * problem.heads_per_kv / kBlockQ + number + 1
                                          : number * (of.blocks / heads);
    work.block = before * heads + block_and_head;
    const int begin = of.first_tile(*this) + split * of.tiles_of_split(*this);
    const Range queries = work.queries(problem, 0, kBlockQ);
    const Range seen = work.sequence(problem).mask().key_range(queries.begin, smaller(queries.end, work.seqlen_q));
    work.keys = TileRange::touched(seen, kBlockK);
    work.keys.begin = larger(work.keys.begin, begin);
    work.keys.end = smaller(work.keys.end, begin + of.tiles_of_split(*this));
    if (work.keys.count() < 1) work.keys = {begin, begin + 1};
  }
};
