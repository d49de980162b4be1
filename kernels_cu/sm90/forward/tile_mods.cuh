// score_mod, mask_mod, bias, sinks and dropout (mods) for the consumers of forward and lse on Hopper. Plain kernels
// contain none of this.
#pragma once
#include "../../common/dropout.cuh"
#include "../../common/fragment.cuh"
#include "../../common/mods.cuh"
#include "../../common/select.cuh"
#include "../pipeline/work_tile.cuh"
#include "kernel_params.cuh"

static_assert(!kDecode || (!kDropout && !kBlockSparse), "kernels for decoding drop no weights, and take all key tiles");

// The mods of a lane's two rows. In decode, rows of a block belong to all query heads of a kv head.
using ModHeads = Select<kDecode, TwoModHeads, ModHead>;

// Returns the mods of one query head of a work tile.
template <class Params, class AnyWork>
__device__ __forceinline__ ModHead make_mod_head(const Params& params, const AnyWork& work, int query_head) {
  const ProblemParams& problem = params.problem;
  const int seqlen_q = work.sequence(problem).seqlen_q();
  return ModHead(params, problem, work.sequence_idx(), query_head, seqlen_q, work.seqlen_k(problem));
}

// Returns the mods of this lane's rows.
template <class Params, class AnyWork>
__device__ __forceinline__ ModHeads make_mod_heads(const Params& params, const AnyWork& work) {
  if constexpr (kDecode) {
    const int warp = kWarpsSplitKeys ? 0 : fresh_thread() / 32 % 4,
              row = work.row_begin + 16 * warp + fresh_thread() % 32 / 4;
    const int group = params.problem.heads_per_kv, first = work.head * group;
    auto of_row = [&](int r) { return make_mod_head(params, work, first + r - fast_div(r, group) * group); };
    return {of_row(row), of_row(row + 8)};
  } else {
    return make_mod_head(params, work, work.head);
  }
}

// The mods of one work tile; empty in plain kernels. `Rows` are the lane's two queries.
template <class Params, class AnyWork>
struct TileModsOf {
  const Params& params;
  const AnyWork& work;

  struct Nothing {};

  __device__ __forceinline__ TileModsOf(const Params& kernel_params, const AnyWork& work_tile)
      : params(kernel_params), work(work_tile) {}

  // Returns the mods of the lane's rows with the keys from `key` on. `less` is subtracted from the scores of each row.
  template <class Rows>
  __device__ __forceinline__ auto tile(const Rows& rows, int key, const float2& less = {0.0f, 0.0f}) const {
    if constexpr (!kHasMods) return Nothing{};
    else if constexpr (kScoreMod) return Precomputed(*this, rows, key, less);
    else return Deferred<Rows>{*this, rows, key};
  }

  // Turns products into scores minus `less`, and masked ones into -inf. is_full: the mask_mod shows all of the tile.
  // Scores that weigh nothing are not set to -inf: see kUnseen in softmax.cuh.
  template <class Tile, int kCount>
  __device__ __forceinline__ void apply(const Tile& tile, float (&s)[kCount], bool is_full) const {
    if (kSkipsFullTiles && is_full) {
      if constexpr (kScoreMod) tile.template apply<false>(s);
    } else if constexpr (kScoreMod || kMaskMod) {
      tile.template apply<kMaskMod>(s);
    }
  }

  // Zeros the dropped weights of key tile n.
  template <class Rows>
  __device__ __forceinline__ void drop(float (&weights)[kBlockK / 2], const Rows& rows, int n) const {
    Dropout(params, work.sequence_idx(), work.head)
        .template drop<kBlockK % 32 == 0>(weights, rows, n * kBlockK, fresh_thread() % 4);
  }

  // Adds the sink, and applies dropout's scale to a row of out.
  __device__ __forceinline__ void finish(float& o_scale, float& lse) const {
    // Decode adds sinks once all splits of a row are merged (DecodeOutput::count_sink).
    if constexpr (kSinks && !kDecode) Sink(params, work.head).add(o_scale, lse);
    if constexpr (kDropout) o_scale *= params.kept_scale;
  }

 private:
  // The data of a score_mod. It is computed before the products arrive, since it takes long.
  struct Precomputed {
    const ModHeads heads;
    const ModRows rows;

    template <class Rows>
    __device__ __forceinline__ Precomputed(const TileModsOf& tile_mods, const Rows& of, int key, const float2& less)
        : heads(make_mod_heads(tile_mods.params, tile_mods.work)), rows(heads, of, key, fresh_thread() % 4, less) {}

    template <bool kAsksMask, int kCount>
    __device__ __forceinline__ void apply(float (&s)[kCount]) const {
      apply_mods<kAsksMask, false>(heads, s, rows);
    }
  };

  // The data of a mask_mod alone. It is computed where it is applied, since most tiles need no mask.
  template <class Rows>
  struct Deferred {
    const TileModsOf& tile_mods;
    const Rows& rows;
    const int key;

    template <bool kAsksMask, int kCount>
    __device__ __forceinline__ void apply(float (&s)[kCount]) const {
      const ModHeads heads = make_mod_heads(tile_mods.params, tile_mods.work);
      apply_mods<kAsksMask, false>(heads, s, ModRows(heads, rows, key, fresh_thread() % 4));
    }
  };
};
using TileMods = TileModsOf<KernelParams, QueryWork>;
