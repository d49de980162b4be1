// The work of a block of threads in backward on Hopper: key blocks, each with the query tiles that see some of them.
#pragma once
#include "../common/sequence.cuh"
#include "../common/tile_range.cuh"
#include "../common/work.cuh"
#include "config.cuh"

static_assert(sizeof(TiledBackwardParams) == kParamsBytes, "the host packs other parameters");

// The query tiles that see some key of a block, in the order in which the block takes them.
struct QueryTiles : TileRange {
  int first;

  // Each key block begins at a tile of its own (L38): under a mask at the first that it sees, else as if there were a
  // diagonal. When deterministic, they follow each other through the same tiles in the order of their keys.
  __device__ __forceinline__ QueryTiles(const TiledBackwardParams& p, const Sequence& sequence, int block) {
    const int key_begin = block * kBlockK, key_end = smaller(key_begin + kBlockK, sequence.seqlen_k());
    TileRange::operator=(TileRange::covering(sequence.mask().row_range(key_begin, key_end), kBlockQ));
    const bool all = begin < end && count() == p.num_q_blocks;
    first = p.deterministic ? end - 1
            : all           ? unsigned(block) * (kBlockK / 16) / (kBlockQ / 16) % p.num_q_blocks
                            : begin;
  }

  // The tile of step n of a head, and the tile after tile m.
  __device__ __forceinline__ int at(const TiledBackwardParams& p, int n) const {
    return p.deterministic ? first - n : first + n >= p.num_q_blocks ? first + n - p.num_q_blocks : first + n;
  }
  __device__ __forceinline__ static int next(const TiledBackwardParams& p, int m) {
    return p.deterministic ? m - 1 : m + 1 == p.num_q_blocks ? 0 : m + 1;
  }
};

// The key blocks index … index_end - 1, counted over batch and kv heads, which a block of threads takes one after the
// other, each over its query heads. Of the first and of the last one it may take only some steps, if others share them.
struct KeyWork {
  const TiledBackwardParams& params;
  int index, index_end;
  int skipped, last_steps;    // steps that others take of the first key block; end of the steps of the last one
  int batch, kv_head, block;  // of the key block at hand
  Range steps;                // of the key block at hand

  // Blocks of threads wait only for blocks with a lower index (sm90/dq_turns.cuh), which are on the GPU already.
  __device__ __forceinline__ explicit KeyWork(const TiledBackwardParams& p) : params(p) {
    const ProblemParams& problem = p.problem;
    if (blockIdx.x >= p.whole_blocks) {
      const unsigned all_steps = p.num_q_blocks * problem.heads_per_kv;
      const unsigned from = (blockIdx.x - p.whole_blocks) * p.shared_steps;
      const unsigned last = smaller(from + p.shared_steps, p.shared_keys * all_steps) - 1;
      index = p.shared_first + from / all_steps, skipped = from % all_steps;
      index_end = p.shared_first + last / all_steps + 1, last_steps = last % all_steps + 1;
      return;
    }
    const unsigned heads = problem.batch * (problem.heads_q / problem.heads_per_kv);
    const unsigned num_parts = (p.num_k_blocks + p.key_blocks - 1) / p.key_blocks;
    const HeadBlock part = longest_first(blockIdx.x, num_parts, heads, p.heads_together);
    index = part.head * p.num_k_blocks + part.block * p.key_blocks, skipped = 0;
    index_end = smaller<int>(index + p.key_blocks, (part.head + 1) * p.num_k_blocks), last_steps = 1 << 30;
  }

  __device__ __forceinline__ Sequence sequence() const { return {params.problem, batch}; }

  // Goes to the next key block. The result is false if there is none.
  __device__ __forceinline__ bool next_block() {
    if (index == index_end) return false;
    const ProblemParams& problem = params.problem;
    const Work work(head_by_head(index, params.num_k_blocks), unsigned(problem.heads_q / problem.heads_per_kv));
    batch = work.batch, kv_head = work.head, block = work.block;
    const QueryTiles tiles(params, sequence(), block);
    steps = {skipped, tiles.count() * problem.heads_per_kv};
    skipped = 0;
    if (++index == index_end) steps.end = smaller(steps.end, last_steps);
    return true;
  }

  // Calls f(query head, query tile) for every step of the key block. `step` counts on over key blocks.
  template <class F>
  __device__ __forceinline__ void for_each_step(unsigned& step, F f) const {
    int left = steps.end - steps.begin, head = kv_head * params.problem.heads_per_kv, n = steps.begin;
#pragma unroll 1
    while (left > 0) {
      const QueryTiles tiles(params, sequence(), block);  // why here: L5
      const int count = tiles.count();
      if (n >= count) {
        n -= count, ++head;
        continue;
      }
      int m = tiles.at(params, n);
#pragma unroll 1
      for (int i = smaller(count - n, left); i > 0; --i, --left, ++step) {
        f(head, m);
        m = QueryTiles::next(params, m);
      }
      n = 0, ++head;
    }
  }

  // The number of a tile of dq: of its counter, and of its accumulator.
  __device__ __forceinline__ unsigned dq_tile(int head, int m) const {
    return static_cast<unsigned>(sequence().query_head(head)) * params.num_q_blocks + m;
  }

  // Where lse and then delta of query 0 of a head lie.
  __device__ __forceinline__ const float* stats(int head) const {
    return params.stats + 2 * sequence().rows_offset(head, params.stats_rows);
  }
};
