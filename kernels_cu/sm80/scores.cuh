// Scores of a warp's queries with one key tile, for forward, lse and dq.
#pragma once
#include "../common/mask_tiles.cuh"
#include "../common/dropout.cuh"
#include "../common/mask.cuh"
#include "../common/mods.cuh"
#include "../common/score.cuh"
#include "gemm.cuh"
#include "tile.cuh"
#include "tile_scheduler.cuh"

static_assert(kBlockQ % (16 * kNumWarps) == 0, "each warp owns whole 16-row fragments");
constexpr int kRowsPerWarp = kBlockQ / kNumWarps, kFragments = kRowsPerWarp / 16;  // of a warp (rows per warp, L26)

// Returns this lane's first query. The others follow in steps of 8.
__device__ __forceinline__ int lane_row(const QueryWork& work) {
  return work.rows.begin + threadIdx.x / 32 * kRowsPerWarp + threadIdx.x % 32 / 4;
}

// The loader of key tiles of k or v.
template <int kCols>
using KeyLoader = TileLoader<kBlockK, kCols, AnySequence::KeyPlace>;

// A block of queries: its scores, and the key tiles that some of its queries see.
struct QueryBlock : QueryWork {
  const Score score;
  const ModHead mod_head;
  const Dropout dropout;
  AnySequence::HeldMask mask;
  const DescendingTiles tiles;
  const ModParams& mod_params;
  const TileLoader<kBlockQ, kHeadDim> q_loader;
  const KeyLoader<kHeadDim> k_loader;

  template <class Params>
  __device__ __forceinline__ explicit QueryBlock(const Params& p)
      : QueryWork(p),
        score{p.problem.score},
        mod_head(p, p.problem, sequence_idx(), head, sequence.seqlen_q(), sequence.seqlen_k()),
        dropout(p, sequence_idx(), head),
        mask(sequence.mask()),
        tiles(TileRange::covering(exists() ? mask.key_range(rows.begin, rows.end) : Range{0, 0}, kBlockK)),
        mod_params(p),
        q_loader(p.q, sequence.queries(), head, p.problem.head_dim),
        k_loader(p.k, sequence.keys(), kv_head, p.problem.head_dim) {}

  // True if the block has a query. Only variable-length sequences have blocks without one.
  __device__ __forceinline__ bool exists() const { return !kVarlen || rows.begin < rows.end; }

  // Returns the key tiles that are visible under the mask_mod.
  __device__ __forceinline__ VisibleTiles<DescendingTiles, kBlockQ, kBlockK> visible_tiles() const {
    return {tiles, mod_params, sequence_idx(), head, rows, sequence.seqlen_k()};
  }

  // Starts to load key tile n of k or v into ring slot `slot` at `smem`, if there is such a tile.
  template <class Loader>
  __device__ __forceinline__ void fetch(const Loader& loader, unsigned smem, int n, int slot) const {
    if (tiles.has(n)) loader.load(smem + slot * Loader::kBytes, n * kBlockK, sequence.visible_keys());
  }

  // True if some query of the block does not see all keys of tile n.
  __device__ __forceinline__ bool needs_mask(int n) const {
    return !mask.all_visible(rows, {n * kBlockK, (n + 1) * kBlockK});
  }

  // s = mask(score(s)). kWithMods: applies mods here; otherwise they follow later. is_full: the mask_mod shows all of
  // the tile.
  template <bool kWithMods = true>
  __device__ __forceinline__ void score_and_mask(float (&s)[kFragments][kBlockK / 2], int n,
                                                 bool is_full = false) const {
    score.apply(s);
    if constexpr (kWithMods) {
      if (kSkipsFullTiles && is_full) apply_mods_to_tile<false>(s, n);
      else apply_mods_to_tile<kMaskMod>(s, n);
    }
    const float hidden = kWithMods ? -infinity() : hidden_product();
    if (needs_mask(n)) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        mask.apply(s[m], lane_row(*this) + 16 * m, n * kBlockK, threadIdx.x % 4, hidden);
      }
    }
    if constexpr (kVarlen) mask_missing_pages(s, n, sequence, hidden);
  }

 private:
  template <bool kAsksMask>
  __device__ __forceinline__ void apply_mods_to_tile(float (&s)[kFragments][kBlockK / 2], int n) const {
    if constexpr (kScoreMod || kAsksMask) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        const ModRows rows(mod_head, LaneQueries{lane_row(*this) + 16 * m}, n * kBlockK, threadIdx.x % 4);
        apply_mods<kAsksMask>(mod_head, s[m], rows);
      }
    }
  }

  // Sets scores of keys on missing pages to `hidden`.
  template <class Varlen>
  __device__ __forceinline__ static void mask_missing_pages(float (&s)[kFragments][kBlockK / 2], int n,
                                                            const Varlen& sequence, float hidden) {
    const PagedPlace& keys = sequence.k_place;
    const Range range{n * kBlockK, const_min((n + 1) * kBlockK, sequence.seqlen_k())};
    if (!keys.is_paged() || !keys.pages.lacks_some(range)) return;
#pragma unroll
    for (int j = 0; j < kBlockK / 4; ++j) {
      const int key = range.begin + j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
      if (key < range.end && !keys.pages.has(key)) {
#pragma unroll
        for (int m = 0; m < kFragments; ++m) s[m][j / 2 * 4 + j % 2] = s[m][j / 2 * 4 + 2 + j % 2] = hidden;
      }
    }
  }
};

// The warp's rows of q: held in registers over all tiles, or read from shared memory for each tile.
struct QFragments {
  FragmentA held[kQInRegisters ? kHeadDim / kStepElements : 1][kFragments];
  Rows<QSwizzle> rows;

  __device__ explicit QFragments(unsigned q_smem) : rows(q_smem, threadIdx.x / 32 * kRowsPerWarp) {}

  // Called once q has arrived.
  __device__ __forceinline__ void load() {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int kk = 0; kk < kHeadDim / kStepElements; ++kk) rows(held[kk], kk);
    }
  }

  __device__ __forceinline__ void operator()(FragmentA (&a)[kFragments], int kk) const {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) a[m] = held[kk][m];
    } else {
      rows(a, kk);
    }
  }
};

// s = q kᵀ
__device__ __forceinline__ void compute_scores(float (&s)[kFragments][kBlockK / 2], const QFragments& q,
                                               unsigned k_smem) {
  gemm_abt<QSwizzle, kHeadDim / kStepElements>(s, q, b_lane_address<QSwizzle>(k_smem));
}
