// Backward (FlashAttention-2, arXiv 2307.08691, algorithm 2) for one block of keys of one kv head, over its query
// heads: dk, dv, and this block's terms of dq.
//
//   s = k qᵀ, dp = v doutᵀ      per query tile, transposed: rows are keys
//   p = exp(s - lse)            ds = p (dp - delta) slope      in registers, see pointwise.cuh
//   dv += p dout                dk += ds q
//   dq += dsᵀ k                 added to global memory in float32, in no fixed order; omitted without kWithDq
//
// With splits, several thread blocks divide the query heads of a kv head, and convert.cu adds their dk and dv.
//
// Roles    kGroup warps share kWarpKeys keys. For s and dp each warp takes kPieceQ queries of the tile; for dv and dk
//          it takes every kGroup-th block of 16 columns. A group of one warp keeps p and ds in registers for dv and dk.
//          Larger groups exchange p and ds through shared memory. For dq all groups exchange ds there, and each warp
//          owns some queries and some columns. All threads copy.
// Barriers of the thread block, for each tile:
//          (A)  the tile has arrived, and every warp is done with the previous tile
//          (B)  p and ds are written
//          (C)  with one stage: every warp is done with q and dout, and the next tile may be fetched. A group of one
//               warp is done with them at (B).
//          If p and ds share one buffer, two more barriers enclose the reads of p, before ds is written.
#include "../common/accumulators.cuh"
#include "../common/float_rows.cuh"
#include "../common/mask_tiles.cuh"
#include "gemm_ab.cuh"
#include "pointwise.cuh"
#include "tile.cuh"
#include "weights.cuh"
#include "tile_scheduler.cuh"

struct SharedStorage {
  alignas(128) char k[kBlockK * kHeadDim * kElementBytes];
  alignas(128) char v[kBlockK * kHeadDimV * kElementBytes];
  alignas(128) char q[kStages][kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char dout[kStages][kBlockQ * kHeadDimV * kElementBytes];
  alignas(128) char weights[kGroup > 1 && !kSharedWeights ? 2 : 1][kWeightBytes];  // ds, p
  alignas(128) float2 stats[kStages][kBlockQ];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
using Params = WithMods<BackwardParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");
static_assert(kPaddedSlot % kBlockQ == 0, "a query tile would read the stats of another sequence");

constexpr int kFragments = kWarpKeys / 16;
constexpr int kPieces = kGroup == 1 ? kBlockQ / kPieceQ : 1;

// The partition of a dq tile among warps: kDqFragments fragments of 16 queries each, and as many columns as that
// leaves.
constexpr int kDqFragments =
    kBlockQ % 32 == 0 && kNumWarps % (kBlockQ / 32) == 0 && kHeadDim % (16 * kNumWarps / (kBlockQ / 32)) == 0 ? 2 : 1;
constexpr int kDqRowWarps = kBlockQ / (16 * kDqFragments);
constexpr int kDqColumnWarps = kNumWarps / kDqRowWarps;
static_assert(kNumWarps % kDqRowWarps == 0 && kHeadDim % (16 * kDqColumnWarps) == 0, "warps cover a tile of dq");
static_assert(kHeadDim % (16 * kGroup) == 0 && kHeadDimV % (16 * kGroup) == 0, "warps cover the columns");

using Scores = float[kFragments][kPieceQ / 2];

// A warp's keys and its index in the group. Computed at each use: hoisted, they would hold registers over the loop
// (L4).
struct WarpRole {
  int key;     // the warp's first key, relative to the key block
  int member;  // the warp's index in its group

  __device__ __forceinline__ WarpRole() {
    const int warp = fresh_thread() / 32;
    key = warp / kGroup * kWarpKeys;
    member = warp % kGroup;
  }
};

// Replaces s and dp by p and ds. `stats` is the shared-memory address of the piece's lse and delta.
template <bool kPlain>
__device__ __forceinline__ void piece_p_and_ds(Scores& s, Scores& dp, const Score& score, unsigned stats) {
  const int lane = fresh_thread() % 32;
#pragma unroll
  for (int j = 0; j < kPieceQ / 8; ++j) {
    const float4 x = ld_shared_v4_f32(stats + (8 * j + lane % 4 * 2) * 8);  // lse and delta of two queries
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        p_and_ds<kPlain>(s[m][i], dp[m][i], score, x.x, x.y);
        p_and_ds<kPlain>(s[m][i + 1], dp[m][i + 1], score, x.z, x.w);
      }
    }
  }
}

// The mods of a query head: its score and mask functions, and its dropout.
struct ModWeights {
  const ModHead scores;
  const Dropout dropout;

  __device__ __forceinline__ ModWeights(const Params& params, const KeyWork& work, int head)
      : scores(params, params.problem, work.sequence_idx(), head, work.sequence.seqlen_q(), work.sequence.seqlen_k()),
        dropout(params, work.sequence_idx(), head) {}
};

// Replaces s and dp by p and ds with mods, whose rows are keys. `key` and `query` are the first ones of the piece.
template <bool kAsksMask>
__device__ __forceinline__ void piece_p_and_ds_with_mods(Scores& s, Scores& dp, const Score& score,
                                                         const ModWeights& mod_weights, unsigned stats, int key,
                                                         int query) {
  const int lane = fresh_thread() % 32, first = query + lane % 4 * 2;
  Kept<kPieceQ / 2> kept[kFragments];
  mod_weights.dropout.kept_of_keys<kWarpKeys % 32 == 0 && kBlockK % 32 == 0>(kept, key, query, lane);
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
    const int row = key + 16 * m + lane / 4;
    const ModHead::Row rows[2] = {mod_weights.scores.row(row, first), mod_weights.scores.row(row + 8, first)};
#pragma unroll
    for (int j = 0; j < kPieceQ / 8; ++j) {
      const float4 x = ld_shared_v4_f32(stats + (8 * j + lane % 4 * 2) * 8);  // lse and delta of two queries
      ModHead::Pair pair;
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        const int half = i / 2 % 2, column = 8 * j + i % 2;
        if (i % 2 == 0) pair = mod_weights.scores.pair(rows[half], column);
        const ModHead::Result result = mod_weights.scores.at(rows[half], pair, s[m][i], column);
        p_and_ds_with_mods<kAsksMask>(s[m][i], dp[m][i], score, result, kept[m].has(i), mod_weights.dropout.scale(),
                                      i % 2 == 0 ? x.x : x.z, i % 2 == 0 ? x.y : x.w);
      }
    }
  }
}

// Replaces products s and dp by p and ds. `key` and `query` are the first ones of the piece; the mask's rows are keys.
// is_full: the mask_mod shows all of the tile.
__device__ __forceinline__ void compute_weights(Scores& s, Scores& dp, const Score& score,
                                                const ModWeights& mod_weights, const Mask& mask, unsigned stats,
                                                int key, int query, bool is_full) {
  const bool visible = mask.all_visible<true>({key, key + kWarpKeys}, {query, query + kPieceQ});
  if (!kModWeights && visible && !score.changes()) return piece_p_and_ds<true>(s, dp, score, stats);
  score.apply(s);
  const int lane = fresh_thread() % 32;
  if (!kModWeights || !visible) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m) {
      mask.apply<true>(s[m], key + 16 * m + lane / 4, query, lane % 4, hidden_product());
    }
  }
  if constexpr (!kModWeights) piece_p_and_ds<false>(s, dp, score, stats);
  else if (kSkipsFullTiles && is_full) piece_p_and_ds_with_mods<false>(s, dp, score, mod_weights, stats, key, query);
  else piece_p_and_ds_with_mods<kMaskMod>(s, dp, score, mod_weights, stats, key, query);
}

// Adds a lane's registers of a fragment to an accumulator.
__device__ __forceinline__ void add_fragment(float* gmem, int lane, const float* x) {
  if constexpr (kFragmentByLane) {
    red_add_v4_f32(gmem + fragment_index(lane, 0), x[0], x[1], x[2], x[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) red_add_f32(gmem + fragment_index(lane, i), x[i]);
  }
}

// Adds this warp's fragments of dsᵀ k to the accumulator of dq, from row `row` of the head on.
__device__ __forceinline__ void add_dq(const BackwardParams& params, const AnySequence& sequence, unsigned ds_smem,
                                       unsigned k_smem, int head, int row) {
  const int thread = fresh_thread(), lane = thread % 32;
  const int row_warp = thread / 32 / kDqColumnWarps, column_warp = thread / 32 % kDqColumnWarps;
  constexpr int kColumns = kHeadDim / kDqColumnWarps;
  // Columns at a time; float32 takes at most 32, to save registers.
  constexpr int kPass = !kIsTf32 ? kColumns : kColumns % 32 == 0 ? 32 : 16;
#pragma unroll 1
  for (int pass = 0; pass < kColumns / kPass; ++pass) {
    const int block = pass * (kPass / 16) * kDqColumnWarps + column_warp;  // the first of 16 columns
    float dq[kDqFragments][kPass / 2] = {};
    gemm_ab<QSwizzle, kBlockK, 16 * kDqColumnWarps>(dq, QueryRows(ds_smem, 16 * kDqFragments * row_warp), k_smem,
                                                    16 * block);
#pragma unroll
    for (int m = 0; m < kDqFragments; ++m) {
      const int strip = row / 16 + row_warp * kDqFragments + m;
      if (strip * 16 >= sequence.seqlen_q()) continue;
      const int most_queries = AnySequence::most_queries(params.problem), at = sequence.query_strip(16 * strip);
      float* const target =
          fragment_strip(params.dq_acc, sequence.query_head(head), most_queries, at, kHeadDim) + block * kFragmentBlock;
#pragma unroll
      for (int j = 0; j < kPass / 8; ++j) {
        add_fragment(target + (j / 2 * kDqColumnWarps * 2 + j % 2) * kFragmentFloats, lane, &dq[m][4 * j]);
      }
    }
  }
}

// Stores a warp's accumulator of dk or dv into the accumulator of its split.
template <int kColumns, int kCount>
__device__ __forceinline__ void store_split(float* acc, const BackwardParams& params, const KeyWork& work,
                                            const float (&x)[kFragments][kCount], const WarpRole& role) {
  const int lane = threadIdx.x % 32;
  const int most_keys = AnySequence::most_keys(params.problem);
  const long long head = work.sequence.kv_head(work.head) * params.splits + work.part;
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
    const int strip = (work.keys.begin + role.key) / 16 + m;
    if (strip * 16 >= work.sequence.seqlen_k()) continue;
    const int at = work.sequence.key_strip(16 * strip);
    float* const target = fragment_strip(acc, head, most_keys, at, kColumns) + role.member * kFragmentBlock;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      float* const fragment = target + (j / 2 * kGroup * 2 + j % 2) * kFragmentFloats;
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[fragment_index(lane, i)] = x[m][4 * j + i];
    }
  }
}

// Adds a warp's accumulator of dk or dv to float32 rows of the call.
template <int kCount>
__device__ __forceinline__ void add_keys(const Operand& sums, const KeyWork& work, const float (&x)[kFragments][kCount],
                                         const WarpRole& role, float scale, int columns) {
  const Range visible = work.sequence.visible_keys();
#pragma unroll
  for (int r = 0; r < 2 * kFragments; ++r) {
    const int key = work.keys.begin + role.key + threadIdx.x % 32 / 4 + 8 * r, first = 16 * role.member;
    if (key >= work.keys.end || key < visible.begin || key >= visible.end) continue;
    char* const row = work.place_of_keys().address(sums, 4, work.head, key, first);
    add_row<kGroup>(reinterpret_cast<float*>(row), x[r / 2], r % 2, scale, columns - first, sums.aligned);
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned k_smem = smem_address(storage.k), v_smem = smem_address(storage.v);
  const unsigned ds_smem = smem_address(storage.weights[0]);
  const unsigned p_smem = smem_address(storage.weights[sizeof(storage.weights) / kWeightBytes - 1]);

  const ProblemParams& problem = params.problem;
  const Score score{problem.score};
  const KeyWork work(params);
  if (kVarlen && work.keys.begin >= work.keys.end) return;
  const AnySequence& sequence = work.sequence;
  const Mask mask = sequence.mask().transposed();
  // Queries that see some key of the block.
  const Range queries = work.exists() ? mask.key_range(work.keys.begin, work.keys.end) : Range{0, 0};
  const AscendingTiles tiles = TileRange::covering(queries, kBlockQ);
  // Returns the tiles of one query head that are visible under the mask_mod. Computed at each use, to hold no registers
  // (L4).
  auto tiles_of = [&](int head) {
    return VisibleTiles<AscendingTiles, kBlockK, kBlockQ, true>(
        tiles, params, work.sequence_idx(), head, {work.keys.begin, const_min(work.keys.end, sequence.seqlen_k())},
        sequence.seqlen_q());
  };

  auto fetch = [&](int head, int m, int slot) {
    const TileLoader<kBlockQ, kHeadDim> q_loader(params.q, sequence.queries(), head, problem.head_dim);
    const TileLoader<kBlockQ, kHeadDimV> dout_loader(params.dout, sequence.queries(), head, problem.head_dim_v);
    const int row = m * kBlockQ, thread = fresh_thread();
    q_loader.load(smem_address(storage.q[slot]), row, sequence.visible_queries());
    dout_loader.load(smem_address(storage.dout[slot]), row, sequence.visible_queries());
    if (thread < kBlockQ / 2) {
      const float2* const stats = params.stats + sequence.rows_offset(head, params.stats_rows) + row;
      cp_async_16(smem_address(storage.stats[slot]) + thread * 16, stats + 2 * thread);
    }
  };
  // Tiles of one query head come before tiles of the next one.
  auto fetch_first = [&](int head, int slot) {
    int m = tiles.first();
    if constexpr (kBlockSparse) {
      while (!tiles.has(m = tiles_of(head).visible_from(tiles.first()).n()) && ++head < work.heads.end) {
      }
      if (!tiles.has(m)) return;
    }
    fetch(head, m, slot);
  };
  auto fetch_next = [&](int head, int next, int slot) {
    if (tiles.has(next)) fetch(head, next, slot);
    else if (head + 1 < work.heads.end) fetch_first(head + 1, slot);
    cp_async_commit();
  };

  float dk[kFragments][kHeadDim / kGroup / 2] = {}, dv[kFragments][kHeadDimV / kGroup / 2] = {};
  const TileLoader<kBlockK, kHeadDim> k_loader(params.k, work.place_of_keys(), work.head, problem.head_dim);
  const TileLoader<kBlockK, kHeadDimV> v_loader(params.v, work.place_of_keys(), work.head, problem.head_dim_v);
  k_loader.load(k_smem, work.keys.begin, sequence.visible_keys());
  v_loader.load(v_smem, work.keys.begin, sequence.visible_keys());
  if (tiles.has(tiles.first())) fetch_first(work.heads.begin, 0);
  cp_async_commit();

  int slot = 0;
#pragma unroll 1
  for (int head = work.heads.begin; head < work.heads.end; ++head) {
    const ModWeights mod_weights(params, work, head);
    const auto visible = [&] { return tiles_of(head); };
#pragma unroll 1
    for (auto walk = walk_along(tiles, visible); walk.has_tile(); walk.go_on()) {
      const int m = walk.n();
      walk.look_ahead();
      cp_async_wait<0>();
      __syncthreads();  // (A)
      if constexpr (kStages == 2) fetch_next(head, walk.next(), slot ^ 1);
      const unsigned q_smem = smem_address(storage.q[slot]), dout_smem = smem_address(storage.dout[slot]);

#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        const WarpRole role;
        const int query = (kGroup > 1 ? role.member : piece) * kPieceQ;
        Scores s = {}, dp = {};
        gemm_abt<QSwizzle, kHeadDim / kStepElements>(s, Rows<QSwizzle>(k_smem, role.key),
                                                     b_lane_address<QSwizzle>(q_smem) + query * QSwizzle::kRowBytes);
        gemm_abt<VSwizzle, kHeadDimV / kStepElements>(
            dp, Rows<VSwizzle>(v_smem, role.key), b_lane_address<VSwizzle>(dout_smem) + query * VSwizzle::kRowBytes);
        compute_weights(s, dp, score, mod_weights, mask, smem_address(storage.stats[slot]) + query * 8,
                        work.keys.begin + role.key, m * kBlockQ + query, walk.is_full());
        if constexpr (kGroup > 1) {
          store_fragments<WeightSwizzle, 16>(p_smem, s, role.key, query);
          if constexpr (kSharedWeights) {
            __syncthreads();
            gemm_ab<VSwizzle, kBlockQ, 16 * kGroup>(dv, KeyRows(p_smem, role.key), dout_smem, 16 * role.member);
            __syncthreads();
          }
        }
        if constexpr (kGroup > 1 || kWithDq) store_fragments<WeightSwizzle, 16>(ds_smem, dp, role.key, query);
        if constexpr (kGroup == 1) {
          gemm_weights<VSwizzle>(dv, s, dout_smem + query * VSwizzle::kRowBytes);
          gemm_weights<QSwizzle>(dk, dp, q_smem + query * QSwizzle::kRowBytes);
        }
      }
      if constexpr (kGroup > 1 || kWithDq || kStages == 1) __syncthreads();  // (B)
      if constexpr (kGroup > 1) {
        const WarpRole role;
        if constexpr (!kSharedWeights) {
          gemm_ab<VSwizzle, kBlockQ, 16 * kGroup>(dv, KeyRows(p_smem, role.key), dout_smem, 16 * role.member);
        }
        gemm_ab<QSwizzle, kBlockQ, 16 * kGroup>(dk, KeyRows(ds_smem, role.key), q_smem, 16 * role.member);
        if constexpr (kStages == 1) __syncthreads();  // (C)
      }
      if constexpr (kStages == 1) fetch_next(head, walk.next(), 0);
      if constexpr (kWithDq) add_dq(params, sequence, ds_smem, k_smem, head, m * kBlockQ);
      if constexpr (kStages == 2) slot ^= 1;
    }
  }
  cp_async_wait<0>();  // k and v may still be in flight if no query sees the block
  __syncthreads();
  const WarpRole role;
  const KeyWork& same = work.again(params);
  if constexpr (kDropout) {
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) scale_row(dv[r / 2], r % 2, Dropout(params, 0, 0).scale());
  }
  if (params.dk_acc != nullptr) {
    store_split<kHeadDim>(params.dk_acc, params, same, dk, role);
    store_split<kHeadDimV>(params.dv_acc, params, same, dv, role);
    return;
  }
  if constexpr (kAccumulates) {
    add_keys(params.dk, same, dk, role, problem.score.softmax_scale, problem.head_dim);
    add_keys(params.dv, same, dv, role, 1.0f, problem.head_dim_v);
  } else {
    // dk and dv take the place of k and v in shared memory, and leave from there.
#pragma unroll
    for (int r = 0; r < 2 * kFragments; ++r) scale_row(dk[r / 2], r % 2, problem.score.softmax_scale);
    store_fragments<QSwizzle, 16 * kGroup>(k_smem, dk, role.key, 16 * role.member);
    store_fragments<VSwizzle, 16 * kGroup>(v_smem, dv, role.key, 16 * role.member);
    __syncthreads();
    store_tile<kBlockK, kHeadDim>(params.dk, same.place_of_keys(), same.head, k_smem, same.keys,
                                  sequence.visible_keys(), problem.head_dim);
    store_tile<kBlockK, kHeadDimV>(params.dv, same.place_of_keys(), same.head, v_smem, same.keys,
                                   sequence.visible_keys(), problem.head_dim_v);
  }
}
