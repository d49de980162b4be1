// One term of the gradient of a captured array, for one load in a score's expression: `ModTerm`.
//
//   s = q kᵀ, dp = dout vᵀ                              per tile
//   p = exp(score(s) - lse)    ds = p (dp - delta)      in registers, with dropout as in pointwise.cuh
//   sum[index of the load] += ds · d score / d load
//
// Sums     If all indices are b, h, q_idx, k_idx or constant: a register sums the same element over all tiles that the
//          thread block walks (mod_walk.cuh). At the end, rows of the tile are added unless sums are separate by query,
//          and columns unless they are separate by key.
//          Otherwise elements are gathered: each warp adds to its own table (table_sums.cuh), or all warps add to one
//          table by atomics, as the host chooses.
//          portable/sum_tables.cu adds the tables of all warps and thread blocks. Except for atomics, each sum has a
//          fixed order.
// Roles    Every warp owns kBlockQ / kNumWarps queries and all keys of a tile, and all threads copy.
// Barriers of the thread block, for each tile:
//          (A)  the tile has arrived
//          (B)  every warp is done with the tile in shared memory, and the next one is fetched
#include "../common/dropout.cuh"
#include "../common/gradient_sums.cuh"
#include "../common/mods.cuh"
#include "gemm.cuh"
#include "mod_walk.cuh"
#include "pointwise.cuh"
#include "table_sums.cuh"
#include "tile.cuh"

struct SharedStorage {
  alignas(128) char q[kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char dout[kBlockQ * kHeadDimV * kElementBytes];
  alignas(128) char k[kBlockK * kHeadDim * kElementBytes];
  alignas(128) char v[kBlockK * kHeadDimV * kElementBytes];
};
using Params = WithMods<ModGradientParams>;
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");
static_assert(kStages == 1, "a tile is fetched while another one is worked on in registers");
static_assert(kBlockQ % (16 * kNumWarps) == 0, "each warp owns whole 16-row fragments");
static_assert(kNumWarps * kBlockK * 4 <= sizeof(SharedStorage::q), "the sums of warps take the place of q");

constexpr int kRowsPerWarp = kBlockQ / kNumWarps, kFragments = kRowsPerWarp / 16;
constexpr int kLaneRows = 2 * kFragments;  // the lane's row r is 8 r rows after its first one
using Tile = float[kFragments][kBlockK / 2];

__device__ __forceinline__ int lane_row() { return threadIdx.x / 32 * kRowsPerWarp + threadIdx.x % 32 / 4; }

// Starts to load the operands of a tile that differ from the previous tile's.
__device__ __forceinline__ void fetch(const Params& p, const SharedStorage& storage, const AnySequence& sequence,
                                      const WalkedTile& at, bool new_rows, bool new_keys) {
  const ProblemParams& problem = p.problem;
  if (new_rows) {
    const Range visible = sequence.visible_queries();
    const TileLoader<kBlockQ, kHeadDim> q(p.q, sequence.queries(), at.head, problem.head_dim);
    q.load(smem_address(storage.q), at.first_query(), visible);
    const TileLoader<kBlockQ, kHeadDimV> dout(p.dout, sequence.queries(), at.head, problem.head_dim_v);
    dout.load(smem_address(storage.dout), at.first_query(), visible);
  }
  if (new_keys) {
    const Range visible = sequence.visible_keys();
    using KeyPlace = AnySequence::KeyPlace;
    const TileLoader<kBlockK, kHeadDim, KeyPlace> k(p.k, sequence.keys(), at.kv_head, problem.head_dim);
    k.load(smem_address(storage.k), at.first_key(), visible);
    const TileLoader<kBlockK, kHeadDimV, KeyPlace> v(p.v, sequence.keys(), at.kv_head, problem.head_dim_v);
    v.load(smem_address(storage.v), at.first_key(), visible);
  }
  cp_async_commit();
}

// Loads the next sequence's operands for the same tile, by additions to addresses. Used where the walk only changes the
// sequence, and the functions do not depend on it.
template <bool kStays>
struct StayingTile {
  __device__ __forceinline__ StayingTile(const Params&, const AnySequence&, const WalkedTile&) {}
  __device__ __forceinline__ bool fetch_next(const Params&, const SharedStorage&) { return false; }
};
template <>
struct StayingTile<true> {
  using Q = TileLoader<kBlockQ, kHeadDim>;
  using Dout = TileLoader<kBlockQ, kHeadDimV>;
  using K = TileLoader<kBlockK, kHeadDim, AnySequence::KeyPlace>;
  using V = TileLoader<kBlockK, kHeadDimV, AnySequence::KeyPlace>;
  const char *q, *dout, *k, *v;  // this thread's source addresses in the current sequence
  bool is_whole;

  __device__ __forceinline__ StayingTile(const Params& p, const AnySequence& sequence, const WalkedTile& at) {
    const ProblemParams& problem = p.problem;
    const int query = at.first_query(), key = at.first_key();
    const Q of_q(p.q, sequence.queries(), at.head, problem.head_dim);
    const Dout of_dout(p.dout, sequence.queries(), at.head, problem.head_dim_v);
    const K of_k(p.k, sequence.keys(), at.kv_head, problem.head_dim);
    const V of_v(p.v, sequence.keys(), at.kv_head, problem.head_dim_v);
    q = of_q.source_of(query), dout = of_dout.source_of(query), k = of_k.source_of(key), v = of_v.source_of(key);
    is_whole = of_q.is_whole(query, sequence.visible_queries()) &&
               of_dout.is_whole(query, sequence.visible_queries()) && of_k.is_whole(key, sequence.visible_keys()) &&
               of_v.is_whole(key, sequence.visible_keys());
  }

  // Returns false if some operand tile is not copied whole.
  __device__ __forceinline__ bool fetch_next(const Params& p, const SharedStorage& storage) {
    if (!is_whole) return false;
    q += p.q.stride_batch * kElementBytes, dout += p.dout.stride_batch * kElementBytes;
    k += p.k.stride_batch * kElementBytes, v += p.v.stride_batch * kElementBytes;
    copy<Q>(storage.q, q, p.q);
    copy<Dout>(storage.dout, dout, p.dout);
    copy<K>(storage.k, k, p.k);
    copy<V>(storage.v, v, p.v);
    cp_async_commit();
    return true;
  }

 private:
  template <class Loader>
  __device__ __forceinline__ static void copy(const char* tile, const char* source, const Operand& x) {
    const unsigned target = Loader::target_of(smem_address(tile));
    Loader::copy_whole(target, source, x.stride_seqlen * kElementBytes, fresh_thread() / Loader::kLanes);
  }
};

// Reads delta.cu's numbers for the lane's rows; inf and 0 for queries without keys, which then weigh nothing.
__device__ __forceinline__ void load_stats(float2 (&stats)[kLaneRows], const Params& p, const AnySequence& sequence,
                                           const WalkedTile& at) {
  const Range visible = sequence.visible_queries();
  const float* const of_head = p.stats + 2 * (sequence.query_head(at.head) * p.stats_rows);
  // Kernels that read stats as rows (stats_step 1) number varlen queries from the first one that sees a key.
  const int first = kVarlen && p.stats_step == 1 ? visible.begin : 0;
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    const int query = at.first_query() + lane_row() + 8 * r;
    stats[r] = make_float2(infinity(), 0.0f);
    if (query >= visible.begin && query < visible.end) {
      const long long row = sequence.padded_query(query - first);
      const float* const of_query = of_head + p.stats_step * row;
      stats[r] = make_float2(of_query[0], of_query[p.stats_delta]);
    }
  }
}

// The row and pair levels of a lane's elements of a tile, which mods compute before the products …
struct KnownTile {
  const ModHead mod_head;
  ModHead::Row rows[kFragments][2];
  ModHead::Pair pairs[kFragments][kBlockK / 8][2];

  __device__ __forceinline__ KnownTile(const Params& p, const AnySequence& sequence, const WalkedTile& at)
      : mod_head(p, p.problem, at.batch, at.head, sequence.seqlen_q(), sequence.seqlen_k()) {
    const int first_row = at.first_query() + lane_row(), first_key = at.first_key() + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[m][half] = mod_head.row(LaneQueries{first_row + 16 * m}[half], first_key);
#pragma unroll
        for (int j = 0; j < kBlockK / 8; ++j) pairs[m][j][half] = mod_head.pair(rows[m][half], 8 * j);
      }
    }
  }
};

// … for each tile, or once if the tile stays.
template <bool kStays>
struct FoundTile {
  const KnownTile tile;

  __device__ __forceinline__ FoundTile(const Params& p, const AnySequence& sequence, const WalkedTile& at)
      : tile(p, sequence, at) {}
  __device__ __forceinline__ const KnownTile& at(const Params&, const AnySequence&, const WalkedTile&) const {
    return tile;
  }
};
template <>
struct FoundTile<false> {
  __device__ __forceinline__ FoundTile(const Params&, const AnySequence&, const WalkedTile&) {}
  __device__ __forceinline__ KnownTile at(const Params& p, const AnySequence& sequence, const WalkedTile& tile) const {
    return KnownTile(p, sequence, tile);
  }
};

// Replaces dp by ds times the derivative. If elements are gathered, s becomes their table indices, as bits.
__device__ __forceinline__ void differentiate(Tile& s, Tile& dp, const float2 (&stats)[kLaneRows],
                                              const KnownTile& known_tile, const Params& p, const AnySequence& sequence,
                                              const WalkedTile& at) {
  const int first_row = at.first_query() + lane_row(), column_pair = threadIdx.x % 4;
  const Dropout dropout(p, at.batch, at.head);
  const Mask mask = sequence.mask();
  const int warp_row = at.first_query() + threadIdx.x / 32 * kRowsPerWarp;
  const bool all_visible =
      mask.all_visible<true>({warp_row, warp_row + kRowsPerWarp}, {at.first_key(), at.first_key() + kBlockK});
  Score{p.problem.score}.apply(s);
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
    const LaneQueries rows{first_row + 16 * m};
    const auto kept = dropout.kept<kBlockK % 32 == 0, kBlockK / 2>(rows, at.first_key(), column_pair);
    if (!all_visible) mask.apply<true>(s[m], rows[0], at.first_key(), column_pair, hidden_product());
#pragma unroll
    for (int j = 0; j < kBlockK / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows inside: the reverse order spilled 196 bytes (L57)
          const int i = 4 * j + 2 * half + e, column = 8 * j + e;
          const float2 stat = stats[2 * m + half];
          const auto result =
              known_tile.mod_head.at(known_tile.rows[m][half], known_tile.pairs[m][j][half], s[m][i], column);
          const bool hidden = is_hidden_product(s[m][i]) | !result.visible | (result.score <= kLeastScore / kLog2E);
          float ds =
              weight(result.score, kLog2E, stat.x) * ((kept.has(i) ? dp[m][i] * dropout.scale() : 0.0f) - stat.y);
          ds = hidden ? 0.0f : ds;
          // Where ds is 0 the score does not change, and the derivative may be inf or NaN.
          dp[m][i] = ModTerm::kVaries && ds == 0.0f ? 0.0f : ds * result.derivative;
          if constexpr (ModTerm::kLooksUp) s[m][i] = __int_as_float(ModTerm::place(result, LookedUpAxes{p}));
        }
      }
    }
  }
}

// The entries of a thread block's sums, one tile's. The host sets a count to 1 where sums are not separate.
struct TileSums {
  const Params& p;
  long long first;  // the thread block's first entry

  __device__ __forceinline__ TileSums(const Params& params, const ModWalk& walk) : p(params) {
    const long long sequences = p.by_sequence ? p.problem.batch : 1, heads = p.by_head ? p.problem.heads_q : 1;
    first = ((walk.part * sequences + walk.batch) * heads + walk.head) * queries() * keys();
  }

  __device__ __forceinline__ long long queries() const { return p.by_query ? p.problem.seqlen_q : 1; }
  __device__ __forceinline__ long long keys() const { return p.by_key ? p.problem.seqlen_k : 1; }

  __device__ __forceinline__ void put(int query, int key, float x) const {
    if (query >= queries() || key >= keys()) return;
    const long long at = first + query * keys() + key;
    if (p.tables != nullptr) p.tables[at] = x;
    else store_number(p.result, at, x, p.result_kind);
  }
};

__device__ __forceinline__ void store_sums(const Tile& sums, const Params& p, const ModWalk& walk, float* of_warps) {
  const TileSums out(p, walk);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = walk.q_tile * kBlockQ + lane_row();
  const int key = walk.k_tile * kBlockK;
  if (p.by_query) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float of_row = 0.0f;
#pragma unroll
      for (int j = 0; j < kBlockK / 4; ++j) {
        const float x = sums[r / 2][j / 2 * 4 + r % 2 * 2 + j % 2];
        if (p.by_key) out.put(query + 8 * r, key + j / 2 * 8 + lane % 4 * 2 + j % 2, x);
        of_row += x;
      }
      if (!p.by_key) {
        of_row = quad_sum(of_row);
        if (lane % 4 == 0) out.put(query + 8 * r, 0, of_row);
      }
    }
    return;
  }
  float of_lane = 0.0f;
#pragma unroll
  for (int j = 0; j < kBlockK / 4; ++j) {
    float of_column = 0.0f;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) of_column += sums[r / 2][j / 2 * 4 + r % 2 * 2 + j % 2];
    if (p.by_key) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) of_column += __shfl_xor_sync(0xffffffffu, of_column, step);
      if (lane < 4) of_warps[warp * kBlockK + j / 2 * 8 + lane * 2 + j % 2] = of_column;
    }
    of_lane += of_column;
  }
  if (!p.by_key) {
    of_lane = warp_sum(of_lane);
    if (lane == 0) of_warps[warp * kBlockK] = of_lane;
  }
  __syncthreads();
  const int columns = p.by_key ? kBlockK : 1;
  for (int column = threadIdx.x; column < columns; column += kNumThreads) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) total += of_warps[w * kBlockK + column];
    out.put(0, key + column, total);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char smem_bytes[];
  __shared__ WalkedSequences<kVarlen>::Memory sequences;
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem_bytes);

  const ModWalk walk(params, sequences);
  const WarpTable table(params, walk.part, walk.batch, walk.head);
  Tile sums = {};
  if constexpr (ModTerm::kLooksUp) table.zero();

  WalkedTile at;
  if (walk.begin(at)) {
    fetch(params, storage, walk.sequences.at(at.batch, at.slot), at, true, true);
    StayingTile<ModTerm::kStays> staying(params, walk.sequences.at(at.batch, at.slot), at);
    const FoundTile<ModTerm::kStays> known_tile(params, walk.sequences.at(at.batch, at.slot), at);
    bool exists;
#pragma unroll 1
    do {
      // 1. s = q kᵀ, dp = dout vᵀ
      const auto& sequence = walk.sequences.at(at.batch, at.slot);
      float2 stats[kLaneRows];
      load_stats(stats, params, sequence, at);
      cp_async_wait<0>();
      __syncthreads();  // (A)
      Tile s = {}, dp = {};
      const int warp_row = fresh_thread() / 32 * kRowsPerWarp;
      gemm_abt<QSwizzle, kHeadDim / kStepElements>(s, Rows<QSwizzle>(smem_address(storage.q), warp_row),
                                                   b_lane_address<QSwizzle>(smem_address(storage.k)));
      gemm_abt<VSwizzle, kHeadDimV / kStepElements>(dp, Rows<VSwizzle>(smem_address(storage.dout), warp_row),
                                                    b_lane_address<VSwizzle>(smem_address(storage.v)));
      __syncthreads();  // (B)

      // 2. Start the next loads.
      WalkedTile next = at;
      exists = walk.advance(next);
      if (exists && !staying.fetch_next(params, storage)) {
        const bool new_keys = next.k_tile != at.k_tile || next.batch != at.batch || next.kv_head != at.kv_head;
        const WalkedTile to = ModTerm::kStays ? next.forgotten() : next;
        fetch(params, storage, walk.sequences.at(to.batch, to.slot), to, to.step != at.step, new_keys);
      }

      // 3. The sums
      differentiate(s, dp, stats, known_tile.at(params, sequence, at), params, sequence, at);
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        if constexpr (ModTerm::kLooksUp) {
          table.add(s[m], dp[m]);
        } else {
#pragma unroll
          for (int i = 0; i < kBlockK / 2; ++i) sums[m][i] += dp[m][i];
        }
      }
      at = next;
    } while (exists);
  }
  if constexpr (!ModTerm::kLooksUp) store_sums(sums, params, walk, reinterpret_cast<float*>(storage.q));
}
