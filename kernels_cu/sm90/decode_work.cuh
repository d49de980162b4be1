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

// Deals out work. One warp asks. All query blocks stand in a line: sequence after sequence, in it block after block, of
// each the kv heads. Each takes as many places as it has pieces of work; or, if the line is cut into shares of equal
// length for the blocks of threads, as many as it has key tiles, and kOverhead more.
struct DecodeQueue : WorkCounter {
  __device__ void begin(const DecodeParams& params) {
    const ProblemParams& problem = params.problem;
    known = part_of(problem, 0, 0);
    split_tiles = params.split_tiles;
    for_each_group(problem, [&](const Part& part, int) {
      num_places += part.places(problem, split_tiles);
      return false;
    });
    num_places = sum_of_warp(num_places);
    if (split_tiles > 0) {
      num_places = smaller(num_places, params.max_slots);
    } else {
      share = larger((num_places + int(gridDim.x) - 1) / int(gridDim.x), kLeastShare);
      place = index * share, share_end = smaller(place + share, num_places);
    }
  }

  __device__ void advance(const DecodeParams& params) {
    if (split_tiles > 0) take_next(params, num_places);
  }

  // With equal shares, each call gives the next piece of the block's share.
  __device__ DecodeWork work(const DecodeParams& params) {
    const ProblemParams& problem = params.problem;
    DecodeWork work;
    work.row_begin = kNoWork;
    if (split_tiles > 0) place = index, share_end = num_places;
    while (place < share_end && !work.exists()) find(problem, work);
    return work;
  }

 private:
  static constexpr int kOverhead = 1;  // key tiles that take as long as it takes to begin and to end a piece
  static constexpr int kLeastShare = 2;

  // The rows that blocks of threads write for one sequence, or for no sequence.
  struct Part {
    Range rows;       // of the second axis of q
    int blocks;       // query blocks of a kv head
    TileRange tiles;  // key tiles that some query sees; at least one

    __device__ int splits(int split_tiles) const {
      return (tiles.end + split_tiles - 1) / split_tiles - tiles.begin / split_tiles;
    }
    // Those of a query block, and of all of them.
    __device__ int places_of_block(int split_tiles) const {
      return split_tiles > 0 ? splits(split_tiles) : tiles.count() + kOverhead;
    }
    __device__ int places(const ProblemParams& problem, int split_tiles) const {
      return blocks * heads_kv(problem) * places_of_block(split_tiles);
    }
  };

  int split_tiles = 0;  // key tiles of a split; 0 for equal shares
  int num_places = 0;
  int share = 0, place = 0, share_end = 0;
  Part known;  // of the first 32 parts, this lane's

  __device__ static int heads_kv(const ProblemParams& problem) { return problem.heads_q / problem.heads_per_kv; }
  __device__ static int blocks_of(const ProblemParams& problem, int rows) {
    return (rows * problem.heads_per_kv + kBlockQ - 1) / kBlockQ;
  }
  __device__ static int sum_of_warp(int x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
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

  // Describes the piece of work at `place`, if there is one, and goes on behind it.
  __device__ void find(const ProblemParams& problem, DecodeWork& work) {
    int before = 0;  // places of the parts before
    bool is_found = false;
    for_each_group(problem, [&](const Part& part, int number) {
      const int lane = threadIdx.x % 32, places = part.places(problem, split_tiles);
      int end = places;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, end, step);
        end += lane >= step ? other : 0;
      }
      end += before;
      const unsigned past = __ballot_sync(0xffffffffu, end > place);
      before = __shfl_sync(0xffffffffu, end, 31);
      if (past == 0) return false;
      const int found = __ffs(past) - 1;
      auto of_found = [&](int x) { return __shfl_sync(0xffffffffu, x, found); };
      const Range rows = {of_found(part.rows.begin), of_found(part.rows.end)};
      const TileRange tiles = {of_found(part.tiles.begin), of_found(part.tiles.end)};
      describe(problem, work, {rows, of_found(part.blocks), tiles}, of_found(end - places), of_found(number));
      return is_found = true;
    });
    if (!is_found) place = share_end;  // why: somebody may write to the lengths while they are read
  }

  // The piece at `place`, of a sequence whose first one is at `first`.
  __device__ void describe(const ProblemParams& problem, DecodeWork& work, const Part& part, int first, int number) {
    const int places = part.places_of_block(split_tiles), within = place - first;
    const int block_of_head = within / places, place_of_block = within - block_of_head * places;
    const int head = block_of_head % heads_kv(problem), block = block_of_head / heads_kv(problem);
    // why so: a sequence has at most one block more than its rows fill, so that no two have the same number.
    const int before = is_packed(problem) ? part.rows.begin * problem.heads_per_kv / kBlockQ + number + 1
                                          : number * part.blocks;
    work.block = (before + block) * heads_kv(problem) + head;
    int begin, end;
    if (split_tiles > 0) {
      const int first_split = part.tiles.begin / split_tiles;
      begin = (first_split + place_of_block) * split_tiles, end = begin + split_tiles;
      work.split = place_of_block, work.num_splits = places, work.first_slot = place - place_of_block;
    } else {
      const int first_place = place - place_of_block, first_share = first_place / share, count = part.tiles.count();
      const int here = smaller(count - place_of_block, share_end - place);
      place = smaller(share_end, first_place + places);
      if (here <= 0) return;
      begin = part.tiles.begin + place_of_block, end = begin + here;
      const int last_share = smaller((first_place + count - 1) / share, int(gridDim.x) - 1);
      work.split = index - first_share, work.num_splits = last_share - first_share + 1;
      // why: along the line, each piece is of the next share, or of the next query block.
      work.first_slot = first_share + work.block;
    }
    work.set(RaggedSequence(problem, number), number, part.rows);
    work.head = work.kv_head = head;
    work.row_begin = block * kBlockQ;
    const Range queries = work.queries(problem, 0, kBlockQ);
    const Range seen = work.sequence(problem).mask().key_range(queries.begin, smaller(queries.end, work.seqlen_q));
    work.keys = TileRange::touched(seen, kBlockK);
    work.keys.begin = larger(work.keys.begin, begin);
    work.keys.end = smaller(work.keys.end, end);
    if (work.keys.count() < 1) work.keys = {begin, begin + 1};
  }
};
