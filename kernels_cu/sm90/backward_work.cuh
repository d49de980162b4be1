// The work of a block of threads in backward on Hopper: key blocks, each with the query tiles that see some of them.
#pragma once
#include "../common/tile_range.cuh"
#include "../common/work.cuh"
#include "config.cuh"
#include "dealt_work.cuh"
#include "told_steps.cuh"

using Params = WithOwn<TiledBackwardParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");
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

// The query heads of a kv head, counted from its first one, that this block of threads takes.
__device__ __forceinline__ Range heads_of_part(const TiledBackwardParams& p) {
  const unsigned log2 = parts_log2(p);
  const int part = blockIdx.x & ((1u << log2) - 1), heads = p.problem.heads_per_kv;
  return {heads * part >> log2, heads * (part + 1) >> log2};
}

// The steps of a key block that this block of threads takes, of so many query tiles: those of some query heads.
__device__ __forceinline__ Range steps_of_part(const TiledBackwardParams& p, int tiles) {
  const Range heads = heads_of_part(p);
  return {heads.begin * tiles, heads.end * tiles};
}

// The key blocks index … index_end - 1, counted over batch and kv heads, which a block of threads takes one after the
// other, each over its query heads. Of the first and of the last one it may take only some steps, if others share them.
struct DenseKeyBlocks {
  struct Dealt {  // what is kept of it in shared memory: nothing
    __device__ void init() const {}
  };

  const Params& params;
  int index, index_end;
  int skipped, last_steps;    // steps that others take of the first key block; end of the steps of the last one
  int batch, kv_head, block;  // of the key block at hand
  Range steps;                // of the key block at hand

  // Blocks of threads wait only for blocks with a lower index (sm90/dq_turns.cuh), which are on the GPU already.
  __device__ __forceinline__ DenseKeyBlocks(const Params& p, const Dealt&) : params(p) {
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
    HeadBlock part = longest_first(blockIdx.x >> parts_log2(p), num_parts, heads, p.heads_together);
    if (kCells && p.key_order != nullptr) part.block = __ldg(p.key_order + part.head * p.order_step + part.block);
    index = part.head * p.num_k_blocks + part.block * p.key_blocks, skipped = 0;
    index_end = smaller<int>(index + p.key_blocks, (part.head + 1) * p.num_k_blocks), last_steps = 1 << 30;
  }

  __device__ __forceinline__ Sequence sequence() const { return {params.problem, batch}; }
  __device__ __forceinline__ WholeSequence whole_sequence() const {
    return {batch, params.problem.seqlen_q, params.problem.seqlen_k, 0, 0};
  }

  __device__ __forceinline__ QueryTiles query_tiles() const {
    return QueryTiles(*this, sequence().mask(), block);
  }
  __device__ __forceinline__ int num_query_tiles() const { return params.num_q_blocks; }

  // One warp gets the next work for all of them: each finds it by itself.
  __device__ __forceinline__ void deal() const {}

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

// The same of sequences of several lengths: key blocks that delta.cu has listed (portable/key_blocks.cuh). As many blocks of
// threads as there are multiprocessors take them one by one. why: many sequences leave room for more key blocks than there
// are, and a block of threads takes 2 to 3 µs to begin.
struct RaggedKeyBlocks : DealtWork<4, kNumThreads / 32> {
  using Dealt = Ring;

  // What is told of a key block beside its kv head: its number among those that are shared, and which of how many parts of it
  // this is, which are steps that follow each other.
  enum Share { kNth, kPart, kParts };

  const Params& params;
  int kv_head, block;
  int held_query_tiles;  // of a head. why held: L5
  Range steps;

  __device__ __forceinline__ RaggedKeyBlocks(const Params& p, const Dealt& in_memory)
      : DealtWork(in_memory), params(p) {}

  __device__ __forceinline__ QueryTiles query_tiles() const {
    return QueryTiles(*this, sequence().mask(), block);
  }
  __device__ __forceinline__ int num_query_tiles() const { return held_query_tiles; }

  // Blocks of threads wait only for work that was taken before theirs, and so is being done (sm90/dq_turns.cuh).
  __device__ __forceinline__ void deal() const {
    const unsigned next = number + 1;
    await_place(next);
    if (threadIdx.x % 32 == 0) {
      const ProblemParams& problem = params.problem;
      const int4 shares = __ldcg(static_cast<const int4*>(params.key_shares));
      const unsigned index = atomicAdd(taken(), 1u);
      const unsigned heads = problem.heads_q / problem.heads_per_kv, listed = shares.x, whole = shares.y;
      const unsigned parts = index < whole ? 1 : shares.z, of_parts = (index - whole) / parts;
      const unsigned number = index < whole ? index : whole + of_parts;
      if (number < listed * heads) {
        const HeadBlock at = longest_first(number, listed, heads, params.heads_together);
        deal_out(next, params.key_list, at.block, {at.head, of_parts, index - whole - of_parts * parts, parts});
      } else {
        end(next);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool next_block() {
    if (!go_on()) return false;
    kv_head = dealt_head(), block = dealt_block();
    held_query_tiles = (sequence().seqlen_q() + kBlockQ - 1) / kBlockQ;
    steps = {0, query_tiles().count() * params.problem.heads_per_kv};
    if (const int parts = num_sharers(); parts > 1) {
      const int part = share(kPart), each = steps.end / parts, more = steps.end % parts;
      steps.begin = part * each + smaller(part, more);
      steps.end = steps.begin + each + (part < more);
    }
    return true;
  }

  __device__ __forceinline__ bool is_shared() const { return num_sharers() > 1; }
  __device__ __forceinline__ unsigned nth_shared() const { return share(kNth); }
  __device__ __forceinline__ unsigned num_sharers() const { return share(kParts); }
  __device__ __forceinline__ unsigned* shared_counter() const { return turns_behind() + nth_shared(); }

 private:
  // Counters behind the turns at dq: of shared key blocks, then of the work that was taken.
  __device__ __forceinline__ unsigned* turns_behind() const {
    return params.turns + params.problem.heads_q * params.num_q_blocks;
  }
  __device__ __forceinline__ unsigned* taken() const { return turns_behind() + params.shared_keys; }
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

// Finds the steps of a key block in which something is seen, tells of each and calls f for it, and tells of their end.
template <class AnyWork, class F>
__device__ __forceinline__ void find_each_step(AnyWork& work, unsigned& step, F f) {
  const Params& params = work.params;
  const auto of = work.sequence();
  const int first_head = work.kv_head * params.problem.heads_per_kv, key = work.block * kBlockK;
  const Range heads = heads_of_part(params);
#pragma unroll 1
  for (int head = first_head + heads.begin; head < first_head + heads.end; ++head) {
    // Tiles from the first one on that the key block would begin with if there were no cells, then those before it.
#pragma unroll 1
    for (int lap = 0; lap < 2; ++lap) {
      const QueryTiles all = work.query_tiles();  // why here: L5
      const int middle = params.deterministic ? all.begin : all.first;
      const DirectedTiles tiles(lap == 0 ? TileRange{middle, all.end} : TileRange{all.begin, middle},
                                params.deterministic ? -1 : 1);
      const SeenTiles<DirectedTiles, kBlockK, kBlockQ, true> seen(
          tiles, params, work.batch, head, {key, smaller(key + kBlockK, of.seqlen_k())}, of.seqlen_q());
      SeenWalk walk(tiles.first(), tiles.step);
#pragma unroll 1
      for (; walk.has_tile(seen, tiles.step); ++step) {
        const SeenTile tile = walk.take<SeenTile>(tiles.step);
        work.tell({head, tile});
        f(head, tile.n(), tile.is_full());
      }
    }
  }
  work.tell({ToldStep::kEnd, SeenTile(0)});
}

// What warps do with the key block at hand.
struct KeyWork : KeyBlocks, ToldSteps<kNumWarps - 1> {
  using Told = ToldSteps<kNumWarps - 1>;

  struct Dealt : KeyBlocks::Dealt, Told::Ring {
    // One thread calls.
    __device__ void init() const { KeyBlocks::Dealt::init(), Told::Ring::init(); }
  };

  __device__ __forceinline__ KeyWork(const Params& p, const Dealt& in_memory)
      : KeyBlocks(p, in_memory), Told(in_memory) {}

  // Calls f(query head, query tile, whether the caller's mask shows all of it) for every step of the key block. `step`
  // counts on over key blocks. With cells, `lead_each_step` tells of the steps.
  template <class F>
  __device__ __forceinline__ void for_each_step(unsigned& step, F f) {
    if constexpr (kCells) {
#pragma unroll 1
      for (ToldStep told = hear(); !told.is_end(); told = hear(), ++step) {
        f(told.head, told.tile.n(), told.tile.is_full());
      }
      return;
    }
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
        f(head, m, false);
        m = QueryTiles::next(*this, m);
      }
      n = 0, ++head;
    }
  }

  // The same for the one warp that finds the steps with cells.
  template <class F>
  __device__ __forceinline__ void lead_each_step(unsigned& step, F f) {
    if constexpr (kCells) find_each_step(*this, step, f);
    else for_each_step(step, f);
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
