// The work of decoding on Hopper: few queries of each sequence, whose keys are shared out among blocks of threads.
#pragma once
#include "ragged_work.cuh"

// A share (a split) of the keys of a query block. Its rows are those of all query heads of a kv head: row r is query
// r / heads_per_kv of head r % heads_per_kv of the group. Its `head` is the kv head.
struct alignas(16) DecodeWork : RaggedQueryWork {
  int split, num_splits;  // of the query block
  int first_piece;        // the number of the block's first split among all pieces of work
  int block;              // the query block, among those that all sequences and kv heads may have

  __device__ __forceinline__ Range queries(const ProblemParams& problem, int begin, int end) const {
    const int group = problem.heads_per_kv;
    return {(row_begin + begin) / group, (row_begin + end + group - 1) / group};
  }
  __device__ __forceinline__ LaneQueries lane_queries(const ProblemParams& problem, int row) const {
    return {(row_begin + row) / problem.heads_per_kv, (row_begin + row + 8) / problem.heads_per_kv};
  }
};

// Deals out work. One warp asks. The splits of a query block follow each other, then come the other kv heads.
struct DecodeQueue : WorkCounter {
  __device__ void begin(const DecodeParams& params) {
    const ProblemParams& problem = params.problem;
    known = part_of(problem, 0, 0);
    split_tiles = params.split_tiles;
    if (split_tiles == 0) {
      float tiles = 0.0f;  // of all query blocks. why a float: sequences that share keys may have more than 2^31
      for_each_group(problem, [&](const Part& part, int) {
        tiles += static_cast<float>(part.blocks) * (heads_kv(problem) * part.tiles.count());
        return false;
      });
      split_tiles = tiles_of_split(sum_of_warp(tiles));
    }
    for_each_group(problem, [&](const Part& part, int) {
      num_work += part.pieces(problem, split_tiles);
      return false;
    });
    num_work = smaller(sum_of_warp(num_work), params.max_work);
  }

  __device__ void advance(const DecodeParams& params) { take_next(params, num_work); }

  __device__ DecodeWork work(const DecodeParams& params) const {
    const ProblemParams& problem = params.problem;
    DecodeWork work;
    work.row_begin = kNoWork;
    if (index >= unsigned(num_work)) return work;
    int before = 0;  // pieces of the parts before
    for_each_group(problem, [&](const Part& part, int number) {
      const int lane = threadIdx.x % 32, pieces = part.pieces(problem, split_tiles);
      int end = pieces;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, end, step);
        end += lane >= step ? other : 0;
      }
      end += before;
      const unsigned past = __ballot_sync(0xffffffffu, end > int(index));
      before = __shfl_sync(0xffffffffu, end, 31);
      if (past == 0) return false;
      const int found = __ffs(past) - 1;
      auto of_found = [&](int x) { return __shfl_sync(0xffffffffu, x, found); };
      const Range rows = {of_found(part.rows.begin), of_found(part.rows.end)};
      const TileRange tiles = {of_found(part.tiles.begin), of_found(part.tiles.end)};
      const int blocks = of_found(part.blocks), first = of_found(end - pieces), sequence = of_found(number);
      describe(problem, work, rows, tiles, blocks, first, sequence);
      return true;
    });
    return work;
  }

 private:
  // The rows that blocks of threads write for one sequence, or for no sequence.
  struct Part {
    Range rows;       // of the second axis of q
    int blocks;       // query blocks of a kv head
    TileRange tiles;  // key tiles that some query sees; at least one

    __device__ int splits(int split_tiles) const {
      return (tiles.end + split_tiles - 1) / split_tiles - tiles.begin / split_tiles;
    }
    __device__ int pieces(const ProblemParams& problem, int split_tiles) const {
      return blocks * heads_kv(problem) * splits(split_tiles);
    }
  };

  int split_tiles = 0;  // key tiles of a split
  int num_work = 0;
  Part known;  // of the first 32 parts, this lane's

  __device__ static int heads_kv(const ProblemParams& problem) { return problem.heads_q / problem.heads_per_kv; }
  __device__ static int blocks_of(const ProblemParams& problem, int rows) {
    return (rows * problem.heads_per_kv + kBlockQ - 1) / kBlockQ;
  }
  template <class Number>
  __device__ static Number sum_of_warp(Number x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }

  // As many key tiles as give each block of threads one split, or, where these are long, four shorter ones, so that
  // sequences of several lengths end together.
  __device__ static int tiles_of_split(float tiles) {
    constexpr int kLeast = 2, kLong = 32;
    const int each = static_cast<int>(ceilf(tiles / gridDim.x));
    return each <= kLong ? larger(each, kLeast) : larger((each + 3) / 4, kLong);
  }

  // Parts of the axis of queries, and the sequence that a part is.
  __device__ static bool is_packed(const ProblemParams& problem) { return problem.cu_seqlens_q != nullptr; }
  __device__ static int num_parts(const ProblemParams& problem) { return problem.batch + (is_packed(problem) ? 2 : 0); }
  __device__ static int sequence_of(const ProblemParams& problem, int part) { return part - is_packed(problem); }

  // Each lane's part, from `group` on; the parts before end with row so_far. why the largest bound so far: parts then do
  // not overlap, whatever cu_seqlens say.
  __device__ static Part part_of(const ProblemParams& problem, int group, int so_far) {
    const Axis axis = axis_of_queries(problem);
    const int lane = threadIdx.x % 32;
    const bool exists = group + lane < num_parts(problem);
    Part part = {{0, axis.rows}, 0, {0, 1}};
    if (is_packed(problem)) {
      int end = exists ? axis.bound(group + lane + 1) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, end, step);
        end = lane >= step ? larger(end, other) : end;
      }
      end = larger(end, so_far);
      const int before = __shfl_up_sync(0xffffffffu, end, 1);
      part.rows = {lane == 0 ? so_far : before, end};
    }
    if (exists) part.blocks = blocks_of(problem, part.rows.end - part.rows.begin);
    if (part.blocks > 0) {
      const RaggedSequence sequence(problem, sequence_of(problem, group + lane));
      part.tiles = TileRange::touched(sequence.seen_keys(), kBlockK);
      part.tiles.end = larger(part.tiles.end, part.tiles.begin + 1);
    }
    return part;
  }

  // Calls visit(part, number of its sequence) in each lane for 32 parts at a time, until it returns true.
  template <class Visit>
  __device__ void for_each_group(const ProblemParams& problem, Visit visit) const {
    Part part = known;
#pragma unroll 1
    for (int group = 0; group < num_parts(problem); group += 32) {
      if (group > 0) part = part_of(problem, group, __shfl_sync(0xffffffffu, part.rows.end, 31));
      if (visit(part, sequence_of(problem, group + threadIdx.x % 32))) return;
    }
  }

  // Piece `index`, where `first` is the first of its sequence.
  __device__ void describe(const ProblemParams& problem, DecodeWork& work, Range rows, TileRange tiles, int blocks,
                           int first, int number) const {
    const int first_split = tiles.begin / split_tiles;
    const int splits = (tiles.end + split_tiles - 1) / split_tiles - first_split;
    const int within = int(index) - first, block_of_head = within / splits, split = within - block_of_head * splits;
    const int head = block_of_head % heads_kv(problem), block = block_of_head / heads_kv(problem);
    work.set(RaggedSequence(problem, number), number, rows);
    work.head = work.kv_head = head;
    work.row_begin = block * kBlockQ;
    work.split = split, work.num_splits = splits, work.first_piece = int(index) - split;
    // why so: a sequence has at most one block more than its rows fill, so that no two have the same number.
    const int before = is_packed(problem) ? rows.begin * problem.heads_per_kv / kBlockQ + number + 1 : number * blocks;
    work.block = (before + block) * heads_kv(problem) + head;
    const Range queries = work.queries(problem, 0, kBlockQ);
    const Range seen = work.sequence(problem).mask().key_range(queries.begin, smaller(queries.end, work.seqlen_q));
    const int begin = (first_split + split) * split_tiles;
    work.keys = TileRange::touched(seen, kBlockK);
    work.keys.begin = larger(work.keys.begin, begin);
    work.keys.end = smaller(work.keys.end, begin + split_tiles);
    if (work.keys.count() < 1) work.keys = {begin, begin + 1};
  }
};
