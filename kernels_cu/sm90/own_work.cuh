// Scores, masks, sinks and dropout of the caller's own, as the consumers of forward and lse on Hopper use them. In
// plain kernels nothing is left of it.
#pragma once
#include "../common/dropout.cuh"
#include "../common/fragment.cuh"
#include "../common/own_scores.cuh"
#include "forward_work.cuh"

static_assert(!kDecode || (!kDropout && !kBlockSparse), "kernels for decoding drop no weights, and take all key tiles");

// The functions of a lane's two rows. In decoding the rows of a block are those of all query heads of a kv head.
template <bool kOfSeveral>
struct HeadsOf {
  using Type = ModHead;
};
template <>
struct HeadsOf<true> {
  using Type = TwoModHeads;
};
using ModHeads = HeadsOf<kDecode>::Type;

// Those of one head of a piece of work.
template <class Params, class AnyWork>
__device__ __forceinline__ ModHead own_head(const Params& params, const AnyWork& work, int query_head) {
  const ProblemParams& problem = params.problem;
  const int seqlen_q = work.sequence(problem).seqlen_q();
  return ModHead(params, problem, work.sequence_idx(), query_head, seqlen_q, work.seqlen_k(problem));
}

// Those of this lane.
template <class Params, class AnyWork>
__device__ __forceinline__ ModHeads own_heads(const Params& params, const AnyWork& work) {
  if constexpr (kDecode) {
    const int warp = kWarpsSplitKeys ? 0 : fresh_thread() / 32 % 4,
              row = work.row_begin + 16 * warp + fresh_thread() % 32 / 4;
    const int group = params.problem.heads_per_kv, first = work.head * group;
    auto of_row = [&](int r) { return own_head(params, work, first + r - fast_div(r, group) * group); };
    return {of_row(row), of_row(row + 8)};
  } else {
    return own_head(params, work, work.head);
  }
}

// What is the caller's own of one piece of work. `Rows` are the lane's two queries.
template <bool kEnabled, class Params, class AnyWork>
struct ModWorkOf {
  struct Nothing {};

  __device__ __forceinline__ ModWorkOf(const Params&, const AnyWork&) {}
  template <class Rows>
  __device__ __forceinline__ Nothing tile(const Rows&, int, const float2& = {}) const {
    return {};
  }
  template <int kCount>
  __device__ __forceinline__ void apply(const Nothing&, float (&)[kCount], bool) const {}
  template <class Rows>
  __device__ __forceinline__ void drop(float (&)[kBlockK / 2], const Rows&, int) const {}
  __device__ __forceinline__ void finish(float&, float&) const {}
};

template <class Params, class AnyWork>
struct ModWorkOf<true, Params, AnyWork> {
  const Params& params;
  const AnyWork& work;

  __device__ __forceinline__ ModWorkOf(const Params& own, const AnyWork& of) : params(own), work(of) {}

  // What is known of the lane's rows with the keys from `key` on. less: what is taken off the scores of each row.
  template <class Rows>
  __device__ __forceinline__ auto tile(const Rows& rows, int key, const float2& less = {0.0f, 0.0f}) const {
    if constexpr (kScoreMod) return Known(*this, rows, key, less);
    else return Unknown<Rows>{*this, rows, key};
  }

  // Products become scores, less what is told of their row; those that are hidden become -inf. is_full: the mask among
  // the functions shows all of the tile. why scores that weigh nothing do not: kUnseen in sm90/softmax.cuh.
  template <class Tile, int kCount>
  __device__ __forceinline__ void apply(const Tile& tile, float (&s)[kCount], bool is_full) const {
    if (kSkipsFullTiles && is_full) {
      if constexpr (kScoreMod) tile.template apply<false>(s);
    } else if constexpr (kScoreMod || kMaskMod) {
      tile.template apply<kMaskMod>(s);
    }
  }

  // Weights of key tile n that are dropped become zero.
  template <class Rows>
  __device__ __forceinline__ void drop(float (&weights)[kBlockK / 2], const Rows& rows, int n) const {
    Dropout(params, work.sequence_idx(), work.head)
        .template drop<kBlockK % 32 == 0>(weights, rows, n * kBlockK, fresh_thread() % 4);
  }

  // Counts the sink, and multiplies a row of out by what dropout multiplies weights by.
  __device__ __forceinline__ void finish(float& o_scale, float& lse) const {
    // why not in decoding: sinks are counted when all splits of a row are merged (DecodeOutput::count_sink).
    if constexpr (!kDecode) Sink(params, work.head).add(o_scale, lse);
    if constexpr (kDropout) o_scale *= params.kept_scale;
  }

 private:
  // What scores are made with, before their products are there. why: it takes long.
  struct Known {
    const ModHeads heads;
    const ModRows rows;

    template <class Rows>
    __device__ __forceinline__ Known(const ModWorkOf& own, const Rows& of, int key, const float2& less)
        : heads(own_heads(own.params, own.work)), rows(heads, of, key, fresh_thread() % 4, less) {}

    template <bool kAsksMask, int kCount>
    __device__ __forceinline__ void apply(float (&s)[kCount]) const {
      apply_own<kAsksMask, false>(heads, s, rows);
    }
  };

  // The same of a mask alone, found where it is asked. why: most tiles do not ask it.
  template <class Rows>
  struct Unknown {
    const ModWorkOf& own;
    const Rows& rows;
    const int key;

    template <bool kAsksMask, int kCount>
    __device__ __forceinline__ void apply(float (&s)[kCount]) const {
      const ModHeads heads = own_heads(own.params, own.work);
      apply_own<kAsksMask, false>(heads, s, ModRows(heads, rows, key, fresh_thread() % 4));
    }
  };
};
using ModWork = ModWorkOf<kHasMods, KernelParams, QueryWork>;
