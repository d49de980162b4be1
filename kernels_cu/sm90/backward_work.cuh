// The work of a block of threads in backward on Hopper: key blocks, each with the query tiles that see some of them.
#pragma once
#include "../common/tile_range.cuh"
#include "../common/work.cuh"
#include "config.cuh"
#include "seen_sequence.cuh"

static_assert(sizeof(TiledBackwardParams) == kParamsBytes, "the host packs other parameters");
static_assert(!kLengths || kPaddedSlot % kBlockQ == 0, "a query tile would read the stats of another sequence");

// The query tiles that see some key of a block, in the order in which the block takes them. `of` are its key blocks, and
// are asked for the number of all query tiles where it is needed. why: L5.
struct QueryTiles : TileRange {
  int first;

  // Each key block begins at a tile of its own (L38): under a mask at the first that it sees, else as if there were a
  // diagonal. When deterministic, they follow each other through the same tiles in the order of their keys.
  template <class KeyBlocks>
  __device__ __forceinline__ QueryTiles(const KeyBlocks& of, const Mask& mask, int block) {
    const int key_begin = block * kBlockK, key_end = smaller(key_begin + kBlockK, mask.seqlen_k);
    TileRange::operator=(TileRange::covering(mask.row_range(key_begin, key_end), kBlockQ));
    const bool all = begin < end && count() == of.num_query_tiles();
    first = of.params.deterministic ? end - 1
            : all ? unsigned(block) * (kBlockK / 16) / (kBlockQ / 16) % of.num_query_tiles()
                  : begin;
  }

  // The tile of step n of a head, and the tile after tile m.
  template <class KeyBlocks>
  __device__ __forceinline__ int at(const KeyBlocks& of, int n) const {
    if (of.params.deterministic) return first - n;
    return first + n >= of.num_query_tiles() ? first + n - of.num_query_tiles() : first + n;
  }
  template <class KeyBlocks>
  __device__ __forceinline__ static int next(const KeyBlocks& of, int m) {
    return of.params.deterministic ? m - 1 : m + 1 == of.num_query_tiles() ? 0 : m + 1;
  }
};

// 2 to this power blocks of threads share the query heads of each key block. why a variant: L53.
__device__ __forceinline__ unsigned parts_log2(const TiledBackwardParams& p) { return kSharesHeads ? p.parts_log2 : 0; }

// The steps of a key block that this block of threads takes, of so many query tiles: those of some query heads.
__device__ __forceinline__ Range steps_of_part(const TiledBackwardParams& p, int tiles) {
  const unsigned log2 = parts_log2(p);
  const int part = blockIdx.x & ((1u << log2) - 1), heads = p.problem.heads_per_kv;
  return {(heads * part >> log2) * tiles, (heads * (part + 1) >> log2) * tiles};
}

// The key blocks index … index_end - 1, counted over batch and kv heads, which a block of threads takes one after the
// other, each over its query heads. Of the first and of the last one it may take only some steps, if others share them.
struct DenseKeyBlocks {
  struct Found {};  // what blocks of threads find out before they begin: nothing

  const TiledBackwardParams& params;
  int index, index_end;
  int skipped, last_steps;    // steps that others take of the first key block; end of the steps of the last one
  int batch, kv_head, block;  // of the key block at hand
  Range steps;                // of the key block at hand

  // Blocks of threads wait only for blocks with a lower index (sm90/dq_turns.cuh), which are on the GPU already.
  __device__ __forceinline__ DenseKeyBlocks(const TiledBackwardParams& p, const Found&) : params(p) {
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
    const HeadBlock part = longest_first(blockIdx.x >> parts_log2(p), num_parts, heads, p.heads_together);
    index = part.head * p.num_k_blocks + part.block * p.key_blocks, skipped = 0;
    index_end = smaller<int>(index + p.key_blocks, (part.head + 1) * p.num_k_blocks), last_steps = 1 << 30;
  }

  __device__ __forceinline__ Sequence sequence() const { return {params.problem, batch}; }

  __device__ __forceinline__ QueryTiles query_tiles() const {
    return QueryTiles(*this, sequence().mask(), block);
  }
  __device__ __forceinline__ int num_query_tiles() const { return params.num_q_blocks; }

  // Goes to the next key block. The result is false if there is none.
  __device__ __forceinline__ bool next_block() {
    if (index == index_end) return false;
    const ProblemParams& problem = params.problem;
    const Work work(head_by_head(index, params.num_k_blocks), unsigned(problem.heads_q / problem.heads_per_kv));
    batch = work.batch, kv_head = work.head, block = work.block;
    steps = steps_of_part(params, query_tiles().count());
    steps.begin += skipped, skipped = 0;
    if (++index == index_end) steps.end = smaller(steps.end, last_steps);
    return true;
  }

  // Whether other blocks of threads take steps of the key block at hand, too, and its number among such key blocks.
  __device__ __forceinline__ bool is_shared() const {
    return kSharesHeads || (blockIdx.x >= params.whole_blocks &&
                      steps.end - steps.begin < params.num_q_blocks * params.problem.heads_per_kv);
  }
  __device__ __forceinline__ unsigned nth_shared() const {
    return kSharesHeads ? blockIdx.x >> parts_log2(params) : index - 1 - params.shared_first;
  }
  // The blocks of threads that share it.
  __device__ __forceinline__ unsigned num_sharers() const {
    if (kSharesHeads) return 1u << parts_log2(params);
    const unsigned nth = nth_shared(), all_steps = params.num_q_blocks * params.problem.heads_per_kv;
    return ((nth + 1) * all_steps - 1) / params.shared_steps - nth * all_steps / params.shared_steps + 1;
  }
  // Its counter follows those of all tiles of dq.
  __device__ __forceinline__ unsigned* shared_counter() const {
    return params.turns + Sequence::num_query_heads(params.problem) * params.num_q_blocks + nth_shared();
  }
};

// The same of a sequence among several of different lengths: key blocks that follow each other.
struct RaggedKeyBlocks {
  // What one warp finds out before the others begin.
  struct alignas(16) Found {
    SeenRows rows;
    int kv_head, begin, end;  // the key blocks begin … end - 1

    Found() = default;
    __device__ Found(const TiledBackwardParams& p, UnseenRows& unseen) {
      const ProblemParams& problem = p.problem;
      const unsigned heads = problem.heads_q / problem.heads_per_kv;
      const HeadBlock at = longest_first(blockIdx.x >> parts_log2(p), p.num_k_blocks, heads, p.heads_together);
      const Axis axis = axis_of_keys(problem);
      const int size = kBlockK * p.key_blocks;
      const Territory territory = Territory::of_slot(axis, at.block, size);
      const RaggedSequence sequence(problem, territory.sequence);
      const int row = territory.row(at.block, size);
      rows = SeenRows(problem, sequence);
      kv_head = at.head, begin = row / kBlockK;
      end = min(begin + p.key_blocks, (rows.seqlen_k + kBlockK - 1) / kBlockK);
      if (p.turns[problem.heads_q * p.num_q_blocks] != 0) end = begin;  // why: see delta.cu
      unseen = {problem.rows_k, sequence.k_place.batch, territory.begin, {row, min(row + size, territory.num_rows())},
                sequence.seen_keys()};
    }

    __device__ __forceinline__ bool exists() const { return begin < end; }

    __device__ void clear(const TiledBackwardParams& p, const UnseenRows& unseen, unsigned zeros) const {
      unseen.clear<kPanelsQk>(p.dk_map, zeros, kv_head);
      unseen.clear<kPanelsV>(p.dv_map, zeros, kv_head);
    }
  };

  const TiledBackwardParams& params;
  unsigned found;  // the address of Found in shared memory
  int kv_head, block, block_end;
  Range steps;

  __device__ __forceinline__ RaggedKeyBlocks(const TiledBackwardParams& p, const Found& in_memory)
      : params(p), found(smem_address(&in_memory)), kv_head(ld_shared_u32(smem_address(&in_memory.kv_head))) {
    block = ld_shared_u32(smem_address(&in_memory.begin)) - 1, block_end = ld_shared_u32(smem_address(&in_memory.end));
  }

  __device__ __forceinline__ SeenSequence sequence() const { return {found}; }

  __device__ __forceinline__ QueryTiles query_tiles() const {
    return QueryTiles(*this, sequence().mask(), block);
  }
  __device__ __forceinline__ int num_query_tiles() const { return (sequence().seqlen_q() + kBlockQ - 1) / kBlockQ; }

  __device__ __forceinline__ bool next_block() {
    if (++block == block_end) return false;
    steps = steps_of_part(params, query_tiles().count());
    return true;
  }

  __device__ __forceinline__ bool is_shared() const { return kSharesHeads; }
  __device__ __forceinline__ unsigned nth_shared() const { return blockIdx.x >> parts_log2(params); }
  __device__ __forceinline__ unsigned num_sharers() const { return 1u << parts_log2(params); }
  // why one further: see DeltaParams.
  __device__ __forceinline__ unsigned* shared_counter() const {
    return params.turns + params.problem.heads_q * params.num_q_blocks + 1 + nth_shared();
  }
};

template <bool kOfSeveralLengths>
struct KeyBlocksOf {
  using Type = DenseKeyBlocks;
};
template <>
struct KeyBlocksOf<true> {
  using Type = RaggedKeyBlocks;
};

using KeyBlocks = KeyBlocksOf<kLengths>::Type;

// What warps do with the key block at hand.
struct KeyWork : KeyBlocks {
  using KeyBlocks::KeyBlocks;

  // Calls f(query head, query tile) for every step of the key block. `step` counts on over key blocks.
  template <class F>
  __device__ __forceinline__ void for_each_step(unsigned& step, F f) const {
    int left = steps.end - steps.begin, head = kv_head * params.problem.heads_per_kv, n = steps.begin;
#pragma unroll 1
    while (left > 0) {
      const QueryTiles tiles = query_tiles();  // why here: L5
      const int count = tiles.count();
      if (n >= count) {
        n -= count, ++head;
        continue;
      }
      int m = tiles.at(*this, n);
#pragma unroll 1
      for (int i = smaller(count - n, left); i > 0; --i, --left, ++step) {
        f(head, m);
        m = QueryTiles::next(*this, m);
      }
      n = 0, ++head;
    }
  }

  // The number of a tile of dq: of its counter, and of its accumulator.
  __device__ __forceinline__ unsigned dq_tile(int head, int m) const {
    const auto of = sequence();
    return static_cast<unsigned>(of.query_head(head)) * params.num_q_blocks + of.padded_query(0) / kBlockQ + m;
  }

  // Where lse and then delta of query 0 of a head lie.
  __device__ __forceinline__ const float* stats(int head) const {
    return params.stats + 2 * (sequence().query_head(head) * params.stats_rows) + sequence().padded_query(0);
  }
};
